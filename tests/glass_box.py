"""What the tests of glass-box collectives let real ranks do."""

from __future__ import annotations

import torch
import torch.distributed as dist

import dlearn
from dlearn.collectives import halving_doubling, ring, star, tree
from dlearn.errors import SetupError

ALGORITHMS = {each.__name__.rpartition(".")[2]: each for each in (ring, halving_doubling, tree, star)}
SIZES = [0, 1, 2, 7, 1000, 1024, 100_003, 600_001]


def shares(size: int) -> torch.Tensor:
    """This rank's share: numbers over six decades, so that the order of adding shows in the last bits."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    scale = 10.0 ** torch.randint(-3, 4, (size,), generator=generator)
    return torch.randn(size, generator=generator) * scale


def everything() -> tuple[list[str], dict[str, str]]:
    """All that they can do on these ranks: what went wrong, and what was said of what they cannot."""
    for size in (960, 16):
        with dlearn.span(f"{size} items"):
            for algorithm in ALGORITHMS.values():
                algorithm.all_reduce(torch.ones(size))
    wrong = all_reduces() + the_others() + any_tensor()
    if dist.get_world_size() >= 3:
        wrong += in_a_part_of_the_ranks()
    return wrong, refused()


def all_reduces() -> list[str]:
    """Sums are close to the exact one, equal in every bit on all ranks and each time; the ring's are gloo's."""
    wrong, n = [], dist.get_world_size()
    for size in SIZES if n <= 3 else SIZES[:-1]:
        mine = shares(size)
        everyone = [torch.empty(size) for _ in range(n)]
        dist.all_gather(everyone, mine)
        exact = torch.stack(everyone).double().sum(0)
        scale = torch.stack(everyone).double().abs().sum(0)
        gloos = mine.clone()
        dist.all_reduce(gloos)
        for name, algorithm in ALGORITHMS.items():
            result, again = mine.clone(), mine.clone()
            algorithm.all_reduce(result)
            algorithm.all_reduce(again)
            dist.all_gather(everyone, again)
            if not bool(((result - exact).abs() <= 1e-6 * scale).all()):
                wrong.append(f"{name} of {size}: the sum")
            if not all(torch.equal(result, each) for each in everyone):
                wrong.append(f"{name} of {size}: results differ")
            if name == "ring" and n <= 4 and not torch.equal(result, gloos):
                wrong.append(f"ring of {size}: not gloo's bits")
    return wrong


def the_others() -> list[str]:
    """reduce_scatter, all_gather, broadcast and reduce of every algorithm that has them; what went wrong."""
    rank, n = dist.get_rank(), dist.get_world_size()
    wrong = []

    def expect(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
        if not torch.equal(got, wanted):
            wrong.append(f"{what}: {got.tolist()[:8]} instead of {wanted.tolist()[:8]}")

    for name, algorithm in ALGORITHMS.items():
        if hasattr(algorithm, "all_gather"):
            output = torch.empty(3 * n)
            algorithm.all_gather(output, torch.full((3,), float(rank)))
            expect(f"{name} all_gather", output, torch.arange(n).repeat_interleave(3).float())
            given = torch.arange(2.0 * n) * (rank + 1)
            output = torch.empty(2)
            algorithm.reduce_scatter(output, given)
            factor = n * (n + 1) / 2
            expect(f"{name} reduce_scatter", output, torch.arange(2.0 * n)[2 * rank : 2 * rank + 2] * factor)
            expect(f"{name} input", given, torch.arange(2.0 * n) * (rank + 1))
        for root in range(n):
            if hasattr(algorithm, "broadcast"):
                tensor = torch.full((5,), float(rank))
                algorithm.broadcast(tensor, root)
                expect(f"{name} broadcast from {root}", tensor, torch.full((5,), float(root)))
            if hasattr(algorithm, "reduce"):
                tensor = torch.full((5,), float(rank + 1))
                algorithm.reduce(tensor, root)
                mean = torch.full((5,), 2.0 * rank)
                algorithm.reduce(mean, root, op=dist.ReduceOp.AVG)
                if rank == root:
                    expect(f"{name} reduce to {root}", tensor, torch.full((5,), n * (n + 1) / 2))
                    expect(f"{name} mean at {root}", mean, torch.full((5,), n - 1.0))
    return wrong


def any_tensor() -> list[str]:
    """Types, shapes and operations beside the sum of a row of float32; what went wrong."""
    rank, n = dist.get_rank(), dist.get_world_size()
    op = dist.ReduceOp
    cases = [
        (torch.full((3, 4), rank + 1, dtype=torch.int64), op.SUM),
        (torch.full((5,), rank + 1, dtype=torch.uint8), op.MAX),
        (torch.full((5,), rank + 2, dtype=torch.int32), op.PRODUCT),
        (torch.full((5,), 1 << rank, dtype=torch.int32), op.BOR),
        (torch.full((5,), 3 - rank % 2, dtype=torch.int32), op.BAND),
        (torch.tensor(rank + 0.5, dtype=torch.float64), op.SUM),
        (torch.arange(12.0).view(3, 4).t() * (rank + 1), op.SUM),  # not contiguous
    ]
    wrong = []
    for tensor, reduce in cases:
        gloos = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gloos, op=reduce)
        for name, algorithm in ALGORITHMS.items():
            mine = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
            algorithm.all_reduce(mine, op=reduce)
            if not torch.equal(mine, gloos):
                wrong.append(f"{name} {reduce} of {tensor.dtype}: {mine} instead of {gloos}")
    for name, algorithm in ALGORITHMS.items():
        mean = torch.full((5,), rank * 2.0)
        algorithm.all_reduce(mean, op=op.AVG)
        if mean.tolist() != [n - 1.0] * 5:
            wrong.append(f"{name} AVG: {mean}")
    return wrong


def refused() -> dict[str, str]:
    """What cannot be carried, and what is said of it before anything is sent."""
    ones, n = torch.ones(4), dist.get_world_size()
    calls = {
        "sparse": lambda: ring.all_reduce(ones.to_sparse()),
        "expanded": lambda: tree.all_reduce(torch.ones(1).expand(4)),
        "meta": lambda: star.all_reduce(torch.ones(4, device="meta")),
        "mean of integers": lambda: ring.all_reduce(torch.ones(4, dtype=torch.int32), op=dist.ReduceOp.AVG),
        "order of complex": lambda: ring.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX),
        "input": lambda: ring.reduce_scatter(torch.empty(4), torch.ones(4 * n - 1)),
        "types": lambda: ring.all_gather(torch.empty(4 * n), ones.double()),
        "root": lambda: tree.broadcast(ones, root=n),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
        except SetupError as error:
            said[name] = str(error)
    # The ranks still agree on what comes next.
    ring.all_reduce(ones)
    assert ones.tolist() == [n] * 4
    return said


def in_a_part_of_the_ranks() -> list[str]:
    """A group that leaves rank 1 out, and counts its own ranks."""
    group = dist.new_group([0, 2])
    wrong = []
    for name, algorithm in ALGORITHMS.items():
        tensor = torch.full((3,), dist.get_rank() + 1.0)
        if dist.get_rank() in (0, 2):
            algorithm.all_reduce(tensor, group=group)
            if tensor.tolist() != [4.0] * 3:
                wrong.append(f"{name} in a part: {tensor}")
    return wrong
