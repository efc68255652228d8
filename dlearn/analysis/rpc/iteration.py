"""One training iteration over RPC, message by message, a column for each trainer, and what the kernel counted.

It is the n-th distributed autograd context of all workers that have any."""

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain, pairwise

import msgspec
import numpy as np

from dlearn.errors import TraceError
from dlearn.events.event import RPC, RpcWindow
from dlearn.join.columns import grouped
from dlearn.join.ends import bytes_of
from dlearn.join.joining import operations
from dlearn.join.ledger import WireBytes
from dlearn.join.operation_messages import messages_of
from dlearn.join.rpc_messages import UNKNOWN, phase_of, wire_bytes
from dlearn.join.selection import PHASES
from dlearn.join.tables.message_table import Message
from dlearn.join.wire import meters
from dlearn.shown import Paragraph, RankNames, Result, Table, count_text, listed
from dlearn.trace import Trace

_PHASES = PHASES[1:5]  # From forward to cleanup.
PhaseMessages = list[tuple[str, Message]]  # Messages, each with its phase.


class IterationStep(msgspec.Struct, frozen=True, kw_only=True):
    """A message of an iteration, in words, and that of each trainer; from a driver, or to it."""

    phase: str
    op: str
    what: str
    control: bool
    from_driver: bool
    messages: tuple[Message | None, ...]

    @property
    def first(self) -> Message:
        return next(message for message in self.messages if message is not None)


class PhaseBytes(WireBytes, frozen=True, kw_only=True):
    """Bytes between the driver and another worker in one phase."""

    phase: str
    message_count: int
    not_predicted: int = 0  # Messages whose size is not known: with one, there is no residue.

    @property
    def residue_bytes(self) -> int | None:
        return None if self.not_predicted else super().residue_bytes


