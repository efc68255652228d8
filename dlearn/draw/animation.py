"""A walk through a trace as an animated GIF, for slides and for pages that run no script.

Packets move from rank to rank; those of one step of an operation move together.
"""

import io
import math
import os
from collections.abc import Collection, Sequence
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from PIL import Image

from dlearn.analysis.replay import Change, StatePanel, Step, Walkthrough
from dlearn.draw.canvas import draw_arrow, draw_boxes, write
from dlearn.draw.palette import FAINT, HELD, INK, LANE, MISSING, SERIES, Color, cut, look, plain, wrap
from dlearn.draw.traffic_graph import Pair, Point, hub_of, on_circle
from dlearn.errors import DlearnError
from dlearn.join.tables.message_table import Message
from dlearn.shown import count_text, size_text

MOST_FRAMES = 40
_LAST_MS = 3000
WIDTH = 760.0  # Of the stage, in pixels.
_BOXES = ((4, 132.0, 92.0), (8, 108.0, 78.0), (16, 76.0, 62.0), (math.inf, 24.0, 18.0))
"""For up to so many ranks: width and height of a box, in pixels."""
_HEAD = 24.0  # Above a box, for its name.
_TOP, _BELOW = 84, 34
_DPI = 72  # So that a point is a pixel.
_TEXT_PX, _TITLE_PX = 12, 16
_AT_REST = "#c8c8c8"
_MOST_LABELLED = 16  # With more ranks, packets have no labels.


def animate(walk: Walkthrough, path: str | os.PathLike[str], *, seconds: float = 1.2) -> None:
    """Write a GIF of at most 40 frames, which shows for `seconds` what happens at the same time.

    If not all steps fit, the GIF says how many are left out.
    """
    file = Path(path)
    if file.suffix.lower() != ".gif":
        raise DlearnError(f"{file.name!r}: an animation is saved as .gif.")
    if not walk.steps:
        raise DlearnError("nothing to animate: no message is known here, and no action of a rank.")
    if not 0.1 <= seconds <= 60:
        raise DlearnError(f"{seconds} seconds for a step: an animation can show one for 0.1 to 60.")
    if not file.parent.is_dir():
        raise DlearnError(f"cannot write {path}: there is no folder {file.parent}. Make it first.")
    rounds = [list(steps) for _, steps in groupby(walk.steps, key=lambda step: step.moment)]
    counts = _frame_counts([steps[0].message is not None for steps in rounds])
    stage = Stage(walk, shown=sum(map(len, rounds[: len(counts)])))
    frames: list[np.ndarray] = []
    milliseconds: list[int] = []
    before = 0
    for steps, count in zip(rounds, counts, strict=False):
        frames += [stage.frame(steps, before, (number + 1) / count) for number in range(count)]
        milliseconds += [round(1000 * seconds / count)] * count
        before += len(steps)
    milliseconds[-1] = _LAST_MS
    first, *more = _in_one_palette(frames)
    style: dict[str, Any] = {"duration": milliseconds, "loop": 0, "optimize": False}
    first.save(file, save_all=True, append_images=more, **style)


def _frame_counts(moves: Sequence[bool]) -> list[int]:
    """Give each round its frames, more where packets move; leave out rounds that do not fit."""
    for moving in (6, 5, 4, 3):
        counts = [moving if packets else 1 for packets in moves]
        if sum(counts) <= MOST_FRAMES:
            return counts
    fitting = sum(total <= MOST_FRAMES for total in accumulate(counts))
    return counts[:fitting]


