"""What each dimension of a mesh sends in one training step: a row for each kind of call.

What a rank sends in a row's calls depends on its place in that row's dimension only.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec

from dlearn.join.gloo_schedules import chunk_bounds

SOURCES = {
    "[M]": "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021)",
    "[S]": "Korthikanti et al., Reducing Activation Recomputation in Large Transformers (2022)",
    "[Z]": "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training (2020)",
    "[G]": "Lepikhin et al., GShard: Scaling Giant Models with Conditional Computation (2020)",
    "[N]": "nccl-tests, PERFORMANCE.md; chunks: gloo's source (join/gloo_schedules.py)",
}


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model of pairs of matrices, [hidden, width] and [width, hidden], and the batch of a step.

    With `experts`, every second layer has so many pairs, and a token uses one of them: token i of a
    rank uses expert i modulo `experts`, so that all have as many. `batch` counts sequences,
    `sequence` tokens.
    """

    layers: int
    width: int
    hidden: int
    batch: int
    sequence: int = 1
    number_bytes: int = 4
    experts: int = 0

    @property
    def pair_numbers(self) -> int:
        """Return how many weights one pair has."""
        return 2 * self.width * self.hidden

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence


class Ways(msgspec.Struct, frozen=True, kw_only=True):
    """How many ranks each dimension has, and what is cut."""

    dp: int
    tp: int
    pp: int
    ep: int
    micro_batches: int
    sharded: bool
    sequence_parallel: bool
    gloo: bool

    @property
    def sizes(self) -> dict[str, int]:
        """Return the mesh: dimension -> ranks, from the outermost to the innermost."""
        return {"pp": self.pp, "dp": self.dp, "ep": self.ep, "tp": self.tp}

    @property
    def ranks(self) -> int:
        return self.pp * self.dp * self.ep * self.tp


class Behind(StrEnum):
    """Which computing can hide a call."""

    NOTHING = "nothing"
    BACKWARD_PASS = "the backward pass"
    LAYER = "the layer before"
    MICRO_BATCH = "a micro-batch"


class PlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of call: `calls` of them a rank and step, each with a payload of `payload_bytes`.

    `sent_bytes` is what each place in a group sends in one call.
    """

    dimension: str
    phase: str
    op: str
    what: str
    calls: int
    payload_bytes: int
    sent_bytes: tuple[int, ...]
    formula: str
    source: str
    behind: Behind

    @property
    def group_bytes(self) -> int:
        """Return what all ranks of one group send in a step."""
        return self.calls * sum(self.sent_bytes)


def plan_rows(shape: ModelShape, ways: Ways) -> Iterator[PlanRow]:
    """Yield the rows of all dimensions of more than one rank, in the order of the mesh."""
    local = RankShare(shape, ways)
    if ways.pp > 1:
        yield from _stages(local)
    yield from _weights(local)
    if ways.ep > 1:
        yield from _routed(local)
    if ways.tp > 1:
        yield from _activations(local)


class RankShare:
    """What one rank has: layers, tokens of a micro-batch, and their activation in bytes."""

    def __init__(self, shape: ModelShape, ways: Ways) -> None:
        self.shape, self.ways = shape, ways
        self.layers = shape.layers // ways.pp
        self.expert_layers = self.layers // 2 if shape.experts else 0
        self.tokens = shape.tokens // (ways.dp * ways.ep * ways.micro_batches)
        self.activation = self.tokens * shape.width * shape.number_bytes


# Activations --------------------------------------------------------------------------------------


def _stages(local: RankShare) -> Iterator[PlanRow]:
    """Yield what crosses stage boundaries; with sequence parallel, a rank has 1/tp of it."""
    ways = local.ways
    size = local.activation // (ways.tp if ways.sequence_parallel else 1)
    for phase, what in (("forward", "activations"), ("backward", "their gradients")):
        silent = ways.pp - 1 if phase == "forward" else 0  # This stage has no boundary there.
        sent = [size] * ways.pp
        sent[silent] = 0
        yield PlanRow(
            dimension="pp", phase=phase, op="send", what=what, calls=ways.micro_batches,
            payload_bytes=size, sent_bytes=tuple(sent), formula="S", source="[M]",
            behind=Behind.MICRO_BATCH,
        )  # fmt: skip


def _routed(local: RankShare) -> Iterator[PlanRow]:
    """Yield the tokens' way to their experts and back, and that of their gradients."""
    calls = 2 * local.expert_layers * local.ways.micro_batches
    for phase, what in (("forward", "tokens, results"), ("backward", "their gradients")):
        name = Name("ep", phase, what, "[G]")
        yield _row(local, "all_to_all_single", name, calls, local.activation)


