"""When a GPU did what was launched: its clock against the host's, events that are not passed, and no waiting.

The GPU is made by hand: a clock that runs 40 ppm fast, and busy streams. (Real ones: gpu/test_one_gpu.py.)
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
import torch
from pictures import ddp_buckets
from traces import Job, fact, tensor

from dlearn import analysis
from dlearn.events.event import NOT_OBSERVED
from dlearn.hooks.cuda_times import CudaTimes

GPU = torch.device("cuda", 0)
US, SECOND = 1000, 10**9


@dataclass
class Stream:
    busy_until_ns: float = 0.0


class Gpu:
    """Stands in for `torch.cuda`, and for the host's clock, which goes on by 2 µs whenever somebody looks at it."""

    def __init__(self) -> None:
        self.host_ns = 10**15
        self.program, self.current = Stream(), None

    def clock(self) -> int:
        self.host_ns += 2 * US
        return self.host_ns

    def now_ns(self) -> float:
        return self.host_ns * (1 + 40e-6)

    def is_current_stream_capturing(self) -> bool:
        return False

    def current_stream(self, device: torch.device) -> Stream:
        return self.current or self.program

    def Stream(self, *, device: torch.device, priority: int) -> Stream:
        return Stream()

    @contextmanager
    def stream(self, stream):
        self.current = stream
        yield
        self.current = None

    def Event(self, *, enable_timing: bool) -> Event:
        return Event(self)

    def run(self, us: float) -> None:
        """A kernel on the program's stream."""
        self.program.busy_until_ns = max(self.now_ns(), self.program.busy_until_ns) + us * US


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at_ns = gpu, 0.0

    def record(self, stream: Stream) -> None:
        self.at_ns = max(self.gpu.now_ns(), stream.busy_until_ns)

    def query(self) -> bool:
        return self.gpu.now_ns() >= self.at_ns

    def elapsed_time(self, other: Event) -> float:
        assert self.query()
        assert other.query(), "CUDA raises an error"
        return (other.at_ns - self.at_ns) / 1e6

    def synchronize(self) -> None:
        raise AssertionError("a guest waits for nobody")


@dataclass
class Work:
    """Its future is complete at once, as NCCL's, and the GPU in `us` from now; or it is not, as gloo's."""

    gpu: Gpu
    us: float
    complete: bool = True

    def get_future(self) -> Work:
        return self

    done = property(lambda self: lambda: self.complete)

    def wait(self) -> None:
        assert self.complete, "it would hold the program up"
        assert self.gpu.current is not None, "the program's own stream would wait"
        self.gpu.current.busy_until_ns = max(self.gpu.current.busy_until_ns, self.gpu.now_ns() + self.us * US)


class Lines(list):
    """Stands in for the recorder."""

    fact = list.append

    def failed(self, where, error):
        raise error


def spans_of(folder, lines):
    """As a trace tells them that has these lines."""
    job = Job(folder, ranks=1)
    for _ in range(10):
        job.span(0, "launched")
    job.files[0].extend(lines)
    trace = job.load()
    assert trace.problems == ()
    return trace.processes[0].device_spans


def test_what_was_launched_is_told_on_the_hosts_clock_within_the_bound(tmp_path):
    gpu, lines = Gpu(), Lines()
    times = CudaTimes(lines, cuda=gpu, clock=gpu.clock)
    times.mark(GPU)
    gpu.host_ns += 4 * SECOND
    begun, at_ns = times.mark(GPU), gpu.host_ns
    gpu.run(300)
    ended = times.mark(GPU)
    times.between(1, begun, ended)
    times.collective(2, ended, Work(gpu, 800), "world")
    times.collective(3, ended, Work(gpu, 400), "pair")  # Each group waits on a stream of its own.
    times.collective(4, begun, None, "world")  # It ran in line: nothing else ran on the program's stream meanwhile.
    times.collective(5, begun, Work(gpu, 0, complete=False), "world")  # It ends on the host.
    times.collective(6, begun, Work(gpu, 1e15), "world")  # It hangs.
    assert not [line for line in lines if hasattr(line, "event")], "nothing of it is over"
    gpu.host_ns += 5 * SECOND
    times.CLOSE_SECONDS = 0.01
    times.close()
    found = spans_of(tmp_path, lines)
    # In µs from there. Without the second reading the GPU's 40 ppm would make 160 µs of 4 s.
    expected = {1: (0, 300), 2: (300, 800), 3: (300, 400), 4: (0, 300)}
    assert found.keys() == expected.keys(), "what is not over stays unknown"
    for number, (start_us, end_us) in expected.items():
        span = found[number]
        # The host looks at its clock every 2 µs, a few times while these were marked.
        assert span.error_ns < 5 * US
        assert abs(span.start_ns - at_ns - start_us * US) <= 60 * US
        assert abs(span.end_ns - at_ns - end_us * US) <= 60 * US
    assert [line.event for line in lines if hasattr(line, "event") and line.blocks] == [4]


