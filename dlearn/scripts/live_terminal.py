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
from pathlib import Path

from dlearn.live.live_rows import LiveRows

AGAIN_SECONDS = 1.0
PRINTED_AGAIN_SECONDS = 10.0
_SAVE, _RESTORE, _ALL_SCROLLS = "\0337", "\0338", "\033[r"


@contextmanager
def live_rows(folder: Path) -> Iterator[None]:
    """Show the rows of the ranks as long as the block lasts."""
    over, rows, start = threading.Event(), LiveRows(folder), time.monotonic()

    def lines() -> list[str]:
        shown = rows.lines()
        return [f"dlearn: {time.monotonic() - start:.0f} s", *shown] if shown else []

    show = _at_the_foot if sys.stderr.isatty() else _printed
    thread = threading.Thread(target=show, args=(lines, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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
        more = len(shown) - taken
        # What stands there moves up, and what is printed from now on scrolls above.
        up = "\n" * more + f"\033[{more}A" if more else ""
        _paint(up, shown, f"\033[1;{height - len(shown)}r", height)
        taken = len(shown)
    if taken:
        _paint("", [""] * taken, _ALL_SCROLLS, os.get_terminal_size(2).lines)


def _paint(before: str, lines: list[str], scrolls: str, height: int) -> None:
    """Write rows at the foot in one piece: other processes write to this terminal, too."""
    rows = (f"\033[{height - len(lines) + 1 + n};1H\033[K{line}" for n, line in enumerate(lines))
    os.write(2, f"{before}{_SAVE}{scrolls}{''.join(rows)}{_RESTORE}".encode(errors="replace"))
