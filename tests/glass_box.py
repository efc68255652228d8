"""What the tests of glass-box collectives let real ranks do."""

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


def everything() -> dict[str, str]:
    """Do all that they can on these ranks, and compare; return what is said of what they cannot."""
    with dlearn.span("960 items"):
        for algorithm in ALGORITHMS.values():
            algorithm.all_reduce(torch.ones(960))
    all_reduces()
    the_others()
    any_tensor()
    if dist.get_world_size() >= 3:
        in_a_part_of_the_ranks()
    return refused()


def all_reduces() -> None:
    """Sums are close to the exact one, equal in every bit on all ranks and each time; the ring's are gloo's."""
    n = dist.get_world_size()
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
            assert ((result - exact).abs() <= 1e-6 * scale).all(), (name, size)
            assert all(torch.equal(result, each) for each in everyone), (name, size)
            assert name != "ring" or n > 4 or torch.equal(result, gloos), size


def the_others() -> None:
    """reduce_scatter, all_gather, broadcast and reduce of every algorithm that has them."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for algorithm in ALGORITHMS.values():
        if hasattr(algorithm, "all_gather"):
            output = torch.empty(3 * n)
            algorithm.all_gather(output, torch.full((3,), float(rank)))
            assert torch.equal(output, torch.arange(n).repeat_interleave(3).float()), algorithm
            given = torch.arange(2.0 * n) * (rank + 1)
            output = torch.empty(2)
            algorithm.reduce_scatter(output, given)
            wanted = torch.arange(2.0 * n)[2 * rank : 2 * rank + 2] * n * (n + 1) / 2
            assert torch.equal(output, wanted), algorithm
            assert torch.equal(given, torch.arange(2.0 * n) * (rank + 1)), "the input stays"
        for root in range(n):
            if hasattr(algorithm, "broadcast"):
                algorithm.broadcast(tensor := torch.full((5,), float(rank)), root)
                assert tensor.tolist() == [root] * 5, algorithm
            if hasattr(algorithm, "reduce"):
                algorithm.reduce(tensor := torch.full((5,), float(rank + 1)), root)
                algorithm.reduce(mean := torch.full((5,), 2.0 * rank), root, op=dist.ReduceOp.AVG)
                assert rank != root or tensor.tolist() == [n * (n + 1) / 2] * 5, algorithm
                assert rank != root or mean.tolist() == [n - 1.0] * 5, algorithm


def any_tensor() -> None:
    """Types, shapes and operations beside the sum of a row of float32."""
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
    for tensor, reduce in cases:
        gloos = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gloos, op=reduce)
        for algorithm in ALGORITHMS.values():
            mine = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)
            algorithm.all_reduce(mine, op=reduce)
            assert torch.equal(mine, gloos), f"{algorithm} {reduce}: {mine} instead of {gloos}"
    for algorithm in ALGORITHMS.values():
        algorithm.all_reduce(mean := torch.full((5,), rank * 2.0), op=op.AVG)
        assert mean.tolist() == [n - 1.0] * 5, algorithm


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


def in_a_part_of_the_ranks() -> None:
    """A group that leaves rank 1 out, and counts its own ranks."""
    group = dist.new_group([0, 2])
    for algorithm in ALGORITHMS.values():
        tensor = torch.full((3,), dist.get_rank() + 1.0)
        if dist.get_rank() in (0, 2):
            algorithm.all_reduce(tensor, group=group)
            assert tensor.tolist() == [4.0] * 3, algorithm
