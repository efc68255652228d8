"""`dlearn explain`: who sent what to whom in words, who died where, and who waits for whom."""

from __future__ import annotations

import argparse

from dlearn.analysis.telling.words import explain
from dlearn.commands.asked import add_trace, load


def arguments(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)


def run(options: argparse.Namespace) -> None:
    print(explain(load(options, tell_problems=False)))
