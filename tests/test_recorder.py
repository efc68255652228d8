"""What the recorder sees of real ranks, and that it is a guest there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import msgspec
import programs
import pytest
import torch
import torch.distributed as dist
import workloads
from installed_torch import flight_recorder_knows_gloo, on_gloo, own_words
from torch.nn.parallel import DistributedDataParallel

import dlearn
from dlearn import Cluster, Trace, explain, messages, operations
from dlearn.analysis import assert_traffic, hangs, reconcile
from dlearn.cluster.run import Run
from dlearn.errors import TraceError
from dlearn.hooks.callers import caller
from dlearn.trace.event import NOT_OBSERVED, REFUSED, Collective, PointToPoint, Stretch

pytestmark = pytest.mark.usefixtures("own_folder")


def quiet(workload):
    """Torch's own warnings of deprecation are not what is tested here."""

    def run() -> object:
        warnings.simplefilter("ignore")
        return workload()

    return run


def record(workload, ranks: int = 2, **options: object) -> Run:
    return Cluster(ranks).run(quiet(workload), timeout=100, **options)


# All ops, from any caller ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workload", on_gloo(workloads.truth))
def test_workload_is_seen_whole_and_predicted_to_the_byte(workload):
    """PowerSGD, FSDP2, DTensor, ZeRO, object collectives and the rest, as they come."""
    run = record(workload)
    calls = [event for event in run.trace.events if isinstance(event, Collective | PointToPoint)]
    assert Counter(call.op for call in calls if call.rank == 0) == workloads.truth[workload]
    assert [call for call in calls if call.end_ns is None or call.failed] == []
    assert [each for each in run.trace.matches if each.missing] == []
    assert [each for each in operations(run.trace) if each.problem] == []
    assert run.trace.problems == ()
    # Every call has its line in the user's code.
    assert {Path(call.site.split(":")[0]).name for call in calls} <= {"workloads.py", "programs.py"}
    assert Counter(reason for _, reason in messages(run.trace).unexplained) == Counter()
    assert reconcile(run.trace).exact


def test_the_workloads_and_this_make_all_twenty_calls():
    def the_last_one() -> None:
        lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(2)]
        dist.all_gather_coalesced(lists, [torch.ones(2), torch.ones(3)])

    events = record(the_last_one).trace.where(op="all_gather_coalesced").events
    assert [[tensor.payload_bytes for tensor in event.inputs] for event in events] == [[8, 12], [8, 12]]
    assert len(workloads.truth) == 15
    # Of the 20 ops at the dispatcher, a recv from any source is called recv too.
    seen = {op for counts in workloads.truth.values() for op in counts}
    assert len(seen) + len({"all_gather_coalesced", "recv from any source"}) == 20


def test_calls_from_a_thread_are_recorded_with_its_name():
    def from_a_thread() -> None:
        import threading

        with dlearn.span("outer"):
            thread = threading.Thread(target=lambda: dist.all_reduce(torch.ones(4)), name="helper")
            thread.start()
            thread.join()

    trace = record(from_a_thread).trace
    assert {event.thread for event in trace.where(op="all_reduce").events} == {"helper"}
    # It inherits the open span of the recording thread.
    assert len(trace.within("outer").where(op="all_reduce").events) == 2


def test_what_torch_sends_from_a_pool_of_threads_stands_where_it_was_handed_over(tmp_path):
    """As DCP's async_save does: no code of the user's is on that thread, and the main one may be anywhere."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with dlearn.record(tmp_path / "trace"), ThreadPoolExecutor(1) as pool:
            called = pool.submit(dist.all_reduce, torch.ones(2))
            line = sys._getframe().f_lineno - 1
            called.result()
    finally:
        dist.destroy_process_group()
    (call,) = (event for event in Trace.load(tmp_path / "trace").events if isinstance(event, Collective))
    assert (Path(call.site).name, call.phase) == (f"test_recorder.py:{line}", "none")
    assert call.thread.startswith("ThreadPoolExecutor")


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a program of its own leaves, which deletes its working directory, and leaves a second recording open."""
    folder = tmp_path_factory.mktemp("alone")
    script = folder / "job.py"
    script.write_text(
        "import os, dlearn, torch, torch.distributed as dist\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "with dlearn.record('../trace'), ThreadPoolExecutor(1) as pool:\n"
        "    os.rmdir(os.getcwd())\n"
        "    dist.all_reduce(torch.ones(2))\n"
        "    pool.submit(dist.all_reduce, torch.ones(2)).result()\n"
        "dist.destroy_process_group()\n"
        f"os.chdir({str(folder)!r})\n"
        "context = dlearn.record('open')\n"
        "context.__enter__()\n"
    )
    (folder / "gone").mkdir()
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100, cwd=folder / "gone")
    assert (run.returncode, run.stderr) == (0, "")
    return folder


