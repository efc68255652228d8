"""Notices to the user through `logging`: "dlearn: text" on stderr, or where a handler puts them.

    logging.getLogger("dlearn").addHandler(logging.FileHandler("dlearn.log"))  # Only there.

A root logger's handler for the console shows them instead, others as well. DLEARN_QUIET=1 in the
environment silences them in all processes of a job.
"""

import logging
import os
import sys
from contextlib import suppress


def notice(text: str, *, alone: bool = False) -> None:
    """Tell the user one thing, on a line of its own; `alone`: no bar of progress can stand there."""
    if os.environ.get("DLEARN_QUIET", "0") in ("", "0"):
        # Not made before: `dictConfig` disables the loggers that are there when a program calls it.
        logger = logging.getLogger("dlearn")
        if not logger.handlers:
            logger.addHandler(_OnStderr())
        logger.warning("%s", text, extra={"alone": alone})


class _OnStderr(logging.Handler):
    """Shows notices on what is stderr now, unless a handler of the program's own shows them."""

    def emit(self, record: logging.LogRecord) -> None:
        logger, root, stderr = logging.getLogger(record.name), logging.getLogger(), sys.stderr
        if stderr is not None and len(logger.handlers) == 1:
            shown = logger.propagate and any(map(_on_console, root.handlers))
            text = "" if shown else f"dlearn: {record.getMessage()}\n"
            with suppress(Exception):  # Of one that is closed, or of the program's own making.
                above = "" if getattr(record, "alone", False) else _new_line()
                stderr.write(above + text)
                stderr.flush()


def _new_line() -> str:
    """Begin a line below a bar of progress, ours or another rank's, without asking for its lock."""
    if getattr(sys.stderr, "isatty", bool)():
        return "\n\033[J"  # And clear it: the second of two bars may stand there.
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return "\n" if getattr(tqdm, "monitor", None) else ""  # It is there from the first bar on.


def _on_console(handler: logging.Handler) -> bool:
    of_rich = getattr(getattr(handler, "console", None), "file", None)
    stream = getattr(handler, "stream", of_rich)
    return stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
