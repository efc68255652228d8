"""What the tests of glass-box collectives let real ranks do."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from dlearn.collectives import exchange, halving_doubling, ring, star, tree
from dlearn.errors import SetupError

ALGORITHMS = {each.__name__.rpartition(".")[2]: each for each in (ring, halving_doubling, tree, star)}
SIZES = [0, 1, 2, 7, 8, 1000, 1024, 100_003]


def shares(size: int, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """This rank's share: numbers over six decades, so that the order of adding shows in the last bits."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    scale = 10.0 ** torch.randint(-3, 4, (size,), generator=generator)
    return (torch.randn(size, generator=generator) * scale).to(dtype)


def all_reduce_everything(sizes: list[int]) -> dict[tuple[str, int], tuple[bool, bool, torch.Tensor]]:
    """(algorithm, size) -> equal to gloo in every bit; close to the exact sum; the result."""
    found = {}
    for size in sizes:
        mine = shares(size)
        everyone = [torch.empty(size) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        exact = torch.stack(everyone).double().sum(0)
        scale = torch.stack(everyone).double().abs().sum(0)
        gloos = mine.clone()
        dist.all_reduce(gloos)
        for name, algorithm in ALGORITHMS.items():
            result = mine.clone()
            algorithm.all_reduce(result)
            close = bool(((result - exact).abs() <= 1e-6 * scale).all())
            found[name, size] = (torch.equal(result, gloos), close, result)
    return found


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
                if rank == root:
                    expect(f"{name} reduce to {root}", tensor, torch.full((5,), n * (n + 1) / 2))
    return wrong


def any_tensor() -> list[str]:
    """Types, shapes and operations beside the sum of a row of float32; what went wrong."""
    rank, n = dist.get_rank(), dist.get_world_size()
    op = dist.ReduceOp
    cases = [
        (torch.full((3, 4), rank + 1, dtype=torch.int64), op.SUM),
        (torch.full((5,), rank + 1, dtype=torch.uint8), op.MAX),
        (torch.full((5,), rank + 1.0, dtype=torch.bfloat16), op.MIN),
        (torch.full((5,), rank + 2, dtype=torch.int32), op.PRODUCT),
        (torch.full((5,), 1 << rank, dtype=torch.int32), op.BOR),
        (torch.full((5,), 3 - rank % 2, dtype=torch.int32), op.BAND),
        (torch.full((5,), 1 << rank, dtype=torch.int32), op.BXOR),
        (torch.tensor(rank + 0.5, dtype=torch.float64), op.SUM),
        (torch.arange(12.0).view(3, 4).t() * (rank + 1), op.SUM),  # not contiguous
        (torch.arange(20.0)[::2] * (rank + 1), op.MAX),
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
        boolean = torch.tensor([rank == 0, False])
        algorithm.all_reduce(boolean, op=op.MAX)
        if boolean.tolist() != [True, False]:
            wrong.append(f"{name} MAX of bool: {boolean}")
    return wrong


def refused() -> dict[str, str]:
    """What cannot be carried, and what is said of it before anything is sent."""
    ones, n = torch.ones(4), dist.get_world_size()
    calls = {
        "sparse": lambda: ring.all_reduce(ones.to_sparse()),
        "expanded": lambda: tree.all_reduce(torch.ones(1).expand(4)),
        "meta": lambda: star.all_reduce(torch.ones(4, device="meta")),
        "mean of integers": lambda: ring.all_reduce(torch.ones(4, dtype=torch.int32), op=dist.ReduceOp.AVG),
        "bits of floats": lambda: halving_doubling.all_reduce(ones, op=dist.ReduceOp.BAND),
        "order of complex": lambda: ring.all_reduce(torch.ones(2, dtype=torch.complex64), op=dist.ReduceOp.MAX),
        "output": lambda: ring.all_gather(torch.empty(4 * n + 1), ones),
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


def in_a_part_of_the_ranks() -> list[float]:
    """A group that leaves rank 1 out, and counts its own ranks."""
    group = dist.new_group([0, 2])
    tensor = torch.full((3,), dist.get_rank() + 1.0)
    if dist.get_rank() != 1:
        for algorithm in ALGORITHMS.values():
            algorithm.all_reduce(tensor, group=group)
    return tensor.tolist()


def die_in_the_middle() -> str:
    """Rank 2 takes part in the first step of a ring, and leaves; what the others are told."""
    ring.all_reduce(torch.ones(40))
    if dist.get_rank() == 2:
        # All that it does in the second ring is what its neighbours see of its first step.
        original = exchange.Exchange.trade

        def first_step_only(self: exchange.Exchange, step: int, **parts: object) -> None:
            original(self, step, **parts)
            os._exit(7)

        exchange.Exchange.trade = first_step_only
    ring.all_reduce(torch.ones(40))
    return "done"


def script(backend: str, leave: str) -> None:
    """A whole program, started as a process of its own by torchrun's variables."""
    import dlearn.collectives  # noqa: F401

    dist.init_process_group(backend)
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    print(tensor.tolist())
    if leave == "destroy":
        dist.destroy_process_group()


if __name__ == "__main__":
    script(*sys.argv[1:])
