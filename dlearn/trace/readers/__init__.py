"""Files of other tools, as a trace of ours: each format has a file here, which tells its own by what is in it.

A reader takes the files of a job one by one, and gives for each rank the lines that our own file of it would have.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import msgspec

from dlearn.errors import TraceError
from dlearn.shown import count_text
from dlearn.trace.event import GroupFact, Header, Line
from dlearn.trace.job_facts import Imported
from dlearn.trace.printable import printable
from dlearn.trace.readers.flight_recorder import FlightRecorder
from dlearn.trace.readers.kineto import Kineto
from dlearn.trace.readers.nccl_comms import NcclLog
from dlearn.trace.readers.not_read import INSPECTOR, LOOKED_AT, NotRead
from dlearn.trace.readers.otf2_archive import Otf2
from dlearn.trace.wiring import Wired

if TYPE_CHECKING:
    from dlearn.trace.store import ProcessFile

Lines = tuple[Header, list[Line]]
MOST_BYTES = 1 << 30
"""Of one file, unpacked: a dump of 2,000 calls has some 5 MB, a profiler's file often 100."""


class Reader(Protocol):
    """One format."""

    def take(self, path: Path, data: bytes) -> bool:
        """Whether this file is of the format; then what is needed of it is kept. TraceError where it is damaged."""

    def ranks(self) -> list[Lines]:
        """The lines of each rank, when all files have been taken."""


READERS: tuple[Callable[[], Reader], ...] = (NotRead, FlightRecorder, Kineto, Otf2, NcclLog)
"""Where there are files of several formats, the first that has ranks is read; NCCL's log beside another, too."""


def is_own(paths: Sequence[Path]) -> bool:
    """Whether these are traces of ours, or nothing that can be read: that is told where ours are read."""
    try:
        inside = [list(path.iterdir()) if path.is_dir() else [path] for path in paths]
        found = [path for each in inside for path in each if path.exists()]
        return not found or any(path.suffix == ".jsonl" and not _is_inspectors(path) for path in found)
    except OSError:
        return True


def _is_inspectors(path: Path) -> bool:
    with path.open("rb") as stream:
        return INSPECTOR in stream.read(LOOKED_AT)


def translate(paths: Sequence[Path], folder: Path) -> list[str]:
    """Write a trace of ours into this folder, and say what is left out. TraceError if none can be read."""
    made = [make() for make in READERS]
    taken = _taken(paths, made)
    for reader in made:
        ranks = reader.ranks()
        if ranks:
            break
    else:
        where = ", ".join(map(str, paths))
        known = next((reader.told() for reader in made if isinstance(reader, NotRead)), "")
        if known:
            raise TraceError(printable(f"{where}: {known} (what is read: docs/from-your-cluster.md)."))
        raise TraceError(
            printable(f"{where}: neither a trace (a folder with one .jsonl file per process) nor a dump of torch's")
            + " Flight Recorder, a profiler's file (one for each rank), NCCL's log or an OTF2 archive."
        )
    said = _wired(ranks, made) if not isinstance(reader, NcclLog) else []
    for header, lines in ranks:
        try:
            told = [msgspec.json.encode(line) + b"\n" for line in (header, *lines)]
        except OverflowError:
            raise TraceError(f"the file of rank {header.rank} holds numbers that no call has.") from None
        (folder / f"rank-{header.rank}.jsonl").write_bytes(b"".join(told))
    used = [reader, *(each for each in made if said and isinstance(each, NcclLog))]
    left_out = [path for path, of in taken.items() if of not in used]
    names = ", ".join(path.name for path in left_out[:3])
    return said + [printable(f"{count_text(len(left_out), 'more file')} not read: {names}")] * bool(left_out)


def beside(logs: Sequence[Path], files: Iterable[ProcessFile]) -> list[str]:
    """Add what NCCL's log says of the ranks of these files of ours; what was taken from it, in a sentence."""
    log = NcclLog()
    others = [path.name for path, reader in _taken(logs, [log]).items() if reader is None]
    wired: list[Wired] = []
    for file in files:
        ranks = [group.rank for group in file.groups.values() if group.default]
        rank = file.header.rank if file.header.rank is not None else next(iter(ranks), -1)
        found = log.beside(rank, file.header.host, file.groups.values())
        file.wired |= {each.group: each for each in found}
        wired += found
    if others:
        raise TraceError(printable(f"{others[0]}: beside a trace of ours, only NCCL's log is read."))
    return [printable(log.told_beside(wired))]


def _taken(paths: Sequence[Path], made: Sequence[Reader]) -> dict[Path, Reader | None]:
    """Each file there, and which of these readers has taken it."""
    try:
        found = [each for path in paths for each in (sorted(path.iterdir()) if path.is_dir() else [path])]
        found = [path for path in found if path.is_file()]
    except OSError as error:
        raise TraceError(printable(f"{error.filename}: cannot be read: {error.strerror}")) from None
    taken: dict[Path, Reader | None] = {}
    for path in found:
        for name, data in _contents(path):
            taken[name] = next((reader for reader in made if reader.take(name, data)), None)
    return taken


def _wired(ranks: list[Lines], made: Sequence[Reader]) -> list[str]:
    """Add what NCCL's log says, if there is one beside; what was taken from it, in a sentence."""
    wired: list[Wired] = []
    logs = [log for log in made if isinstance(log, NcclLog) and log.lines]
    for log in logs:
        for header, lines in ranks:
            groups = [line for line in lines if isinstance(line, GroupFact)]
            found = log.beside(-1 if header.rank is None else header.rank, header.host, groups)
            lines += found
            wired += found
    return [printable(log.told_beside(wired)) for log in logs]


def notes(facts: Sequence[Imported]) -> list[str]:
    """What a trace was made from, and what that does not tell."""
    sources = Counter(fact.source for fact in facts)
    told = [f"{count_text(many, 'file')} made from {source}" for source, many in sources.items()]
    left_out, took_ns = sum(fact.unexplained for fact in facts), sum(fact.unexplained_ns for fact in facts)
    long = f", which took {took_ns / 1e6:,.3g} ms" * bool(took_ns)
    return told + [f"calls that do not say who sent what to whom: {left_out:,}{long}"] * bool(left_out)


def _contents(path: Path) -> Iterator[tuple[Path, bytes]]:
    """The file, or what is in it if it is packed (.gz, .tar, .tar.gz, as its first bytes say): in memory only."""
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
            stream.seek(0)
            data = _whole(gzip.GzipFile(fileobj=stream) if packed else stream, path)
        if not tarfile.is_tarfile(io.BytesIO(data)):
            yield path, data
            return
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                if (inside := archive.extractfile(member)) is not None:
                    yield path / member.name, _whole(inside, path)
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise TraceError(printable(f"{path}: cannot be read: {getattr(error, 'strerror', '') or error}")) from None


def _whole(stream: IO[bytes] | gzip.GzipFile, path: Path) -> bytes:
    data = stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise TraceError(printable(f"{path} holds more than {MOST_BYTES:,} B: no such file does."))
    return data


def room() -> AbstractContextManager[str]:
    """A folder for a translation that nobody keeps."""
    return tempfile.TemporaryDirectory(prefix="dlearn-import-")