class Iteration(Result, frozen=True, kw_only=True):
    """Every message of one iteration, by phase. `drivers` are the ranks whose contexts it consists of."""

    number: int
    drivers: tuple[int, ...]
    steps: tuple[IterationStep, ...]
    phases: tuple[PhaseBytes, ...]
    labels: RankNames

    @property
    def messages(self) -> tuple[Message, ...]:
        """Return all messages, in the order of sending."""
        found = filter(None, chain.from_iterable(step.messages for step in self.steps))
        return tuple(sorted(found, key=lambda message: message.sent_ns or 0))

    @property
    def story(self) -> tuple[IterationStep, ...]:
        """Return the messages that hold what the program asked for."""
        return tuple(step for step in self.steps if not step.control)

    def sentences(self) -> list[str]:
        """Describe the story, then what the runtime adds, then messages of unknown kind."""
        unknown = sum(step.op == UNKNOWN for step in self.steps)
        at_least = "At least " if unknown else ""
        asked = f"{at_least}{len(self.story)} of {len(self.steps)} carry what was asked for"
        texts = [f"Iteration {self.number}: {self._count()}. {asked}:"]
        texts += [f"{number}. {self._sentence(step)}" for number, step in enumerate(self.story, 1)]
        rest = Counter((*self._ends(step), step.op, step.what) for step in self.steps if step.control)
        added, links, count = [], [], 0
        for (src, dst, op, what), times in rest.items():
            if op == UNKNOWN:
                links.append(f"{times} x {src} -> {dst}")
            else:
                added.append(f"{times} x {op} ({src} -> {dst}): {what}")
                count += times
        texts += [f"The other {count} are what the runtime adds:", *added]
        if unknown:
            texts.append(f"Of {unknown} the kind is not known: {', '.join(links)}")
        return texts

    def _count(self) -> str:
        """Return "28 messages, 14 for each of 2"."""
        columns = zip(*(step.messages for step in self.steps), strict=True)
        counts = [len(column) - column.count(None) for column in columns]
        text = count_text(sum(counts), "message")
        if len(counts) < 2:  # Of an iteration without messages there are none.
            return text
        if len({*counts}) == 1:
            return f"{text}, {counts[0]} for each of {len(counts)}"
        pairs = zip(counts, self.drivers, strict=True)
        return f"{text}, {listed([f'{count} for {self.labels[rank]}' for count, rank in pairs])}"

    def _ends(self, step: IterationStep) -> tuple[str, str]:
        """Return sender and receiver: "each trainer", or the names of those that do."""
        names = [self.labels[rank] for rank, m in zip(self.drivers, step.messages, strict=True) if m is not None]
        drivers = "each trainer" if len(names) == len(self.drivers) > 1 else listed(names)
        return (drivers, self._others) if step.from_driver else (self._others, drivers)

    @property
    def _others(self) -> str:
        others = sorted({rank for m in self.messages for rank in (m.src, m.dst)} - set(self.drivers))
        return ", ".join(self.labels[rank] for rank in others) or "another worker"

    def _sentence(self, step: IterationStep) -> str:
        src, dst = self._ends(step)
        tensors = bytes_of(step.first.tensors)
        known = step.first.payload_bytes is not None or step.first.known_by == "python"
        none = "no tensor" if known else "data of unknown size"
        size = f"{tensors:,} B of tensors" if tensors else none
        return f"{step.phase}: {src} sends {dst} {size}: {step.what}"

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each message, in the order of `steps`, once for each trainer."""
        for number, step in enumerate(self.steps, 1):
            for message in filter(None, step.messages):
                row: dict[str, object] = {"number": number, "phase": step.phase, "op": step.op}
                row |= {"src": self.labels[message.src], "dst": self.labels[message.dst]}
                row |= {"tensor_bytes": bytes_of(message.tensors), "wire_bytes": wire_bytes(message)}
                yield row | {"sent_ns": message.sent_ns, "control": step.control, "what": step.what}

    def rows(self) -> list[list[str]]:
        """Return a head and a message a row; bytes on the wire, a column for each trainer."""
        digits = len(str(len(self.steps)))
        wires = [f"wire, {self.labels[rank]}" for rank in self.drivers]
        table = [[f"{'#':>{digits}}", "phase", "message", "from", "payload", "tensors", *wires]]
        for number, step in enumerate(self.steps, 1):
            tensors, packed = bytes_of(step.first.tensors), step.first.packed_bytes
            src = "trainer" if step.from_driver else self._others
            payload = "?" if packed is None else f"{packed:,}"
            row = [f"{number:>{digits}}", step.phase, step.op, src, payload]
            row.append(f"{tensors:,}" if tensors else "")
            for message in step.messages:
                size = wire_bytes(message) if message is not None else None
                row.append("" if message is None else "?" if size is None else f"{size:,}")
            table.append(row)
        return table

    def phase_rows(self) -> list[list[str]]:
        """Return bytes by phase and direction: predicted, the recorder's own, measured, residue."""
        table = [["phase", "from", "to", "messages", "predicted", "observer", "measured", "residue"]]
        for each in self.phases:
            measured = "not measured" if each.measured_bytes is None else f"{each.measured_bytes:,}"
            residue = "" if each.residue_bytes is None else f"{each.residue_bytes:,}"
            known = [f"{each.message_count}", f"{each.predicted_bytes:,}", f"{each.observer_bytes:,}"]
            table.append([each.phase, self.labels[each.src], self.labels[each.dst], *known, measured, residue])
        return table

    def paragraphs(self) -> tuple[Paragraph, ...]:
        return *self.sentences(), "", Table(self.rows(), names=4), "", Table(self.phase_rows(), names=3)


def iterations(trace: Trace) -> int:
    """Count the iterations: as many as each worker that drives any has contexts."""
    return min((len(found) for found in _contexts(trace).values()), default=0)


def iteration(trace: Trace, number: int | None = None) -> Iteration:
    """Return every message of iteration `number`, counted from 0; of the last one if none is named.

    Raises TraceError if the trace has no distributed autograd context, or not so many.
    """
    contexts = _contexts(trace)
    count = iterations(trace)
    if not count:
        raise TraceError("no distributed autograd context is in this trace: there is no iteration over RPC to tell of.")
    number = count - 1 if number is None else number
    if not 0 <= number < count:
        raise TraceError(f"the trace has {count} iterations, 0 to {count - 1}; there is no iteration {number}.")
    drivers = tuple(sorted(contexts))
    by_rank = {rank: _messages(trace, contexts[rank][number]) for rank in drivers}
    phases: list[PhaseBytes] = []
    for rank, sent in by_rank.items():
        phases += _phases(trace, contexts[rank][number], sent)
    steps, labels = tuple(_steps(by_rank)), trace.labels
    return Iteration(number=number, drivers=drivers, steps=steps, phases=tuple(phases), labels=labels)


