"""One training step on a mesh of pipeline, data, expert and tensor parallel ranks, by hand.

What `analysis.plan` predicts, this runs. Forward and backward are formulas, so that each message
is a call that you can read here.
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh

from dlearn.analysis import ModelShape, plan
from dlearn.recorder import span

Gradients = list[torch.Tensor]


def train(
    shape: ModelShape, *, dp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1,
    micro_batches: int = 1, sharded: bool = False, sequence_parallel: bool = False,
) -> list[Gradients]:  # fmt: skip
    """Take one step, in the span "step"; return this rank's gradients of each of its layers.

    Raises DlearnError where the model or the batch cannot be divided evenly.
    """
    plan(
        shape, dp=dp, tp=tp, pp=pp, ep=ep, micro_batches=micro_batches, sharded=sharded,
        sequence_parallel=sequence_parallel,
    )  # fmt: skip
    rank = MeshPlace(pp=pp, dp=dp, ep=ep, tp=tp)
    layers = []
    for number in rank.part(range(shape.layers), "pp"):
        layers.append(CutLayer(shape, number, rank, sharded, sequence_parallel))
    tokens = rank.part(rank.part(inputs(shape), "dp"), "ep").chunk(micro_batches)
    with span("step"):
        kept = []
        for x in tokens:
            kept.append(forward(layers, x.reshape(-1, shape.width), rank, sequence_parallel))
        for y in reversed(kept):
            backward(layers, y, rank)
        return [layer.reduced() for layer in layers]


def forward(
    layers: Sequence["CutLayer"], x: torch.Tensor, rank: "MeshPlace", sequence_parallel: bool
) -> torch.Tensor:  # fmt: skip
    """Send a micro-batch through this stage, [tokens, width]; return what comes out."""
    if sequence_parallel:
        x = rank.part(x, "tp")
    if rank.neighbour(-1) is not None:
        x = torch.empty_like(x)
        dist.recv(x, rank.neighbour(-1), group=rank.groups["pp"])
    for layer in layers:
        x = layer.forward(x)
    if rank.neighbour(+1) is not None:
        dist.send(x, rank.neighbour(+1), group=rank.groups["pp"])
    return x


def backward(layers: Sequence["CutLayer"], y: torch.Tensor, rank: "MeshPlace") -> None:
    """Send the gradients of a micro-batch back through this stage. The loss is the sum of y²."""
    gradient = 2 * y
    if rank.neighbour(+1) is not None:
        dist.recv(gradient, rank.neighbour(+1), group=rank.groups["pp"])
    for layer in reversed(layers):
        gradient = layer.backward(gradient)
    if rank.neighbour(-1) is not None:
        dist.send(gradient, rank.neighbour(-1), group=rank.groups["pp"])


class MeshPlace:
    """This rank's place in each dimension of the mesh, and its groups."""

    def __init__(self, **sizes: int) -> None:
        self.sizes, self.places = sizes, dict.fromkeys(sizes, 0)
        self.groups: dict[str, ProcessGroup] = {}
        names = tuple(name for name, size in sizes.items() if size > 1)
        if not names:
            return
        mesh = init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)
        for name in names:
            self.groups[name] = mesh.get_group(name)
            self.places[name] = mesh.get_local_rank(name)
        if {"dp", "ep"} <= {*names}:  # Dense layers are equal on all of these.
            self.groups["dp_ep"] = mesh["dp", "ep"]._flatten("dp_ep").get_group()

    def part(self, whole, dimension: str):  # type: ignore[no-untyped-def]
        """Return this rank's part of a tensor's rows, or of a range."""
        n, place = self.sizes[dimension], self.places[dimension]
        each = len(whole) // n
        return whole[place * each : (place + 1) * each]

    def neighbour(self, step: int) -> int | None:
        """Return the global rank of the next stage, or the one before; None at an end."""
        place = self.places["pp"] + step
        if not 0 <= place < self.sizes["pp"]:
            return None
        return dist.get_global_rank(self.groups["pp"], place)


