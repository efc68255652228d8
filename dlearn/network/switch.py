"""The switch: a process that carries packets between ranks with their path's rate, latency, queue.

It needs the standard library alone: its first line, behind the ranks' TUNs, names ports and routes;
each later line is a command, and has an answer. A packet enters a port, waits until those before it
have left (or is dropped from a full queue), leaves at the port's rate, and is at the next port
after the latency. That begins to pass it on before its last byte has come, unless it is faster: so
a path of two equal ports takes as long as one link.
"""

import ctypes
import gc
import heapq
import json
import os
import random
import select
import signal
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from typing import Any

LARGEST_BYTES = 65_535
READ_AT_ONCE = 16
SLICE_SECONDS = BREATHLESS = 0.05
"""A slice of time; in one with less waiting than this share the switch carries what it can."""
RECENT = 2000
LEAST_SECONDS = 0.01  # A port that was full for less says nothing about its rate.
MOST_RANKS = 64
_TCP, _IPV4 = 6, 4
_PR_SET_TIMERSLACK = 29
_SHORTEST = 20  # Bytes of the head of IPv4, and of TCP's.
_HEAD = struct.Struct("!HHI")  # Of TCP: ports, sequence number.
PACE_SECONDS = 0.002  # Between looks at a rank that is slowed; the least time it is stopped for.

clock = time.monotonic


class Port:
    """One direction of one link, with what it has forwarded."""

    def __init__(self, *link: Any) -> None:
        self.free = self.last = self.left = self.until = 0.0
        self.packets = self.bytes = self.dropped = self.lost = 0
        self.pace = self.deepest = self.full_bytes = self.full_seconds = self.late = 0.0
        self.set(*link)

    def set(self, rate: float, latency: float, jitter: float, loss: float, queue: float | None) -> None:
        """Set `rate` in bytes a second (0: no limit), and `queue` in bytes (None: the sender waits)."""
        pace = 1 / rate if rate else 0.0
        if pace != self.pace:  # What was carried at another rate says nothing about this one.
            self.pace, self.full_bytes, self.full_seconds = pace, 0.0, 0.0
        self.latency, self.jitter, self.loss = latency, jitter, loss
        self.room = float("inf") if queue is None or not rate else queue * self.pace

    def counts(self) -> dict[str, float | None]:
        """Return what the port has forwarded. `rate`, in bit/s, is that of packets right behind another."""
        full = self.full_seconds > LEAST_SECONDS
        counts = {name: getattr(self, name) for name in ("packets", "bytes", "dropped", "lost")}
        return counts | {
            "rate": self.full_bytes * 8 / self.full_seconds if full else None,
            "late": self.late / max(1, self.packets),
            "deepest": round(self.deepest / self.pace) if self.pace else 0,
        }


class Route:
    """The path from one rank to another: TCP's payload once, what was sent again, and what was dropped."""

    def __init__(self, ports: list[Port]) -> None:
        self.ports, self.cut = ports, False
        self.packets = self.payload = self.again = self.dropped = 0
        self._next: dict[int, int] = {}

    def count(self, packet: bytes) -> bool:
        """Count a packet. Return whether it is a mere acknowledgement: these pass queued packets, as in Linux."""
        self.packets += 1
        head = (packet[0] & 15) * 4
        if packet[9] != _TCP or len(packet) < head + _SHORTEST:
            return False
        source, target, number = _HEAD.unpack_from(packet, head)
        flags = packet[head + 13]
        payload = max(0, len(packet) - head - (packet[head + 12] >> 4) * 4)
        end = number + payload + (flags & 1) + (flags >> 1 & 1)  # FIN and SYN have a number each.
        flow = source << 16 | target
        if end == number:
            return True
        if flags & 2:
            self._next[flow] = number
        new = (end - self._next.get(flow, number)) & 0xFFFFFFFF
        if new < 1 << 31:
            self._next[flow] = end & 0xFFFFFFFF
            self.payload += min(new, payload)
            self.again += max(0, payload - new)
        else:
            self.again += payload
        return False

    def counts(self) -> list[int]:
        """Return packets, bytes of payload, bytes that were sent again, and dropped packets."""
        return [self.packets, self.payload, self.again, self.dropped]


