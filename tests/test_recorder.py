"""What the recorder sees of real ranks, and that it is a guest there.

All of workloads.py runs once, and so do the scenes below, each with a group of its own. Tests read the recordings.
"""

import os
import sys
import sysconfig
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import programs
import pytest
import torch
import torch.distributed as dist
import workloads
from installed_torch import flight_recorder_knows_gloo
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import dlearn
from dlearn import Trace, explain, messages, operations
from dlearn.analysis import assert_traffic, hangs, reconcile, traffic
from dlearn.errors import DlearnError
from dlearn.events.event import NOT_OBSERVED, REFUSED, Collective, Gradient, PhaseSpan, PointToPoint, Span


@pytest.fixture(scope="module")
def everything(recorded):
    """PowerSGD, FSDP2, DTensor, ZeRO, object collectives and the rest, as they come."""
    return recorded(workloads.every, arguments=workloads.LEFT_OUT)


def calls_of(trace, **which):
    return trace.where(**which).of(Collective, PointToPoint)


def test_workloads_are_seen_whole_and_predicted_to_the_byte(everything):
    for workload, truth in workloads.truth.items():
        if workload.__name__ not in workloads.LEFT_OUT:
            seen = calls_of(everything.within(workload.__name__), rank=0)
            assert (workload.__name__, Counter(call.op for call in seen)) == (workload.__name__, truth)
    calls = calls_of(everything)
    assert [call for call in calls if call.end_ns is None or call.failed] == []
    assert [each for each in operations(everything) if each.problem or each.missing] == []
    assert {Path(call.site.split(":")[0]).name for call in calls} == {"workloads.py", "programs.py"}
    assert messages(everything).unexplained == ()
    assert reconcile(everything).exact
    assert everything.problems == ()


def test_every_all_reduce_of_ddp_has_its_bucket_phase_and_role(everything):
    trace = everything.within("ddp")
    told = [(call.op, call.phase, call.role) for call in calls_of(trace, rank=0)]
    assert told == [
        ("all_gather", "setup", "DDP compares the parameters' shapes"),
        ("broadcast", "setup", "DDP compares the parameters' shapes"),
        ("broadcast", "setup", "DDP sends rank 0's model"),
        ("all_reduce", "backward", ""),
        ("broadcast", "forward", "DDP agrees on the rebuilt buckets"),
        ("broadcast", "forward", "DDP agrees on the rebuilt buckets"),
        ("all_reduce", "backward", ""),
        ("all_reduce", "backward", ""),
    ]
    # One bucket of all ten parameters in step 0. Then those of the last three layers, which are ready first
    # (10*64+10 + 2*(64*64+64) floats), and those of the first two. The fp16 hook halves them.
    for name, sizes in (("ddp", [69160, 35880, 33280]), ("ddp_fp16_hook", [34580, 17940, 16640])):
        reduced = [each for each in operations(everything.within(name)) if each.op == "all_reduce"]
        assert [each.bucket.index for each in reduced] == [0, 0, 1]
        assert [each.ends[0].inputs[0].payload_bytes for each in reduced] == sizes
        assert reduced[1].bucket.parameters == ("8.bias", "8.weight", "6.bias", "6.weight", "4.bias", "4.weight")
        assert reduced[1].what.startswith("gradient of bucket 0: 8.bias, 8.weight")
        sent = messages(everything.within(name))
        said = "gradient of bucket 0: 8.bias, 8.weight, 6.bias, 6.weight and 2 more"
        assert said in {row[-1] for row in sent.table_rows(sent)}


def test_what_fsdp2_sends_names_its_module_and_equal_ones_share_a_sentence(everything):
    trace = everything.within("fsdp2")
    told = Counter(each.what for each in operations(trace))
    assert told == {f"{what}s of {2 * i}": n for what, n in (("parameter", 4), ("gradient", 2)) for i in range(5)}
    assert "(parameters of 0, 2, 4 and 1 more) in the forward pass, 8 times" in str(explain(trace))