def test_a_program_whose_working_directory_is_deleted_is_recorded(alone):
    calls = Trace.load(alone / "trace").where(op="all_reduce").events
    assert [call.site for call in calls] == [f"{alone.name}/job.py:{line}" for line in (6, 7)]


def test_a_recording_left_open_is_closed_at_exit(alone):
    assert Trace.load(alone / "open").processes[0].closed


def test_a_monitored_barrier_that_fails_has_waited_and_was_not_refused():
    def without_rank_1() -> None:
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="failed to pass monitoredBarrier"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.2))

    trace = record(without_rank_1).trace
    assert [event.ended_by for event in trace.where(op="monitored_barrier").events] == ["return"]
    assert "rank 0 waits for rank 1 in monitored_barrier #1" in str(explain(trace))


def test_what_is_refused_meets_no_other_call_and_takes_no_message_its_confirmation():
    """A send and a collective that rank 0 alone is refused, and an all_gather that gloo refuses on both ranks."""

    def refused_at_times() -> None:
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="contiguous"):
                dist.send(torch.ones(4, 4)[:, ::2], 1)
            with pytest.raises(RuntimeError, match="invalid root rank"):
                dist.broadcast(torch.ones(2), 99)
            dist.send(torch.ones(4), 1)
        else:
            dist.recv(torch.ones(4), 0)
        with pytest.raises(RuntimeError, match="invalid tensor size"):
            dist.all_gather([torch.ones(3)] * 2, torch.ones(4 + dist.get_rank()))
        dist.all_reduce(torch.ones(4))

    trace = record(refused_at_times).trace
    assert sorted((each.op, each.ranks, each.refused, each.missing) for each in operations(trace)) == [
        ("all_gather", (0, 1), True, ()),
        ("all_reduce", (0, 1), False, ()),
        ("broadcast", (0,), True, ()),
        ("send", (0,), True, ()),
        ("send", (0, 1), False, ()),
    ]
    assert {event.error for event in trace.events if event.ended_by == REFUSED} == {"RuntimeError"}
    assert hangs(trace) == ()
    found = messages(trace)
    assert [message.confirmed for message in found] == [True] * len(found)
    assert found.unexplained == ()
    assert_traffic(trace, op="all_reduce")


@pytest.mark.parametrize("turned", [False, True])
def test_a_group_that_is_made_again_of_other_ranks_is_one_group(turned, tmp_path):
    """Its second making is the first that rank 2 sees, with torch's ranks as before or the other way round."""

    def again() -> None:
        rank = int(os.environ["RANK"])
        for members, own in [((0, 1), rank), ((0, 2), 2 - rank if turned else rank)]:
            store = f"file://{tmp_path}/store {members}"
            dist.init_process_group("gloo", init_method=store, rank=own, world_size=3)
            group = dist.new_group(members)
            if own in members:
                dist.broadcast(torch.ones(3), 0, group=group)
            dist.barrier()
            dist.destroy_process_group()

    trace = Cluster(3, init=False).run(quiet(again)).trace
    assert [each.missing for each in trace.matches] == [()] * 4
    assert len({each.group.name for each in trace.matches}) == 4
    last = [each.group.members for each in trace.matches if len(each.ends) == 2][-1]
    assert last == ((2, 0) if turned else (0, 2))


def test_a_group_lives_a_little_longer_than_the_program_holds_it(tmp_path):
    """Else a DDP model that goes after it takes gloo's threads along, with Python's lock in its hand."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with dlearn.record(tmp_path / "trace"):
            first = dist.new_group()
            held = weakref.ref(first)
            dist.destroy_process_group(first)
            del first
            assert held() is not None
            second = dist.new_group()
            assert held() is None
            held = weakref.ref(second)
            dist.destroy_process_group(second)
            del second
        assert held() is None
    finally:
        dist.destroy_process_group()


GOES_OUT_OF_SCOPE = """
import sys, torch, torch.distributed as dist, dlearn
from torch.nn.parallel import DistributedDataParallel
folder, store, rank = sys.argv[1:]