class Straggler:
    """A process that is stopped, again and again, so that what it computes takes `factor` times as long.

    It may be ended while it is stopped; and the system ends ranks with their fork server, which ends
    with the notebook. So none stays stopped for ever, whatever is killed meanwhile.
    """

    def __init__(self, pid: int, factor: float) -> None:
        self.factor, self.slept, self.stopped_at, self.until = factor, 0.0, 0.0, 0.0
        self._handle = os.pidfd_open(pid)  # Its number may mean another process one day; this does not.
        self._processor = ~pid << 3 | 2  # CLOCK_PROCESS_CPUTIME_ID of that process: the C macro MAKE_PROCESS_CPUCLOCK.
        self._began = self.computed = time.clock_gettime(self._processor)

    def pace(self) -> None:
        """Stop it when it owes a pause for what it has computed, and let it go on when that is over."""
        with suppress(OSError):  # It has ended.
            self.computed = time.clock_gettime(self._processor)
            now = clock()
            owed = (self.factor - 1) * (self.computed - self._began) - self.slept
            if not self.stopped_at and owed >= PACE_SECONDS:
                signal.pidfd_send_signal(self._handle, signal.SIGSTOP)
                self.stopped_at, self.until = now, now + owed
            elif self.stopped_at and now >= self.until:
                self.go_on()

    def go_on(self) -> None:
        if self.stopped_at:
            self.slept += clock() - self.stopped_at
            self.stopped_at = 0.0
            with suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGCONT)

    def end(self) -> None:
        self.go_on()
        os.close(self._handle)

    def counts(self) -> list[float | None]:
        """Return the factor asked and the one reached, and the seconds that it has computed."""
        computed = self.computed - self._began
        return [self.factor, 1 + self.slept / computed if computed else None, computed]