def test_comm_hooks_and_optimizers_own_messages_are_told_as_theirs(everything):
    """PowerSGD sends P below its hook, Q by a callback on a thread of gloo's: elimination does not tell whose."""
    calls = calls_of(everything.within("ddp_power_sgd"), rank=0, op="all_reduce")
    assert {(call.launcher, call.bucket_index) for call in calls} == {("comm hook", 0)}
    phases = Counter(call.phase for call in calls_of(everything.within("zero_redundancy_optimizer"), rank=0))
    assert phases["optimizer"] == 2 * 10, "ten parameters in each of two steps"


def test_every_stretch_of_a_step_is_seen_and_holds_what_happens_in_it(recorded):
    trace = recorded(programs.train_ddp, ranks=3, arguments=(4,))
    for rank in range(3):
        mine = trace.where(rank=rank)
        phase_spans = mine.of(PhaseSpan)
        assert [each.phase for each in phase_spans] == ["forward", "backward", "optimizer"] * 4
        assert all(a.end_ns <= b.start_ns for a, b in pairwise(phase_spans))
        inside = [*mine.of(Gradient), *(call for call in mine.of(Collective) if call.phase == "backward")]
        assert len(inside) > 20
        for event in inside:
            around = [each for each in phase_spans if each.start_ns <= event.start_ns <= each.end_ns]
            assert [each.phase for each in around] == [event.phase]


def all_scenes() -> int:
    scenes = (waits_here_and_there, waits_in_vain, is_refused_at_times, waits_for_nothing, holds_many)
    for program in (*scenes, sends_much, shapes, strange_spans, has_ranges, has_workers, whispers):
        group = dist.new_group()
        dist.barrier()
        with dlearn.span(program.__name__):
            program(group, dist.get_rank())
    return os.getpid()


@pytest.fixture(scope="module")
def seen(recorded):
    """What is seen within a scene."""
    return recorded(all_scenes).within


def waits_here_and_there(group, rank) -> None:
    dist.all_reduce(torch.ones(4), group=group)
    dist.broadcast(torch.ones(4), 0, async_op=True, group=group).wait()
    model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    model(torch.ones(1, 2)).sum().backward()  # DDP's reducer waits in C++, where no wait is seen.


def test_the_end_is_told_by_the_wait_only_where_the_call_itself_waits(seen):
    calls = [call for call in calls_of(seen("waits_here_and_there"), rank=0) if not call.role]
    told = [(call.op, call.launcher, call.ended_by) for call in calls]
    assert told == [("all_reduce", "", "wait"), ("broadcast", "", "callback"), ("all_reduce", "reducer", "callback")]


def waits_in_vain(group, rank) -> None:
    if rank == 0:
        with pytest.raises(RuntimeError, match="failed to pass monitoredBarrier"):
            dist.monitored_barrier(group, timeout=timedelta(seconds=0.2))


def test_a_monitored_barrier_that_fails_has_waited_and_was_not_refused(seen):
    (call,) = calls_of(seen("waits_in_vain"))
    assert (call.ended_by, call.error.partition(":")[0]) == ("return", "RuntimeError")
    assert "rank 0 waits for rank 1 in monitored_barrier #1" in str(explain(seen("waits_in_vain")))


def is_refused_at_times(group, rank) -> None:
    """A send and a collective that rank 0 alone is refused, and an all_gather that gloo refuses on both ranks."""
    if rank == 0:
        with pytest.raises(RuntimeError, match="contiguous"):
            dist.send(torch.ones(4, 4)[:, ::2], 1, group)
        with pytest.raises(RuntimeError, match="invalid root rank"):
            dist.broadcast(torch.ones(2), group=group, group_src=99)
        dist.send(torch.ones(4), 1, group)
    else:
        dist.recv(torch.ones(4), 0, group)
    with pytest.raises(RuntimeError, match="invalid tensor size"):
        dist.all_gather([torch.ones(3)] * 2, torch.ones(4 + rank), group)
    dist.all_reduce(torch.ones(4), group=group)


