"""One file per process, a line of JSON per event and per end (writer.py appends them): read back, and checked."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np

from dlearn.errors import TraceError
from dlearn.events import event as seen
from dlearn.events import job_facts
from dlearn.events.clocks import Clock, device_spans
from dlearn.events.event import FORMATS, NOT_OBSERVED, Collective, End, Event, Footer, Header, PointToPoint
from dlearn.events.event_table import NONE, UNSEEN, EventTable, find, of_events
from dlearn.events.job_facts import AnyLine, DeviceTime
from dlearn.events.mpi_facts import ANY_TAG, Probe
from dlearn.events.printable import is_plain, printable, printable_all
from dlearn.events.process import Process
from dlearn.events.rendezvous import Rendezvous
from dlearn.events.short_events import Damage, Rows, fill_in_ends, short_table, split
from dlearn.events.short_lines import ENDED_BY
from dlearn.events.source import ServiceCall, SourceFact, classes
from dlearn.events.wiring import Wired
from dlearn.events.writer import MAX_LINE_BYTES

UNLISTED_MEMBERS = 256
"""Only a process group made by hand, outside `init_process_group`, is written without `ranks`: it is small."""

MOST_DAMAGED = 10_000  # After so many damaged lines the rest of a file is not read.
_BLOCK_BYTES = 1 << 20  # Lines are read about this much at a time.

_decoder = msgspec.json.Decoder(AnyLine)
_OWN_KINDS = {str(kind.__struct_config__.tag) for kind in get_args(AnyLine)}
_set = msgspec.structs.force_setattr
"""Events are frozen, but while they are being read, they are still being made."""
_DAMAGE = (ValueError, RecursionError)
"""What reading a damaged line may raise: msgspec's and Unicode's errors are ValueErrors."""


@dataclass
class ProcessFile(Process):
    """What one file holds. `problems` names every line that could not be used, and what the footer says is not here."""

    events: dict[int, Event] = field(default_factory=dict)
    short: EventTable = field(default_factory=lambda: of_events(()))
    kinds: dict[str, type[Event] | str] = field(default_factory=dict)
    """Of Sources that are not dlearn's own: the class, or the name of a Source that is not installed here."""
    unknown: dict[int, str] = field(default_factory=dict)
    """The numbers of the events that were left out for that, and their kinds."""
    joined: set[str] = field(default_factory=set)
    clocks: list[job_facts.ClockReading] = field(default_factory=list)
    peers: dict[int, job_facts.Peer] = field(default_factory=dict)
    device_clocks: list[job_facts.DeviceReading] = field(default_factory=list)
    device_times: list[DeviceTime] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def clock_name(self) -> str:
        return self.header.clock or f"host {self.header.host}"

    @property
    def event_count(self) -> int:
        return len(self.events) + len(self.short)

    def move(self, clock: Clock) -> None:
        """Move all times to the reference clock, in place."""
        self.clock = clock
        self.device_spans = device_spans(self.device_times, self.device_clocks, clock)
        if not clock.offset_ns and not clock.drift:
            return
        own = [column for name, column in self.short.own.items() if name.endswith("_ns")]
        for times in (self.short.start_ns, self.short.end_ns, *own):
            known = times != NONE
            times[known] = [clock.to_reference(at_ns) for at_ns in times[known].tolist()]
        for event in self.events.values():
            for name in ("start_ns", "end_ns", "handed_ns", "arrived_ns", "returned_ns"):
                at_ns = getattr(event, name, None)
                if at_ns is not None:
                    _set(event, name, clock.to_reference(at_ns))

    def tables(self) -> tuple[EventTable, EventTable]:
        """Return all events, as those of its rank: those of long lines, and those of short ones."""
        for event in chain(self.events.values(), self.short.firsts):
            _set(event, "rank", self.rank)
        self.short.rank[:] = self.rank
        return of_events(self.events.values()), self.short

    def process(self) -> Process:
        facts = {each.name: getattr(self, each.name) for each in fields(Process)}
        return Process(**facts)


