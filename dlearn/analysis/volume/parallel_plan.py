"""A plan: every byte of a data, tensor, pipeline and expert parallel step, before it runs.

`compare` puts a recorded step beside it. What no run has confirmed is a prediction.
"""

from collections import Counter
from collections.abc import Iterator
from functools import cached_property

from dlearn.analysis.volume.plan_rows import (
    SOURCES,
    ModelShape,
    PlanRow,
    Ways,
    group_size,
    plan_rows,
)
from dlearn.analysis.volume.traffic import traffic
from dlearn.errors import DlearnError, TraceError
from dlearn.join.joining import operations
from dlearn.shown import Paragraph, Result, Table, size_text
from dlearn.trace import Trace

BACKENDS = ("dlearn_ring", "gloo")


def plan(
    shape: ModelShape,
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    micro_batches: int = 1,
    sharded: bool = False,
    sequence_parallel: bool = False,
    backend: str = "dlearn_ring",
) -> "ParallelPlan":
    """Predict every byte of one training step on a mesh of pp x dp x ep x tp ranks.

    The batch is divided over dp and ep, layers over pp, the hidden units of a layer over tp, and
    experts over ep. `sharded` weights are gathered for each pass of a micro-batch (FSDP). Raises
    DlearnError where something cannot be divided evenly.
    """
    if backend not in BACKENDS:
        raise DlearnError(f"a plan is for one of {', '.join(BACKENDS)}, not {backend!r}")
    ways = Ways(
        dp=dp, tp=tp, pp=pp, ep=ep, micro_batches=micro_batches, sharded=sharded,
        sequence_parallel=sequence_parallel, gloo=backend == "gloo",
    )  # fmt: skip
    _check(shape, ways)
    return ParallelPlan(shape=shape, ways=ways, rows=tuple(plan_rows(shape, ways)))


def _check(shape: ModelShape, ways: Ways) -> None:
    """Raise DlearnError, with one sentence, if a part of the model or batch is no whole number."""
    sizes = {name: getattr(shape, name) for name in shape.__struct_fields__ if name != "experts"}
    sizes |= ways.sizes | {"micro_batches": ways.micro_batches}
    for name, count in sizes.items():
        if count < 1:
            raise DlearnError(f"{name} is {count}: it has to be at least 1")
    if ways.ep > 1 and not shape.experts:
        raise DlearnError(f"ep is {ways.ep}, and the model has no experts: ModelShape(experts=...)")
    if shape.experts and ways.sequence_parallel:
        raise DlearnError("sequence parallel with experts is not planned here: choose one of them")
    parts = ways.dp * ways.ep * ways.micro_batches
    tokens = shape.tokens // parts
    in_stage, stages = (2, "2 · pp: every second one has experts") if shape.experts else (1, "pp")
    divided = [
        ("the batch", shape.batch, parts, "dp · ep · micro_batches"),
        ("layers", shape.layers, ways.pp * in_stage, stages),
        ("hidden", shape.hidden, ways.tp, "tp"),
    ]
    if shape.experts:
        divided.append(("experts", shape.experts, ways.ep, "ep"))
        divided.append(("the tokens of a micro-batch", tokens, shape.experts, "experts"))
    if ways.sequence_parallel:
        divided.append(("the tokens of a micro-batch", tokens, ways.tp, "tp"))
    if ways.sharded:
        numbers = shape.width * shape.hidden // ways.tp
        divided.append(("a rank's matrix", numbers, ways.dp * ways.ep, "dp · ep"))
    for what, count, by, name in divided:
        if count % by:
            raise DlearnError(f"{what}, {count}, cannot be divided by {by} ({name})")


