"""Dumps of torch's Flight Recorder: the last calls of each rank before a job hung, and how far each group had come.

One file a rank, a pickle or JSON (torch/csrc/distributed/c10d/FlightRecorder.hpp); whose it is, only its name says.
A dump holds the last calls, after a timeout often only those that had not ended; so what is not in it may all the same
have been called. How far a rank had come in a group, `pg_status` says: but it counts sends and receives too, so it
speaks of groups without any. Times are of the CPU's calls, by the wall clock of each host.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from dlearn.errors import TraceError
from dlearn.trace.event import NOT_OBSERVED, Collective, Event, GroupFact, Header, Line, PointToPoint
from dlearn.trace.job_facts import Imported, Reached
from dlearn.trace.printable import printable, printable_all
from dlearn.trace.readers import plain_pickle
from dlearn.trace.readers.torch_names import IN_PLACE, OPS, tensors, title

SOURCE = "Flight Recorder dumps: times are those of the CPU's calls, and only each rank's last calls are there"
MOST_DIGITS = 6
"""Of a rank."""
_PEERS = re.compile(r"(?P<op>send|recv) \d+(?:->|<-)(?P<peer>\d{1,9})(?!\d)")
_RANK = re.compile(r"(\d+)\D*$")


class Frame(msgspec.Struct):
    """A line of the stack, innermost first."""

    filename: str = ""
    line: int = 0


class Entry(msgspec.Struct):
    """One call. `collective_seq_id` counts the collectives of its group, `record_id` all calls of the process."""

    record_id: int
    process_group: tuple[str, str]
    profiling_name: str
    time_created_ns: int
    pg_id: int = -1
    collective_seq_id: int = 0
    p2p_seq_id: int = 0
    input_sizes: list[list[int]] = []
    input_dtypes: list[str] = []
    output_sizes: list[list[int]] = []
    output_dtypes: list[str] = []
    state: str = ""
    time_discovered_completed_ns: int | None = None
    retired: bool = False
    is_p2p: bool = False
    frames: list[Frame] = []


class Status(msgspec.Struct):
    """The numbers of the last calls of a group that this rank has made, and that its watchdog has seen end."""

    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


class Config(msgspec.Struct):
    """A group that this rank knows; `ranks` is text, as "[0, 1]"."""

    name: str = ""
    desc: str = ""
    ranks: str = ""


class Dump(msgspec.Struct):
    """The file of one rank."""

    version: str
    entries: list[Entry] = []
    pg_config: dict[str, Config] = {}
    pg_status: dict[str, Status] = {}
    rank: int = -1
    path: str = ""

    @property
    def complete(self) -> bool:
        """Whether every call since the beginning is here: then one that is not was never made."""
        return bool(self.entries) and [entry.record_id for entry in self.entries] == list(range(len(self.entries)))


Key = tuple[str, tuple[int, ...]]
"""A group: its name, and the global ranks of its members. After a split one name may stand for several."""


class FlightRecorder:
    """The dumps of a job, file by file."""

    def __init__(self) -> None:
        self._dumps: dict[int, Dump] = {}

    def take(self, path: Path, data: bytes) -> bool:
        """Whether this is a dump; then it is kept. TraceError where it is damaged, or of another job."""
        dump = _dump(path, data)
        if dump is None:
            return False
        before = self._dumps.setdefault(dump.rank, dump)
        if [each.time_created_ns for each in before.entries] != [each.time_created_ns for each in dump.entries]:
            raise TraceError(f"{before.path} and {path.name} are both of rank {dump.rank}, and differ: give one job.")
        if any(entry.frames for entry in dump.entries):
            self._dumps[dump.rank] = dump  # The same as JSON knows no lines of code.
        return True

    def ranks(self) -> list[tuple[Header, list[Line]]]:
        """The lines of each rank."""
        job = _Dumps([dump for _, dump in sorted(self._dumps.items())])
        return [job.lines(dump) for dump in job.dumps]


def _dump(path: Path, data: bytes) -> Dump | None:
    """None where this is something else. TraceError where it is a dump, and damaged."""
    start = data.lstrip()[:1]
    if not data.startswith(b"\x80") and (start != b"{" or b'"traceEvents"' in data):
        return None
    try:
        value = plain_pickle.loads(data) if data.startswith(b"\x80") else msgspec.json.decode(data)
        if not isinstance(value, dict) or "version" not in value or not {"entries", "pg_config"} & value.keys():
            return None
        dump = msgspec.convert(printable_all(_lists(value)), Dump, strict=False)
    except (ValueError, RecursionError) as error:
        raise TraceError(printable(f"{path}: no dump that can be read: {str(error)[:200]}.")) from None
    found = _RANK.search(path.stem)
    if found is None or len(found[1]) > MOST_DIGITS:
        raise TraceError(printable(f"{path}: its name does not end in a rank, as a Flight Recorder dump's does."))
    dump.rank, dump.path = int(found[1]), printable(path.name)
    return dump


def _lists(value: Any) -> Any:
    """Tuples as lists: strings in both are looked at alike."""
    match value:
        case list() | tuple():
            return [_lists(each) for each in value]
        case dict():
            return {str(key): _lists(each) for key, each in value.items()}
        case _:
            return value


class _Dumps:
    """What the dumps of all ranks say together."""

    def __init__(self, dumps: list[Dump]) -> None:
        self.dumps = dumps
        self._came: dict[str, set[int]] = defaultdict(set)
        for dump in dumps:
            for entry in dump.entries:
                self._came[entry.process_group[0]].add(dump.rank)
        calls = [(self.key(dump, entry.process_group[0]), entry) for dump in dumps for entry in dump.entries]
        self._with_sends = {key for key, entry in calls if entry.is_p2p}
        # gloo counts sends without noting them.
        self._with_sends |= {key for key, entry in calls if entry.profiling_name.startswith("gloo:")}
        self._of_id: dict[str, set[Key]] = defaultdict(set)
        for dump in dumps:
            for entry in dump.entries:
                self._of_id[str(entry.pg_id)].add(self.key(dump, entry.process_group[0]))

    def key(self, dump: Dump, name: str) -> Key:
        """gloo's dumps do not say who is in a group: then those are whose calls in it are here."""
        config = dump.pg_config.get(name, Config())
        try:
            ranks = ast.literal_eval(config.ranks or "[]")
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            ranks = []
        known = isinstance(ranks, list) and all(isinstance(rank, int) and rank >= 0 for rank in ranks) and ranks
        return name, tuple(dict.fromkeys(ranks)) if known else tuple(sorted(self._came[name]))

    def lines(self, dump: Dump) -> tuple[Header, list[Line]]:
        described = {entry.process_group[0]: entry for entry in dump.entries}
        groups = {name: self.key(dump, name) for name in described}
        reached = list(self._reached(dump))
        groups |= {key[0]: key for key, _, _ in reached}
        titles = {name: title(name, self._description(name)) for name in groups}
        facts = [self._fact(dump, key, titles[name]) for name, key in groups.items() if dump.rank in key[1]]
        events = [event for entry in dump.entries if (event := _event(entry, titles)) is not None]
        start_ns = min((entry.time_created_ns for entry in dump.entries), default=0)
        start_ns = start_ns or min((e.time_created_ns for d in self.dumps for e in d.entries), default=0)
        header = Header(
            format=5, job=SOURCE, host="", pid=0, torch="", dlearn="", start_ns=start_ns, rank=dump.rank,
            world_size=max(max((*ranks, 0)) for _, ranks in (*groups.values(), ("", (dump.rank,)))) + 1,
        )  # fmt: skip
        limits = Imported(source=SOURCE, complete=dump.complete, unexplained=len(dump.entries) - len(events))
        came = [
            Reached(group=titles[key[0]], called=status.last_enqueued_collective,
                    ended=status.last_completed_collective, inferred=inferred)
            for key, status, inferred in reached if key not in self._with_sends
        ]  # fmt: skip
        return header, [limits, *facts, *came, *events]

    def _description(self, name: str) -> str:
        told = (config.desc for dump in self.dumps for key, config in dump.pg_config.items() if key == name)
        entries = (e.process_group[1] for dump in self.dumps for e in dump.entries if e.process_group[0] == name)
        return next(filter(None, (*entries, *told)), "")

    def _fact(self, dump: Dump, key: Key, title: str) -> GroupFact:
        name, ranks = key
        calls = (entry for each in self.dumps for entry in each.entries if entry.process_group[0] == name)
        backend = next((entry.profiling_name.partition(":")[0] for entry in calls), "nccl")
        default = self._description(name) == "default_pg"
        return GroupFact(
            name=title, backend=backend, rank=ranks.index(dump.rank), size=len(ranks), ranks=ranks, default=default
        )

    def _reached(self, dump: Dump) -> Iterable[tuple[Key, Status, bool]]:
        """How far this rank had come in which group, and whether that is inferred: a status has a number, and only
        calls say of which group. Of a number without any: the one group that others have under it, with this rank."""
        own = {str(entry.pg_id): entry.process_group[0] for entry in dump.entries}
        for number, status in dump.pg_status.items():
            if number in own:
                yield self.key(dump, own[number]), status, False
                continue
            here = [key for key in self._of_id[number] if dump.rank in key[1] and key[0] in dump.pg_config]
            if len(here) == 1:
                yield here[0], status, True


