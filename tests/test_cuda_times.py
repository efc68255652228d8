"""When a GPU did what was launched: its clock against the host's, events that are not passed, and no waiting.

The GPU is made by hand: a clock that runs 40 ppm fast, and streams that are busy until some moment of it.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import pytest
import torch
from traces import Job, tensor

from dlearn import Cluster, Trace, analysis, draw, operations
from dlearn.analysis.ddp.overlap import Times
from dlearn.analysis.ddp.training_steps import on_device
from dlearn.hooks.cuda_times import PATIENCE_NS, READ_AGAIN_NS, CudaTimes
from dlearn.trace.device_times import device_spans
from dlearn.trace.event import NOT_OBSERVED, Collective, Gradient, Stretch
from dlearn.trace.job_facts import DeviceReading, DeviceTime

GPU = torch.device("cuda", 0)
US = 1000
FAST = 1 + 40e-6


class Host:
    """A clock that goes on by 2 µs whenever somebody looks at it."""

    now_ns = 10**15

    def __call__(self) -> int:
        self.now_ns += 2 * US
        return self.now_ns


@dataclass
class Stream:
    busy_until_ns: float = 0.0
    blocked: int = 0


@dataclass
class Gpu:
    """Stands in for `torch.cuda`."""

    host: Host
    program: Stream = field(default_factory=Stream)
    own: list[Stream] = field(default_factory=list)
    capturing: bool = False
    current: Stream | None = None

    @property
    def now_ns(self) -> float:
        return self.host.now_ns * FAST

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self, device: torch.device) -> Stream:
        return self.current or self.program

    def Stream(self, *, device: torch.device, priority: int) -> Stream:
        self.own.append(Stream())
        return self.own[-1]

    @contextmanager
    def stream(self, stream):
        self.current = stream
        yield
        self.current = None

    def Event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)

    def run(self, us: float) -> float:
        """A kernel on the program's stream; when it will be over, on the GPU's clock."""
        self.program.busy_until_ns = max(self.now_ns, self.program.busy_until_ns) + us * US
        return self.program.busy_until_ns


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at_ns = gpu, 0.0

    def record(self, stream: Stream) -> None:
        self.at_ns = max(self.gpu.now_ns, stream.busy_until_ns)

    def query(self) -> bool:
        return self.gpu.now_ns >= self.at_ns

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query(), "CUDA raises an error"
        return (other.at_ns - self.at_ns) / 1e6

    def synchronize(self) -> None:
        raise AssertionError("a guest waits for nobody")


@dataclass
class Work:
    """Its future is complete at once, as NCCL's, and the GPU at `over_ns`; or it is not, as gloo's."""

    gpu: Gpu
    over_ns: float
    complete: bool = True

    def get_future(self) -> Work:
        return self

    def done(self) -> bool:
        return self.complete

    def wait(self) -> None:
        assert self.complete, "it would hold the program up"
        stream = self.gpu.current_stream(GPU)
        assert stream is not self.gpu.program
        stream.busy_until_ns = max(stream.busy_until_ns, self.over_ns)


class Lines(list):
    """Stands in for the recorder."""

    fact = list.append

    def failed(self, where, error):
        raise error

    def spans(self):
        times = [line for line in self if isinstance(line, DeviceTime)]
        readings = [line for line in self if isinstance(line, DeviceReading)]
        return device_spans(times, readings, lambda at_ns: at_ns)


@pytest.fixture
def gpu():
    return Gpu(Host())


@pytest.fixture
def lines():
    return Lines()


@pytest.fixture
def times(gpu, lines):
    return CudaTimes(lines, cuda=gpu, clock=gpu.host)


def test_a_kernel_and_a_collective_are_told_on_the_hosts_clock_within_the_bound(gpu, lines, times):
    begun = times.mark(GPU)
    at_ns = gpu.host.now_ns
    gpu.run(300)
    ended = times.mark(GPU)
    times.between(7, begun, ended)
    times.collective(8, ended, Work(gpu, gpu.program.busy_until_ns + 500 * US), "world")
    assert gpu.program.busy_until_ns < gpu.now_ns + 300 * US, "the program's stream waits for nothing of it"
    assert lines.spans() == {}, "nothing of it is over"
    gpu.host.now_ns += 1_000 * US
    times.close()
    found = lines.spans()
    for number, start_us, end_us in ((7, 0, 300), (8, 300, 800)):
        span = found[number]
        # The host looks at its clock every 2 µs, so an empty stream's event is known within (4 / 2 + 1) µs.
        assert span.error_ns <= 3 * US
        assert abs(span.start_ns - at_ns - start_us * US) <= span.error_ns
        assert abs(span.end_ns - at_ns - end_us * US) <= span.error_ns


def test_drift_is_taken_evenly_between_two_readings(gpu, lines, times):
    times.mark(GPU)
    gpu.host.now_ns += READ_AGAIN_NS * 4 // 5
    begun, at_ns = times.mark(GPU), gpu.host.now_ns
    times.between(1, begun, begun)
    gpu.host.now_ns += READ_AGAIN_NS
    times.close()
    # Without the second reading the GPU's 40 ppm would make 160 µs of 4 s.
    assert abs(lines.spans()[1].start_ns - at_ns) <= lines.spans()[1].error_ns < 5 * US
    assert sum(isinstance(line, DeviceReading) for line in lines) == 2


def test_what_is_not_over_at_the_end_of_the_recording_stays_unknown(gpu, lines, times, monkeypatch):
    monkeypatch.setattr(CudaTimes, "CLOSE_SECONDS", 0.01)
    begun = times.mark(GPU)
    times.collective(1, begun, Work(gpu, gpu.now_ns + 10**18), "world")  # it hangs
    times.close()
    assert lines.spans() == {}


def test_a_collective_on_the_callers_stream_blocks_it_and_one_that_ends_on_the_host_is_left_alone(gpu, lines, times):
    begun = times.mark(GPU)
    gpu.run(100)
    times.collective(1, begun, None, "world")
    times.collective(2, begun, Work(gpu, 0, complete=False), "world")
    gpu.host.now_ns += 1_000 * US
    times.close()
    (only,) = (line for line in lines if isinstance(line, DeviceTime))
    assert (only.event, only.blocks) == (1, True)


def test_each_group_waits_on_a_stream_of_its_own(gpu, lines, times):
    begun = times.mark(GPU)
    times.collective(1, begun, Work(gpu, gpu.now_ns + 900 * US), "world")
    times.collective(2, begun, Work(gpu, gpu.now_ns + 100 * US), "pair")
    gpu.host.now_ns += 1_000 * US
    times.close()
    found = lines.spans()
    assert found[2].end_ns < found[1].end_ns - 700 * US


def test_where_no_gpu_is_nothing_of_cuda_is_touched(monkeypatch):
    untouchable = CudaTimes(Lines(), cuda=None)
    assert untouchable.mark(torch.device("cpu")) is None
    assert untouchable.mark(None) is None
    untouchable.between(1, None, None)
    untouchable.close()
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert CudaTimes(Lines(), cuda=None).mark(GPU) is None, "our stream would hold up the program's"


def test_a_gpu_that_captures_a_graph_or_does_not_answer_is_left_alone(gpu, lines, times):
    gpu.capturing = True
    assert times.mark(GPU) is None
    gpu.capturing = False
    gpu.Event = lambda enable_timing: Deaf(gpu)
    asked_ns = gpu.host.now_ns
    assert times.mark(GPU) is None
    assert gpu.host.now_ns - asked_ns < 4 * PATIENCE_NS
    asked_ns = gpu.host.now_ns
    assert times.mark(GPU) is None
    assert gpu.host.now_ns - asked_ns < 10 * US, "for a while it is not asked again"
    assert lines == []


class Deaf(Event):
    def query(self) -> bool:
        return False


def test_the_hooks_tell_it_of_every_stretch_gradient_and_collective(tmp_path, monkeypatch):
    """A real DDP model on torch's fake process group, whose Works are complete at once, as NCCL's are."""
    monkeypatch.chdir(tmp_path)

    def train():
        import time

        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        import dlearn
        from dlearn.recorder import recording

        def hook(state, bucket):
            dist.all_reduce(bucket.buffer(), async_op=True)
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        class OnTheHost(CudaTimes):
            """Takes the CPU for a GPU, whose streams are never busy."""

            def __init__(self, emit):
                super().__init__(emit, cuda=Gpu(time_of_day), clock=time_of_day)

            def mark(self, device):
                return super().mark(device and GPU)

        class time_of_day:
            now_ns = property(lambda self: time.monotonic_ns())
            __call__ = staticmethod(time.monotonic_ns)

        time_of_day = time_of_day()
        recording.CudaTimes = OnTheHost
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        with dlearn.record("inner"):
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
            model.register_comm_hook(None, hook)  # DDP's own all-reduce wants a result, and the fake group has none
            optimizer = torch.optim.SGD(model.parameters())
            for _ in range(3):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()

    Cluster(1, init=False, record=False).run(train, timeout=60)
    trace = Trace.load("inner")
    spans = trace.processes[0].device_spans
    asked = [event for event in trace.events if isinstance(event, Gradient | Stretch)]
    asked += [event for event in trace.events if isinstance(event, Collective) and event.launcher == "comm hook"]
    assert len(asked) == 3 * (2 + 3 + 1)
    backward = [event for event in asked if isinstance(event, Stretch) and event.phase == "backward"]
    assert len(backward) == 3
    for event in backward:
        span = spans[event.number]
        assert span.start_ns <= event.start_ns + span.error_ns
        assert span.end_ns >= event.end_ns - span.error_ns
        for other in (each for each in asked if event.start_ns <= each.start_ns < event.end_ns):
            inner, error = spans[other.number], span.error_ns
            assert span.start_ns - error <= inner.start_ns <= inner.end_ns <= span.end_ns + error
    assert not any("could not be recorded" in problem for problem in trace.problems)


# What is said of it ---------------------------------------------------------------------------------------------------


def launched(job, *, unknown=None, error_ns=2 * US):
    """One step on two ranks: all is launched within 70 µs, and the GPU is at it from 1000 to 1330 µs.

    On the GPU forward 0-100, backward 110-300, optimizer 310-330; gradients at 150 and 250; buckets 151-211, 251-291,
    all in µs from 1000. `unknown`: the number of an event whose time on the GPU nobody knows.
    """
    gpu = {"device": "cuda:0"}
    facts = {"launcher": "reducer", "backward": 0, "phase": "backward", "by": NOT_OBSERVED}
    for rank in range(2):
        job.bucket(rank, 0, {"b": 40}, count=2)
        job.bucket(rank, 1, {"a": 60}, count=2)
        job.stretch(rank, "forward", 10 * US, 20 * US)
        for name, at in (("b", 31), ("a", 34)):
            job.gradient(rank, name, at_ns=at * US)
        for size, at in ((40, 32), (60, 35)):
            inputs = (msgspec.structs.replace(tensor(size), device="cuda:0"),)
            job.collective("all_reduce", ranks=[rank], start_ns=at * US, end_ns=None, inputs=inputs, **facts)
        job.stretch(rank, "backward", 30 * US, 40 * US)
        job.stretch(rank, "optimizer", 50 * US, 60 * US)
        on_gpu = [(0, 100), (150, 150), (250, 250), (151, 211), (251, 291), (110, 300), (310, 330)]
        # The GPU's clock began when the host's stood at 500 µs.
        for at in (0, 1000 * US):
            job.files[rank].append(DeviceReading(**gpu, device_ns=at, at_ns=500 * US + at, error_ns=error_ns))
        for number, (start, end) in enumerate(on_gpu, start=2):
            if number != unknown:
                at = {"start_ns": (500 + start) * US, "end_ns": (500 + end) * US}
                job.files[rank].append(DeviceTime(event=number, **gpu, **at))
    return job.load()


def test_overlap_is_said_of_the_times_of_the_gpu(tmp_path):
    trace = launched(Job(tmp_path, ranks=2, backend="nccl"))
    assert trace.problems == ()
    found = analysis.overlap(trace)
    (step,) = found.steps
    # As in test_overlap: bucket 0 travels 151-211, the last gradient comes at 250, bucket 1 travels 251-291.
    assert [share.times for share in step.shares] == [Times(60 * US, 0, 40 * US, 0)] * 2
    assert found.finding.startswith("60% of the communication time is hidden")
    assert found.note == ("Times of the GPUs, by CUDA events; against those of the CPUs they may be wrong by 2.00 µs.")
    assert found.note in str(found)
    parts = analysis.breakdown(trace)
    assert [each.total_ns for each in parts.items] == [330 * US] * 2
    for phase, length in (("forward", 100 * US), ("backward", (190 - 40) * US), ("optimizer", 20 * US)):
        assert [each.length_ns(phase) for each in parts.items] == [length] * 2
    assert parts.note == found.note
    first, second = (each for each in analysis.bucket_times(trace).items if each.rank == 0)
    # The pass began at 1110 µs.
    assert (first.begins_ns, first.ready, second.ready) == (1110 * US, (("b", 1150 * US),), (("a", 1250 * US),))
    assert (first.launched_ns, first.done_ns) == (1151 * US, 1211 * US)


def test_the_times_of_the_host_stay_beside_them(tmp_path):
    trace = launched(Job(tmp_path, ranks=2, backend="nccl"))
    call = next(event for event in trace.where(kind="collective", rank=0).events)
    assert (call.start_ns, call.end_ns, call.ended_by) == (32 * US, None, NOT_OBSERVED)
    view = on_device(trace.where(rank=0))
    call = next(event for event in view.events if event.number == call.number)
    assert (call.start_ns, call.end_ns, call.ended_by) == (1151 * US, 1211 * US, "cuda event")
    assert {event.rank for event in view.events} == {0}
    asked = operations(view)
    assert [(each.ranks, each.start_ns, each.end_ns) for each in asked] == [
        ((0, 1), 1151 * US, 1211 * US),
        ((0, 1), 1251 * US, 1291 * US),
    ]


def test_where_one_time_is_missing_nothing_is_made_up(tmp_path):
    trace = launched(Job(tmp_path, ranks=2, backend="nccl"), unknown=6)
    found = analysis.overlap(trace)
    assert [share.times for share in found.steps[0].shares] == [None, None]
    assert found.finding == "Not observed: nobody saw when the operations ended"
    assert found.note == ""
    assert analysis.breakdown(trace).note.startswith("On a GPU: the times of the CPU that launches")


def test_the_time_of_an_event_that_is_not_there_is_damage(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.files[0].append(DeviceTime(event=5, device="cuda:0", start_ns=1, end_ns=2))
    (problem,) = job.load().problems
    assert "the time of event 5 on a GPU, which cannot be" in problem


def test_after_the_last_reading_the_bound_grows():
    readings = [DeviceReading(device="cuda:0", device_ns=at, at_ns=at, error_ns=1) for at in (0, 1000)]
    late = DeviceTime(event=1, device="cuda:0", start_ns=500, end_ns=1000 + 10**9)
    # Two clocks may part by 500 ppm: 0.5 ms in a second.
    assert device_spans([late], readings, lambda at_ns: at_ns)[1].error_ns == 1 + 500_000


# On real GPUs ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with NCCL: torch.cuda.is_available() is False")
@pytest.mark.parametrize("ranks", sorted({1, torch.cuda.device_count()} - {0}) or [1])
def test_overlap_of_a_real_run_on_nccl(ranks, own_folder):

    def train():
        import torch.distributed as dist

        device = torch.device("cuda", dist.get_rank())
        torch.cuda.set_device(device)
        model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).to(device)
        ddp = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index])
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        for _ in range(5):
            ddp(torch.ones(256, 2048, device=device)).sum().backward()
            optimizer.step()
        dist.all_reduce(torch.ones(1000, device=device))
        torch.cuda.synchronize()

    trace = Cluster(ranks, backend="nccl").run(train, timeout=120).trace
    assert trace.problems == ()
    found = analysis.overlap(trace)
    assert len(found.steps) == 5
    for step in found.steps:
        assert all(share.times is not None for share in step.shares)
    assert found.note.startswith("Times of the GPUs, by CUDA events")
    for each in analysis.bucket_times(trace).items:
        assert max(at for _, at in each.ready) <= each.launched_ns <= each.done_ns
    assert draw.breakdown(trace).get_title(loc="left")
