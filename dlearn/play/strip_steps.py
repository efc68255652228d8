"""The steps of a strip: their lengths, and the shares of their time, which stand for many calls."""

from collections import Counter
from statistics import median
from typing import Any

from dlearn.analysis.ddp.overlap import overlap
from dlearn.analysis.ddp.step_times import RunSteps
from dlearn.events.printable import printable
from dlearn.shown import time_text
from dlearn.trace import Trace

_FEWEST = 5  # Of fewer steps the calls are shown, and no lengths.
_NAMED = 3
_PARTS = {"forward": 0, "backward": 0, "optimizer": 0, "transfer": 1, "waiting": 2}


def step_facts(
    trace: Trace, steps: RunSteps, lanes: dict[int, int], spans: dict[str, int], unit_ns: int
) -> dict[str, Any]:
    """Return each step's title, start, end, span and length (-1: unfinished), and its cells.

    A cell is a step on a rank: its index, lane, start, length and, where they are known, how long
    it computed, sent what was not hidden, and waited. `awaited` says for each step and lane how
    long the others waited for it.
    """
    titled: list[tuple[str, int, int, int, int]] = []
    cells: list[list[int]] = []
    awaited = []
    found = enumerate(overlap(trace).steps)
    shares = {(at, share.rank): share for at, step in found for share in step.shares}
    for at, step in enumerate(steps.steps):
        first, waits = len(cells), Counter[int]()
        for rank, on_rank in step.cells.items():
            length = -1 if on_rank.length_ns is None else on_rank.length_ns // unit_ns
            begin = (on_rank.start_ns - trace.whole.first_ns) // unit_ns
            cells.append([at, lanes[rank], begin, length])
            share = shares.get((at, rank))
            if share is not None and share.observed and length >= 0:
                lengths_ns = [0, 0, 0, 0]
                for row in share.rows:
                    lengths_ns[_PARTS.get(row.phase, -1)] += row.length_ns
                cells[-1] += [length_ns // unit_ns for length_ns in lengths_ns[:3]]
                waits += share.waits
        begins = min(cell[2] for cell in cells[first:])
        ends = max(cell[2] + max(0, cell[3]) + 1 for cell in cells[first:])
        length = -1 if step.length_ns is None else step.length_ns // unit_ns
        titled.append((printable(step.title), begins, ends, spans.get(step.title, -1), length))
        awaited.append([waits[rank] // unit_ns for rank in lanes])
    is_run = len(titled) >= _FEWEST
    return {
        "steps": titled,
        "cells": cells,
        "awaited": awaited if any(map(any, awaited)) else [],
        "isRun": is_run,
        "areShares": is_run and any(len(cell) > 4 for cell in cells),
        "median": median(steps.lengths_ns or [1]) / unit_ns,
    }


def step_lengths(steps: RunSteps, facts: dict[str, Any]) -> dict[str, Any]:
    """Return paths of all lengths, one unit high, and index, title and time of the longest."""
    finished, most = steps.finished, max(steps.lengths_ns, default=1)
    longest = sorted(sorted(finished, key=lambda at: -finished[at])[:_NAMED])
    lengths = dict.fromkeys(("step", "longest", "unfinished"), "")
    names: list[tuple[int, str, str]] = []
    for at, (title, begins, ends, *_) in enumerate(facts["steps"]):
        kind = "longest" if at in longest else "step"
        high = finished.get(at, most) / most
        if at not in finished:
            kind, ends = "unfinished", facts["length"]
        lengths[kind] += f"M{begins} 1V{1 - high:.3f}H{ends}V1"
        if at in longest:
            names.append((at, title, time_text(finished[at])))
    middle_ns = round(median(steps.lengths_ns or [0]))
    lengths["median"] = f"M0 {1 - middle_ns / most:.3f}H{facts['length']}"
    return {"lengths": lengths, "longest": names, "median": time_text(middle_ns)}