class ParallelPlan(Result, frozen=True, dict=True):
    """Rows of one step, and what each rank sends in it, in bytes."""

    shape: ModelShape
    ways: Ways
    rows: tuple[PlanRow, ...]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_by_dimension.values())

    @property
    def bytes_by_dimension(self) -> dict[str, int]:
        """Return what all ranks send over each dimension."""
        total: Counter[str] = Counter()
        for row in self.rows:
            total[row.dimension] += self.row_bytes(row)
        return dict(total)

    @cached_property
    def bytes_by_rank(self) -> dict[int, int]:
        return {rank: sum(self.sends(rank).values()) for rank in range(self.ways.ranks)}

    def row_bytes(self, row: PlanRow) -> int:
        """Return what all ranks send in the calls of a row."""
        return row.group_bytes * (self.ways.ranks // group_size(self.ways, row.dimension))

    def sends(self, rank: int) -> dict[str, int]:
        """Return what one rank sends over each dimension."""
        places = self._places(rank)
        total: Counter[str] = Counter()
        for row in self.rows:
            total[row.dimension] += row.calls * row.sent_bytes[places[row.dimension]]
        return dict(total)

    def _places(self, rank: int) -> dict[str, int]:
        """Return a rank's place in each dimension; the last one, tp, counts fastest."""
        places, rest = {}, rank
        for name, size in reversed(self.ways.sizes.items()):
            rest, places[name] = divmod(rest, size)
        return places | {"dp_ep": places["dp"] * self.ways.ep + places["ep"]}

    def compare(self, trace: Trace) -> "PlanComparison":
        """Put the recorded messages of a step beside the plan.

        Raises TraceError where it has another number of ranks, or messages of unknown size.
        """
        if len(trace.ranks) != self.ways.ranks:
            ranks = f"{self.ways.ranks} ranks, the trace has {len(trace.ranks)}"
            raise TraceError(f"the plan is for {ranks}")
        recorded, planned = _sent(trace, ""), {}
        for dimension in sorted({each.group.dimension for each in operations(trace)} - {""}):
            there = _sent(trace.where(dimension=dimension), dimension)
            recorded += there
            recorded.subtract({("", rank): size for (_, rank), size in there.items()})
        for rank in range(self.ways.ranks):
            for dimension, size in self.sends(rank).items():
                planned[dimension, rank] = size
        found = {key: size for key, size in recorded.items() if size}
        return PlanComparison(planned=planned, recorded=found)

    @property
    def finding(self) -> str:
        mesh = " x ".join(f"{name} {size}" for name, size in self.ways.sizes.items() if size > 1)
        ranks = f"{self.ways.ranks:,} ranks" + (f" ({mesh})" if mesh else "")
        return f"Predicted: {ranks} send {size_text(self.total_bytes)} in a step"

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a record for each row, with the bytes that all ranks send."""
        for row in self.rows:
            yield {
                "dimension": row.dimension, "phase": row.phase, "op": row.op, "what": row.what,
                "n": group_size(self.ways, row.dimension), "calls": row.calls,
                "payload_bytes": row.payload_bytes, "bytes": self.row_bytes(row),
                "formula": row.formula, "source": row.source,
            }  # fmt: skip

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        names = ["dimension", "phase", "call", "of"]
        rows = [[*names, "n", "calls a rank", "S", "all send", "each sends", "source"]]
        for row in self.rows:
            n = group_size(self.ways, row.dimension)
            sizes = (row.payload_bytes, self.row_bytes(row))
            names = [row.dimension, row.phase, row.op, row.what]
            numbers = [str(n), f"{row.calls:,}", *map(size_text, sizes)]
            rows.append([*names, *numbers, row.formula, row.source])
        if self.rows:
            yield Table(rows, names=4, numbers=4)
        used = {mark for row in self.rows for mark in row.source.split(", ")}
        yield from (f"{mark} {paper}" for mark, paper in SOURCES.items() if mark in used)


def _sent(trace: Trace, dimension: str) -> Counter[tuple[str, int]]:
    """Return the bytes that each rank has sent. TraceError if a message's size is not known."""
    sent = traffic(trace)
    for problem in sent.not_known():
        raise TraceError(f"a plan needs the size of every message: {problem}")
    return Counter({(dimension, rank): sent.bytes_from(rank=rank) for rank in trace.ranks})


class PlanComparison(Result, frozen=True):
    """Planned and recorded bytes by (dimension, rank)."""

    planned: dict[tuple[str, int], int]
    recorded: dict[tuple[str, int], int]

    @property
    def residues(self) -> dict[tuple[str, int], int]:
        """Return recorded less planned bytes, by (dimension, rank); "" is no dimension."""
        keys = sorted({*self.planned, *self.recorded})
        return {key: self.recorded.get(key, 0) - self.planned.get(key, 0) for key in keys}

    @property
    def exact(self) -> bool:
        return not any(self.residues.values())

    @property
    def finding(self) -> str:
        total = sum(self.recorded.values())
        if self.exact:
            return f"Each rank sends what was planned, to the byte: {total:,} B in all, residue 0"
        (dimension, rank), size = max(self.residues.items(), key=lambda item: abs(item[1]))
        more, where = "less" if size < 0 else "more", dimension or "no dimension"
        sends = f"rank {rank} sends {abs(size):,} B {more} than planned over {where}"
        return f"The recorded step differs from the plan: {sends}"

    def records(self) -> Iterator[dict[str, object]]:
        for (dimension, rank), size in self.residues.items():
            planned = self.planned.get((dimension, rank), 0)
            yield {
                "dimension": dimension, "rank": rank, "planned_bytes": planned,
                "recorded_bytes": planned + size, "residue_bytes": size,
            }  # fmt: skip

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        rows = [["dimension", "planned", "recorded", "largest residue of a rank"]]
        for dimension in dict.fromkeys(dimension for dimension, _ in self.residues):
            sums = []
            for table in (self.planned, self.recorded):
                sums.append(sum(size for (name, _), size in table.items() if name == dimension))
            residues = [size for (name, _), size in self.residues.items() if name == dimension]
            sums.append(max(residues, key=abs))
            rows.append([dimension or "none", *(f"{size:,}" for size in sums)])
        yield Table(rows)