def test_what_is_refused_meets_no_other_call_and_takes_no_message_its_confirmation(seen):
    trace = seen("is_refused_at_times")
    assert sorted((each.op, each.ranks, each.refused, each.missing) for each in operations(trace)) == [
        ("all_gather", (0, 1), True, ()),
        ("all_reduce", (0, 1), False, ()),
        ("broadcast", (0,), True, ()),
        ("send", (0,), True, ()),
        ("send", (0, 1), False, ()),
    ]
    reasons = {event.error for event in trace.events if event.ended_by == REFUSED}
    assert "RuntimeError: input tensor has to be contiguous" in reasons
    assert all(reason.startswith("RuntimeError: ") for reason in reasons)
    assert hangs(trace) == ()
    found = messages(trace)
    assert [message.confirmed for message in found] == [True] * len(found)
    assert found.unexplained == ()
    assert_traffic(trace, op="all_reduce")


def waits_for_nothing(group, rank) -> None:
    from torch.distributed._functional_collectives import wait_tensor

    if rank == 0:
        work = dist.isend(torch.ones(2), 1, group)
        wait_tensor(torch.empty(0))  # It has no address, and the send has no output.
        dist.barrier()
        assert work is not None
    else:
        dist.recv(torch.ones(2), 0, group)
        dist.barrier()


def holds_many(group, rank) -> None:
    works = []
    for _ in range(1200):
        works.append(dist.irecv(torch.ones(1), 0, group) if rank else dist.isend(torch.ones(1), 1, group))
    for work in works:
        work.wait()


def sends_much(group, rank) -> None:
    large = torch.empty(65 << 20, dtype=torch.uint8)
    dist.recv(large, 0, group) if rank else dist.send(large, 1, group)


def test_works_are_held_until_they_end_but_not_more_than_fit(seen):
    ended = {call.op: (call.ended_by, call.pending) for call in calls_of(seen("waits_for_nothing"), kind="p2p")}
    assert ended == {"send": (NOT_OBSERVED, False), "recv": ("wait", False)}
    assert {call.ended_by for call in calls_of(seen("sends_much"))} == {"wait"}
    assert len(messages(seen("holds_many"))) == 1200
    # 1000 are held. Rank 0 has held the send that nobody waited for, too.
    assert [process.footer.works_dropped for process in seen("holds_many").processes] == [201, 200]


def shapes(group, rank) -> None:
    dist.all_reduce(torch.ones(1000)[10:20], group=group)
    dist.broadcast(torch.zeros(1000) if rank else torch.ones(1).expand(1000), 0, group)
    dist.all_reduce(torch.ones(2, 3, dtype=torch.float64).t(), group=group)
    for _ in range(3):
        dist.all_reduce(torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 4), (100, 4)), group=group)
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(2)]
    dist.all_gather_coalesced(lists, [torch.ones(2), torch.ones(3)], group)
    half = torch.ones(8)[4:]
    dist.recv(half, 0, group) if rank else dist.send(half, 1, group)


def test_views_expanded_and_sparse_tensors_are_counted_as_gloo_sends_them(seen):
    *collectives, send = calls_of(seen("shapes"), rank=0)
    counted = [[(each.logical_bytes, each.payload_bytes) for each in call.inputs] for call in collectives]
    # A view counts its own elements; gloo sends an expanded tensor in full (4 kB on the wire, by its counters);
    # a sparse one as two int64 indices and two rows of four float32: 16 + 32.
    assert counted == [[(40, 40)], [(4000, 4000)], [(48, 48)], *[[(1600, 48)]] * 3, [(8, 8), (12, 12)]]
    assert traffic(seen("shapes")).unexplained == 3  # Gloo adds up what one has twice.
    assert (send.offset_bytes, send.whole_bytes) == (16, 32)


def strange_spans(group, rank) -> None:
    with dlearn.span("\ud800"), dlearn.span(object()), dlearn.span("x" * 3_000_000), dlearn.span(7):
        pass

    def steps():
        with dlearn.span("inner"):
            yield

    generator = steps()
    next(generator)
    with dlearn.span("main"):
        generator.close()
        dist.all_reduce(torch.ones(2), group=group)