def train():
    group = dist.new_group([0, 1])
    layers = [torch.nn.Linear(64, 64) for _ in range(6)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group, bucket_cap_mb=0.02)
    model(torch.randn(8, 64)).sum().backward()
    dist.destroy_process_group(group)

with dlearn.record(folder):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    for _ in range(10):
        train()
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_ddp_model_may_go_right_after_its_group(tmp_path):
    """Without a recording torch hangs here after a few rounds; a recording keeps it from that."""
    command = [sys.executable, "-c", GOES_OUT_OF_SCOPE, str(tmp_path / "trace"), str(tmp_path / "store")]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    try:
        assert [rank.wait(90) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()


def test_group_ranks_are_resolved_to_ranks():
    def in_a_group() -> None:
        group = dist.new_group([1, 2])
        if dist.get_rank() == 1:
            dist.send(torch.ones(2), 2, group=group)
        if dist.get_rank() == 2:
            dist.recv(torch.ones(2), 1, group=group)

    (message,) = messages(record(in_a_group, ranks=3).trace)
    assert (message.src, message.dst, message.payload_bytes, message.how) == (1, 2, 8, "observed")


# Completion -----------------------------------------------------------------------------------------------------------


def test_the_end_is_not_the_wait():
    """The main thread waits only when the end stands in the trace, where the callback has written it."""

    def late_wait() -> None:
        work = dist.all_reduce(torch.ones(4), async_op=True)
        (folder,) = Path(".dlearn/runs").glob("*/trace")
        while Trace.load(folder).where(op="all_reduce", rank=dist.get_rank()).events[0].pending:
            pass
        work.wait()

    events = record(late_wait).trace.where(op="all_reduce").events
    assert {event.ended_by for event in events} == {"callback"}


def test_the_end_is_told_by_the_wait_only_where_the_call_itself_waits():
    def both() -> None:
        dist.all_reduce(torch.ones(4))
        work = dist.broadcast(torch.ones(4), 0, async_op=True)
        work.wait()
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2)).sum().backward()  # DDP's reducer waits in C++, where no wait is seen.

    trace = record(both).trace.where(kind="collective", rank=0)
    told = [(event.op, event.launcher, event.ended_by) for event in trace.events if not event.role]
    assert told == [("all_reduce", "", "wait"), ("broadcast", "", "callback"), ("all_reduce", "reducer", "callback")]
    assert all(event.end_ns is not None for event in trace.events)


def test_a_failed_wait_ends_its_call_with_the_error():
    def alone() -> None:
        group = dist.new_group([0, 1], timeout=timedelta(seconds=1))
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError):
                dist.all_reduce(torch.ones(2), group=group)

    (event,) = record(alone).trace.where(op="all_reduce").events
    assert (event.ended_by, event.pending) == ("wait", False)
    assert event.error.endswith("Error")


def test_a_wait_for_an_empty_tensor_ends_no_send():
    def confused() -> None:
        from torch.distributed._functional_collectives import wait_tensor

        if dist.get_rank() == 0:
            work = dist.isend(torch.ones(2), 1)
            wait_tensor(torch.empty(0))  # It has no address, and the send has no output.
            dist.barrier()
            assert work is not None
        else:
            dist.recv(torch.ones(2), 0)
            dist.barrier()

    events = record(confused).trace.where(kind="p2p").events
    ended = {event.op: (event.ended_by, event.pending) for event in events}
    assert ended == {"send": (NOT_OBSERVED, False), "recv": ("wait", False)}


def test_works_held_are_limited_and_counted():
    def many() -> None:
        works = []
        for _ in range(1200):
            if dist.get_rank() == 0:
                works.append(dist.isend(torch.ones(1), 1))
            else:
                works.append(dist.irecv(torch.ones(1), 0))
        for work in works:
            work.wait()

    trace = record(many).trace
    assert [process.footer.works_dropped for process in trace.processes] == [200, 200]
    assert len(messages(trace)) == 1200


# Bytes ----------------------------------------------------------------------------------------------------------------


