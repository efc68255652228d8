"""What an all-reduce costs in theory: time = steps * latency + bytes / bandwidth, with both constants fitted here.

A message of m bytes takes `latency + m / bandwidth` (R. Hockney, "The communication challenge for MPP", Parallel
Computing 20, 1994), and a rank can send one and receive another at the same time. The steps and bytes of the algorithms
are those of R. Thakur, R. Rabenseifner and W. Gropp, "Optimization of Collective Communication Operations in MPICH",
Int. J. of High Performance Computing Applications 19(1), 2005; the time of adding up is left out.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np

from dlearn.analysis.costs.bandwidth import bandwidth, speed_text
from dlearn.errors import DlearnError
from dlearn.join.joining import operations
from dlearn.join.operation_messages import messages_of, why_unknown
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import Paragraph, Result, Table, size_text, time_text
from dlearn.trace import Trace

Measurement = tuple[float, float]
"""(bytes, seconds) of one message, or of one collective."""


class Cost(NamedTuple):
    """Of the longest chain of messages of which each must wait for the one before: their number, and their bytes."""

    steps: int
    bytes: float


# In theory ------------------------------------------------------------------------------------------------------------


def ring(ranks: int, size: float) -> Cost:
    """Return the cost of reduce-scatter and all-gather: `ranks - 1` steps of 1/n of the data."""
    steps = 2 * (ranks - 1)
    return Cost(steps, steps * size / ranks)


def halving_doubling(ranks: int, size: float) -> Cost:
    """Return the cost of halving and doubling: log2(ranks) steps each, of 1/2, 1/4 ... of the data.

    Where `ranks` is no power of two, the ranks beyond it send all their data to a neighbour before,
    and receive the result afterwards.
    """
    rounds = ranks.bit_length() - 1
    power = 1 << rounds
    folds = 0 if ranks == power else 2
    return Cost(2 * rounds + folds, (2 * (power - 1) / power + folds) * size)


def tree(ranks: int, size: float) -> Cost:
    """Return the cost of a binomial tree, reduce then broadcast: all of the data at each level."""
    steps = 2 * (ranks - 1).bit_length()
    return Cost(steps, steps * size)


def star(ranks: int, size: float) -> Cost:
    """Return the cost of all ranks' data through the root's one link, one after another, twice."""
    steps = 2 * (ranks - 1)
    return Cost(steps, steps * size)


ALGORITHMS: dict[str, Callable[[int, float], Cost]] = {
    "ring": ring, "halving_doubling": halving_doubling, "tree": tree, "star": star
}  # fmt: skip


def cost(algorithm: str, ranks: int, size: float) -> Cost:
    """Return the steps and bytes of an all-reduce: "ring", "halving_doubling", "tree" or "star"."""
    if algorithm not in ALGORITHMS:
        raise DlearnError(f"there is no algorithm {algorithm!r} here; there are: {', '.join(ALGORITHMS)}.")
    if ranks < 2 or size < 0:
        raise DlearnError(f"an all-reduce needs at least 2 ranks and 0 bytes, not {ranks} ranks and {size} bytes.")
    return ALGORITHMS[algorithm](ranks, size)


def cost_seen(operation: Operation) -> Cost | str:
    """Count the same two numbers in the operation's messages, or return why they are unknown.

    A step lasts as long as the busiest rank sends or receives in it.
    """
    found = messages_of(operation)
    reason = None if found else why_unknown(operation)
    if reason is not None:
        return str(reason)
    ports: defaultdict[int, defaultdict[tuple[str, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for message in found:
        for port in (("out", message.src), ("in", message.dst)):
            ports[message.step][port].append(message.payload_bytes or 0)
    return Cost(
        sum(max(len(sizes) for sizes in step.values()) for step in ports.values()),
        sum(max(sum(sizes) for sizes in step.values()) for step in ports.values()),
    )


# On this machine ------------------------------------------------------------------------------------------------------


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """The two constants: seconds that a message takes before its first byte, and the bytes per second from then on.

    `error` is how far the worst of the `medians` that it was fitted to lies from it, as a part of the model's time.
    """

    latency_s: float
    bandwidth: float
    error: float = 0.0
    medians: int = 0

    def time_s(self, spent: Cost) -> float:
        return spent.steps * self.latency_s + spent.bytes / self.bandwidth

    @property
    def fitted(self) -> str:
        """Return "fitted to 9 medians, the worst is 12% off"; "" where the constants were given."""
        return f"fitted to {self.medians} medians, the worst is {self.error:.0%} off" if self.medians else ""

    def __str__(self) -> str:
        constants = f"{time_text(round(self.latency_s * 1e9))} latency, {speed_text(self.bandwidth)}"
        return f"{constants} ({self.fitted})" if self.fitted else constants


def measurements(trace: Trace, *, op: str = "send") -> list[Measurement]:
    """Return (bytes, seconds) of every message that the program sent, or of every other `op`.

    A message's time runs from the later of its two calls to the end of its recv. For a `fit`, let
    two ranks play ping-pong with blocking sends and receives, and nothing else.
    """
    found: list[Measurement] = []
    for operation in operations(trace):
        if operation.op == op:
            with suppress(DlearnError):  # One that failed, or whose end was not seen.
                each = bandwidth(operation)
                found.append((each.size_bytes, each.duration_ns / 1e9))
    return found


def fit(measured: Iterable[Measurement]) -> Model:
    """Fit latency and bandwidth, neither negative, to the times of single messages of two sizes or more.

    The error is minimized relative to the measured time: microseconds of a small message count as
    much as milliseconds of a large one.
    """
    medians = medians_of(measured)
    if len(medians) < 2:
        raise DlearnError("a fit needs messages of at least two sizes, one small and one large.")
    # Minimize the sum of (latency / time + bytes / time / bandwidth - 1)^2, both columns of one length.
    rows = np.array([(1 / time, size / time) for size, time in medians.items()])
    length = np.linalg.norm(rows, axis=0)
    latency, per_byte = (np.linalg.lstsq(rows / length, np.ones(len(rows)), rcond=None)[0] / length).tolist()
    if per_byte <= 0:
        raise DlearnError("the larger messages took no longer than the small ones: measure larger ones, more often.")
    if latency < 0:
        latency, per_byte = 0.0, float(rows[:, 1].sum() / length[1] ** 2)
    error = max(abs(time / (latency + size * per_byte) - 1) for size, time in medians.items())
    return Model(latency_s=latency, bandwidth=1 / per_byte, error=error, medians=len(medians))


def medians_of(measured: Iterable[Measurement]) -> dict[float, float]:
    """Return size -> median of its times, in order of size."""
    times: defaultdict[float, list[float]] = defaultdict(list)
    for size, time in measured:
        if not (0 <= size < float("inf") and 0 < time < float("inf")):
            raise DlearnError(f"a measurement is (bytes, seconds), and takes some time; not ({size}, {time}).")
        times[size].append(time)
    return {size: median(times[size]) for size in sorted(times)}


# Who is faster --------------------------------------------------------------------------------------------------------


def crossover(model: Model, ranks: int, one: str = "ring", other: str = "tree") -> float | None:
    """Return the size in bytes at which both take the same time; None if one is never slower.

    Equate steps_1 * latency + k_1 * size / bandwidth with the same of the other: k is the bytes for
    one byte of data.
    """
    (steps, k), (other_steps, other_k) = cost(one, ranks, 1), cost(other, ranks, 1)
    if k == other_k:
        return None
    size = (steps - other_steps) * model.latency_s * model.bandwidth / (other_k - k)
    return size if size > 0 else None


class Predictions(Result, frozen=True):
    """The predicted times in seconds: `times[algorithm][i]` is that for `sizes[i]` bytes."""

    model: Model
    ranks: int
    sizes: tuple[int, ...]
    times: dict[str, tuple[float, ...]]

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each algorithm at each size."""
        for name, times in self.times.items():
            for size, seconds in zip(self.sizes, times, strict=True):
                yield {"algorithm": name, "bytes": size, "seconds": seconds}

    def rows(self) -> list[list[str]]:
        """Return a row for each algorithm, with steps and bytes (S: size); the fastest has a *."""
        table = [["all-reduce", "steps", "bytes", *(size_text(size) for size in self.sizes)]]
        least = [min(times) * (1 + 1e-9) for times in zip(*self.times.values(), strict=True)]
        for name, times in self.times.items():
            steps, k = cost(name, self.ranks, 1)
            marks = ["*" if time <= best else " " for time, best in zip(times, least, strict=True)]
            cells = [time_text(round(time * 1e9)) + mark for time, mark in zip(times, marks, strict=True)]
            table.append([name, str(steps), f"{k:.3g} S", *cells])
        return table

    def paragraphs(self) -> tuple[Paragraph, ...]:
        return f"{finding(self.model, self.ranks)}. {self.model}.", Table(self.rows())


def predictions(model: Model, ranks: int, sizes: Iterable[int]) -> Predictions:
    """Predict the time of an all-reduce of each size by each algorithm."""
    asked = tuple(sizes)
    times = {name: tuple(model.time_s(cost(name, ranks, size)) for size in asked) for name in ALGORITHMS}
    return Predictions(model, ranks, asked, times)


def finding(model: Model, ranks: int) -> str:
    """Return "4 ranks, in theory: below 68.4 kB the tree beats the ring; ..."."""
    size = crossover(model, ranks)
    if size is None:
        return f"{ranks} ranks, in theory: nothing beats the ring, at any size"
    best, of_ring = cost("halving_doubling", ranks, 1), cost("ring", ranks, 1)
    beats = best != of_ring and best.steps <= of_ring.steps and best.bytes <= of_ring.bytes
    beaten = "both" if beats else "the tree"
    told = f"below {size_text(round(size))} the tree beats the ring; halving-doubling always beats {beaten}"
    return f"{ranks} ranks, in theory: {told}"