def has_ranges(group, rank) -> None:
    @record_function("layer")
    def layer(depth: int) -> None:
        with record_function("attention"):
            dist.all_reduce(torch.ones(2), group=group)
        if depth:
            layer(depth - 1)

    def doubled(x: torch.Tensor):
        with torch.autograd.profiler.record_function("compiled"):
            return x * 2

    layer(1)
    with record_function("thread"), ThreadPoolExecutor(1, "helper") as pool:
        pool.submit(dist.all_reduce, torch.ones(4), group=group).result()
        pool.submit(layer, 0).result()
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]).step()  # A range of torch's own.
    with pytest.raises(ValueError, match="bad"), record_function("fails"):
        raise ValueError("bad")
    for compiled in (torch.jit.script(doubled), torch.compile(doubled, backend="eager")):
        assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


def test_ranges_of_the_profiler_are_spans_but_not_those_of_torch_itself(seen):
    trace = seen("has_ranges").where(rank=0)
    ranges = {span.number: span for span in trace.of(Span)}
    paths = [(ranges[span.parent].name if span.parent in ranges else "", span.name) for span in ranges.values()]
    layer, attention = ("", "layer"), ("layer", "attention")
    assert paths[:4] == [layer, attention, ("layer", "layer"), attention]
    assert paths[4:] == [("", "thread"), ("thread", "layer"), attention, ("", "fails")]
    assert not any(span.pending or not span.of_profiler for span in ranges.values())
    calls = [(call.thread, ranges[call.parent].name) for call in calls_of(trace)]
    assert calls == [("", "attention")] * 2 + [("helper_0", "thread"), ("helper_0", "attention")]
    # No counters are read for a range: the bytes on the wire are those of the span around it.
    assert {"has_ranges", "attention"} & {part.what for part in reconcile(trace.whole).parts} == {"has_ranges"}


def has_workers(group, rank) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    for (batch,) in DataLoader(TensorDataset(torch.arange(8.0)), batch_size=2, num_workers=2):
        dist.all_reduce(batch, group=group)


def whispers(group, rank) -> None:
    text = "".join(["TOP", "SECRET"])
    dist.all_gather_object([None, None], {"password": text}, group)
    dist.all_reduce(torch.full((4,), 271828182.0), group=group)
    tensor = torch.tensor([ord(letter) for letter in text], dtype=torch.uint8)
    dist.recv(tensor, 0, group) if rank else dist.send(tensor, 1, group)
    with pytest.raises(ValueError, match=text):
        raise ValueError(text)


def test_strange_spans_and_workers_of_a_data_loader_break_neither_program_nor_trace(seen, recorded):
    trace = recorded(all_scenes)
    assert [problem.partition(": ")[2][:-5] for problem in trace.problems] == [
        "sends and receives whose end was not observed"
    ] * 2
    assert {"?", "7"} < set(trace.spans)
    assert len(calls_of(seen("main"))) == 2
    assert [process.header.pid for process in trace.processes] == list(recorded.results(all_scenes).values())
    assert len(calls_of(seen("has_workers"))) == 2 * 4


def test_no_value_and_no_argument_reaches_the_files(seen, recorded):
    assert len(calls_of(seen("whispers"))) >= 8
    for file in recorded.folder(all_scenes).iterdir():
        text = file.read_bytes()
        assert b"TOPSECRET" not in text
        assert b"271828182" not in text


def own_recordings() -> tuple[Path, object]:
    given_back = looks_around()
    model = DistributedDataParallel(programs.mlp(), bucket_cap_mb=0.02)
    model(torch.randn(8, 64)).sum().backward()
    with dlearn.record("late model"):
        model(torch.randn(8, 64)).sum().backward()
    begins_late()
    with dlearn.record("small", max_bytes=2000):
        for _ in range(100):
            dist.all_reduce(torch.ones(2))
    are_refused()
    return Path.cwd(), given_back