class CutLayer:
    """A pair of matrices, or this rank's experts, [pairs, rows, columns]; tp cuts hidden units."""

    def __init__(
        self, shape: ModelShape, number: int, rank: MeshPlace, sharded: bool, halves: bool
    ) -> None:  # fmt: skip
        self.routed = bool(shape.experts and number % 2)
        self.rank, self.sharded, self.halves = rank, sharded, halves
        self.tp, self.ep = rank.groups.get("tp"), rank.groups.get("ep")
        names = ["dp"] if self.routed else ["dp_ep", "dp", "ep"]
        self.data = next((rank.groups[name] for name in names if name in rank.groups), None)
        whole = weights(shape, number)
        self.weights = [each.contiguous() for each in cut(whole, rank, self.routed)]
        self.gradients = [torch.zeros_like(each) for each in self.weights]
        self.shapes = [each.shape for each in self.weights]
        if sharded:
            self.weights = [self.shard(each) for each in self.weights]
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(x · columnsᵀ) · rowsᵀ; keep what the backward pass needs."""
        columns, rows = self.whole()
        x = self.enter(x)
        hidden = (x @ columns.mT).relu()
        self.kept.append((x, hidden))
        return self.leave(hidden @ rows.mT)

    def backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Add to the gradients of the weights, and return that of x."""
        columns, rows = self.whole()
        x, hidden = self.kept.pop()
        gradient = self.enter(gradient)
        inside = gradient @ rows * (hidden > 0)
        self.gradients[0] += inside.mT @ x
        self.gradients[1] += gradient.mT @ hidden
        return self.leave(inside @ columns)

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Return all tokens that this layer's pairs work on, [pairs, tokens, width]."""
        if self.halves and self.tp:
            x = gathered(x, self.tp)
        return self.dispatched(x) if self.routed else x[None]

    def leave(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum over tp, and return this rank's tokens, [tokens, width]."""
        if self.tp and self.halves:
            return scattered(partial[0], self.tp)
        if self.tp:
            dist.all_reduce(partial, group=self.tp)
        return self.combined(partial) if self.routed else partial[0]

    # Experts: token i belongs to expert i modulo their number.

    def dispatched(self, x: torch.Tensor) -> torch.Tensor:
        """Send each token to the rank of its expert; return [experts here, tokens, width]."""
        here = len(self.gradients[0])
        n = self.rank.sizes["ep"]
        by_expert = x.view(-1, n * here, x.shape[1]).transpose(0, 1)
        arrived = exchanged(by_expert, self.ep).view(n, here, -1, x.shape[1])
        return arrived.transpose(0, 1).reshape(here, -1, x.shape[1])

    def combined(self, y: torch.Tensor) -> torch.Tensor:
        """Send each result back to its token: the way of `dispatched`, backwards."""
        n, (here, _, width) = self.rank.sizes["ep"], y.shape
        by_rank = y.view(here, n, -1, width).transpose(0, 1)
        came = exchanged(by_rank, self.ep).view(n * here, -1, width)
        return came.transpose(0, 1).reshape(-1, width)

    # Data parallel: all ranks of a group have the same weights, or a shard of them each.

    def shard(self, matrix: torch.Tensor) -> torch.Tensor:
        if self.data is None:
            return matrix.flatten()
        return matrix.flatten().chunk(self.data.size())[self.data.rank()].clone()

    def whole(self) -> list[torch.Tensor]:
        """Return both matrices; gather them where this rank has only a shard."""
        if not self.sharded:
            return self.weights
        found = []
        for own, shape in zip(self.weights, self.shapes, strict=True):
            found.append((gathered(own, self.data) if self.data else own).view(shape))
        return found

    def reduced(self) -> Gradients:
        """Return gradients summed over the data parallel ranks, or this rank's shards of them."""
        found = []
        for each in self.gradients:
            if self.sharded:
                each = scattered(each.flatten(), self.data) if self.data else each.flatten()
            elif self.data:
                dist.all_reduce(each, group=self.data)
            found.append(each)
        return found


# Calls --------------------------------------------------------------------------------------------


def gathered(part: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    whole = part.new_empty(group.size() * len(part), *part.shape[1:])
    dist.all_gather_single(whole, part.contiguous(), group=group)
    return whole


def scattered(whole: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    part = whole.new_empty(len(whole) // group.size(), *whole.shape[1:])
    dist.reduce_scatter_single(part, whole.contiguous(), group=group)
    return part


def exchanged(parts: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """Give part i to rank i of the group."""
    if group is None:
        return parts.contiguous()
    came = torch.empty_like(parts, memory_format=torch.contiguous_format)
    dist.all_to_all_single(came, parts.contiguous(), group=group)
    return came


# The model and its batch, equal on all ranks ------------------------------------------------------


def inputs(shape: ModelShape) -> torch.Tensor:
    """Return the batch, [batch, sequence, width]."""
    generator = torch.Generator().manual_seed(99)
    return torch.randn(shape.batch, shape.sequence, shape.width, generator=generator)


def weights(shape: ModelShape, number: int) -> Gradients:
    """Return a layer's matrices, [pairs, hidden, width] and [pairs, width, hidden]."""
    generator = torch.Generator().manual_seed(number)
    pairs = shape.experts if shape.experts and number % 2 else 1
    columns = torch.randn(pairs, shape.hidden, shape.width, generator=generator)
    rows = torch.randn(pairs, shape.width, shape.hidden, generator=generator)
    return [columns / shape.width**0.5, rows / shape.hidden**0.5]


def cut(whole: Gradients, rank: MeshPlace, routed: bool) -> Iterator[torch.Tensor]:
    """Yield this rank's part of both matrices: its experts, and its hidden units of them."""
    for matrix, hidden_at in zip(whole, (1, 2), strict=True):
        part = rank.part(matrix, "ep") if routed else matrix
        yield rank.part(part.transpose(0, hidden_at), "tp").transpose(0, hidden_at)
