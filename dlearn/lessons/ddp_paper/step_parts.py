"""A training step cut into its parts, as stacked bars: those of the median step, the mean of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean

from matplotlib.axes import Axes

from dlearn.analysis.breakdown import Breakdown, Parts
from dlearn.lessons.ddp_paper import charts

NAMES = ("forward", "backward", "waiting, exposed", "transfer, exposed", "optimizer", "between")


def lengths(step: Parts) -> tuple[float, ...]:
    """In ms, in the order of NAMES; waiting and transfer are 0 where their end was not observed."""
    times = step.times
    exposed = (times.exposed_waiting_ns, times.exposed_transfer_ns) if times is not None else (0, 0)
    parts = (step.forward_ns, step.backward_ns, *exposed, step.optimizer_ns, step.between_ns)
    return tuple(part / 1e6 for part in parts)


def chart(found: Mapping[str, Breakdown], *, title: str, notes: Sequence[str] = ()) -> Axes:
    """A bar for each run, by its name: the step of median length."""
    columns = [tuple(map(mean, zip(*(lengths(each) for each in run.middle), strict=True))) for run in found.values()]
    parts = [charts.Part(name, values) for name, values in zip(NAMES, zip(*columns, strict=True), strict=True)]
    shown = [part for part in parts if any(part.values)]
    return charts.bars(
        list(found),
        shown,
        title=title,
        y="ms",
        stacked=True,
        text=lambda ms: f"{ms:.1f} ms",
        notes=["The step of median length, the mean of its ranks.", *notes],
    )