def read(path: Path) -> ProcessFile:
    """Read one process's file. A damaged line is left out and named, a bad header a TraceError."""
    blocks = _blocks(path)
    file = ProcessFile(path, _read_header(path, next(blocks, b"")))
    damage, lines = _read_lines(file, blocks)
    damaged = [f"line {number}{why}" for number, why in sorted(damage.items())]
    file.problems += _lost(file, damaged, lines - (file.exit_status is not None) - (file.network is not None))
    if file.problems:
        file.complete = False
        # Where lines are lost, an event without an end is no hang.
        for event in file.events.values():
            if event.pending:
                _set(event, "ended_by", NOT_OBSERVED)
        file.short.ended_by[file.short.pending] = UNSEEN
    if file.footer and file.footer.works_dropped:
        unseen = f"{file.footer.works_dropped:,}"
        file.problems.append(printable(f"{path.name}: sends and receives whose end was not observed: {unseen}"))
    return file


def _read_lines(file: ProcessFile, blocks: Iterable[bytes]) -> tuple[Damage, int]:
    """Take in all lines after the first. Return the damaged ones, and the number of the last."""
    begins: dict[int, list[Rows]] = defaultdict(list)
    ends = [np.empty((0, 4), np.int64)]
    later: list[tuple[int, End | DeviceTime]] = []
    damage: Damage = {}
    read = 1
    for data in blocks:
        block = split(data, first_line=read + 1)
        for found in block.begins:
            begins[found.shape[1]].append(found)
        ends.append(block.ends)
        read += block.lines
        later += _take_lines(file, block.others, damage)
        if len(damage) >= MOST_DAMAGED:
            break
    short = [np.concatenate(each) for each in begins.values()]
    file.short, ends_of_runs, damaged = short_table(short, file.events, file.unknown)
    # Now all events are here: their ends follow.
    others, damaged_ends = fill_in_ends(file.short, np.concatenate([*ends, ends_of_runs]))
    damage |= damaged | damaged_ends
    later += [(line, End(event=event, at_ns=at_ns, by=ENDED_BY[by])) for line, event, at_ns, by in others.tolist()]
    # An end with more than a time and a word does not fit into a row: its event becomes an object.
    ended = {line.event for _, line in later if isinstance(line, End)}
    to_objects = find(file.short.number, np.array(sorted(ended), np.int64))[1]
    for event in file.short.made(np.flatnonzero(to_objects)):
        file.events[event.number] = event
    file.short = file.short.part(~to_objects)
    for number, late in later:
        try:
            _take_later(file, late)
        except ValueError as error:
            damage[number] = _why(error)
    return damage, read


def _take_lines(file: ProcessFile, lines: dict[int, bytes], damage: Damage) -> Iterator[tuple[int, End | DeviceTime]]:
    """Take each line in, or note its damage. Yield what says more of an event: it may come later."""
    for number, line in lines.items():
        if len(damage) >= MOST_DAMAGED:
            return
        if len(line) > MAX_LINE_BYTES:
            damage[number] = f" is longer than {MAX_LINE_BYTES:,} bytes"
            continue
        if not line.endswith(b"\n"):
            damage[number] = ", the last, is cut off"
            continue
        try:
            decoded = _decode_line(line, file)
            if isinstance(decoded, End | DeviceTime):
                yield number, decoded
                continue
            _take(file, decoded)
            if isinstance(decoded, seen.RpcReply) and decoded.run is not None:
                at_ns = decoded.returned_ns
                if at_ns is not None:
                    yield number, End(event=decoded.run, by="return", at_ns=at_ns)
        except _DAMAGE as error:
            damage[number] = _why(error)


def _lost(file: ProcessFile, damaged: list[str], lines: int) -> list[str]:
    """Say what is not in the file. `lines` is the number of its last line."""
    name = file.path.name
    problems = []
    if damaged:
        count = f"{len(damaged):,} damaged lines were" if len(damaged) > 1 else "one damaged line was"
        problems.append(f"{name}: {count} left out ({'; '.join(damaged[:3])})")
    if len(damaged) >= MOST_DAMAGED:
        problems.append(f"{name}: what follows them was not read")
    footer = file.footer
    if footer and footer.lines >= lines:
        problems.append(f"{name}: {footer.lines + 1 - lines:,} of {footer.lines + 1:,} lines are lost")
    if footer and footer.not_written:
        why = _REFUSED.get(footer.refusal) or f"the system refused them: {footer.refusal}"
        problems.append(f"{name}: {footer.not_written:,} lines were not written ({why})")
    if footer and footer.hook_errors:
        problems.append(f"{name}: {footer.hook_errors:,} calls could not be recorded (see stderr of the run)")
    return [printable(problem) for problem in problems]