def looks_around() -> tuple[list[str], ...]:
    """What a recording changes in torch, what of it is left afterwards, and its threads."""
    import torch.distributed.rpc
    from torch._C._distributed_c10d import Work
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.rpc import api, backend_registry
    from torch.optim import optimizer

    def state() -> dict[str, object]:
        own = (c10d, dist, api, backend_registry, torch.autograd, dist.autograd)
        names = {f"{module.__name__}.{name}": value for module in own for name, value in vars(module).items()}
        names |= {kernel: torch._C._dispatch_dump(kernel) for kernel in KERNELS}
        names |= {f"range {name}": value for name, value in vars(record_function).items()}
        names |= {f"stage {name}": value for name, value in vars(PipelineStage.__base__).items()}
        names |= {"wait": Work.wait, "inside forward": DistributedDataParallel._inside_ddp_forward}
        hooks = [list(optimizer._global_optimizer_post_hooks), list(optimizer._global_optimizer_pre_hooks)]
        return names | {"hooks": hooks, "backward": torch.autograd._engine_run_backward}

    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("dlearn")}

    os.environ.pop("LOCAL_WORLD_SIZE", None)  # As where nobody says that all ranks are on one host.
    before, threads_before = state(), threads()
    with dlearn.record("inner", steps={0, 1}, hang_after=30, gather=True, graph=True):
        torch.nn.Linear(4, 4)(torch.ones(1, 4)).sum().backward()
        engine_alone = state()["backward"]
        model = DistributedDataParallel(programs.mlp())
        model(torch.randn(2, 64)).sum().backward()
        during, threads_during = state(), threads()
    after = state()
    changed, left = ([name for name in before if now[name] != before[name]] for now in (during, after))
    left += [name for name in ["backward without DDP"] if engine_alone is not before["backward"]]
    left += [each.shape for each in model.parameters() if each._post_accumulate_grad_hooks]
    return changed, left, sorted(threads_during - threads_before), sorted(threads() - threads_before)


KERNELS = [f"c10d::{op}" for op in ("allreduce_", "send", "barrier", "monitored_barrier_", "recv_any_source_")]
KERNELS += ["_c10d_functional::wait_tensor"]


def begins_late() -> None:
    """Ranks 1 and 2 record a call that rank 0 has made before; sends before do not count, and rank 0 has more."""
    rank, others = dist.get_rank(), dist.new_group()
    for each in (1, 2):
        if rank == 0:
            dist.recv(torch.ones(2), each)
        elif rank == each:
            dist.send(torch.ones(2), 0)
    group = dist.new_group()
    for _ in range(5):
        dist.all_reduce(torch.ones(1), group=others)
    if rank == 0:
        dist.all_reduce(torch.ones(1), group=group)
    with dlearn.record("late"):
        if rank:
            dist.all_reduce(torch.ones(1), group=group)
        dist.all_reduce(torch.ones(2), group=group)
        dist.broadcast(torch.ones(3), 0, group=group)
        dist.all_reduce(torch.ones(1), group=others)


def are_refused() -> None:
    """A second recording inside the first, and one beside a tool that has put its own kernel into torch."""
    with pytest.raises(DlearnError, match="being recorded already"), dlearn.record("outer"), dlearn.record("again"):
        pass
    library = torch.library.Library("c10d", "IMPL")
    library.impl("allreduce_", lambda keyset, *args: None, "BackendSelect", with_keyset=True)
    with pytest.raises(DlearnError, match="another tool, or another recording"), dlearn.record("refused"):
        pass
    library._destroy()


@pytest.fixture(scope="module")
def own(recorded):
    return recorded.results(own_recordings, ranks=3, record=False)


def test_undo_with_every_option_gives_back_all_kernels_names_hooks_and_threads(own):
    changed, left, threads, threads_left = own[0][1]
    assert left == threads_left == []
    names = {"torch.distributed.destroy_process_group", "torch.distributed.rpc.backend_registry.init_backend"}
    names |= {"torch.distributed.distributed_c10d._new_process_group_helper", "wait", "inside forward", "hooks"}
    names |= {"range __init__", "range __enter__", "range __exit__", "stage forward_one_chunk"}
    assert {*KERNELS, *names, "backward"} <= set(changed)
    assert threads == ["dlearn-clock", "dlearn-hang-watch"]


def test_a_model_made_before_the_recording_is_seen_too(own):
    reduced = [each for each in operations(Trace.load(own[0][0] / "late model")) if each.op == "all_reduce"]
    assert [each.bucket.index for each in reduced] == [0, 1]


