"""The four algorithms: right to the bit, in the steps and bytes of theory, and clear about what they cannot do.
And the ring as a backend of torch: programs run on it unchanged, and every step is seen."""

import threading
from collections import Counter
from pathlib import Path

import glass_box
import programs
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import workloads
from hanging import end_when, in_calls
from installed_torch import gather_several, scatter_several

from dlearn import Cluster, Trace, messages, operations
from dlearn.analysis import reconcile, traffic
from dlearn.errors import RankError, SetupError
from dlearn.events.event import Collective
from dlearn.lessons import trees_and_rings

RING = {"backend": "dlearn_ring"}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_results_are_right_to_the_bit_in_the_steps_and_bytes_of_theory(ranks, recorded):
    """Ranks compare their results (glass_box.py). 960 items can be cut evenly by 2 to 5, and by gloo
    into 2 segments for each."""
    trace = recorded(glass_box.everything, ranks=ranks)
    assert ranks == 1 or reconcile(trace).exact
    for name, operation in zip(glass_box.ALGORITHMS, operations(trace.within("960 items")), strict=True):
        if ranks > 1:
            cost = trees_and_rings.cost(name, ranks, 3840)
            assert trees_and_rings.cost_seen(operation) == cost, name
            numbers = {each.step for each in messages(trace) if each.operation.seq == operation.seq}
            assert len(numbers) == cost.steps or name in ("tree", "star"), name


def test_what_cannot_be_carried_is_refused_before_anything_is_sent(recorded):
    carries = "glass-box collectives carry dense tensors on the CPU, not a torch."
    assert recorded.results(glass_box.everything, ranks=3)[1] == {
        "sparse": f"{carries}sparse_coo one on cpu; use torch's own collective.",
        "expanded": "an expanded tensor has several items in one place of memory: call .contiguous() first.",
        "meta": f"{carries}strided one on meta; use torch's own collective.",
        "mean of integers": "glass-box collectives know no AVG of torch.int32.",
        "order of complex": "glass-box collectives know no MAX of torch.complex64.",
        "input": "with 3 ranks the large tensor has 3 times the items of the small one, not 11 and 4.",
        "types": "all tensors of a collective have one type, not ['torch.float64', 'torch.float32'].",
        "root": "the root is a rank of the group, 0 to 2, not 3.",
    }


def test_every_workload_runs_on_the_ring_and_is_counted_to_the_byte(recorded):
    """PowerSGD calls collectives from callbacks. torch refuses a monitored barrier on any backend but gloo."""
    trace = recorded(workloads.every, arguments=("monitored_barrier", *workloads.LEFT_OUT), **RING)
    seen = Counter(each.op for each in trace.where(rank=0).of(Collective))
    assert seen["all_reduce"] > 20
    assert reconcile(trace).exact
    assert messages(trace).unexplained == ()
    assert trace.problems == ()
    names = {workload.__name__ for workload in workloads.truth}
    assert names - set(trace.spans) == {"monitored_barrier", *workloads.LEFT_OUT}


def test_ddp_on_the_ring_is_ddp_on_gloo_to_the_bit_and_steps_stand_inside_their_operation(recorded):
    gloos, ring = (recorded.results(programs.train_ddp, ranks=3, arguments=(4,), **way) for way in ({}, RING))
    for rank in range(3):
        assert all(torch.equal(*pair) for pair in zip(gloos[rank], ring[rank], strict=True))
    trace = recorded(programs.train_ddp, ranks=3, arguments=(4,), **RING)
    first = next(each for each in operations(trace) if each.op == "all_reduce")
    assert first.group.backend == "dlearn_ring"
    assert first.what.startswith("gradient of bucket 0: ")
    assert {(end.launcher, end.phase) for end in first.ends} == {("reducer", "backward")}
    assert {Path(end.site.split(":")[0]).name for end in first.ends} == {"programs.py"}
    # 2 (n-1) steps on each of 3 ranks, through an inner group over gloo.
    assert len(first.steps) == 12
    assert {(step.group.backend, step.group.name) for step in first.steps} == {("gloo", "0 steps")}
    assert [process.groups["0 steps"].within for process in trace.processes] == ["0", "0", "0"]
    assert {message.how for message in messages(trace) if message.op == "all_reduce"} == {"observed"}


def several_at_once() -> list[torch.Tensor]:
    """What DTensor calls for sequence parallel, and their older form, of 4 and 8 items from each rank."""
    mine = [torch.arange(float(4 * count)) + dist.get_rank() for count in (1, 2)]
    gathered = gather_several(mine, dist.group.WORLD)
    shares = scatter_several(mine, "sum", [0, 0], dist.group.WORLD)
    lists = [[torch.zeros_like(each) for each in mine] for _ in range(dist.get_world_size())]
    dist.all_gather_coalesced(lists, mine)
    return [funcol.wait_tensor(each) for each in (*gathered, *shares)] + [each for of_rank in lists for each in of_rank]


def test_several_tensors_in_one_call_take_the_bytes_of_theory(recorded):
    gloos, rings = (recorded.results(several_at_once, ranks=4, **way) for way in ({}, RING))
    assert all(torch.equal(*pair) for rank in range(4) for pair in zip(gloos[rank], rings[rank], strict=True))
    trace = recorded(several_at_once, ranks=4, **RING)
    assert {message.how for message in messages(trace)} == {"observed"}
    sent = {each.op: traffic(trace.where(op=each.op)).bytes_from(rank=0) for each in operations(trace)}
    assert sent == {
        "all_gather_single_coalesced": 3 * 12 * 4,  # its own 12 items, to three others
        "reduce_scatter_single_coalesced": 3 * 3 * 4,  # three quarters of its 12 items
        "all_gather_coalesced": 3 * 12 * 4,
    }


def groups_of_its_own() -> tuple[list[object], Path]:
    """Three times: works and futures, an operation that it refuses, and a recording that begins late."""
    import dlearn.collectives

    for turn in range(3):
        dist.init_process_group("dlearn_ring")
        works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        done = [works[0].wait(), works[1].get_future().wait()[0].tolist(), works[2].wait() and works[2].is_completed()]
        try:
            dist.all_reduce(torch.ones(3, dtype=torch.int32), op=dist.ReduceOp.AVG)
        except SetupError as error:
            done.append(str(error))
        with dlearn.record(f"late {turn}"):
            dist.all_reduce(torch.ones(10))
        dist.destroy_process_group()
    done += [thread.name for thread in threading.enumerate() if "dlearn_ring" in thread.name]
    return done, Path.cwd()


def test_work_futures_late_recordings_and_groups_made_again(recorded):
    done, folder = recorded.results(groups_of_its_own, init=False, record=False)[0]
    assert done == [True, [2.0] * 3, True, "glass-box collectives know no AVG of torch.int32."], "no thread is left"
    for turn in range(3):
        trace = Trace.load(folder / f"late {turn}")
        assert [len(operation.steps) for operation in operations(trace)] == [4]
        assert reconcile(trace).exact


def test_different_sizes_hang_and_a_rank_that_dies_is_named(own_folder):
    """gloo would end the process: here such messages never meet."""
    run = end_when(in_calls(1, 1), Cluster(2, **RING), programs.sum_of_different_sizes)
    assert "with different sizes: 200 B on rank 0, 400 B on rank 1" in run.error.what
    with pytest.raises(RankError) as caught:
        Cluster(3, **RING).run(programs.all_reduce_then, "exit", timeout=60)
    assert caught.value.rank == 1
    assert "rank 1 died: it exited with code 3" in caught.value.what
    assert "PeerError: " in caught.value.what
