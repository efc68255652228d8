"""When a GPU did what the CPU had only launched, by CUDA events on its streams.

A call of NCCL returns, and its future completes, when the kernel is queued. So the end is an event on
the caller's stream if the operation ran there (`async_op=False`: no Work comes back). Else it is one
on a stream that waits for the Work's future; this holds up the stream, not the thread
(ATen/core/ivalue_inl.h, `synchronizeWithCurrentStreams`). It is our own: one of torch's pool may be
the program's. Nothing waits for the GPU: what it has not passed when the recording ends stays unknown.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Work

from dlearn.hooks import Emit
from dlearn.trace.job_facts import DeviceReading, DeviceTime

READ_AGAIN_NS = 5_000_000_000  # CUDA gives times as a float of ms: over 5 s exact to half a µs.
PATIENCE_NS = 1_000_000  # An empty stream passes an event at once; no other is asked for longer.
ROUNDS, RESOLUTION_NS, MOST_PENDING, OWN_PRIORITY = 3, 1_000, 10_000, -2


class _Reading(NamedTuple):
    """An event at a moment that the host knows, and its time since the first of its device."""

    event: Any
    device_ns: int

    def time_of(self, event: Any) -> int:
        return self.device_ns + int(self.event.elapsed_time(event) * 1e6)


class Mark(NamedTuple):
    """An event on its way, and the reading from which its time is counted."""

    event: Any
    device: torch.device
    since: _Reading


class CudaTimes:
    """The events of one process that its GPUs have not passed yet."""

    CLOSE_SECONDS = 1.0

    def __init__(self, emit: Emit, *, cuda: Any = torch.cuda, clock: Any = time.monotonic_ns) -> None:
        self._emit, self._cuda, self._clock = emit, cuda, clock
        self._looking = threading.Lock()
        # With one hardware queue for all streams, ours would hold up the program's kernels.
        self._off = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        self.forget()

    def forget(self) -> None:
        """Drop all events: in a forked child nothing of CUDA can be used."""
        self._streams: dict[tuple[torch.device, str], Any] = {}
        self._readings: dict[torch.device, _Reading] = {}
        self._due_ns: dict[torch.device, int] = {}
        self._pending: deque[tuple[int, Mark, Mark, bool]] = deque()

    def mark(self, device: torch.device | None) -> Mark | None:
        """Mark where this GPU's current stream is now; None where that cannot be known."""
        if device is None or device.type != "cuda" or self._off:
            return None
        try:
            since = None if self._cuda.is_current_stream_capturing() else self._read(device)
            if since is not None:
                event = self._cuda.Event(enable_timing=True)
                event.record(self._cuda.current_stream(device))
                return Mark(event, device, since)
        except Exception as error:
            self._emit.failed("the time of a GPU", error)
        return None

    def collective(self, number: int, begun: Mark, work: Work | None, group: str) -> None:
        """Note when the Work of event `number` is over on the GPU; without one, its stream here."""
        if work is None:
            return self.between(number, begun, self.mark(begun.device), blocks=True)
        future = work.get_future()
        if future.done():  # Else it ends on the host, and waiting for it would hold up the program.
            with self._cuda.stream(self._stream(begun.device, group)):
                future.wait()
                ended = self.mark(begun.device)
            self.between(number, begun, ended)

    def between(self, number: int, begun: Mark, ended: Mark | None, *, blocks: bool = False) -> None:
        """Note that what event `number` launched lies between these; it `blocks` its stream."""
        if ended and number >= 0 and len(self._pending) < MOST_PENDING:
            self._pending.append((number, begun, ended, blocks))
        self._look(most=8)

    def _look(self, *, most: int) -> None:
        """Write down the oldest that the GPU has passed. One thread does it, others go on."""
        if not self._looking.acquire(blocking=False):
            return
        try:
            while self._pending and most:
                number, begun, ended, blocks = self._pending[0]
                if not ended.event.query() or not begun.event.query():
                    return
                self._pending.popleft()
                most -= 1
                start, device = begun.since.time_of(begun.event), str(begun.device)
                at = {"start_ns": start, "end_ns": max(start, ended.since.time_of(ended.event))}
                self._emit.fact(DeviceTime(event=number, device=device, blocks=blocks, **at))
        finally:
            self._looking.release()

    def _stream(self, device: torch.device, group: str) -> Any:
        """Return our own stream for a group; that of "" never waits for anything."""
        if (device, group) not in self._streams:
            self._streams[device, group] = self._cuda.Stream(device=device, priority=OWN_PRIORITY)
        return self._streams[device, group]

    def _read(self, device: torch.device, *, now: bool = False) -> _Reading | None:
        """Return the last reading of this GPU's clock; if it is old, the best of some new ones."""
        last = self._readings.get(device)
        if self._clock() < self._due_ns.get(device, 0) and not now:
            return last
        self._due_ns[device] = self._clock() + READ_AGAIN_NS
        looks = [self._look_at_clock(self._stream(device, "")) for _ in range(ROUNDS)]
        event, before, after = min(looks, key=lambda look: look[2] - look[1])
        if after - before > PATIENCE_NS:
            return last
        new = self._readings[device] = _Reading(event, last.time_of(event) if last else 0)
        error_ns = (after - before + 1) // 2 + RESOLUTION_NS
        at = {"device_ns": new.device_ns, "at_ns": (before + after) // 2, "error_ns": error_ns}
        self._emit.fact(DeviceReading(device=str(device), **at))
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
        """Write down what the GPU has passed or soon does, and read its clock once more."""
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