def test_views_expanded_and_sparse_tensors_are_counted_as_gloo_sends_them():
    def shapes() -> None:
        rank = dist.get_rank()
        dist.all_reduce(torch.ones(1000)[10:20])
        dist.broadcast(torch.ones(1).expand(1000) if rank == 0 else torch.zeros(1000), 0)
        dist.all_reduce(torch.ones(2, 3, dtype=torch.float64).t())
        dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 4), (100, 4)))

    events = record(shapes).trace.where(rank=0, kind="collective").events
    counted = [(event.inputs[0].logical_bytes, event.inputs[0].payload_bytes) for event in events]
    # A view counts its own elements; gloo sends an expanded tensor in full (4 kB on the wire, by its counters);
    # a sparse one as two int64 indices and two rows of four float32: 16 + 32.
    assert counted == [(40, 40), (4000, 4000), (48, 48), (1600, 48)]


# DDP ------------------------------------------------------------------------------------------------------------------


def test_every_all_reduce_of_ddp_has_its_bucket():
    trace = record(lambda: programs.train_ddp(3), ranks=3).trace
    reduced = [each for each in operations(trace) if each.op == "all_reduce"]
    assert [each.bucket.index for each in reduced] == [0, 0, 1, 0, 1]
    # One bucket of all ten parameters in step 0. Then those of the last three layers, which are ready first
    # (10*64+10 + 2*(64*64+64) floats), and those of the first two.
    sizes = [sum(tensor.payload_bytes for tensor in each.ends[0].inputs) for each in reduced]
    assert sizes == [69160, 35880, 33280, 35880, 33280]
    assert reduced[1].bucket.parameters == ("8.bias", "8.weight", "6.bias", "6.weight", "4.bias", "4.weight")
    assert reduced[1].what.startswith("gradient of bucket 0: 8.bias, 8.weight")
    assert {each.ends[0].phase for each in reduced} == {"backward"}


def test_phases_and_roles_of_a_ddp_step():
    trace = record(lambda: programs.train_ddp(2)).trace.where(rank=0, kind="collective")
    assert [(event.op, event.phase, event.role) for event in trace.events] == [
        ("all_gather", "setup", "DDP compares the parameters' shapes"),
        ("broadcast", "setup", "DDP compares the parameters' shapes"),
        ("broadcast", "setup", "DDP sends rank 0's model"),
        ("all_reduce", "backward", ""),
        ("broadcast", "forward", "DDP agrees on the rebuilt buckets"),
        ("broadcast", "forward", "DDP agrees on the rebuilt buckets"),
        ("all_reduce", "backward", ""),
        ("all_reduce", "backward", ""),
    ]


def test_what_join_adds_to_ddp():
    def uneven() -> None:
        from torch.distributed.algorithms.join import Join

        model = DistributedDataParallel(torch.nn.Linear(8, 4))
        with Join([model]):
            for _ in range(1 + dist.get_rank()):
                model(torch.ones(2, 8)).sum().backward()

    calls = record(uneven).trace.where(rank=0, op="all_reduce").events
    # Rank 0 has one input, then it shadows rank 1, and then all agree on whose model is the final one.
    counts, asks = "Join counts the ranks that still have inputs", "DDP asks whether gradients are summed this time"
    assert [(call.phase, call.role) for call in calls] == [
        *[("forward", counts), ("forward", asks), ("backward", "")],
        *[("none", counts), ("none", asks), ("none", "")],
        *[("none", counts), ("none", "DDP finds a rank that has the final model")],
    ]


def test_power_sgd_says_the_bucket_of_each_of_its_steps():
    """P is sent below the hook, Q by a callback on a thread of gloo's: with two buckets no elimination tells whose."""

    def one_compressed_pass() -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        model = DistributedDataParallel(torch.nn.Linear(64, 64))
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()

    trace = record(one_compressed_pass).trace
    calls = [event for event in trace.where(rank=0, op="all_reduce").events if isinstance(event, Collective)]
    assert [(call.launcher, call.bucket_index) for call in calls] == [("comm hook", 0)] * 5
    assert {each.bucket.index for each in operations(trace) if each.op == "all_reduce" and each.bucket} == {0}


def test_the_optimizers_own_messages_are_in_its_phase():
    trace = record(workloads.zero_redundancy_optimizer).trace.where(rank=0, op="broadcast")
    # Ten parameters in each of two steps; the other four broadcasts are DDP's.
    assert Counter(event.phase for event in trace.events)["optimizer"] == 20