@pytest.mark.skipif(not flight_recorder_knows_gloo(), reason="torch's flight recorder does not number gloo's calls yet")
def test_recordings_that_begin_at_different_calls_still_meet(own):
    found = operations(Trace.load(own[0][0] / "late"))
    assert [(each.op, each.seq, len(each.ends), each.problem) for each in found] == [
        ("all_reduce", 1, 2, ""),
        ("all_reduce", 2, 3, ""),
        ("broadcast", 3, 3, ""),
        ("all_reduce", 6, 3, ""),
    ]


def test_a_full_file_is_counted_not_written(own):
    trace = Trace.load(own[0][0] / "small")
    for process in trace.processes:
        lengths = [len(line) for line in process.path.read_bytes().splitlines(keepends=True)]
        written, longest = sum(lengths[:-1]), max(lengths)
        assert written <= 2000 < written + longest  # The footer is written in any case.
        assert process.footer.lines == len(lengths) - 1
        assert process.footer.lines + process.footer.not_written > 200, "each begin and each end: written or counted"
    assert len(trace.problems) == 3
    assert all("lines were not written" in problem for problem in trace.problems)


def test_every_job_has_its_own_name(own, recorded, everything):
    jobs = [{process.header.job for process in trace.processes} for trace in (recorded(all_scenes), everything)]
    jobs += [{process.header.job for name in ("late", "small") for process in Trace.load(own[0][0] / name).processes}]
    assert [len(each) for each in jobs] == [1, 1, 1]
    assert len(set.union(*jobs)) == 3


def test_results_are_bit_equal_with_and_without_the_recorder(recorded):
    ran = [recorded.results(programs.train_ddp, ranks=3, arguments=(4,), **way) for way in ({}, {"record": False})]
    for rank in range(3):
        assert all(torch.equal(a, b) for a, b in zip(ran[0][rank], ran[1][rank], strict=True))


@pytest.fixture
def group_of_one():
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_call_stands_in_the_users_line_whoever_makes_it(tmp_path, group_of_one, monkeypatch):
    """A pool's thread, as DCP's async_save does; an installed library; code that a compiler has made."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    made_by = ["<eval_with_key>.1 from torch/proxy_tensor.py:1738 in wrapped", f"{tmp_path}/cache/rd/c.py"]
    made_by += [f"{sysconfig.get_path('purelib')}/library/reducing.py"]
    called = []
    for file in made_by:
        functions: dict[str, Callable[..., object]] = {}
        exec(compile("def forward(self, call): return call()", file, "exec"), functions)
        called.append(functions["forward"])
    graph = type("GraphModule", (torch.nn.Module,), {"forward": called[0]})()
    with dlearn.record(tmp_path / "trace"), ThreadPoolExecutor(1) as pool:
        here = sys._getframe().f_lineno
        pool.submit(dist.all_reduce, torch.ones(2)).result()
        graph(lambda: dist.all_reduce(torch.ones(2)))
        called[1](None, lambda: dist.all_reduce(torch.ones(2)))
        called[2](None, dist.barrier)
    calls = Trace.load(tmp_path / "trace").of(Collective)
    assert [Path(call.site).name for call in calls] == [f"test_recorder.py:{here + place}" for place in (1, 2, 3, 4)]
    assert {call.phase for call in calls} == {"none"}
    assert calls[0].thread.startswith("ThreadPoolExecutor")


def test_a_group_lives_a_little_longer_than_the_program_holds_it(tmp_path, group_of_one):
    """Else a DDP model that goes after it takes gloo's threads along, with Python's lock in its hand."""
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


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"),
    reason="this torch traces no collectives on fake tensors",
)
def test_what_is_only_traced_on_fake_tensors_is_no_message(tmp_path, group_of_one):
    from torch._subclasses import FakeTensorMode

    with dlearn.record(tmp_path / "trace"):
        with FakeTensorMode():
            dist.all_reduce(torch.ones(3))
            dist.all_gather([torch.ones(3)], torch.ones(3))
            dist.barrier()
            dist.isend(torch.ones(3), 0)
        dist.all_reduce(torch.ones(3, device="meta"))
        dist.broadcast(torch.ones(3), 0)
    assert [each.op for each in operations(Trace.load(tmp_path / "trace"))] == ["broadcast"]
