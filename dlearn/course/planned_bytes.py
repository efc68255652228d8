"""The exercise `plan_bytes`: predict what one rank sends in a step, and have each byte recorded."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist

from dlearn.analysis import ModelShape, traffic
from dlearn.course import parallel_step
from dlearn.course.exercise import SPAN, Attempt, Exercise, ResultError
from dlearn.errors import TrafficError
from dlearn.recorder import span

PLANS = {
    2: ({"dp": 2, "tp": 1, "pp": 1}, {"dp": 1, "tp": 2, "pp": 1}),
    3: ({"dp": 1, "tp": 1, "pp": 3},),
    4: ({"dp": 2, "tp": 2, "pp": 1}, {"dp": 1, "tp": 2, "pp": 2}, {"dp": 2, "tp": 1, "pp": 2}),
}
"""Ranks -> the plans that are recorded on so many."""
DIMENSIONS = ("dp", "tp", "pp")


def _shape(seed: int) -> ModelShape:
    """Return a model whose numbers 2, 3 and 4 divide."""
    width = 12 * (2 + seed % 3)
    hidden = 12 * (5 + seed // 3 % 4)
    return ModelShape(layers=6, width=width, hidden=hidden, batch=12, sequence=2, number_bytes=4)


def drive_plan(predict: Callable[..., Any], seed: int) -> list[Any]:
    """Return what the submission predicts for this rank in each plan, which it then runs."""
    rank, shape, predicted = dist.get_rank(), _shape(seed), []
    with span(SPAN):
        for number, plan in enumerate(PLANS[dist.get_world_size()]):
            predicted.append(predict(shape, *plan.values(), rank))
            with span(f"plan {number}"):
                dp, tp, pp = plan.values()
                parallel_step.train(shape, dp=dp, tp=tp, pp=pp, micro_batches=2)
    return predicted


def _form(tried: Attempt) -> None:
    for rank, predicted in sorted(tried.results.items()):
        for each in predicted:
            if not isinstance(each, Mapping) or {*each} != {*DIMENSIONS}:
                raise ResultError(f"rank {rank}: {each!r} is no dict with the keys dp, tp and pp")
            if not all(isinstance(size, int | float) for size in each.values()):
                raise ResultError(f"rank {rank}: {each!r} has a value that is no number")


def _as_recorded(dimension: str, tried: Attempt) -> None:
    """Raise TrafficError at the first rank that sends other bytes than were predicted."""
    _form(tried)
    for number, plan in enumerate(PLANS[tried.ranks]):
        trace = tried.trace.within(f"plan {number}")
        sent = traffic(trace.where(dimension=dimension)) if plan[dimension] > 1 else None
        for rank, predictions in sorted(tried.results.items()):
            recorded = sent.bytes_from(rank=rank) if sent else 0
            predicted = predictions[number].get(dimension)
            if predicted != recorded:
                divided = ", ".join(f"{name} {ranks}" for name, ranks in plan.items())
                sends = f"rank {rank} sends {recorded:,} B over {dimension}"
                raise TrafficError(f"{divided}: {sends}, and you predict {predicted} B")


_CRITERIA = {"form": _form} | {name: partial(_as_recorded, name) for name in DIMENSIONS}
PLAN_BYTES = Exercise("plan_bytes", drive_plan, _CRITERIA)