def test_comm_hooks_name_their_bucket():
    trace = record(workloads.ddp_fp16_hook).trace
    reduced = [each for each in operations(trace) if each.op == "all_reduce"]
    assert [each.bucket.index for each in reduced] == [0, 0, 1]
    # Half of the buckets' 69,160, 35,880 and 33,280 B.
    assert [each.ends[0].inputs[0].payload_bytes for each in reduced] == [34580, 17940, 16640]


def test_unused_parameters_cost_a_map():
    """find_unused_parameters: buckets as the constructor made them, and one map of int32 in each step."""

    def dropped_layer() -> None:
        class Net(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.used(x)

        model = DistributedDataParallel(Net(), find_unused_parameters=True)
        model(torch.randn(2, 4)).sum().backward()

    what = [each.what for each in operations(record(dropped_layer).trace) if each.op == "all_reduce"]
    assert what[0].startswith("gradient of bucket 0: ")
    assert what[1] == "DDP's map of used parameters"


def test_a_model_made_before_the_recording_is_seen_too(tmp_path):
    def late_recording() -> str:
        model = DistributedDataParallel(programs.mlp(), bucket_cap_mb=0.02)
        model(torch.randn(8, 64)).sum().backward()
        with dlearn.record("late"):
            model(torch.randn(8, 64)).sum().backward()
        return os.getcwd()

    with warnings.catch_warnings():
        Cluster(2, record=False).run(late_recording)
    reduced = [each for each in operations(Trace.load("late")) if each.op == "all_reduce"]
    assert [each.bucket.index for each in reduced] == [0, 1]


# A guest --------------------------------------------------------------------------------------------------------------


def test_results_are_bit_equal_with_and_without_the_recorder():
    with_it = Cluster(3).run(programs.train_ddp, 4).results
    without = Cluster(3, record=False).run(programs.train_ddp, 4).results
    for rank in range(3):
        assert all(torch.equal(a, b) for a, b in zip(with_it[rank], without[rank], strict=True))


def test_undo_with_every_option_gives_back_all_kernels_names_hooks_and_threads():
    ops = ["allreduce_", "send", "barrier", "monitored_barrier_", "recv_any_source_"]
    kernels = [*(f"c10d::{op}" for op in ops), "_c10d_functional::wait_tensor"]

    def look() -> tuple[object, object, object, object]:
        import threading

        import torch.distributed.rpc
        from torch._C._distributed_c10d import Work
        from torch.distributed import distributed_c10d as c10d
        from torch.distributed.rpc import api, backend_registry
        from torch.optim import optimizer

        def state() -> dict[str, object]:
            own = (c10d, dist, api, backend_registry, torch.autograd, dist.autograd)
            names = {f"{module.__name__}.{name}": value for module in own for name, value in vars(module).items()}
            names |= {kernel: torch._C._dispatch_dump(kernel) for kernel in kernels}
            names["wait"] = Work.wait
            names["inside forward"] = DistributedDataParallel._inside_ddp_forward
            hooks = [list(optimizer._global_optimizer_post_hooks), list(optimizer._global_optimizer_pre_hooks)]
            threads = {thread.name for thread in threading.enumerate() if thread.name.startswith("dlearn")}
            return names | {"hooks": hooks, "threads": threads}

        os.environ.pop("LOCAL_WORLD_SIZE", None)  # As where nobody says that all ranks are on one host.
        before = state()
        with dlearn.record("inner", steps={0, 1}, hang_after=30, gather=True, graph=True):
            during = state()
            model = DistributedDataParallel(programs.mlp())
            model(torch.randn(2, 64)).sum().backward()
        after = state()
        dist.barrier()
        changed = [name for name in before if during[name] is not before[name] and during[name] != before[name]]
        left = [name for name in before if after[name] is not before[name] and after[name] != before[name]]
        hooked = [each.shape for each in model.parameters() if each._post_accumulate_grad_hooks]
        return changed, left, hooked, sorted(during["threads"] - before["threads"])

    (changed, left, hooked, threads), _ = Cluster(2, record=False).run(look).results.values()
    assert left == hooked == []
    assert {
        *kernels,
        "wait",
        "inside forward",
        "torch.distributed.distributed_c10d._new_process_group_helper",
        "torch.distributed.destroy_process_group",
        "torch.distributed.rpc.backend_registry.init_backend",
        "hooks",
    } <= set(changed)
    assert threads == ["dlearn-clock", "dlearn-hang-watch"]


@pytest.mark.parametrize("named", [False, True])
def test_the_job_may_meet_again_on_the_same_port(named):
    """A store is there as long as somebody holds it: its server keeps the port, and what was in it."""

    def again(port: int) -> str:
        rank = int(os.environ["RANK"])
        with dlearn.record("again"):
            for turn in range(2):
                store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
                dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
                del store
                dist.barrier()
                dist.destroy_process_group(*([dist.group.WORLD] if named else []))
                Path(f"{rank} {turn}").touch()
                programs.wait_for(f"{1 - rank} {turn}")  # Both have let their store go.
        return "well"

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert Cluster(2, init=False, record=False).run(again, port, timeout=60).results == {0: "well", 1: "well"}


@pytest.mark.parametrize("late", [False, True])
def test_a_store_that_can_do_little_is_no_failure(tmp_path, late):
    """torch's fake groups are used to plan a job: their store holds nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    try:
        if late:
            dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
        with dlearn.record(tmp_path / "fake"):
            if not late:
                dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
            dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()
    (process,) = Trace.load(tmp_path / "fake").processes
    assert process.footer.hook_errors == 0


def test_two_recordings_at_once_are_refused():
    def twice() -> str:
        with dlearn.record("inner"):
            pass
        return ""

    with pytest.raises(dlearn.DlearnError, match="being recorded already"):
        Cluster(1).run(twice)


def test_a_folder_with_another_jobs_trace_is_refused(tmp_path):
    with dlearn.record(tmp_path / "a"):
        pass
    with pytest.raises(TraceError, match="exists already"), dlearn.record(tmp_path / "a"):
        pass
    (file,) = (tmp_path / "a").iterdir()
    earlier = file.rename(file.with_name("earlier.jsonl"))
    earlier.write_bytes(earlier.read_bytes().replace(b'"pid":%d' % os.getpid(), b'"pid":%d' % os.getppid()))
    with pytest.raises(TraceError, match="another job"), dlearn.record(tmp_path / "a"):
        pass


ONE_BY_ONE = """
import sys, torch, torch.distributed as dist, dlearn
folder, store, rank = sys.argv[1:]
with dlearn.record(folder):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
"""


def test_ranks_that_are_started_one_by_one_are_one_job(tmp_path):
    """In two terminals, without a launcher that tells them of each other; the second finds the first one's file."""
    told = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}

    def start(rank: int) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", ONE_BY_ONE, str(tmp_path / "trace"), str(tmp_path / "store"), str(rank)]
        return subprocess.Popen(command, env=told, stderr=subprocess.PIPE)

    with start(0) as first:
        while not list(tmp_path.glob("trace/*.jsonl")) and first.poll() is None:
            time.sleep(0.05)
        with start(1) as second:
            assert (second.wait(60), second.stderr.read()) == (0, b"")
        assert (first.wait(60), first.stderr.read()) == (0, b"")
    trace = Trace.load(tmp_path / "trace")
    assert (trace.ranks, trace.problems) == ((0, 1), ())
    assert [match.missing for match in trace.matches] == [()]