def _activations(local: RankShare) -> Iterator[PlanRow]:
    """Yield tensor parallel's sums of activations: whole, or in two halves."""
    calls = local.layers * local.ways.micro_batches
    for phase, what in (("forward", "activations"), ("backward", "their gradients")):
        if local.ways.sequence_parallel:
            name = Name("tp", phase, what, "[S]")
            yield _row(local, "all_gather_single", name, calls, local.activation)
            yield _row(local, "reduce_scatter_single", name, calls, local.activation)
        else:
            name = Name("tp", phase, what, "[M]")
            yield _row(local, "all_reduce", name, calls, local.activation)


# Weights ------------------------------------------------------------------------------------------


def _weights(local: RankShare) -> Iterator[PlanRow]:
    """Yield what dense layers send, which are equal over dp and ep, then what experts send."""
    shape, ways = local.shape, local.ways
    matrix = shape.width * shape.hidden // ways.tp * shape.number_bytes
    dense = [name for name in ("dp", "ep") if ways.sizes[name] > 1]
    if dense:
        count = 2 * (local.layers - local.expert_layers)
        yield from _matrices(local, "_".join(dense), "dense layers", count, matrix)
    if local.expert_layers and ways.dp > 1:
        own = matrix * (shape.experts // ways.ep)
        yield from _matrices(local, "dp", "experts", 2 * local.expert_layers, own)


def _matrices(
    local: RankShare, dimension: str, which: str, count: int, size: int
) -> Iterator[PlanRow]:  # fmt: skip
    """Yield the sum of gradients; of sharded weights also the gathers, in each pass."""
    sharded = local.ways.sharded
    for phase in ("forward", "backward") if sharded else ():
        name = Name(dimension, phase, f"weights of {which}", "[Z]", Behind.LAYER)
        yield _row(local, "all_gather_single", name, count * local.ways.micro_batches, size)
    op, source = ("reduce_scatter_single", "[Z]") if sharded else ("all_reduce", "[Z]")
    what = f"gradients of {which}"
    name = Name(dimension, "backward", what, source, Behind.BACKWARD_PASS)
    yield _row(local, op, name, count, size)


# Collectives --------------------------------------------------------------------------------------


class Name(NamedTuple):
    """What a row is called, apart from its numbers."""

    dimension: str
    phase: str
    what: str
    source: str
    behind: Behind = Behind.NOTHING


def _row(local: RankShare, op: str, name: Name, calls: int, size: int) -> PlanRow:
    """Return the row of a collective of `size` bytes a call; an all-reduce is a ring.

    Gloo makes an all-reduce of a reduce-scatter, and each rank drops what is not its own.
    """
    n = group_size(local.ways, name.dimension)
    if op == "all_reduce" or (op == "reduce_scatter_single" and local.ways.gloo):
        sent = ring_all_reduce_bytes(n, size, local.shape.number_bytes)
        formula = "2 (n-1)/n·S"
    else:
        sent = (size - size // n,) * n
        formula = "(n-1)/n·S"
    return PlanRow(
        dimension=name.dimension, phase=name.phase, op=op, what=name.what, calls=calls,
        payload_bytes=size, sent_bytes=sent, formula=formula, source=f"{name.source}, [N]",
        behind=name.behind,
    )  # fmt: skip


def ring_all_reduce_bytes(ranks: int, size: int, itemsize: int) -> tuple[int, ...]:
    """Return what each rank of a ring sends: all chunks but one to sum, all but one to share."""
    lengths = [length for _, length in chunk_bounds(ranks, size, itemsize)]
    return tuple(2 * size - lengths[rank] - lengths[rank - 1] for rank in range(ranks))


def group_size(ways: Ways, dimension: str) -> int:
    """Return the ranks of one group; "dp_ep" is dp and ep together."""
    sizes = ways.sizes | {"dp_ep": ways.dp * ways.ep}
    return sizes[dimension]