def launched(folder, *, unknown=None):
    """One step on two ranks: all is launched within 70 µs, and the GPU is at it from 1000 to 1330 µs.

    On the GPU forward 0-100, backward 110-300, optimizer 310-330; gradients at 150 and 250; buckets 151-211, 251-291,
    all in µs from 1000. `unknown`: the number of an event whose time on the GPU nobody knows.
    """
    job = Job(folder, ranks=2, backend="nccl")
    facts = {"launcher": "reducer", "backward": 0, "phase": "backward", "by": NOT_OBSERVED}
    ddp_buckets(job)
    for rank in range(2):
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
            reading = {"device_ns": at, "at_ns": 500 * US + at, "error_ns": 2 * US}
            job.files[rank].append(fact("device clock", device="cuda:0", **reading))
        for number, (start, end) in enumerate(on_gpu, start=2):
            if number != unknown:
                at = {"start_ns": (500 + start) * US, "end_ns": (500 + end) * US}
                job.files[rank].append(fact("device time", event=number, device="cuda:0", **at))
    return job.load()


def test_steps_are_said_of_the_times_of_the_gpu_and_those_of_the_host_stay(tmp_path):
    trace = launched(tmp_path)
    assert trace.problems == ()
    found = analysis.overlap(trace)
    # Bucket 0 travels 151-211, the last gradient comes at 250, bucket 1 travels 251-291.
    assert found.finding.startswith("60% of the communication time is hidden")
    assert found.note == "Times of the GPUs, by CUDA events; against those of the CPUs they may be wrong by 2.00 µs."
    parts = analysis.breakdown(trace)
    assert [each.total_ns for each in parts.items] == [330 * US] * 2
    for phase, length in (("forward", 100 * US), ("backward", (190 - 40) * US), ("optimizer", 20 * US)):
        assert [each.length_ns(phase) for each in parts.items] == [length] * 2
    first, second = (each for each in analysis.bucket_times(trace).items if each.rank == 0)
    assert (first.begins_ns, first.ready, second.ready) == (1110 * US, (("b", 1150 * US),), (("a", 1250 * US),))
    assert (first.launched_ns, first.done_ns) == (1151 * US, 1211 * US)
    call = trace.where(kind="collective", rank=0).events[0]
    assert (call.start_ns, call.end_ns, call.ended_by) == (32 * US, None, NOT_OBSERVED)
    # Where one time is missing nothing is made up.
    trace = launched(tmp_path / "unknown", unknown=6)
    found = analysis.overlap(trace)
    assert [share.observed for share in found.steps[0].shares] == [False, False]
    assert (found.finding, found.note) == ("Not observed: when the operations ended", "")
    assert analysis.breakdown(trace).note.startswith("On a GPU: the times of the CPU that launches")


def test_after_the_last_reading_the_bound_grows(tmp_path):
    readings = [fact("device clock", device="cuda:0", device_ns=at, at_ns=at, error_ns=1) for at in (0, 1000)]
    late = fact("device time", event=1, device="cuda:0", start_ns=500, end_ns=1000 + SECOND)
    # Two clocks may part by 500 ppm: 0.5 ms in a second.
    assert spans_of(tmp_path, [*readings, late])[1].error_ns == 1 + 500_000
