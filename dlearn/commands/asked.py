"""The trace that a command was asked for."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dlearn.errors import TraceError, WrongArguments
from dlearn.trace.trace import Trace


def add_trace(parser: argparse.ArgumentParser) -> None:
    """The arguments that `load` reads."""
    text = "its folder, with one .jsonl file per process; of several hosts, the folder from each"
    parser.add_argument("trace", metavar="TRACE", nargs="+", help=text)
    parser.add_argument(
        "--attempt", metavar="N", type=int, help="of a job that was restarted; from 0 (default: the last)"
    )
    parser.add_argument("--within", metavar="SPAN", help='only what belongs to this span, as "step 3"')


def add_out(parser: argparse.ArgumentParser, text: str) -> None:
    """The file that a command writes; `text` says what may stand there."""
    parser.add_argument("-o", "--out", metavar="FILE", type=Path, required=True, help=text)


def load(options: argparse.Namespace, *, tell_problems: bool = True) -> Trace:
    """The trace, or the part of it, that was asked for; what is damaged or missing in it goes to stderr.

    Raises TraceError where it cannot be read, WrongArguments where it has no such span.
    """
    trace = Trace.load(*options.trace, attempt=options.attempt)
    for problem in trace.problems if tell_problems else ():
        print(f"dlearn: {problem}", file=sys.stderr)
    if options.within is None:
        return trace
    try:
        return trace.within(options.within)
    except TraceError as error:
        raise WrongArguments(str(error)) from None


def check_place(path: Path) -> None:
    """Before any work is done."""
    try:
        taken = path.exists() and not path.is_file()
    except OSError as error:
        raise WrongArguments(f"{str(path)[:60]}...: {error.strerror}. Give another -o.") from None
    if taken:
        raise WrongArguments(f"{path} is no file that could be replaced. Give another -o.")
    if not path.parent.is_dir():
        raise WrongArguments(f"{path}: there is no folder {path.parent}. Make it, or give another -o.")
