"""What the benchmarks share: their options, how long a call takes, and a median with its spread."""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from datetime import date
from statistics import median


def option_parser(about: str) -> argparse.ArgumentParser:
    """Return a parser whose help shows this text as it stands."""
    kept = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, formatter_class=kept)


def rounds_asked(about: str, default: int, what: str = "rounds of each kind") -> int:
    """Read `--rounds`, the only option of this benchmark."""
    parser = option_parser(about)
    parser.add_argument("--rounds", type=int, default=default, help=f"{what} (default {default})")
    rounds: int = parser.parse_args().rounds
    return rounds


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