_REFUSED = {"": "size limit", "ENOSPC": "the disk was full", "EDQUOT": "the disk quota was used up"}


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield the first line, then many whole lines at a time. Only a damaged one may lack its end."""
    try:
        if not path.is_file():  # A folder; or a pipe, which would be waited for.
            raise TraceError(printable(f"{path} is no file. Move it out of the trace's folder."))
        with path.open("rb") as stream:
            block = stream.readline(MAX_LINE_BYTES + 1)
            while block:
                yield block
                while block and not block.endswith(b"\n"):
                    block = stream.readline(MAX_LINE_BYTES)
                block = stream.read(_BLOCK_BYTES)
                block += stream.readline(MAX_LINE_BYTES + 1)
    except OSError as error:
        raise TraceError(printable(f"{path}: cannot be read: {error.strerror}")) from None


def _decode_line(line: bytes, file: ProcessFile) -> AnyLine | Event | None:
    """None for an event of a Source that is not installed here."""
    if line.startswith(b"["):
        raise ValueError("a line of numbers has six of them, or three")
    if not file.kinds and is_plain(line):
        plain: AnyLine = _decoder.decode(line)
        return plain
    fields = printable_all(msgspec.json.decode(line))
    kind = str(fields.get("kind")) if isinstance(fields, dict) else ""
    columns: Any = file.kinds.get(kind, AnyLine)
    if not isinstance(columns, str):
        found: AnyLine | Event = msgspec.convert(fields, columns)
        return found
    event = msgspec.convert(fields | {"kind": "Event"}, Event)
    file.unknown[event.number] = kind
    return None


def left_out(files: Iterable[ProcessFile]) -> list[str]:
    """Say for each kind that is not known here how many events are of it."""
    counts = Counter((kind, file.kinds[kind]) for file in files for kind in file.unknown.values())
    return [
        f"{count:,} events of the kind {kind!r} are left out: their source {source!r} is not installed here"
        for (kind, source), count in counts.items()
    ]


def _why(error: Exception) -> str:
    return f": {str(error)[:120]}"


class _Version(msgspec.Struct, tag_field="kind", tag="header"):
    """What the header of any version has."""

    format: int
    dlearn: str = ""


def _read_header(path: Path, line: bytes | None) -> Header:
    if not line:
        raise TraceError(printable(f"{path}, line 1: the file is empty or no trace; expected a header line"))
    try:
        fields = printable_all(msgspec.json.decode(line))
        version = msgspec.convert(fields, _Version)
        if version.format in FORMATS:
            return msgspec.convert(fields, Header)
    except _DAMAGE as error:
        raise TraceError(printable(f"{path}, line 1: no trace header: {str(error)[:120]}")) from None
    here = f"{printable(str(path))}, line 1: trace format {version.format}"
    wrote = version.dlearn[:20] or "unknown"
    reads = f"this dlearn reads formats {FORMATS[0]} and {FORMATS[-1]}"
    raise TraceError(f"{here}; {reads}. The file was written by dlearn {wrote}: use that version.")


def _take(file: ProcessFile, line: AnyLine | Event | None) -> None:
    """Take one line in. Raise ValueError if it contradicts the lines before it."""
    match line:  # The most frequent first: there may be millions.
        case Event():
            _begin(file, line)
        case Header():
            raise ValueError("a second header")
        case Footer():
            if file.footer is not None:
                raise ValueError("a second footer")
            file.footer = line
        case seen.GroupFact():
            _check_group(line)
            known = file.groups.get(line.name, line)  # A mesh may give it a name later.
            if msgspec.structs.replace(line, dimensions=known.dimensions) != known:
                raise ValueError(f"group {line.name[:40]!r} a second time, and different")
            file.groups[line.name] = line
        case seen.Socket():
            if file.sockets.setdefault(line.id, line) != line:
                raise ValueError(f"socket {line.id} a second time, and different")
        case SourceFact():
            if not _OWN_KINDS.isdisjoint(line.kinds):
                raise ValueError(f"source {line.name[:40]!r} has kinds that are dlearn's own")
            file.kinds |= classes(line)
        case seen.Worker():
            file.worker = line  # After shutdown and init_rpc again, the last one.
        case seen.NotMeasured():
            file.not_measured = line.reason
        case job_facts.Joined():
            file.joined.add(line.job)
        case job_facts.ClockReading():
            file.clocks.append(line)
        case job_facts.DeviceReading():
            file.device_clocks.append(line)
        case job_facts.Peer():
            file.peers[line.rank] = line
        case job_facts.Heartbeat():
            if file.heartbeat is None or not file.heartbeat.ended:
                file.heartbeat = line
        case job_facts.Exit():
            file.exit_status = line.status
        case job_facts.Stopped():
            file.stopped_ns = line.at_ns
        case job_facts.Switched():
            file.network = line
        case job_facts.Imported():
            file.imported, file.complete = line, line.complete
        case job_facts.DdpModel():
            file.models[line.model] = line
        case job_facts.OptimizerMade():
            file.optimizers[line.optimizer] = line
        case job_facts.Reached():
            file.reached[line.group] = line
        case Wired():
            file.wired[line.group] = line


def _take_later(file: ProcessFile, line: End | DeviceTime) -> None:
    """Take in what ends or times an event, once all events are here. Raise ValueError if it cannot be."""
    if isinstance(line, End):
        return _end(file, line)
    is_short = find(np.array([line.event]), file.short.number)[1].any()
    if line.start_ns > line.end_ns or not (line.event in file.events or is_short):
        raise ValueError(f"the time of event {line.event} on a GPU, which cannot be")
    file.device_times.append(line)


def _check_group(group: seen.GroupFact) -> None:
    if group.rank >= group.size or len(group.ranks) not in (0, group.size) or len(set(group.ranks)) < len(group.ranks):
        raise ValueError(f"group {group.name[:40]!r} contradicts itself")
    if not group.ranks and group.size > UNLISTED_MEMBERS:
        raise ValueError(f"group {group.name[:40]!r} has {group.size:,} members and does not say which")


def _begin(file: ProcessFile, event: Event) -> None:
    if event.number in file.events:
        raise ValueError(f"event {event.number} a second time")
    if event.end_ns is not None and event.end_ns < event.start_ns:
        raise ValueError(f"event {event.number} ends before it starts")
    file.events[event.number] = event
    if isinstance(event, Rendezvous):
        file.rendezvous.append(event)


def _end(file: ProcessFile, end: End) -> None:
    event = file.events.get(end.event)
    if end.event in file.unknown:
        return
    if event is None:
        raise ValueError(f"the end of event {end.event}, which is not in the file")
    if event.end_ns is not None or event.ended_by:
        raise ValueError(f"the end of event {end.event} a second time")
    if end.at_ns is not None and end.at_ns < event.start_ns:
        raise ValueError(f"event {end.event} ends before it starts")
    _set(event, "ended_by", end.by)
    if end.by != NOT_OBSERVED:
        _set(event, "end_ns", end.at_ns)
    _set(event, "error", end.error)
    _learn(event, end)


def _learn(event: Event, end: End) -> None:
    """Fill in what only the end says; peer and tag stay if the start has them."""
    if isinstance(event, PointToPoint | Probe):
        if end.peer is not None and event.peer is None:
            _set(event, "peer", end.peer)
        if end.tag is not None and event.tag == ANY_TAG:
            _set(event, "tag", end.tag)
    if end.result is not None and isinstance(event, seen.RpcCall | seen.RpcWindow):
        _set(event, "result", end.result)
    if end.inputs and isinstance(event, Collective):
        _set(event, "inputs", end.inputs)
    if end.outputs and isinstance(event, Collective | PointToPoint | ServiceCall):
        _set(event, "tensors" if isinstance(event, PointToPoint) else "outputs", end.outputs)
