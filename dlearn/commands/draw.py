"""`dlearn draw`: a picture of a trace, in a file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from dlearn.commands.asked import add_out, add_trace, check_place, load
from dlearn.errors import SetupError, WrongArguments
from dlearn.trace.event import AutogradNode
from dlearn.trace.trace import Trace

KINDS = ("autograd", "breakdown", "buckets", "reconcile", "sequence", "timeline", "traffic", "traffic_graph")
"""The drawings that need a trace and nothing else."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", choices=KINDS, help=", ".join(KINDS))
    add_trace(parser)
    add_out(parser, "a .svg, .pdf or .png; a file of that name is replaced")
    parser.add_argument("--context", metavar="ID", type=int, help="of distributed autograd (default: the last)")


def run(options: argparse.Namespace) -> None:
    os.environ.setdefault("MPLBACKEND", "agg")  # pictures go to files, no window
    from dlearn import draw  # matplotlib takes a moment

    check_ending(options.out)
    check_place(options.out)
    if options.context is not None and options.kind != "autograd":
        raise WrongArguments("--context chooses one of distributed autograd's: it goes with `draw autograd` only.")
    trace = load(options)
    if options.kind == "autograd":
        axes = draw.autograd(trace, context=context_of(trace, options.context))
    else:
        axes = getattr(draw, options.kind)(trace)
    try:
        draw.save(axes, options.out)
    except OSError as error:
        raise SetupError(f"cannot write {options.out}: {error.strerror}. Give another -o.") from None


def check_ending(path: Path) -> None:
    """Before any work is done."""
    from dlearn.draw.save import ENDINGS

    if path.suffix.lower() not in ENDINGS:
        raise WrongArguments(f"{path}: a picture is saved as {', '.join(ENDINGS)}. Give the file such an ending.")


def context_of(trace: Trace, context: int | None) -> int | None:
    """The same; WrongArguments where the trace has no graph of it."""
    contexts = sorted({event.context for event in trace.of(AutogradNode)})
    if context is not None and context not in contexts:
        known = ", ".join(map(str, contexts)) or "none (record with graph=True)"
        raise WrongArguments(f"there is no graph of context {context} in this trace; there is {known}.")
    return context
