"""Dumps of torch's Flight Recorder: the last calls of each rank, and how far it came in each group.

One file a rank, a pickle or JSON (torch/csrc/distributed/c10d/FlightRecorder.hpp); only its name
says whose it is. After a timeout it often has only the calls that had not ended, so a call that is
not in it may have been made. `pg_status` says how far a rank came in a group; it counts sends and
receives too, so it is used for groups without any. Times are the CPU's, by each host's wall clock.
"""

import io
import pickle
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dlearn.events.event import NOT_OBSERVED
from dlearn.events.job_facts import Reached, group_name
from dlearn.events.readers import rank_lines
from dlearn.events.readers.rank_lines import OPS, ForeignRank, Lines, Tensors, numbers

SOURCE = "Flight Recorder dumps: times are those of the CPU's calls, and only each rank's last calls are there"
_PEERS = re.compile(r"(?P<op>send|recv) \d+(?:->|<-)(?P<peer>\d{1,9})(?!\d)")
_RANK = re.compile(r"(?<!\d)(\d{1,6})\D*$")


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

    @property
    def group(self) -> str:
        return self.process_group[0]

    @property
    def backend(self) -> str:
        """Return "gloo" of "gloo:all_reduce"."""
        return self.profiling_name.partition(":")[0]


class Status(msgspec.Struct):
    """The numbers of the last calls of a group that this rank has made, and that its watchdog has seen end."""

    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


class Config(msgspec.Struct):
    """A group that this rank knows; `ranks` is text, as "[0, 1]"."""

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
    def times(self) -> list[int]:
        return [entry.time_created_ns for entry in self.entries]


Key = tuple[str, tuple[int, ...]]
"""A group: its name, and the global ranks of its members. After a split one name may stand for several."""


class FlightRecorder:
    """The dumps of a job, file by file."""

    def __init__(self) -> None:
        self._dumps: dict[int, Dump] = {}

    def take(self, path: Path, data: bytes) -> bool:
        dump = _dump(path, data)
        if dump is None:
            return False
        before = self._dumps.setdefault(dump.rank, dump)
        if before.times != dump.times:
            raise rank_lines.of_two_jobs(path, before.path, dump.rank)
        if any(entry.frames for entry in dump.entries):
            self._dumps[dump.rank] = dump  # The same as JSON knows no lines of code.
        return True

    def ranks(self) -> list[Lines]:
        job = _Dumps([dump for _, dump in sorted(self._dumps.items())])
        return [job.lines(dump) for dump in job.dumps]


def _dump(path: Path, data: bytes) -> Dump | None:
    """Return None where this is something else. TraceError where it is a dump, and damaged."""
    packed = data.startswith(b"\x80")
    is_json = data.lstrip().startswith(b"{") and b'"version"' in data
    if not packed and (not is_json or b'"traceEvents"' in data):
        return None
    with rank_lines.readable(path, "dump"):
        if packed:
            data = msgspec.json.encode(_plain_data(data))
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        if "version" not in fields or not {"entries", "pg_config"} & fields.keys():
            return None
        dump = msgspec.json.decode(data, type=Dump, strict=False)
    found = _RANK.search(path.stem)
    if found is None:
        why = "its name does not end in a rank, as a Flight Recorder dump's does"
        raise rank_lines.refused(f"{path}: {why}.")
    dump.rank, dump.path = int(found[1]), path.name
    return dump