def test_a_failing_hook_is_reported_once_and_training_goes_on():
    def with_broken_hook() -> float:
        from dlearn.hooks.c10d import collectives

        def broken(frame: object) -> None:
            raise RuntimeError("hook is broken")

        collectives.caller = broken
        tensor = torch.ones(1)
        for _ in range(3):
            dist.all_reduce(tensor)
        return tensor.item()

    run = Cluster(2).run(with_broken_hook)
    assert run.results == {0: 8.0, 1: 8.0}  # 1 doubled three times
    assert run.output[0].count("dlearn: could not record all_reduce (RuntimeError: hook is broken)") == 1
    assert own_words(run.output[0]).count("\n") == 1
    assert "3 calls could not be recorded" in run.trace.problems[0]


def test_a_full_file_is_counted_not_written():
    def little_room() -> None:
        with dlearn.record("small", max_bytes=2000):
            for _ in range(100):
                dist.all_reduce(torch.ones(2))

    Cluster(2, record=False).run(little_room)
    trace = Trace.load("small")
    for process in trace.processes:
        lengths = [len(line) for line in process.path.read_bytes().splitlines(keepends=True)]
        written, longest = sum(lengths[:-1]), max(lengths)
        assert written <= 2000 < written + longest  # The footer is written in any case.
        # Header, the group and where it met, a socket, two samples, 100 starts, 100 ends: written or counted.
        assert process.footer.lines == len(lengths) - 1
        assert process.footer.not_written == 206 - process.footer.lines
    assert "lines were not written" in trace.problems[0]


