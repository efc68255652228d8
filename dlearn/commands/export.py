"""`dlearn export`: a trace in another tool's format, in a file."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from dlearn.commands.asked import add_out, add_trace, check_place, load
from dlearn.errors import SetupError, TraceError
from dlearn.trace.trace import Trace

FORMATS = ("gif", "html", "mermaid", "perfetto")
"""The functions of `dlearn.export` that need a trace and nothing else."""

MARKDOWN = (".md", ".markdown")

File = tuple[Path, Iterable[str] | Iterable[bytes]]
"""Its place, and what stands in it, in pieces."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", metavar="FORMAT", choices=FORMATS, help=", ".join(FORMATS))
    add_trace(parser)
    add_out(parser, "a file of that name is replaced; of mermaid a .md holds all diagrams, else each has a file")


def run(options: argparse.Namespace) -> None:
    """Raises WrongArguments or SetupError where the file has no place, TraceError where there is nothing to export."""
    os.environ.setdefault("MPLBACKEND", "agg")  # no window
    check_place(options.out)
    trace = load(options)
    if not trace.events:
        raise TraceError(f"nothing was recorded in {trace.path}: there is nothing to export.")
    wanted = files_of(options.format, trace, options.out)
    try:
        write(wanted)
    except OSError as error:
        raise SetupError(f"cannot write {options.out}: {error.strerror}. Give another -o.") from None
    if [path for path, _ in wanted] != [options.out]:
        print(f"{len(wanted):,} diagrams: {wanted[0][0]} to {wanted[-1][0]}")


def files_of(form: str, trace: Trace, path: Path) -> Sequence[File]:
    from dlearn import export  # matplotlib takes a moment

    if form == "gif":
        return [(path, [export.gif(trace, tell=_progress if sys.stderr.isatty() else None)])]
    made = getattr(export, form)(trace)
    if form == "mermaid":
        return mermaid_files(made, path)
    return [(path, [made] if isinstance(made, str) else made)]


def _progress(done: int, count: int) -> None:
    print(f"\r\033[Kframe {done} of {count}", end="\n" if done == count else "", file=sys.stderr, flush=True)


def mermaid_files(diagrams: Sequence[str], path: Path) -> Sequence[File]:
    """One file where it can be one: Markdown may hold several diagrams, a file of Mermaid's own only one."""
    if path.suffix.lower() in MARKDOWN:
        return [(path, [f"```mermaid\n{diagram}```\n\n" for diagram in diagrams])]
    if len(diagrams) == 1:
        return [(path, diagrams)]
    return [(path.with_stem(f"{path.stem}-{number}"), [text]) for number, text in enumerate(diagrams, 1)]


def write(wanted: Sequence[File]) -> None:
    """All of them or none: each is written beside its place, and put there when all are done."""
    unfinished = {path: path.with_name(f".{path.name[:100]}.{os.getpid()}.part") for path, _ in wanted}
    try:
        for path, pieces in wanted:
            with unfinished[path].open("wb") as file:
                file.writelines(piece if isinstance(piece, bytes) else piece.encode() for piece in pieces)
        for path, part in unfinished.items():
            part.replace(path)
    finally:
        for part in unfinished.values():
            part.unlink(missing_ok=True)