def _in_one_palette(frames: Sequence[np.ndarray]) -> list[Image.Image]:
    """Reduce all frames to the same 64 colours: then a GIF holds only what changes."""
    sample = Image.fromarray(np.vstack(frames[:: max(1, len(frames) // 6)]))
    colors = sample.quantize(64, dither=Image.Dither.NONE)
    same: dict[str, Any] = {"palette": colors, "dither": Image.Dither.NONE}
    return [Image.fromarray(frame).quantize(**same) for frame in frames]


class Stage:
    """What stays from frame to frame. In pixels from the top left, below title and sentence."""

    def __init__(self, walk: Walkthrough, *, shown: int) -> None:
        self.walk, self.left_out = walk, len(walk.steps) - shown
        self.ranks = list(walk.labels)
        pairs = dict.fromkeys((each.src, each.dst) for each in walk.messages)
        self.pairs = [(src, dst) for src, dst in pairs if src != dst]
        self.spots = spots_of(self.ranks, self.pairs)
        self.bottom = round(self.spots.height + _BELOW)

    def frame(self, steps: Sequence[Step], before: int, part: float) -> np.ndarray:
        """Draw steps that happen together, after `before` others, when `part` (0 to 1) is done."""
        figure = Figure(figsize=(WIDTH / _DPI, (_TOP + self.bottom) / _DPI), dpi=_DPI)
        ax = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(self.bottom, -_TOP))
        ax.set_axis_off()
        after = before + len(steps)
        self._write_words(ax, steps, after)
        sent = [step.message for step in steps if step.message is not None]
        used = {(each.src, each.dst) for each in sent}
        missing = {(each.src, each.dst) for each in sent if each.how == "missing"}
        absent = {rank for step in steps for rank in step.absent}
        for pair in self.pairs:
            red = pair in missing or pair[0] in absent
            color = MISSING if red else INK if pair in used else _AT_REST
            wire = self.spots.wire(pair, self.pairs)
            draw_arrow(ax, *wire, how="observed", color=color, linewidth=1.5)
        panel = self._panel(after)
        held = self.walk.held(panel, after if part == 1.0 else before) if panel else {}
        for rank in self.ranks:
            color = MISSING if rank in absent else INK if rank in chain(*used) else FAINT
            self._draw_machine(ax, rank, color, _mark_of(rank, steps))
            self._draw_cells(ax, rank, [held[key] for key in sorted(held) if key[0] == rank])
        for step in steps:
            if step.message is not None and step.message.src != step.message.dst:
                self._draw_packet(ax, step, step.message, part)
        pixels = io.BytesIO()
        figure.savefig(pixels, format="rgba", dpi=_DPI)
        return np.frombuffer(pixels.getvalue(), np.uint8).reshape(-1, round(WIDTH), 4)[:, :, :3]

    def _write_words(self, ax: Axes, steps: Sequence[Step], after: int) -> None:
        title, sentence = plain(self.walk.title, most=300), steps[0].sentence
        _write(ax, 12, 20 - _TOP, title, room=WIDTH - 24, fontsize=_TITLE_PX, fontweight="bold")
        if steps[0].message is not None and len(steps) > 1:
            sentence = f"{len(steps)} messages at the same time. One of them: {sentence}"
        lines = wrap(plain(sentence, most=400), WIDTH - 24, size=_TEXT_PX)
        for y, text in zip((44, 63), lines, strict=False):
            _write(ax, 12, y - _TOP, text, room=WIDTH - 24)
        progress = f"step {after} of {len(self.walk.steps)}"
        if self.left_out:
            progress += f"; {count_text(self.left_out, 'later step')} left out"
        _write(ax, 12, self.bottom - 16, progress, color=FAINT)

    def _panel(self, after: int) -> StatePanel | None:
        """Return the panel of the operation under way, or else of the next one."""
        panels = {panel.title: panel for panel in self.walk.panels}
        for step in (*reversed(self.walk.steps[:after]), *self.walk.steps[after:]):
            for change in step.changes:
                if not panels[change.panel].lasting:
                    return panels[change.panel]
        return next(iter(panels.values()), None)

    def _draw_machine(self, ax: Axes, rank: int, color: Color, mark: str) -> None:
        (x, y), wide, high = self.spots.middles[rank], self.spots.wide, self.spots.high
        left, top, bottom = x - wide / 2, y - high / 2, y + high / 2
        style = {"facecolor": "white", "edgecolor": color, "linewidth": 1 if color == FAINT else 2}
        draw_boxes(ax, [(left, left + wide, top, bottom)], zorder=5, **style)
        name, above = (str(rank), y) if wide < 40 else (plain(self.walk.labels[rank]), top - 12)
        _write(ax, x, above, name, room=1.6 * wide, ha="center", fontweight="bold")
        ink = MISSING if color == MISSING else INK
        _write(ax, x, bottom + 11, plain(mark), room=1.6 * wide, ha="center", color=ink)

    def _draw_cells(self, ax: Axes, rank: int, held: Sequence[Change]) -> None:
        """Draw a column for each piece, with a band for each rank whose part is in it."""
        (x, y), wide, high = self.spots.middles[rank], self.spots.wide - 12, self.spots.high - 12
        top, bottom, column = y - high / 2, y + high / 2, wide / max(1, len(held))
        band = high / len(self.ranks)
        for number, change in enumerate(held):
            left = x - wide / 2 + column * number
            parts = [(top, bottom, LANE)]
            if change.owners and len(self.ranks) <= len(SERIES):
                for place in map(self.ranks.index, change.owners):
                    parts.append((top + band * place, top + band * (place + 1) - 1, SERIES[place]))
            else:
                parts.append((bottom - high * change.share, bottom, HELD))
            boxes = [(left, left + column - 1.5, *part[:2]) for part in parts]
            draw_boxes(ax, boxes, facecolors=[color for _, _, color in parts], zorder=6)
            if not change.owners and column > 60:
                _write(ax, left + column / 2, y, plain(change.text), room=column - 6, ha="center")

    def _draw_packet(self, ax: Axes, step: Step, message: Message, part: float) -> None:
        start, end = np.array(self.spots.wire((message.src, message.dst), self.pairs))
        face, ink, label = look(step.op).color, INK, size_text(message.payload_bytes)
        if message.how == "missing":
            part, face, ink, label = 0.12, "white", MISSING, f"never came: {label}"
        if step.mark:
            label = f"{plain(step.mark, most=24)}: {label}"
        x, y = start + (end - start) * part
        half = 5 + min(11.0, len(str(message.payload_bytes or 0)) * 1.6)
        box = x - half, x + half, y - half, y + half
        draw_boxes(ax, [box], facecolor=face, edgecolor=ink, zorder=7)
        if len(self.ranks) <= _MOST_LABELLED:
            halo = [withStroke(linewidth=3, foreground="white")]
            style: dict[str, Any] = {"ha": "center", "fontweight": "bold", "path_effects": halo}
            _write(ax, x, y - half - 9, label, color=ink, **style)


def _write(ax: Axes, x: float, y: float, text: str, *, room: float = WIDTH, **more: Any) -> None:
    """Write as much of the text as this room holds."""
    style: dict[str, Any] = {"fontsize": _TEXT_PX, "zorder": 8} | more
    write(ax, x, y, cut(text, room, size=style["fontsize"], bold="fontweight" in more), **style)


def _mark_of(rank: int, steps: Sequence[Step]) -> str:
    """Return what stands below a rank: its own action, that it waits, or that it never came."""
    for step in steps:
        if step.absent:
            return "never came" if rank in step.absent else "waits" if rank in step.waiting else ""
        if step.message is None and step.rank == rank:
            return step.mark
    return ""


class Spots(NamedTuple):
    """The middle of each rank's box, the size of all boxes, and the height of all, in pixels."""

    middles: dict[int, Point]
    wide: float
    high: float
    height: float

    def wire(self, pair: Pair, pairs: Collection[Pair]) -> tuple[Point, Point]:
        """Return both ends of an arrow, at the rims; beside the middle if packets go both ways."""
        (x, y), (to_x, to_y) = self.middles[pair[0]], self.middles[pair[1]]
        far = math.dist((x, y), (to_x, to_y)) or 1.0
        across, down = (to_x - x) / far, (to_y - y) / far
        side, rim = self.wide / 2 / max(1e-6, abs(across)), (self.high / 2 + _HEAD - 5) / max(1e-6, abs(down))
        beside = 6.0 if pair[::-1] in pairs else 0.0
        x, y = x - down * beside, y + across * beside
        rim = min(side + 5, rim, far / 2)
        return (x + across * rim, y + down * rim), (x + across * (far - rim), y + down * (far - rim))


def spots_of(ranks: Sequence[int], pairs: Collection[Pair]) -> Spots:
    """Place ranks on a stage of WIDTH pixels, by who sends to whom in these pairs."""
    _, wide, high = next(box for box in _BOXES if len(ranks) <= box[0])
    hub = hub_of(ranks, pairs)
    around = [rank for rank in ranks if rank != hub]
    row = [around[0], hub, around[1]] if hub is not None and len(around) == 2 else [*ranks]
    places = {rank: place for place, rank in enumerate(row)}
    neighbours = bool(pairs) and all(abs(places[src] - places[dst]) == 1 for src, dst in pairs)
    if len(row) <= 2 or (neighbours and len(row) <= 8):
        gap = min(320.0, WIDTH / max(1, len(row)))
        left = (WIDTH - gap * len(row)) / 2
        middles = {rank: (left + gap * (place + 0.5), high / 2 + _HEAD) for rank, place in places.items()}
        return Spots(middles, max(24.0, min(wide, gap - 110)), high, high + 2 * _HEAD)
    apart = 8 if len(ranks) > 16 else 40
    tall = max(0.32 * WIDTH, len(around) * (high + apart) / math.pi, high + 60 if hub is None else 2 * high + 130)
    across, down = min(WIDTH / 2 - wide / 2 - 12, 1.5 * tall), tall / 2
    center = WIDTH / 2, down + high / 2 + _HEAD
    middles = {} if hub is None else {hub: center}
    for rank, (right, up) in zip(around, on_circle(len(around)), strict=True):
        middles[rank] = center[0] + across * right, center[1] - down * up
    return Spots(middles, wide, high, max(y for _, y in middles.values()) + high / 2 + _HEAD)
