"""`dlearn messages`: every message of a trace, to read or to go on with."""

from __future__ import annotations

import argparse
import sys

from dlearn.analysis.volume.message_lines import csv_lines, json_lines, text_lines
from dlearn.commands.asked import add_trace, load
from dlearn.join.confirming import messages


def arguments(parser: argparse.ArgumentParser) -> None:
    add_trace(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one array; times in ns, sizes in bytes")
    form.add_argument("--csv", action="store_true", help="the same fields")


def run(options: argparse.Namespace) -> None:
    found = messages(load(options))
    lines = json_lines if options.json else csv_lines if options.csv else text_lines
    for line in lines(found):
        print(line)
    if found.unexplained and lines is not text_lines:  # the text ends with it
        print(f"dlearn: {found}", file=sys.stderr)
