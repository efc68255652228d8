"""The costs of the all-reduce algorithms: time over size, as the model has it, and as it was measured."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import quantiles

from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from dlearn.analysis.costs.bandwidth import speed_text
from dlearn.errors import DlearnError
from dlearn.lessons.charts import Series, lines
from dlearn.lessons.trees_and_rings import ALGORITHMS, Measurement, Model, cost, crossover, finding, medians_of
from dlearn.shown import size_text, time_text

_AROUND = 300.0
"""How far the axis reaches around the size whose bytes take as long as its latency, as a factor on either side."""
_NAMES = {"ring": "ring", "tree": "tree", "halving_doubling": "halving-doubling", "star": "star"}


def costs(model: Model, ranks: int = 4, *, measured: Mapping[str, Iterable[Measurement]] | None = None) -> Axes:
    """Draw how long an all-reduce takes over its size, a colour for each algorithm; both axes are logarithmic.

    `measured` gives (bytes, seconds) by the algorithm's name, as `measurements(trace, op="all_reduce")` does.
    """
    seen = {name: list(found) for name, found in (measured or {}).items()}
    unknown = [name for name in seen if name not in ALGORITHMS]
    if unknown:
        raise DlearnError(f"there is no algorithm {unknown[0]!r} here; there are: {', '.join(ALGORITHMS)}.")
    low, high = _range(model, ranks, seen)
    sizes = [low * (high / low) ** (i / 100) for i in range(101)]
    series: dict[str, Series] = {}
    for name, shown in _NAMES.items():
        if any(seen.values()) and not seen.get(name):
            continue
        spent = cost(name, ranks, 1)
        in_theory = [model.time_s(cost(name, ranks, size)) for size in sizes]
        label = f"{shown}: {spent.steps} steps, {spent.bytes:.3g} S"
        series[label] = Series(sizes, in_theory, derived=True)
        if seen.get(name):
            series[f"{shown}, measured"] = _dots(seen[name], like=label)
    crossing = crossover(model, ranks)
    mark = None if crossing is None else (crossing, f"ring = tree: {size_text(round(crossing))}")
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    ticks = [(10.0**power, EngFormatter("B")(10.0**power)) for power in powers]
    x, y = "bytes that each rank has (S)", "time of one all-reduce (s)"
    title, notes = _title(model, ranks, seen), _notes(model, ranks, seen)
    return lines(series, title=title, x=x, y=y, ticks=ticks, log="xy", notes=notes, mark=mark)


def _dots(found: Iterable[Measurement], *, like: str) -> Series:
    """Return the median of each size, and a line over the middle half of its measurements."""
    times: defaultdict[float, list[float]] = defaultdict(list)
    for size, time in found:
        times[size].append(time)
    spread = []
    for each in times.values():
        low, _, high = quantiles(each, n=4, method="inclusive") if len(each) > 1 else (each[0],) * 3
        spread.append((low, high))
    medians = medians_of((size, time) for size in times for time in times[size])
    return Series([*times], [medians[size] for size in times], spread, between="", like=like)


def _range(model: Model, ranks: int, seen: Mapping[str, list[Measurement]]) -> tuple[float, float]:
    """Return all measured sizes, else what is around the size whose bytes take its latency."""
    # Where bytes begin to count: a message of this size has half the bandwidth (Hockney's n_1/2).
    middle = model.latency_s * model.bandwidth or 1e5
    low, high = middle / _AROUND, middle * _AROUND
    positive = [size for found in seen.values() for size, _ in found if size > 0]
    if positive:
        low, high = min(positive) / 2, max(positive) * 2
    crossing = crossover(model, ranks)
    return (low, high) if crossing is None else (min(low, crossing / 3), max(high, crossing * 3))


def _title(model: Model, ranks: int, seen: Mapping[str, list[Measurement]]) -> str:
    """Return who was fastest and how far the model is off; without measurements, the theory."""
    medians = {name: medians_of(found) for name, found in seen.items() if found}
    if not medians:
        return finding(model, ranks)
    sizes = sorted(set.intersection(*map(set, medians.values())))
    if len(medians) == 1 or not sizes:
        return f"{ranks} ranks, measured: {_off_text(model, ranks, seen)}"
    fastest = [min(medians, key=lambda name: medians[name][size]) for size in sizes]
    first, last = _NAMES[fastest[0]], _NAMES[fastest[-1]]
    if len(set(fastest)) == 1:
        return f"{ranks} ranks, measured: {first} is the fastest at every size"
    small, large = size_text(round(sizes[0])), size_text(round(sizes[-1]))
    return f"{ranks} ranks, measured: {first} is the fastest at {small}, {last} at {large}"


def _off_text(model: Model, ranks: int, seen: Mapping[str, list[Measurement]]) -> str:
    """Return "the model is up to 22 times off"."""
    off = [
        time / model.time_s(cost(name, ranks, size))
        for name, found in seen.items()
        for size, time in medians_of(found).items()
    ]
    return f"the model is up to {max(max(off), 1 / min(off)):.2g} times off"


def _notes(model: Model, ranks: int, seen: Mapping[str, list[Measurement]]) -> list[str]:
    latency, speed = time_text(round(model.latency_s * 1e9)), speed_text(model.bandwidth)
    chain = "for the longest chain of messages; adding is left out"
    said = [f"Dashed, the model: steps × {latency} + bytes / {speed}, {chain}."]
    if model.fitted:
        said.append(f"Both constants are {model.fitted}.")
    if any(seen.values()):
        said.append(f"Dots: medians, and the middle half. Against them {_off_text(model, ranks, seen)}.")
    return said