def test_a_data_loaders_workers_neither_hang_nor_write_twice():
    def with_workers() -> int:
        from torch.utils.data import DataLoader, TensorDataset

        loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2)
        with dlearn.span("epoch"):
            for (batch,) in loader:
                dist.all_reduce(batch)
        return os.getpid()

    run = record(with_workers)
    assert len(run.trace.processes) == 2
    assert {process.header.pid for process in run.trace.processes} == set(run.results.values())
    assert len(run.trace.where(op="all_reduce").events) == 2 * 4
    assert run.trace.problems == ()


def test_no_value_and_no_argument_reaches_the_files():
    secret_text, secret_number = "TOPSECRET-" + "x" * 8, 271828182.0

    def whisper(text: str, number: float) -> None:
        objects = [None] * dist.get_world_size()
        dist.all_gather_object(objects, {"password": text})
        dist.all_reduce(torch.full((4,), number))
        tensor = torch.tensor([ord(character) for character in text], dtype=torch.uint8)
        if dist.get_rank() == 0:
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
        with pytest.raises(ValueError, match="TOPSECRET"):
            raise ValueError(text)

    run = Cluster(2).run(whisper, secret_text, secret_number)
    files = list((run.folder / "trace").iterdir())
    assert len(files) == 2
    for file in files:
        data = file.read_bytes()
        assert b"TOPSECRET" not in data
        assert b"271828182" not in data
        assert len(data.splitlines()) > 8
        for line in data.splitlines():
            msgspec.json.decode(line)


@pytest.mark.skipif(not flight_recorder_knows_gloo(), reason="torch's flight recorder does not number gloo's calls yet")
def test_recordings_that_begin_at_different_calls_still_meet():
    def late_on_rank_0() -> None:
        def three() -> None:
            dist.all_reduce(torch.ones(2))
            dist.broadcast(torch.ones(3), 0)
            dist.all_reduce(torch.ones(4))

        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))
            with dlearn.record("late"):
                three()
        else:
            with dlearn.record("late"):
                dist.all_reduce(torch.ones(1))
                three()

    Cluster(2, record=False).run(late_on_rank_0)
    found = operations(Trace.load("late"))
    assert [(each.op, each.seq, len(each.ends), each.problem) for each in found] == [
        ("all_reduce", 1, 1, ""),
        ("all_reduce", 2, 2, ""),
        ("broadcast", 3, 2, ""),
        ("all_reduce", 4, 2, ""),
    ]


def test_sends_before_a_recording_do_not_count_as_collectives():
    """Torch's own sequence number counts them, and the ranks differ in them."""

    def to_rank_0() -> None:
        for rank in (1, 2):
            if dist.get_rank() == 0:
                dist.recv(torch.ones(2), rank)
            elif dist.get_rank() == rank:
                dist.send(torch.ones(2), 0)

    with Cluster(3) as cluster:
        cluster.run(to_rank_0)
        found = operations(cluster.run(programs.sum_of_ones).trace)
    assert [(each.op, each.seq, each.ranks, each.problem) for each in found] == [("all_reduce", 1, (0, 1, 2), "")]


def test_strange_spans_neither_break_the_program_nor_the_trace():
    def strange() -> None:
        with dlearn.span("\ud800"), dlearn.span(object()), dlearn.span("x" * 3_000_000), dlearn.span(7):
            pass

        def steps():
            with dlearn.span("inner"):
                yield

        generator = steps()
        next(generator)
        with dlearn.span("main"):
            generator.close()
            dist.all_reduce(torch.ones(2))

    trace = record(strange).trace
    assert trace.problems == ()
    assert trace.spans[0] == "?"
    assert "7" in trace.spans
    assert len(trace.within("main").where(op="all_reduce").events) == 2


