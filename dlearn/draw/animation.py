"""A walk through a trace as an animated GIF, for slides and pages that play nothing else: a frame for each step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.animation import PillowWriter
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from dlearn.analysis.findings import size_text
from dlearn.analysis.walking import Board, Step, Walkthrough
from dlearn.draw.arrows import draw_arrow
from dlearn.draw.canvas import TEXT_PT, TITLE_PT, WIDTH_IN, cut, plain, wrap, write
from dlearn.draw.palette import CHOSEN, FAINT, HELD, INK
from dlearn.errors import DlearnError
from dlearn.shown import count_text

MOST_FRAMES = 120
_ROWS = 10
"""Steps in sight at once; the last one is the current one."""
_ROW_IN = 0.3
_PIECE_IN = 0.22
_HEAD_IN = 1.05
_DPI = 80
_LAST_FRAMES = 3
"""The last frame stays that much longer."""


def animate(
    walk: Walkthrough,
    path: str | os.PathLike[str],
    *,
    seconds: float = 1.2,
    tell: Callable[[int, int], object] | None = None,
) -> None:
    """Write a GIF with a frame of so many seconds for each of the first 120 steps; what is left out stands in it.

    `tell` hears how many frames are done, and of how many: each takes about a tenth of a second.
    """
    if Path(path).suffix.lower() != ".gif":
        raise DlearnError(f"{Path(path).name!r}: an animation is saved as .gif.")
    if not walk.steps:
        raise DlearnError("there is nothing to animate: no message is known here, and nothing that a rank did.")
    if not 0.02 <= seconds <= 60:
        raise DlearnError(f"{seconds} seconds for a step: a GIF can show one for 0.02 to 60.")
    if not Path(path).parent.is_dir():
        raise DlearnError(f"cannot write {path}: there is no folder {Path(path).parent}. Make it, or choose another.")
    count = min(len(walk.steps), MOST_FRAMES)
    height = _HEAD_IN + _ROWS * _ROW_IN + max(_boards_in(walk, place) for place in range(count + 1)) + 0.35
    with matplotlib.rc_context({"savefig.bbox": None}):
        figure = Figure(figsize=(WIDTH_IN, height), dpi=_DPI, facecolor="white")
        writer = PillowWriter(fps=1 / seconds)  # type: ignore[arg-type]  # it wants 1000 / fps ms for a frame
        with writer.saving(figure, Path(path), _DPI):
            for place in (*range(count + 1), *[count] * _LAST_FRAMES):
                figure.clear()
                draw_frame(figure, walk, place, left_out=len(walk.steps) - count)
                writer.grab_frame()
                if tell is not None:
                    tell(place, count)


def draw_frame(figure: Figure, walk: Walkthrough, place: int, *, left_out: int = 0) -> None:
    """The picture after `place` steps: title, sentence, the last steps as rows, and what each rank holds."""
    width, height = figure.get_size_inches()
    ax = figure.add_axes((0.01, 0, 0.98, 1))
    ax.set_axis_off()
    ax.set_xlim(-0.5, len(walk.labels) - 0.5)
    ax.set_ylim(height, 0)  # in inches from the top
    left, across = -0.5, (width * 0.98 - 0.1) * 72
    _write(ax, left, 0.2, cut(plain(walk.title, most=300), across, size=TITLE_PT), fontsize=TITLE_PT, fontweight="bold")
    said = walk.steps[place - 1].sentence if place else "Nothing has happened yet."
    for line, text in enumerate(_sentence(said, across)):
        _write(ax, left, 0.47 + 0.2 * line, text)
    columns = {rank: float(column) for column, rank in enumerate(walk.labels)}
    top = _HEAD_IN
    for rank, column in columns.items():
        ax.plot([column, column], [top, top + _ROWS * _ROW_IN], color=FAINT, linewidth=1, zorder=1)
        name = cut(plain(walk.labels[rank]), across / len(columns) - 4, size=TEXT_PT)
        _write(ax, column, top - 0.12, name, ha="center", fontweight="bold")
    for row, step in enumerate(walk.steps[max(0, place - _ROWS) : place]):
        y = top + _ROW_IN * (row + 0.7)
        if row == min(place, _ROWS) - 1:
            ax.add_patch(
                Rectangle(
                    (-0.5, y - 0.7 * _ROW_IN), len(columns), _ROW_IN, facecolor=CHOSEN, edgecolor="none", zorder=0
                )
            )
        _draw_step(ax, step, columns, y)
    y = top + _ROWS * _ROW_IN + 0.2
    for board in walk.board_of(place):
        y = _draw_board(ax, walk, board, place, columns, y, across / len(columns))
    rest = f"; {count_text(left_out, 'later step')} left out" if left_out else ""
    _write(ax, left, height - 0.12, f"step {place} of {len(walk.steps)}{rest}", color=FAINT)


def _sentence(text: str, width: float) -> Iterator[str]:
    lines = wrap(plain(text, most=400), width, size=TEXT_PT)
    yield cut(lines[0], width, size=TEXT_PT)
    if lines[1:]:
        yield cut(" ".join(lines[1:]), width, size=TEXT_PT)


def _draw_step(ax: Axes, step: Step, columns: dict[int, float], y: float) -> None:
    message = step.message
    if message is None:
        ax.plot([columns[step.rank]], [y - 0.05], "o", color=FAINT, markersize=6, zorder=3)
        right = columns[step.rank] * 2 >= len(columns)
        shift = 0.12 / WIDTH_IN * len(columns)
        x = columns[step.rank] + (-shift if right else shift)
        _write(ax, x, y - 0.05, plain(step.mark, most=24), ha="right" if right else "left", halo=True)
        return
    src, dst = columns[message.src], columns[message.dst]
    label = ("never came: " if message.how == "missing" else "") + size_text(message.payload_bytes)
    label = f"{plain(step.mark, most=24)}: {label}" if step.mark else label
    if src == dst:
        _write(ax, src, y - 0.05, f"{label} to itself", ha="center", halo=True)
        return
    draw_arrow(ax, (src, y), (dst, y), how=message.how, gid="message")
    _write(ax, (src + dst) / 2, y - 0.1, label, ha="center", halo=True)


def _draw_board(
    ax: Axes, walk: Walkthrough, board: Board, place: int, columns: dict[int, float], y: float, column_pt: float
) -> float:
    """Returns where the next one begins."""
    _write(ax, -0.5, y, plain(board.title, most=120), color=FAINT)
    held = {key: each for key, each in walk.held(board, place).items() if each.text and key[0] in columns}
    fresh = {(change.rank, change.place) for change in (walk.steps[place - 1].changes if place else ())}
    rows: dict[int, int] = {}
    for (rank, piece), change in sorted(held.items()):
        row = piece if not board.lasting else rows.setdefault(rank, 0)
        rows[rank] = rows.get(rank, 0) + 1
        left, top = columns[rank] - 0.46, y + 0.12 + _PIECE_IN * row
        edge = INK if (rank, piece) in fresh else FAINT
        for wide, face, line in ((0.92 * change.share, HELD, 0.0), (0.92, "none", 1.5 if edge == INK else 0.5)):
            ax.add_patch(
                Rectangle((left, top), wide, _PIECE_IN - 0.04, facecolor=face, edgecolor=edge, linewidth=line, zorder=2)
            )
        text = change.text if board.lasting else f"{piece + 1}: {change.text}"
        _write(
            ax, left + 0.03, top + (_PIECE_IN - 0.04) / 2, cut(plain(text), 0.86 * column_pt, size=TEXT_PT), zorder=3
        )
    return y + 0.12 + _PIECE_IN * _height(walk, board, place) + 0.16


def _height(walk: Walkthrough, board: Board, place: int) -> int:
    """In pieces."""
    held = [key for key, change in walk.held(board, place).items() if change.text]
    if not board.lasting:
        return 1 + max((piece for _, piece in held), default=0)
    return max((sum(rank == each for rank, _ in held) for each in walk.labels), default=0)


def _boards_in(walk: Walkthrough, place: int) -> float:
    return sum(0.28 + _PIECE_IN * _height(walk, board, place) for board in walk.board_of(place))


def _write(ax: Axes, x: float, y: float, text: str, *, halo: bool = False, **more: Any) -> None:
    effects = [withStroke(linewidth=2.5, foreground="white")] if halo else None
    write(ax, x, y, text, **{"va": "center", "zorder": 5, "path_effects": effects, **more})
