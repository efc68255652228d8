"""`dlearn run --live`: rows of the ranks at the foot of the terminal; what is printed scrolls above.
Where stderr is no terminal, they are printed now and then.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dlearn.live.live_rows import LiveRows

AGAIN_SECONDS = 1.0
PRINTED_AGAIN_SECONDS = 10.0
_SAVE, _RESTORE, _ALL_SCROLLS = "\0337", "\0338", "\033[r"


@contextmanager
def live_rows(folder: Path) -> Iterator[None]:
    """Show the rows of the ranks as long as the block lasts."""
    over = threading.Event()
    show = _at_the_foot if sys.stderr.isatty() else _printed
    lines = partial(_lines, LiveRows(folder), time.monotonic())
    thread = threading.Thread(target=show, args=(lines, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _lines(rows: LiveRows, start: float) -> list[str]:
    lines = rows.lines()
    return [f"dlearn: {time.monotonic() - start:.0f} s", *lines] if lines else []


def _printed(lines: Callable[[], list[str]], over: threading.Event) -> None:
    while not over.wait(PRINTED_AGAIN_SECONDS):
        if shown := lines():
            print("\n".join(shown), file=sys.stderr, flush=True)


def _at_the_foot(lines: Callable[[], list[str]], over: threading.Event) -> None:
    taken = 0
    while not over.wait(AGAIN_SECONDS):
        width, height = os.get_terminal_size(2)
        shown = [line[: width - 1] for line in lines()][: height // 2]
        shown = [""] * (taken - len(shown)) + shown  # A line that is no longer needed is empty.
        _write(_room(taken, len(shown), height) + _painted(shown, height))
        taken = len(shown)
    if taken:
        _, height = os.get_terminal_size(2)
        _write(_SAVE + "".join(f"\033[{height - n};1H\033[K" for n in range(taken)) + _ALL_SCROLLS + _RESTORE)


def _room(taken: int, wanted: int, height: int) -> str:
    """Move what stands at the foot up, and keep that many lines out of what scrolls."""
    more = max(0, wanted - taken)
    up = "\n" * more + f"\033[{more}A" if more else ""
    return f"{up}{_SAVE}\033[1;{height - wanted}r{_RESTORE}"


def _painted(lines: list[str], height: int) -> str:
    placed = (f"\033[{height - len(lines) + 1 + n};1H\033[K{line}" for n, line in enumerate(lines))
    return _SAVE + "".join(placed) + _RESTORE


def _write(text: str) -> None:
    """Write in one piece: other processes write to this terminal, too."""
    os.write(2, text.encode(errors="replace"))