def test_every_job_has_its_own_name():
    def jobs_of_this_group() -> set[str]:
        with dlearn.record("a"):
            dist.barrier()
        with dlearn.record("b"):
            dist.barrier()
        return {process.header.job for name in "ab" for process in Trace.load(name).processes}

    runs = [Cluster(2, record=False).run(jobs_of_this_group, check=False) for _ in range(2)]
    first, second = runs
    assert first.error is None
    assert len(first.results[0]) == 1
    assert "another job already" in str(second.error), "nothing is mixed with the first job's files"


def test_another_tools_kernel_is_not_overridden():
    def with_another() -> str:
        library = torch.library.Library("c10d", "IMPL")
        library.impl("allreduce_", lambda keyset, *args: None, "BackendSelect", with_keyset=True)
        try:
            with dlearn.record("refused"):
                pass
        except dlearn.DlearnError as error:
            return str(error)
        finally:
            library._destroy()
        return ""

    assert "another tool, or another recording" in Cluster(1, record=False).run(with_another).results[0]


@pytest.mark.slow
def test_under_torch_compile_the_same_is_seen_and_the_same_compiled():
    def compiled() -> dict[str, int]:
        from torch._dynamo.utils import counters

        model = torch.compile(DistributedDataParallel(programs.mlp()), backend="aot_eager")
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()
        return {"graphs": counters["frames"]["ok"], "breaks": sum(counters["graph_break"].values())}

    def eager() -> None:
        model = DistributedDataParallel(programs.mlp())
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()

    run, bare, plain = record(compiled), Cluster(2, record=False).run(quiet(compiled), timeout=100), record(eager)
    assert run.results == bare.results
    assert run.trace.problems == ()
    assert "dlearn" not in run.output[0], "the compiler says nothing of our hooks"
    kinds = [Counter(type(event) for event in each.trace.events) for each in (run, plain)]
    assert kinds[0] == kinds[1]
    assert kinds[0][Stretch] == 2 * 2 * 2
    told = [[each.what for each in operations(trace) if each.op == "all_reduce"] for trace in (run.trace, plain.trace)]
    assert told[0] == told[1]


@pytest.mark.parametrize("file", ["<eval_with_key>.1 from /opt/torch/proxy_tensor.py:1738 in wrapped", "cache/rd/c.py"])
def test_code_that_the_compiler_made_is_neither_a_place_nor_a_module(file, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    name = file if file.startswith("<") else str(tmp_path / file)
    made: dict[str, object] = {}
    exec(compile("def forward(self, look): return look()", name, "exec"), made)
    graph = type("GraphModule", (torch.nn.Module,), {"forward": made["forward"]})()
    found, line = graph(lambda: caller(sys._getframe(1))), sys._getframe().f_lineno
    assert Path(found.site).name == f"test_recorder.py:{line}"
    assert found.phase == ("none" if file.startswith("<") else "forward")


@pytest.mark.slow
def test_a_compiled_functions_messages_are_the_users_own():
    """In the line of the function that was compiled, in no module's forward pass, and without a path of the machine."""

    def compiled() -> int:
        @torch.compile(backend="aot_eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x)
            return x + 1

        step(torch.ones(4))
        return step.__wrapped__.__code__.co_firstlineno

    run = record(compiled)
    (call, _) = (event for event in run.trace.events if isinstance(event, Collective))
    assert (Path(call.site).name, call.phase) == (f"test_recorder.py:{run.results[0]}", "none")
    texts = [path.read_text() for path in run.trace.path.glob("*.jsonl")]
    assert not any(os.sep + os.path.join("site-packages", "torch") in text for text in texts)


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"),
    reason="this torch traces no collectives on fake tensors",
)
def test_what_is_only_traced_on_fake_tensors_is_no_message(tmp_path):
    from torch._subclasses import FakeTensorMode

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with dlearn.record(tmp_path / "trace"):
            with FakeTensorMode():
                dist.all_reduce(torch.ones(3))
                dist.all_gather([torch.ones(3)], torch.ones(3))
                dist.barrier()
                dist.isend(torch.ones(3), 0)
            dist.all_reduce(torch.ones(3, device="meta"))
            dist.broadcast(torch.ones(3), 0)
    finally:
        dist.destroy_process_group()
    trace = Trace.load(tmp_path / "trace")
    assert [each.op for each in operations(trace)] == ["broadcast"]