class _Dumps:
    def __init__(self, dumps: list[Dump]) -> None:
        self.dumps = dumps
        calls = [(dump, entry) for dump in dumps for entry in dump.entries]
        self._came: dict[str, set[int]] = defaultdict(set)
        self._backends: dict[str, str] = {}
        about = [entry.process_group for _, entry in calls]
        for dump in dumps:
            about += [(name, config.desc) for name, config in dump.pg_config.items()]
        self._descriptions = {name: text for name, text in reversed(about) if text}
        for dump, entry in calls:
            self._came[entry.group].add(dump.rank)
            self._backends.setdefault(entry.group, entry.backend)
        self._of_id: dict[str, set[Key]] = defaultdict(set)
        self._with_sends: set[Key] = set()
        for dump, entry in calls:
            key = self._key(dump, entry.group)
            self._of_id[str(entry.pg_id)].add(key)
            if entry.is_p2p or entry.backend == "gloo":  # gloo counts sends without noting them.
                self._with_sends.add(key)

    def lines(self, dump: Dump) -> Lines:
        reached = self._reached(dump)
        groups = {entry.group: self._key(dump, entry.group) for entry in dump.entries}
        groups |= {key[0]: key for key, _ in reached}
        members = {dump.rank}.union(*(ranks for _, ranks in groups.values()))
        rank = ForeignRank(SOURCE, dump.rank, max(members) + 1)
        for name, ranks in groups.values():
            if dump.rank in ranks:
                about, backend = self._descriptions.get(name, ""), self._backends.get(name, "nccl")
                rank.add_group(self._title(name), backend, ranks, about)
        rank.facts += [status for key, status in reached if key not in self._with_sends]
        for entry in dump.entries:
            _add(rank, entry, self._title(entry.group))
        records = [entry.record_id for entry in dump.entries]
        rank.unexplained = len(records) - len(rank.events)
        # Where every call since the beginning is here, one that is not was never made.
        complete = bool(records) and records == list(range(len(records)))
        times = dump.times or [at_ns for each in self.dumps for at_ns in each.times]
        return rank.lines(complete=complete, start_ns=min(times, default=0))

    def _key(self, dump: Dump, name: str) -> Key:
        """Return the group of this name; of gloo's, whose dumps do not list members, the callers."""
        config = dump.pg_config.get(name, Config())
        return name, numbers(config.ranks) or tuple(sorted(self._came[name]))

    def _title(self, name: str) -> str:
        return group_name(name, self._descriptions.get(name, ""))

    def _reached(self, dump: Dump) -> list[tuple[Key, Reached]]:
        """Return how far this rank came in each group.

        A status has a number, and only calls say of which group; without one here, it is inferred.
        """
        own = {str(entry.pg_id): entry.group for entry in dump.entries}
        found: list[tuple[Key, Reached]] = []
        for number, status in dump.pg_status.items():
            here = [key for key in self._of_id[number] if dump.rank in key[1]]
            here = [key for key in here if key[0] in dump.pg_config]
            if number in own:
                here = [self._key(dump, own[number])]
            if len(here) == 1:
                reached = Reached(
                    group=self._title(here[0][0]),
                    called=status.last_enqueued_collective,
                    ended=status.last_completed_collective,
                    inferred=number not in own,
                )
                found.append((here[0], reached))
        return found


def _add(rank: ForeignRank, entry: Entry, group: str) -> None:
    """Add a call; none of what does not say who sent to whom, as sends that were batched."""
    name = entry.profiling_name.partition(":")[2] or entry.profiling_name
    found = _PEERS.match(name)
    if entry.is_p2p and found is None:
        return
    device = "cpu" if entry.backend == "gloo" else "cuda"
    end_ns, ended_by = None, ""
    if entry.retired or entry.state == "completed":
        end_ns, ended_by = entry.time_discovered_completed_ns or None, NOT_OBSERVED
    if end_ns is not None:
        end_ns, ended_by = max(end_ns, entry.time_created_ns), "watchdog"
    seq = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
    rank.add(
        found["op"] if entry.is_p2p and found else OPS.get(name, name), group,
        _tensors(entry.input_sizes, entry.input_dtypes, device),
        _tensors(entry.output_sizes, entry.output_dtypes, device), seq=max(seq, 0),
        peer=int(found["peer"]) if found else -1, number=entry.record_id,
        start_ns=entry.time_created_ns, end_ns=end_ns, ended_by=ended_by, site=_site(entry.frames),
    )  # fmt: skip


def _tensors(sizes: list[list[int]], dtypes: list[str], device: str) -> Tensors:
    named = zip(sizes, dtypes, strict=False)
    return tuple(rank_lines.tensor(shape, dtype, device) for shape, dtype in named)


def _site(frames: list[Frame]) -> str:
    """Return the innermost line that is neither torch's nor a recorder's."""
    for frame in frames:
        if frame.line and not any(part in frame.filename for part in ("/torch/", "/dlearn/hooks/")):
            return f"{frame.filename.rpartition('/')[2]}:{frame.line}"
    return ""


# A pickle can run code: here only numbers, strings, lists and dicts are made of one ----------------------------------

SPREAD = 4
"""A file that refers to one list many times stands for more than it holds: so many values for each of its bytes."""


class PlainUnpickler(pickle.Unpickler):
    """Refuses what names a class or a function, which is all that can run code."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module[:80]}.{name[:80]}, and data need no code")


def _plain_data(data: bytes) -> Any:
    """Return the plain data of a pickle. ValueError where it is none, or stands for too much."""
    try:
        value = PlainUnpickler(io.BytesIO(data)).load()
    except (pickle.UnpicklingError, EOFError, TypeError, AttributeError, LookupError) as error:
        raise ValueError(str(error) or "it is cut off") from None
    except (RecursionError, MemoryError, OverflowError):
        raise ValueError("it is too deep or too large") from None
    left, waiting = SPREAD * len(data) + 1000, [value]
    while waiting and left:
        item = waiting.pop()
        left -= 1
        if isinstance(item, dict):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            waiting += item
    if waiting:
        raise ValueError("it refers to the same lists again and again, and stands for too much")
    return value
