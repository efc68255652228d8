"""What still runs, shown while it does: in a notebook one output that changes in place, in a terminal some lines."""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from dlearn.live.live_rows import LiveRows
from dlearn.shown import in_a_notebook

LIVE = {"dlearn": "live"}  # Metadata of an output that depends on how long a cell took.
_HANG_STYLE = "color:var(--jp-error-color1,#b40426);margin:2px 0"
_ROWS_STYLE = "font-family:var(--jp-code-font-family,monospace);white-space:pre"


class LiveDisplay:
    """It appears after two seconds and changes once a second; at the end one sentence of the run is left."""

    AFTER_SECONDS, AGAIN_SECONDS = 2.0, 1.0

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next = self._start + self.AFTER_SECONDS
        self._lines: list[str] = []
        self._output: Any = None

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, *failure: object) -> None:
        if failure[0] is not None:
            self.step_aside()
            self.end_with("")

    def update(self, head: str, rows: LiveRows | None = None) -> None:
        """Show the head, how long it has taken, and the rows, which are read only if they are to be shown."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self.AGAIN_SECONDS
        head = f"{head}, {now - self._start:.0f} s"
        if in_a_notebook():
            self._show_output(head, rows)
        elif sys.stderr.isatty():
            self._show_lines([head, *(rows.lines() if rows is not None else [])])

    def step_aside(self) -> None:
        """Clear a terminal's lines before something else is printed: they come back below it."""
        if self._lines:
            self._show_lines([])

    def end_with(self, sentence: str) -> None:
        """Replace the rows, where there were any, by a sentence: the run has ended."""
        if self._output is not None:
            self._replace({"text/html": f"<p>{html.escape(sentence)}</p>", "text/plain": sentence})

    def _show_output(self, head: str, rows: LiveRows | None) -> None:
        table = rows.table() if rows is not None else None
        hang = rows.hang if rows is not None else ""
        told = [head, *(table.lines() if table is not None else []), *hang.splitlines()]
        shown = f"<p><strong>{html.escape(head)}</strong></p>"
        if table is not None and len(table.rows) > 1:
            shown += f'<div style="{_ROWS_STYLE}">{table.html()}</div>'
        for sentence in hang.splitlines():
            shown += f'<p role="status" style="{_HANG_STYLE}">{html.escape(sentence)}</p>'
        self._replace({"text/html": shown, "text/plain": "\n".join(told)})

    def _replace(self, data: dict[str, str]) -> None:
        if self._output is not None:
            self._output.update(data, raw=True, metadata=LIVE)
            return
        from IPython.display import display

        self._output = display(data, raw=True, display_id=True, metadata=LIVE)  # type: ignore[no-untyped-call]

    def _show_lines(self, lines: list[str]) -> None:
        up = "\033[1A\033[K" * (len(self._lines) - 1)
        print(f"\r\033[K{up}" + "\n".join(lines), end="", file=sys.stderr, flush=True)
        self._lines = lines
