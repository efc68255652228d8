"""A walk through a trace as an animated GIF, for slides and for pages that run no script."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from dlearn.analysis.replay.moments import shares
from dlearn.analysis.replay.steps import StatePanel, Step, Walkthrough
from dlearn.draw.canvas import draw_boxes, write
from dlearn.draw.film import draw_cells, hue_of, title_of
from dlearn.draw.palette import DARK, LIGHT, WAITING_HATCH, cut, plain, text_width
from dlearn.errors import DlearnError
from dlearn.shown import count_text

MOST_FRAMES = 256  # A ring of 64 ranks has 252 rounds.
_FRAME_MS, _LAST_MS = 80, 3000
_FEWEST = 4  # Frames of a round in which packets still seem to move.
_MOST_MOVING = 16  # Packets of more ranks are too small: what they bring is seen.
_WIDTH, _TOP, _BELOW = 760, 64, 34  # In pixels: of a frame, above and below the panel.
_TALLEST, _ROW, _PACKET = 400.0, 72.0, 88.0  # Of the panel, a row, and the width of a packet.
_DPI = 72  # So that a point is a pixel.
_TEXT = 13.0
_NEVER, _WAITS = "never came", "waits"
_HATCHES = {_WAITS: WAITING_HATCH}


def animate(walk: Walkthrough, path: str | os.PathLike[str], *, seconds: float, dark: bool) -> None:
    """Write a GIF of 12 frames a second; what happens at the same time takes `seconds`."""
    file = Path(path)
    if file.suffix.lower() != ".gif":
        raise DlearnError(f"{file.name!r}: an animation is saved as .gif.")
    if not walk.steps:
        raise DlearnError("nothing to animate: no message is known here, and no action of a rank.")
    if not 0.1 <= seconds <= 60:
        raise DlearnError(f"{seconds} seconds for a step: an animation can show one for 0.1 to 60.")
    if not file.parent.is_dir():
        raise DlearnError(f"cannot write {path}: there is no folder {file.parent}. Make it first.")
    panel = _Panel(walk, DARK if dark else LIGHT)
    rounds = [list(steps) for _, steps in groupby(walk.steps, key=lambda step: step.moment)]
    moves = [steps[0].message is not None for steps in rounds]
    fitting = (MOST_FRAMES - moves.count(False)) // max(1, moves.count(True))
    moving = min(round(1000 * seconds / _FRAME_MS), max(_FEWEST, fitting))
    moving = moving if len(walk.labels) <= _MOST_MOVING else 1
    counts = [moving if packets else 1 for packets in moves]
    shown = sum(total <= MOST_FRAMES for total in accumulate(counts))
    panel.left_out = sum(map(len, rounds[shown:]))
    frames: list[np.ndarray] = []
    milliseconds: list[int] = []
    for steps, count, packets in zip(rounds[:shown], counts, moves, strict=False):
        frames += panel.frames(steps, count)
        milliseconds += [_FRAME_MS if packets else round(1000 * seconds)] * count
    milliseconds[-1] = _LAST_MS
    first, *more = _in_one_palette(frames)
    style: dict[str, Any] = {"duration": milliseconds, "loop": 0, "optimize": False}
    first.save(file, save_all=True, append_images=more, **style)


def _in_one_palette(frames: Sequence[np.ndarray]) -> list[Image.Image]:
    """Reduce all frames to the same 32 colours: then a GIF holds only what changes."""
    sample = Image.fromarray(np.vstack(frames[:: max(1, len(frames) // 12)]))
    same: dict[str, Any] = {"dither": Image.Dither.NONE}
    colors = sample.quantize(32, method=Image.Quantize.MAXCOVERAGE, **same)
    return [Image.fromarray(frame).quantize(palette=colors, **same) for frame in frames]


class _Panel:
    """One panel of a film, at one moment after the other; in pixels below title and round."""

    left_out = done = 0

    def __init__(self, walk: Walkthrough, colors: Mapping[str, str]) -> None:
        self.walk, self.colors, self.ranks = walk, colors, list(walk.labels)
        self.panels = {panel.title: panel for panel in walk.panels}
        of_pieces = [panel for panel in walk.panels if not panel.lasting]
        self.panel: StatePanel | None = None if of_pieces else next(iter(walk.panels), None)
        self.hue, self.title = colors["fill"], walk.title
        if len({id(each.operation) for each in walk.messages}) == len(of_pieces) == 1:
            self.title = title_of(walk.messages[0].operation, len(walk.messages))
        self.names = [plain(name, most=16) for name in walk.labels.values()]
        self.high = min(_ROW, _TALLEST / len(self.names))
        self.gap = self.high / 6 if self.high > 1.2 * _TEXT else 0.0  # Else only two names fit.
        self.left = 24 + max(text_width(name, size=_TEXT, bold=True) for name in self.names)
        marked = any(step.message is None or step.message.how == "missing" for step in walk.steps)
        self.right, self.bottom = _WIDTH - (120 if marked else 12), self.high * len(self.names)

    def frames(self, steps: Sequence[Step], count: int) -> Iterator[np.ndarray]:
        """Draw steps that happen together in `count` frames; the last shows what is after them."""
        still = self._drawn(steps) if count > 1 else np.empty(0)
        for part in np.arange(1, count) / count:
            yield self._with_packets(still, steps, part * part * (3 - 2 * part))
        self.done += len(steps)
        yield self._drawn(steps)

    def _drawn(self, steps: Sequence[Step]) -> np.ndarray:
        below, paper = round(self.bottom) + _BELOW, self.colors["paper"]
        figure = Figure(figsize=(_WIDTH / _DPI, (_TOP + below) / _DPI), dpi=_DPI, facecolor=paper)
        agg: Any = FigureCanvasAgg(figure)
        ax = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(below, -_TOP))
        self._write_words(ax, steps[-1])
        self._draw_rows(ax, steps)
        ax.set_axis_off()
        agg.draw()
        return np.asarray(agg.buffer_rgba())[:, :, :3].copy()

    def _write_words(self, ax: Axes, step: Step) -> None:
        """Write the title, and the operation and its round: nothing too fast to be read."""
        line, sent = step.mark or step.op, step.message
        if sent is not None:
            every = (each for each in self.walk.messages if each.operation is sent.operation)
            rounds = 1 + max(each.step for each in every)
            line += f", round {sent.step + 1} of {rounds}" * (rounds > 1)
            line += f", {_NEVER}" * (sent.how == "missing")
        line += f"; {count_text(self.left_out, 'later step')} left out" * bool(self.left_out)
        for y, text, size, weight in ((22, self.title, 16.0, "bold"), (46, line, _TEXT, "normal")):
            shown = cut(plain(text, most=300), _WIDTH - 24, size=size, bold=weight == "bold")
            style: dict[str, Any] = {"fontsize": size, "fontweight": weight}
            write(ax, 12, y - _TOP, shown, color=self.colors["ink"], **style)

    def _held(self, steps: Sequence[Step]) -> np.ndarray:
        """Return what each rank holds of each piece, of the last operation that has begun."""
        for step in steps:
            for panel in (self.panels[change.panel] for change in step.changes):
                if not panel.lasting and step.message is not None:
                    self.panel, self.hue = panel, hue_of(step.message.operation)
        if self.panel is None or any(step.absent for step in steps):
            return np.full((len(self.ranks), 1), np.nan)  # Nothing is known of a call that hangs.
        changes = self.walk.held(self.panel, self.done).values()
        held = shares((each for each in changes if each.rank in self.ranks), self.ranks)
        return held * 0.99 if self.panel.lasting else held  # Only a result is ever whole.

    def _draw_rows(self, ax: Axes, steps: Sequence[Step]) -> None:
        """Draw what ranks hold, hatches where they wait, in red who never came, and names."""
        held, marks, ends = self._held(steps), _marks(steps), (self.left, self.right)
        ink, faint, paper, red = (self.colors[key] for key in ("ink", "faint", "paper", "missing"))
        usual: dict[str, Any] = {"facecolor": "none", "edgecolor": faint, "zorder": 7}
        panel, every = (*ends, 0.0, self.bottom), 1 if self.gap else len(self.ranks) - 1
        draw_cells(ax, held, self.hue, panel)
        draw_boxes(ax, [] if self.gap else [panel], **usual)
        for place, (rank, name) in enumerate(zip(self.ranks, self.names, strict=True)):
            top, mark = self.high * place, marks.get(rank, "")
            end, looks = top + self.high - self.gap, usual | {"hatch": _HATCHES.get(mark, "")}
            style: dict[str, Any] = {"color": ink, "fontsize": _TEXT}
            if mark == _NEVER:
                looks["edgecolor"] = style["color"] = red
            if self.gap or mark:
                draw_boxes(ax, [(*ends, end, top + self.high)], facecolor=paper, zorder=6)
                draw_boxes(ax, [(*ends, top, end)], **looks)
            if place % every == 0 or mark == _NEVER:
                y, shown = (top + end) / 2, cut(plain(mark), _WIDTH - self.right - 12, size=_TEXT)
                write(ax, self.left - 6, y, name, ha="right", fontweight="bold", **style)
                write(ax, self.right + 8, y, shown, **style)
        if self.panel is not None and not self.panel.lasting:
            text = f"{count_text(held.shape[1], 'piece')} →"
            write(ax, self.left, self.bottom + 14, text, fontsize=_TEXT, color=faint)

    def _with_packets(self, still: np.ndarray, steps: Sequence[Step], part: float) -> np.ndarray:
        """Paint packets on their way from row to row, each in the column of its piece."""
        frame, sent = still.copy(), [(each, each.message) for each in steps if each.message]
        columns, width = self._held(steps).shape[1], self.right - self.left
        most = min(_PACKET, width / max(columns, len(sent)) - 20)
        for number, (step, message) in enumerate(sent):
            places = [each.index for each in step.changes if each.rank == message.dst]
            middle = (number + 0.5) / len(sent)
            if places:
                middle = (min(places) + max(places) + 1) / 2 / columns
            src, dst = self.ranks.index(message.src), self.ranks.index(message.dst)
            x = round(self.left + width * middle)
            y = round(_TOP + self.high * (src + (dst - src) * part) + (self.high - self.gap) / 2)
            for edge, color in ((1, self.colors["ink"]), (0, hue_of(message.operation))):
                down, across = round(self.high / 5) + edge, round(most / 2) + edge
                frame[y - down : y + down, x - across : x + across] = 255 * np.array(to_rgb(color))
        return frame


def _marks(steps: Sequence[Step]) -> dict[int, str]:
    """Return what ranks do by themselves in these steps, who waits, and who never came."""
    marks: dict[int, str] = {}
    for step in steps:
        if step.message is None:
            marks |= {step.rank: step.mark}
        elif step.message.how == "missing":
            marks |= {step.message.src: _NEVER}
        marks |= dict.fromkeys(step.waiting, _WAITS) | dict.fromkeys(step.absent, _NEVER)
    return marks
