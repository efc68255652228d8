"""A walk through a trace as an animated GIF or WebP: packets move from rank to rank, for slides and pages that play
nothing.

What moves at the same time (messages of one operation in the same step of its algorithm) moves together.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from PIL import Image

from dlearn.analysis.findings import size_text
from dlearn.analysis.walking import Board, Change, Step, Walkthrough
from dlearn.draw.arrows import draw_arrow
from dlearn.draw.canvas import draw_boxes, write
from dlearn.draw.layout.stage_spots import WIDTH, spots_of
from dlearn.draw.palette import FAINT, GRID, HELD, INK, LANE, MISSING, SERIES, look
from dlearn.draw.text import cut, plain, wrap
from dlearn.errors import DlearnError
from dlearn.shown import count_text

ENDINGS = (".gif", ".webp")
MOST_FRAMES = 40
_MOVING = (3, 6)
"""Fewest and most frames in which a packet moves."""
_WIDTH, _TOP, _BELOW = round(WIDTH), 84, 34
_LAST_SECONDS = 3.0
_COLORS = 64
_DPI = 72
"""So that a point is a pixel."""
_TEXT_PX, _TITLE_PX = 12, 16
_AT_REST = "#c8c8c8"
_FEW_RANKS = 16
"""Of more of them packets have no labels."""


class Round(NamedTuple):
    """What happens at the same time: the steps from one place of the walk to another."""

    steps: tuple[Step, ...]
    before: int
    after: int

    @property
    def sends(self) -> bool:
        return self.steps[0].message is not None


def animate(
    walk: Walkthrough,
    path: str | os.PathLike[str],
    *,
    seconds: float = 1.2,
    tell: Callable[[int, int], object] | None = None,
) -> None:
    """Write a GIF or a WebP that takes so many seconds for what happens at the same time, in at most 40 frames.

    What is left out stands in it. `tell` hears how many frames are done, and of how many.
    """
    ending = Path(path).suffix.lower()
    if ending not in ENDINGS:
        raise DlearnError(f"{Path(path).name!r}: an animation is saved as {' or '.join(ENDINGS)}.")
    if not walk.steps:
        raise DlearnError("there is nothing to animate: no message is known here, and nothing that a rank did.")
    if not 0.1 <= seconds <= 60:
        raise DlearnError(f"{seconds} seconds for a step: an animation can show one for 0.1 to 60.")
    if not Path(path).parent.is_dir():
        raise DlearnError(f"cannot write {path}: there is no folder {Path(path).parent}. Make it, or choose another.")
    rounds, moving = _that_fit(rounds_of(walk))
    stage = Stage(walk, left_out=len(walk.steps) - rounds[-1].after)
    frames: list[np.ndarray] = []
    milliseconds: list[int] = []
    count = sum(moving if each.sends else 1 for each in rounds)
    for each in rounds:
        parts = [place / moving for place in range(1, moving + 1)] if each.sends else [1.0]
        for part in parts:
            frames.append(stage.frame(each, part))
            milliseconds.append(round(1000 * seconds / len(parts)))
            if tell is not None:
                tell(len(frames), count)
    milliseconds[-1] = round(1000 * _LAST_SECONDS)
    first, *more = map(Image.fromarray, frames) if ending == ".webp" else _in_one_palette(frames)
    how = {"lossless": True, "quality": 50, "method": 3} if ending == ".webp" else {"optimize": False}
    first.save(path, save_all=True, append_images=more, duration=milliseconds, loop=0, **how)


def _in_one_palette(frames: Sequence[np.ndarray]) -> list[Image.Image]:
    """Of a GIF only what changes is written, if all frames have the same colours."""
    some = Image.fromarray(np.vstack(frames[:: max(1, len(frames) // 6)]))
    colors = some.quantize(_COLORS, dither=Image.Dither.NONE)
    return [Image.fromarray(each).quantize(palette=colors, dither=Image.Dither.NONE) for each in frames]


def rounds_of(walk: Walkthrough) -> list[Round]:
    """Put steps that follow one another, and happen at the same time, into rounds."""
    rounds = [tuple(together) for _, together in groupby(walk.steps, key=lambda step: step.moment)]
    ends = list(accumulate(map(len, rounds)))
    return [Round(steps, end - len(steps), end) for steps, end in zip(rounds, ends, strict=True)]


def _that_fit(rounds: Sequence[Round]) -> tuple[list[Round], int]:
    """The first rounds, and in how many frames packets move, so that all have room."""
    fewest, most = _MOVING
    sending = sum(each.sends for each in rounds)
    moving = max(fewest, min(most, (MOST_FRAMES - len(rounds) + sending) // max(1, sending)))
    frames = accumulate(moving if each.sends else 1 for each in rounds)
    fitting = sum(1 for count in frames if count <= MOST_FRAMES)
    return list(rounds[: max(1, fitting)]), moving


# A frame --------------------------------------------------------------------------------------------------------------


class Stage:
    """All that stays the same from frame to frame. Places are pixels from the top left, below title and sentence."""

    def __init__(self, walk: Walkthrough, *, left_out: int) -> None:
        self.walk, self.left_out = walk, left_out
        self.ranks = list(walk.labels)
        self.pairs = dict.fromkeys((each.src, each.dst) for each in walk.messages if each.src != each.dst)
        self.spots = spots_of(self.ranks, self.pairs)
        self.bottom = round(self.spots.height + _BELOW)

    def frame(self, round_: Round, part: float) -> np.ndarray:
        """The stage after this part of a round, from 0 to 1, as pixels."""
        figure = Figure(figsize=(_WIDTH / _DPI, (_TOP + self.bottom) / _DPI), dpi=_DPI)
        ax = figure.add_axes((0, 0, 1, 1), xlim=(0, _WIDTH), ylim=(self.bottom, -_TOP))
        ax.set_axis_off()
        self._write_words(ax, round_)
        sent = [step.message for step in round_.steps if step.message is not None]
        absent = {rank for step in round_.steps for rank in step.absent}
        used = {(each.src, each.dst) for each in sent}
        red = {(each.src, each.dst) for each in sent if each.how == "missing"}
        red |= {pair for pair in self.pairs if pair[0] in absent}
        for pair in self.pairs:
            color = MISSING if pair in red else INK if pair in used else _AT_REST
            draw_arrow(ax, *self.spots.wire(pair, self.pairs), how="observed", color=color, width=1.5)
        held = self._held(round_.after if part == 1.0 else round_.before, round_)
        for rank in self.ranks:
            edge = MISSING if rank in absent else INK if any(rank in pair for pair in used) else FAINT
            self._draw_machine(ax, rank, edge, _mark_of(rank, round_))
            self._draw_cells(ax, rank, held.get(rank, {}))
        for step in round_.steps:
            if step.message is not None and step.message.src != step.message.dst:
                self._draw_packet(ax, step, part)
        pixels = io.BytesIO()
        figure.savefig(pixels, format="rgba", dpi=_DPI)
        return np.frombuffer(pixels.getvalue(), np.uint8).reshape(-1, _WIDTH, 4)[:, :, :3]

    def _write_words(self, ax: Axes, round_: Round) -> None:
        title = plain(self.walk.title, most=300)
        _write(ax, 12, 20 - _TOP, title, room=_WIDTH - 24, fontsize=_TITLE_PX, fontweight="bold")
        together = f"{len(round_.steps)} messages at the same time. One of them: " if len(round_.steps) > 1 else ""
        said = plain(together * round_.sends + round_.steps[0].sentence, most=400)
        for line, text in enumerate(wrap(said, _WIDTH - 24, size=_TEXT_PX)[:2]):
            _write(ax, 12, 44 + 19 * line - _TOP, text, room=_WIDTH - 24)
        rest = f"; {count_text(self.left_out, 'later step')} left out" if self.left_out else ""
        y, total = self.bottom - 16, len(self.walk.steps)
        _write(ax, 12, y, f"step {round_.after} of {total}{rest}", color=FAINT)
        begin, end = _WIDTH - 252, _WIDTH - 12
        ax.hlines([y, y], begin, [end, begin + (end - begin) * round_.after / total], colors=[GRID, FAINT], linewidth=3)

    def _held(self, place: int, round_: Round) -> dict[int, dict[int, Change]]:
        """By rank and place, what stands on the board of the operation under way, or will be next."""
        board = self._board(round_.after)
        held: dict[int, dict[int, Change]] = {}
        for (rank, piece), change in (self.walk.held(board, place) if board else {}).items():
            held.setdefault(rank, {})[piece] = change
        return held

    def _board(self, place: int) -> Board | None:
        boards = {board.title: board for board in self.walk.boards}
        steps = [*reversed(self.walk.steps[:place]), *self.walk.steps[place:]]
        titles = [change.board for step in steps for change in step.changes if not boards[change.board].lasting]
        return boards[titles[0]] if titles else next(iter(boards.values()), None)

    def _draw_machine(self, ax: Axes, rank: int, edge: str, mark: str) -> None:
        (x, y), wide, high = self.spots.middles[rank], self.spots.wide, self.spots.high
        line = 1 if edge == FAINT else 2
        place = x - wide / 2, y - high / 2
        ax.add_patch(Rectangle(place, wide, high, facecolor="white", edgecolor=edge, linewidth=line, zorder=5))
        small = wide < 40
        name, at = (str(rank), y) if small else (plain(self.walk.labels[rank]), place[1] - 12)
        _write(ax, x, at, name, room=1.6 * wide, ha="center", fontweight="bold")
        ink = MISSING if edge == MISSING else INK
        _write(ax, x, y + high / 2 + 11, plain(mark), room=1.6 * wide, ha="center", color=ink)

    def _draw_cells(self, ax: Axes, rank: int, held: Mapping[int, Change]) -> None:
        """A column for each piece, with a band in the colour of each rank whose part is in it."""
        (x, y), wide, high = self.spots.middles[rank], self.spots.wide - 12, self.spots.high - 12
        top, bottom, step, row = y - high / 2, y + high / 2, wide / max(1, len(held)), high / len(self.ranks)
        boxes, faces = [], []
        for column, piece in enumerate(sorted(held)):
            change, left = held[piece], x - wide / 2 + step * column
            right = left + step - 1.5
            boxes.append((left, right, top, bottom))
            faces.append(LANE)
            owners = [self.ranks.index(owner) for owner in change.owners] if len(self.ranks) <= len(SERIES) else []
            boxes += [(left, right, top + row * owner, top + row * (owner + 1) - 1) for owner in owners]
            faces += [SERIES[owner % len(SERIES)] for owner in owners]
            if not owners:
                boxes.append((left, right, bottom - high * change.share, bottom))
                faces.append(HELD)
            if not change.owners and step > 60:
                _write(ax, left + step / 2, y, plain(change.text), room=step - 6, ha="center")
        draw_boxes(ax, boxes, facecolors=faces, zorder=6)

    def _draw_packet(self, ax: Axes, step: Step, part: float) -> None:
        message = step.message
        assert message is not None
        start, end = np.array(self.spots.wire((message.src, message.dst), self.pairs))
        missing = message.how == "missing"
        x, y = start + (end - start) * (0.12 if missing else part)
        half = 5 + min(11.0, len(str(message.payload_bytes or 0)) * 1.6)
        face, ink = ("white", MISSING) if missing else (look(step.op).color, INK)
        draw_boxes(ax, [(x - half, x + half, y - half, y + half)], facecolor=face, edgecolor=ink, zorder=7)
        size = ("never came: " if missing else "") + size_text(message.payload_bytes)
        label = f"{plain(step.mark, most=24)}: {size}" if step.mark else size
        if len(self.ranks) <= _FEW_RANKS:
            halo = [withStroke(linewidth=3, foreground="white")]
            _write(ax, x, y - half - 9, label, ha="center", fontweight="bold", color=ink, path_effects=halo)


def _write(ax: Axes, x: float, y: float, text: str, *, room: float = _WIDTH, **more: Any) -> None:
    """As much of the text as this room holds."""
    style: dict[str, Any] = {"fontsize": _TEXT_PX, "zorder": 8} | more
    write(ax, x, y, cut(text, room, size=style["fontsize"], bold="fontweight" in more), **style)


def _mark_of(rank: int, round_: Round) -> str:
    """What is written below a rank: what it does by itself, or that it waits, or never came."""
    for step in round_.steps:
        if step.absent:
            return "never came" if rank in step.absent else "waits" if rank in step.waiting else ""
        if step.message is None and step.rank == rank:
            return step.mark
    return ""
