"""Gloo's schedules against the kernel's counters, on real ranks: no byte is left over, in any operation."""

import warnings
from collections.abc import Callable, Iterator

import programs
import pytest
import torch
import torch.distributed as dist
from installed_torch import all_gather_single, gloo_sends_lists_to_all, reduce_scatter_single

from dlearn import Cluster, messages
from dlearn.analysis import reconcile

pytestmark = pytest.mark.usefixtures("own_folder")

MiB = 1 << 20


def every_operation(sizes: list[int], dtype: torch.dtype, root: int) -> None:
    """Each collective and p2p call of torch with so many bytes of this type."""
    warnings.simplefilter("ignore")
    itemsize = torch.empty((), dtype=dtype).element_size()
    for size in sizes:
        for call in calls(max(0, size // itemsize), dtype, root):
            call()
    dist.barrier()
    dist.monitored_barrier()


def calls(count: int, dtype: torch.dtype, root: int) -> Iterator[Callable[[], object]]:
    rank, n = dist.get_rank(), dist.get_world_size()

    def some(times: int = 1) -> torch.Tensor:
        return torch.ones(count * times, dtype=dtype)

    def each() -> list[torch.Tensor]:
        return [some() for _ in range(n)]

    yield lambda: dist.all_reduce(some())
    yield lambda: dist.all_reduce(some(), op=dist.ReduceOp.MAX)
    yield lambda: dist.broadcast(some(), root)
    yield lambda: dist.reduce(some(), root)
    yield lambda: dist.all_gather(each(), some())
    yield lambda: all_gather_single(some(n), some())
    yield lambda: dist.reduce_scatter(some(), each())
    yield lambda: reduce_scatter_single(some(), some(n))
    yield lambda: dist.gather(some(), each() if rank == root else None, dst=root)
    yield lambda: dist.scatter(some(), each() if rank == root else None, src=root)
    if gloo_sends_lists_to_all():
        yield lambda: dist.all_to_all(each(), each())
    yield lambda: dist.all_to_all_single(some(n), some(n))
    # Rank r has (r + to) % 3 times as much for rank `to`.
    give, get = [(rank + to) % 3 * count for to in range(n)], [(by + rank) % 3 * count for by in range(n)]
    yield lambda: dist.all_to_all_single(
        torch.ones(sum(get), dtype=dtype), torch.ones(sum(give), dtype=dtype), get, give
    )
    yield lambda: dist.all_reduce_coalesced([some(), some(2)])
    neighbour = torch.ones(count, dtype=dtype)
    yield lambda: [work.wait() for work in (dist.isend(neighbour, (rank + 1) % n), dist.irecv(some(), (rank - 1) % n))]


def check(ranks: int, sizes: list[int], *, dtype: torch.dtype = torch.uint8, root: int = 0) -> None:
    run = Cluster(ranks, measure="phase").run(every_operation, sizes, dtype, root, timeout=110)
    found = reconcile(run.trace)
    assert [(part.what, part.note, part.pairs) for part in found.parts if part.residue_bytes != 0] == []
    assert found.exact
    assert found.whole.note == ""
    # Every operation was measured by itself, but for the sends, which are under way together.
    kinds = 13 + gloo_sends_lists_to_all()
    assert len([part for part in found.parts if " and " not in part.what]) >= kinds * len(sizes)
    said = messages(run.trace)
    assert said.unexplained == ()
    assert all(message.confirmed for message in said)


MORE_THAN_CORES = [pytest.param(ranks, marks=pytest.mark.slow) for ranks in (5, 6)]


@pytest.mark.parametrize("ranks", [2, 3, 4, *MORE_THAN_CORES])
def test_every_operation_to_the_byte(ranks):
    check(ranks, [0, 1, 4, 7, 1000, 100_003], root=ranks - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_itemsize_to_the_byte(dtype):
    check(3, [4, 56, 10_000], dtype=dtype, root=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_large_tensors_to_the_byte(ranks):
    check(ranks, [MiB, 4 * MiB + 12, 25 * MiB + 4])


def sparse_sums(counts: list[int]) -> None:
    """Rank r has r times as many values as the first count says, at places of its own."""
    warnings.simplefilter("ignore")
    for count in counts:
        mine = count * dist.get_rank()
        places = torch.arange(mine).view(1, -1)
        dist.all_reduce(torch.sparse_coo_tensor(places, torch.ones(mine, 3), (1000, 3)).coalesce())


@pytest.mark.parametrize("ranks", [2, 3])
def test_sparse_tensors_to_the_byte(ranks):
    run = Cluster(ranks, measure="phase").run(sparse_sums, [0, 1, 100])
    assert reconcile(run.trace).exact
    assert messages(run.trace).unexplained == ()


def test_what_torch_adds_up_before_it_sends_is_not_predicted(tmp_path):
    """A sparse tensor that has a place twice: how much is left of it is torch's secret, and is not guessed."""

    def twice_the_same_place() -> None:
        dist.all_reduce(torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (10,)))

    found = reconcile(Cluster(2).run(twice_the_same_place).trace)
    assert not found.exact
    assert "calls not predicted: gloo first adds up what a sparse tensor has twice" in found.sentence


@pytest.mark.parametrize("measure", ["span", "phase"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_whole_ddp_run_to_the_byte(ranks, measure):
    run = Cluster(ranks, measure=measure).run(programs.train_ddp, 5)
    found = reconcile(run.trace)
    assert found.exact
    assert all(part.residue_bytes == 0 for part in found.parts)
    assert all(message.confirmed for message in messages(run.trace))
