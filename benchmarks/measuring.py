"""What the benchmarks share: their options, how long a call takes, and a median with its spread."""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from datetime import date
from statistics import median


def options(about: str, **usual: bool | int | str | list[int] | list[str]) -> argparse.Namespace:
    """Read the options of the command line: `rounds=7` is "--rounds 7", `ranks=[2, 4]` "--ranks 2 4".

    The values given here are the defaults; one that is False becomes True where the option is there.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in usual.items():
        shown = f"default: {default}"
        if default is False:
            parser.add_argument(f"--{name}", action="store_true", help=shown)
        elif isinstance(default, list):
            parser.add_argument(f"--{name}", nargs="+", type=type(default[0]), default=default, help=shown)
        else:
            parser.add_argument(f"--{name}", type=type(default), default=default, help=shown)
    return parser.parse_args()


def today() -> str:
    """Return "2026-07-01, 4 cores"."""
    return f"{date.today()}, {os.cpu_count()} cores"


def seconds_of(call: Callable[[], object], times: int = 1) -> float:
    """Return how long one of so many calls takes, on average."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def median_text(numbers: Sequence[float], digits: int = 2) -> str:
    """Return "1.25 (1.01-2.00)": the median, the least and the most."""
    shown = [f"{each:.{digits}f}" for each in (median(numbers), min(numbers), max(numbers))]
    return f"{shown[0]} ({shown[1]}-{shown[2]})"
