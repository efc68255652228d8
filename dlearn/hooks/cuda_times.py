"""The times at which a GPU ran what the CPU launched: CUDA events around collectives and phases.

A call of NCCL returns, and its future completes, when the kernel is queued: the host sees no end.
A GPU passes an event when all work before it on the stream is done; two events give a duration.

The start is an event on the caller's stream. So is the end, if the operation ran on that stream
(`async_op=False` returns no Work). Otherwise it is an event behind the Work's future, on a stream
of our own for each process group: waiting for that future blocks a stream and no thread
(ATen/core/ivalue_inl.h, `synchronizeWithCurrentStreams`), and the program does not use this one.

A guest: nothing waits for the GPU. Events are queried when the next ones are made, and what the GPU
has not passed at the end of the recording stays unknown. Run on one GPU so far.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Work

from dlearn.events.job_facts import DeviceReading, DeviceTime
from dlearn.hooks import Emit

READ_AGAIN_NS = 5_000_000_000
"""CUDA gives the time between two events as a float of ms: over 5 s that is exact to half a microsecond."""
RESOLUTION_NS = 1_000
PATIENCE_NS = 1_000_000
"""A stream with nothing on it passes an event at once; one that does not is not asked longer than that."""
ROUNDS = 3
MOST_PENDING = 10_000
OWN_PRIORITY = -2


class _Reading(NamedTuple):
    """An event at a moment that the host knows; `device_ns` after the first one of its device."""

    event: Any
    device_ns: int
    at_ns: int


class Mark(NamedTuple):
    """An event on its way, and the reading from which its time is counted."""

    event: Any
    device: torch.device
    since: _Reading

    def device_ns(self) -> int:
        return self.since.device_ns + int(self.since.event.elapsed_time(self.event) * 1e6)


class CudaTimes:
    """The events of one process that its GPUs have not passed yet."""

    CLOSE_SECONDS = 1.0

    def __init__(self, emit: Emit, *, cuda: Any = torch.cuda, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self._emit, self._cuda, self._clock = emit, cuda, clock
        self._streams: dict[tuple[torch.device, str], Any] = {}
        self._readings: dict[torch.device, _Reading] = {}
        self._due_ns: dict[torch.device, int] = {}
        self._pending: deque[tuple[int, Mark, Mark, bool]] = deque()
        self._looking = threading.Lock()
        # With one hardware queue for all streams, a stream of ours that waits would hold up the program's kernels.
        self._off = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"

    def mark(self, device: torch.device | None) -> Mark | None:
        """Mark where this GPU's current stream is now; None where no event can be recorded."""
        if device is None or device.type != "cuda" or self._off:
            return None
        try:
            since = None if self._cuda.is_current_stream_capturing() else self._read(device)
            if since is None:
                return None
            event = self._cuda.Event(enable_timing=True)
            event.record(self._cuda.current_stream(device))
            return Mark(event, device, since)
        except Exception as error:
            self._emit.failed("the time of a GPU", error)
            return None

    def collective(self, number: int, begun: Mark, work: Work | None, group: str) -> None:
        """Note the end of event `number`: its Work's future on the GPU, or else its stream now."""
        if work is None:
            self.between(number, begun, self.mark(begun.device), blocks=True)
            return
        future = work.get_future()
        if future.done():  # Else it completes on the host, and waiting for it would make the program wait.
            with self._cuda.stream(self._stream(begun.device, group)):
                future.wait()
                ended = self.mark(begun.device)
            self.between(number, begun, ended)

    def between(self, number: int, begun: Mark | None, ended: Mark | None, *, blocks: bool = False) -> None:
        """Note that event `number` ran between these two; it `blocks` the stream of its caller."""
        if begun is not None and ended is not None and number >= 0 and len(self._pending) < MOST_PENDING:
            self._pending.append((number, begun, ended, blocks))
        self._look(most=8)

    def _look(self, *, most: int) -> None:
        """Write down the oldest ones, as far as the GPU has passed them. One thread does it, others pass by."""
        if not self._pending or not self._looking.acquire(blocking=False):
            return
        try:
            while self._pending and most:
                number, begun, ended, blocks = self._pending[0]
                if not ended.event.query() or not begun.event.query():
                    return
                self._pending.popleft()
                most -= 1
                start, device = begun.device_ns(), str(begun.device)
                end = max(start, ended.device_ns())
                self._emit.fact(DeviceTime(event=number, device=device, start_ns=start, end_ns=end, blocks=blocks))
        finally:
            self._looking.release()

    def _stream(self, device: torch.device, group: str) -> Any:
        """Return our own stream of a group, whose operations are in order; that of "" never waits."""
        if (device, group) not in self._streams:
            self._streams[device, group] = self._cuda.Stream(device=device, priority=OWN_PRIORITY)
        return self._streams[device, group]

    def _read(self, device: torch.device, *, now: bool = False) -> _Reading | None:
        """Return the last reading of this GPU's clock; if that is old, the best of some new ones."""
        last = self._readings.get(device)
        if self._clock() < self._due_ns.get(device, 0) and not now:
            return last
        self._due_ns[device] = self._clock() + READ_AGAIN_NS
        looks = [self._look_at_clock(self._stream(device, "")) for _ in range(ROUNDS)]
        event, before, after = min(looks, key=lambda look: look[2] - look[1])
        if after - before > PATIENCE_NS:
            return last
        since = 0 if last is None else last.device_ns + int(last.event.elapsed_time(event) * 1e6)
        new = self._readings[device] = _Reading(event, since, (before + after) // 2)
        error = (after - before + 1) // 2 + RESOLUTION_NS
        self._emit.fact(DeviceReading(device=str(device), device_ns=since, at_ns=new.at_ns, error_ns=error))
        return new

    def _look_at_clock(self, stream: Any) -> tuple[Any, int, int]:
        """Return an event that was passed between two moments of the host, if it was passed."""
        event = self._cuda.Event(enable_timing=True)
        before = after = self._clock()
        event.record(stream)
        while not event.query() and after - before <= PATIENCE_NS:
            after = self._clock()
        return event, before, self._clock()

    def close(self) -> None:
        """Write what the GPU has passed or soon passes, and read its clock once more."""
        try:
            deadline = time.monotonic() + self.CLOSE_SECONDS
            self._look(most=MOST_PENDING)
            while self._pending and time.monotonic() < deadline:
                time.sleep(0.0005)
                self._look(most=MOST_PENDING)
            for device in list(self._readings):
                self._read(device, now=True)
        except Exception as error:  # CUDA may be broken by now, which is not ours to tell.
            self._emit.failed("the times of the GPU", error)
        self.forget()

    def forget(self) -> None:
        """Forget all in a forked child, where nothing of CUDA can be used."""
        self._pending.clear()
        self._readings.clear()
        self._due_ns.clear()
        self._streams.clear()