def _event(entry: Entry, titles: dict[str, str]) -> Event | None:
    """None of what does not say who sent to whom, as sends that were batched."""
    name = entry.profiling_name.partition(":")[2] or entry.profiling_name
    group = titles[entry.process_group[0]]
    ended_ns = entry.time_discovered_completed_ns or None
    over = entry.retired or entry.state == "completed"
    common: dict[str, Any] = {
        "number": entry.record_id,
        "start_ns": entry.time_created_ns,
        "end_ns": max(ended_ns, entry.time_created_ns) if ended_ns and over else None,
        "ended_by": ("watchdog" if ended_ns else NOT_OBSERVED) if over else "",
        "site": _site(entry.frames),
        "group": group,
    }
    device = "cpu" if entry.profiling_name.startswith("gloo:") else "cuda"
    inputs = tensors(entry.input_sizes, entry.input_dtypes, device)
    outputs = tensors(entry.output_sizes, entry.output_dtypes, device)
    if not entry.is_p2p:
        op = OPS.get(name, name)
        seq = max(entry.collective_seq_id, 0)
        outputs = () if op in IN_PLACE else outputs
        return Collective(op=op, seq=seq, inputs=inputs, outputs=outputs, **common)
    found = _PEERS.match(name)
    if found is None:
        return None
    is_send = found["op"] == "send"
    return PointToPoint(
        op="send" if is_send else "recv",
        peer=int(found["peer"]),
        tag=0,
        seq=max(entry.p2p_seq_id, 0),
        tensors=inputs if is_send else outputs,
        **common,
    )


def _site(frames: list[Frame]) -> str:
    """The innermost line that is neither torch's nor a recorder's."""
    for frame in frames:
        if frame.line and not any(part in frame.filename for part in ("/torch/", "/dlearn/hooks/")):
            return f"{frame.filename.rpartition('/')[2]}:{frame.line}"
    return ""