def _contexts(trace: Trace) -> dict[int, list[RpcWindow]]:
    contexts = (window for window in trace.of(RpcWindow) if window.op == "context")
    return grouped(contexts, lambda window: window.rank)


def _messages(trace: Trace, context: RpcWindow) -> PhaseMessages:
    """Return each message with its phase, by phase and time; a reply stands with its request."""
    found: list[tuple[int, int, str, Message]] = []
    asked = operations(trace.whole)
    for operation in asked.at(np.flatnonzero(asked.table.is_call[asked.rows])):
        exchange = operation.exchange
        if exchange is not None and exchange.context == context.context:
            phase = phase_of(exchange)
            order = _PHASES.index(phase) if phase in _PHASES else len(_PHASES)
            found += [(order, exchange.sent_ns or 0, phase, message) for message in messages_of(operation)]
    found.sort(key=lambda each: (each[0], each[1], each[3].step))
    return [(phase, message) for *_, phase, message in found]


def _steps(by_rank: dict[int, PhaseMessages]) -> Iterator[IterationStep]:
    """Put side by side the n-th message of each kind, in a phase, in one direction."""
    columns: dict[tuple[str, bool, str, str, int], dict[int, Message]] = defaultdict(dict)
    for rank, messages in by_rank.items():
        seen: Counter[tuple[str, bool, str, str]] = Counter()
        for phase, message in messages:
            kind = (phase, message.src == rank, message.op, message.what)
            columns[*kind, seen[kind]][rank] = message
            seen[kind] += 1
    for (phase, from_driver, op, what, _), same in columns.items():
        yield IterationStep(
            phase=phase, op=op, what=what, control=next(iter(same.values())).control,
            from_driver=from_driver, messages=tuple(map(same.get, by_rank)),
        )  # fmt: skip


def _phases(trace: Trace, context: RpcWindow, messages: PhaseMessages) -> Iterator[PhaseBytes]:
    """Sum up what the driver sent and received in each phase; `measure="phase"` measures it there."""
    own = [each for each in messages if context.rank in (each[1].src, each[1].dst)]
    measured = _measured(trace, context)
    ways = grouped(own, lambda each: (each[0], each[1].src, each[1].dst))
    for (phase, src, dst), of_way in ways.items():
        sent = [message for _, message in of_way]
        sizes = [wire_bytes(message) for message in sent]
        yield PhaseBytes(
            phase=phase, src=src, dst=dst, message_count=len(sent), not_predicted=sizes.count(None),
            predicted_bytes=sum(size or 0 for size in sizes),
            observer_bytes=sum(message.observer_bytes for message in sent),
            measured_bytes=measured.get((phase, src, dst)),
        )  # fmt: skip


def _measured(trace: Trace, context: RpcWindow) -> dict[tuple[str, int, int], int]:
    """Return what was counted between the samples before the context, around its backward, and its end."""
    rank, meter = context.rank, meters(trace.whole).get(context.rank)
    windows: dict[str, RpcWindow] = {}
    for window in trace.whole.of(RpcWindow):
        if window.rank == rank and window.context == context.context:
            windows.setdefault(window.op, window)
    backward, release = windows.get("backward"), windows.get("release")
    if meter is None or backward is None or release is None or None in (backward.end_ns, release.end_ns):
        return {}
    if not meter.received or all(still is None for still in meter.still):
        return {}
    times = meter.times_ns
    before = [bisect_right(times, event.start_ns) - 1 for event in (context, backward, release)]
    after = [bisect_left(times, event.end_ns or 0) for event in (backward, release)]
    borders = (before[0], before[1], after[0], before[2], after[1])
    found: dict[tuple[str, int, int], int] = {}
    for phase, (first, last) in zip(_PHASES, pairwise(borders), strict=True):
        if not max(0, meter.known_from) <= first < len(times) or not 0 <= last < len(times):
            continue
        for (group, other), size in meter.between(first, last).items():
            if group == RPC:
                found[phase, rank, other] = size
        for (group, other), size in meter.received[last].items():
            if group == RPC:
                found[phase, other, rank] = size - meter.received[first][group, other]
    return found
