"""How long a plan's step takes on a given machine, and what hides behind computing: a prediction.

Computing and sending are as fast as you say, by a data sheet or a measurement. Rows that hide
behind the same pass share its time, in their order. After Austin et al., "How to Scale Your Model"
(2025); the bubble after Narayanan et al. (2021), as in volume/plan_rows.py.
"""

from collections.abc import Iterator, Mapping

import msgspec

from dlearn.analysis.volume.parallel_plan import ParallelPlan
from dlearn.analysis.volume.plan_rows import Behind, PlanRow
from dlearn.errors import DlearnError
from dlearn.shown import Paragraph, Result, Table, time_text

PASS = {"forward": 2, "backward": 4}
"""FLOPs for each weight and token: a multiplication and an addition; backward for two gradients."""
SHARED = (Behind.BACKWARD_PASS, Behind.LAYER)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs a second of one rank, and bytes a second that it sends: a number, or by dimension."""

    flops_per_s: float
    bytes_per_s: float | Mapping[str, float]

    def __post_init__(self) -> None:
        rates = self.bytes_per_s
        every = [*rates.values()] if isinstance(rates, Mapping) else [rates]
        if min(self.flops_per_s, *every) <= 0:
            speeds = f"{self.flops_per_s}, {rates}"
            raise DlearnError(f"the speeds of a machine have to be more than 0: {speeds}")

    def rate(self, dimension: str) -> float:
        """Return bytes a second over a dimension; over dp and ep together the slower one's."""
        rates = self.bytes_per_s
        if not isinstance(rates, Mapping):
            return rates
        names = [name for name in (dimension, *dimension.split("_")) if name in rates]
        if not names:
            known = ", ".join(rates)
            raise DlearnError(f"the machine has no bytes_per_s for {dimension}, only for {known}")
        return min(rates[name] for name in names)


class RowTime(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that the busiest rank sends for a row of the plan, and that it waits for it.

    `flops_per_byte` are the FLOPs of its pass, of gradients those of the last micro-batch's.
    """

    row: PlanRow
    flops_per_byte: float
    send_s: float
    exposed_s: float


class PlanTimes(Result, frozen=True, dict=True):
    """Predicted seconds of a step: computing, waiting for messages, the pipeline's bubble."""

    plan: ParallelPlan
    machine: Machine
    compute_s: float
    rows: tuple[RowTime, ...]

    @property
    def exposed_s(self) -> float:
        """Return how long a rank waits for messages that nothing hides."""
        return sum(each.exposed_s for each in self.rows)

    @property
    def bubble(self) -> float:
        """Return which part of the time of its passes a stage has nothing to do: (p-1)/(m+p-1)."""
        ways = self.plan.ways
        return (ways.pp - 1) / (ways.micro_batches + ways.pp - 1)

    @property
    def bubble_s(self) -> float:
        """Return the bubble in seconds; the gradients are sent after it."""
        late = sum(each.exposed_s for each in self.rows if each.row.behind is Behind.BACKWARD_PASS)
        passes_s = self.compute_s + self.exposed_s - late
        return passes_s * self.bubble / (1 - self.bubble)

    @property
    def step_s(self) -> float:
        return self.compute_s + self.exposed_s + self.bubble_s

    @property
    def computing(self) -> float:
        """Return the part of the step in which a rank computes, 0 to 1."""
        return self.compute_s / self.step_s

    @property
    def finding(self) -> str:
        parts = {"waiting for messages": self.exposed_s, "bubble": self.bubble_s}
        rest = ", ".join(f"{seconds / self.step_s:.0%} {name}" for name, seconds in parts.items())
        step = time_text(int(self.step_s * 1e9))
        return f"Predicted: a step of {step}, {self.computing:.0%} of it computing, {rest}"

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a record for each row of the plan."""
        for each in self.rows:
            row = each.row
            yield {
                "dimension": row.dimension, "phase": row.phase, "op": row.op, "what": row.what,
                "flops_per_byte": each.flops_per_byte, "send_s": each.send_s,
                "exposed_s": each.exposed_s, "behind": row.behind.value,
            }  # fmt: skip

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        names, numbers = ["dimension", "phase", "call", "of"], ["FLOPs per byte", "to be hidden"]
        rows = [[*names, *numbers, "sends", "waits", "hidden behind"]]
        for each in self.rows:
            row, rate = each.row, self.machine.rate(each.row.dimension)
            ratios = [f"{each.flops_per_byte:,.0f}", f"{self.machine.flops_per_s / rate:,.0f}"]
            times = [time_text(int(seconds * 1e9)) for seconds in (each.send_s, each.exposed_s)]
            rows.append([row.dimension, row.phase, row.op, row.what, *ratios, *times, row.behind])
        if self.plan.rows:
            yield Table(rows, names=4, numbers=4)


def plan_times(plan: ParallelPlan, machine: Machine) -> PlanTimes:
    """Predict the times of a plan's step on a machine, and which messages hide behind computing.

    FLOPs are those of the matrices. Sent gradients hide behind the backward pass of the last
    micro-batch, gathered weights behind the layer before, and a stage's sends behind the next
    micro-batch. Sums of activations and all-to-alls of tokens hide behind nothing.
    """
    shape, ways = plan.shape, plan.ways
    layers = shape.layers // ways.pp
    tokens = shape.tokens // (ways.dp * ways.ep * ways.micro_batches)
    # Seconds of one FLOP for each weight of a layer and each token of a micro-batch.
    pair_s = shape.pair_numbers / ways.tp * tokens / machine.flops_per_s
    compute_s = sum(PASS.values()) * pair_s * layers * ways.micro_batches
    pass_s = {}
    for phase, flops in PASS.items():
        pass_s[phase] = flops * pair_s * layers * ways.micro_batches
    left_s = {phase: seconds * (layers - 1) / layers for phase, seconds in pass_s.items()}
    rows = []
    for row in plan.rows:
        last = ways.micro_batches if row.behind is Behind.BACKWARD_PASS else 1
        # Matrices of so many layers: with experts, some layers are dense and some are not.
        own_layers = row.calls * last / ways.micro_batches / 2
        sent = row.calls * max(row.sent_bytes)
        send_s = sent / machine.rate(row.dimension)
        others_s = pass_s[row.phase] * (1 - 1 / ways.micro_batches)
        exposed_s = _exposed(row, send_s, own_layers, others_s, left_s[row.phase] / last)
        if row.behind in SHARED:
            left_s[row.phase] -= (send_s - exposed_s) * last
        flops_per_byte = pass_s[row.phase] / last * machine.flops_per_s / sent
        rows.append(
            RowTime(row=row, flops_per_byte=flops_per_byte, send_s=send_s, exposed_s=exposed_s)
        )  # fmt: skip
    return PlanTimes(plan=plan, machine=machine, compute_s=compute_s, rows=tuple(rows))


def _exposed(
    row: PlanRow, send_s: float, own_layers: float, others_s: float, left_s: float
) -> float:  # fmt: skip
    """Return the seconds that a rank waits for a row.

    The other micro-batches take `others_s`, and `left_s` of the pass are free.
    """
    if row.behind is Behind.NOTHING:
        return send_s
    if row.behind is Behind.MICRO_BATCH:
        return max(0.0, send_s - others_s)
    # Of the layer that begins or ends a pass: nothing is there to hide it.
    return max(send_s / own_layers, send_s - left_s)