class Switch:
    """A switch that reads packets from the ranks' TUNs, and writes each to its rank's when it is due."""

    def __init__(self, control: socket.socket, plan: dict[str, Any], tuns: list[int]) -> None:
        self.control, self.tuns = control, tuns
        self.ports = [Port(*link) for link in plan["ports"]]
        self.routes: dict[tuple[int, int], Route] = {}
        for source, target, numbers in plan["routes"]:
            self.routes[source, target] = Route([self.ports[number] for number in numbers])
        self.due: list[tuple[float, int, int, bytes, Route, float, float, bool]] = []
        self.number, self.words = 0, b""
        self.late: deque[float] = deque(maxlen=RECENT)
        self.latest = self.waited = self.breathless = 0.0
        self.began, self.carried, self.breathless_bytes = clock(), 0, 0
        self._slice = self.began, 0.0, 0
        self.stragglers: dict[int, Straggler] = {}

    def serve(self) -> None:
        """Forward packets until the other end of the control connection is closed."""
        rank_of = {tun: rank for rank, tun in enumerate(self.tuns)}
        ends = [self.control.fileno(), *self.tuns]
        while True:
            self._pass_on()
            wait = SLICE_SECONDS
            for straggler in self.stragglers.values():
                straggler.pace()
                wait = PACE_SECONDS
            if self.due:
                wait = min(wait, max(0.0, self.due[0][0] - clock()))
            before = clock()
            ready, _, _ = select.select(ends, (), (), wait)
            now = clock()
            self.waited += now - before
            for end in ready:
                if end in rank_of:
                    self._read(end, rank_of[end])
                elif not self._obey():
                    return
            if now - self._slice[0] > SLICE_SECONDS:
                self._close_slice(now)

    def _read(self, tun: int, source: int) -> None:
        for _ in range(READ_AT_ONCE):
            try:
                packet = os.read(tun, LARGEST_BYTES)
            except BlockingIOError:
                return
            ipv4 = len(packet) >= _SHORTEST and packet[0] >> 4 == _IPV4
            route = self.routes.get((source, packet[19] - 1)) if ipv4 else None
            if route is None:
                continue  # To an address that no rank has, or the kernel's own IPv6.
            passes, now = route.count(packet), clock()
            if route.cut:
                route.dropped += 1
            else:
                self._enter(now, 0, packet, route, now, passes)

    def _pass_on(self) -> None:
        """Send what is due now to its next port, or to its rank."""
        now = clock()
        while self.due and self.due[0][0] <= now:
            at, _, hop, packet, route, last, left, follows = heapq.heappop(self.due)
            port, now = route.ports[hop - 1], clock()
            late = now - at
            port.late += late
            if follows:
                port.full_bytes += len(packet)
                if left:
                    port.full_seconds += left + late - port.left
            port.left = left + late if left else port.left
            if hop < len(route.ports):
                self._enter(at, hop, packet, route, last)
                continue
            self.late.append(late)
            self.latest = max(self.latest, late)
            self.carried += len(packet)
            if route.cut:
                route.dropped += 1
                continue
            with suppress(OSError):  # The rank has ended, and its device with it; or has no room: TCP sends again.
                os.write(self.tuns[packet[19] - 1], packet)

    def _enter(self, at: float, hop: int, packet: bytes, route: Route, last: float, passes: bool = False) -> None:
        """Queue a packet at a port, from `at` on; its last byte arrives at `last`. It may pass others."""
        port, size = route.ports[hop], len(packet)
        if port.loss and random.random() < port.loss:
            port.lost += 1
            route.dropped += 1
            return
        lasting = size * port.pace
        waits = port.free - at
        if waits > 0 and waits + lasting > port.room:
            port.dropped += 1
            route.dropped += 1
            return
        port.deepest = max(port.deepest, waits)
        start = at if waits < 0 or passes else port.free
        end = max(start + lasting, last)
        follows, port.until = at < port.until, max(end, port.until)
        port.free = max(port.free, at) + lasting
        port.packets += 1
        port.bytes += size
        there = end + port.latency
        if port.jitter:
            there = port.last = max(port.last, there + random.random() * port.jitter)  # None overtakes another.
        next_at = there
        if hop + 1 < len(route.ports):
            next_at = max(start + port.latency, there - size * route.ports[hop + 1].pace)
        self.number += 1
        heapq.heappush(self.due, (next_at, self.number, hop + 1, packet, route, there, 0.0 if passes else end, follows))

    def _close_slice(self, now: float) -> None:
        began, waited, carried = self._slice
        if self.waited - waited < BREATHLESS * (now - began):
            self.breathless += now - began
            self.breathless_bytes += self.carried - carried
        self._slice = now, self.waited, self.carried

    def _obey(self) -> bool:
        """Carry out the commands that have arrived. Return False if no more will."""
        with suppress(ConnectionError):  # The notebook has ended.
            self.words += (more := self.control.recv(LARGEST_BYTES))
            *lines, self.words = self.words.split(b"\n")
            for line in lines:
                answer = self._carry_out(**json.loads(line))
                self.control.sendall(json.dumps(answer).encode() + b"\n")
            return bool(more)
        return False

    def _carry_out(self, ports: list[Any], cut: list[Any], stragglers: list[tuple[int, float]]) -> dict[str, Any]:
        """Set how the network is to be; return what it has forwarded so far."""
        self._slow_down(dict(stragglers))
        for port, link in zip(self.ports, ports, strict=True):
            port.set(*link)
        for ends, route in self.routes.items():
            route.cut = list(ends) in cut
        late, seconds = sorted(self.late), clock() - self.began
        slowed = [[pid, *straggler.counts()] for pid, straggler in self.stragglers.items()]
        pairs = [[*ends, *route.counts()] for ends, route in self.routes.items()]
        return {
            "seconds": seconds,
            "processor": time.process_time() / seconds,
            "late": late[len(late) // 2] if late else 0.0,
            "latest": self.latest,
            "most": self.breathless_bytes * 8 / self.breathless if self.breathless else None,
            "ports": [port.counts() for port in self.ports],
            "stragglers": slowed,
            "pairs": pairs,
        }

    def _slow_down(self, factors: dict[int, float]) -> None:
        """Slow these processes down, each by its factor, and no other."""
        for pid, straggler in list(self.stragglers.items()):
            if factors.get(pid) != straggler.factor:
                self.stragglers.pop(pid).end()
        for pid in factors.keys() - self.stragglers:
            with suppress(OSError):  # It has ended.
                self.stragglers[pid] = Straggler(pid, factors[pid])


def main() -> None:
    gc.disable()  # There are no cycles here, and looking for them takes milliseconds.
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)  # Else each wait ends some 50 us late.
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # A packet that is due should not wait for a rank's computing.
    control = socket.socket(fileno=os.dup(0))
    _, tuns, _, _ = socket.recv_fds(control, 1, MOST_RANKS)
    with control.makefile("rb", 0) as lines:
        plan = json.loads(lines.readline())
    switch = Switch(control, plan, tuns)
    try:
        switch.serve()
    finally:
        for straggler in switch.stragglers.values():
            straggler.end()


if __name__ == "__main__":
    main()
