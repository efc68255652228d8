"""Files of other tools, as a trace of ours: each format has a file here, which knows its own."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import msgspec

from dlearn.errors import TraceError
from dlearn.events.event import GroupFact
from dlearn.events.job_facts import Imported
from dlearn.events.printable import printable
from dlearn.events.readers.flight_recorder import FlightRecorder
from dlearn.events.readers.kineto import Kineto, schema_of_nodes
from dlearn.events.readers.nccl_comms import NcclLog
from dlearn.events.readers.otf2_archive import Otf2
from dlearn.events.readers.rank_lines import Lines, refused
from dlearn.shown import count_text

if TYPE_CHECKING:
    from dlearn.events.store import ProcessFile

room = partial(tempfile.TemporaryDirectory, prefix="dlearn-import-")
MOST_BYTES = 1 << 30
"""Of one file, unpacked: a dump of 2,000 calls has some 5 MB, a profiler's file often 100."""


class Reader(Protocol):
    """One format."""

    def take(self, path: Path, data: bytes) -> bool:
        """Return whether a file is of it, and keep what is needed. TraceError where damaged."""

    def ranks(self) -> list[Lines]:
        """Return the lines of each rank, when all files have been taken."""


READERS: tuple[Callable[[], Reader], ...] = (FlightRecorder, Kineto, Otf2, NcclLog)
"""Of several formats the first that has ranks is read; NCCL's log beside another, too."""
NOT_READ = {
    # A length, then the version, or an attribute (mlcommons/chakra, schema/protobuf/et_def.proto).
    rb"[\x03-\x7f](\n[\x05-\x0f]\d+\.\d+\.\d+|\x12.\n\x06schema)": "a Chakra execution trace (.et)",
    rb"\s*(<\?xml[^>]*>\s*)?<system version=": "NCCL's topology (XML)",
    rb"\s*(<\?xml[^>]*>\s*)?<graphs version=": "NCCL's graphs (XML)",
}
"""Formats that are known by the beginning of a file, and refused by their names."""


def is_own(paths: Sequence[Path]) -> bool:
    """Return whether these are traces of ours; or nothing, which is refused where ours are read."""
    try:
        found = [path for path in _inside(paths) if path.exists()]
    except OSError:
        return True
    return not found or any(path.suffix == ".jsonl" for path in found)


def _inside(paths: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        found += sorted(path.iterdir()) if path.is_dir() else [path]
    return found


def translate(paths: Sequence[Path], folder: Path) -> list[str]:
    """Write a trace of ours into this folder, and say what is left out. TraceError if none can be read."""
    made = [make() for make in READERS]
    taken = _taken(paths, made)
    try:
        for reader in made:
            if ranks := reader.ranks():
                break
        else:
            raise _refusal(paths, taken)
        log = next(each for each in made if isinstance(each, NcclLog))
        sentences = []
        if log.lines and log is not reader:
            for header, lines in ranks:
                groups = [line for line in lines if isinstance(line, GroupFact)]
                lines += log.beside(header.rank, header.host, groups)
            sentences.append(log.told_beside())
        for header, lines in ranks:
            data = msgspec.json.Encoder().encode_lines([header, *lines])
            (folder / f"rank-{header.rank}.jsonl").write_bytes(data)
    except OverflowError:
        raise refused(f"{paths[0]}: a file holds numbers that no call has.") from None
    left_out = [path.name for path, of in taken.items() if of not in (reader, log)]
    if left_out:
        sentences.append(f"{count_text(len(left_out), 'more file')} not read: {', '.join(left_out[:3])}")
    return [printable(each) for each in sentences]


def _refusal(paths: Sequence[Path], taken: dict[Path, Reader | str]) -> TraceError:
    for path, of in taken.items():
        if isinstance(of, str) and of:
            where = "(what is read: docs/from-your-cluster.md)"
            return refused(f"{path}: it is {of}, a format that is not read yet {where}.")
    return refused(
        f"{', '.join(map(str, paths))}: neither a trace (a folder with one .jsonl file per"
        " process) nor a dump of torch's Flight Recorder, a profiler's file (one for each rank),"
        " NCCL's log or an OTF2 archive."
    )


def beside(logs: Sequence[Path], files: Iterable[ProcessFile]) -> list[str]:
    """Add what NCCL's log says of the ranks of these files of ours; what was taken from it, in a sentence."""
    log = NcclLog()
    for path, reader in _taken(logs, [log]).items():
        if reader is not log:
            raise refused(f"{path.name}: beside a trace of ours, only NCCL's log is read.")
    for file in files:
        found = log.beside(file.own_rank, file.header.host, file.groups.values())
        file.wired |= {each.group: each for each in found}
    return [printable(log.told_beside())]


def _taken(paths: Sequence[Path], made: Sequence[Reader]) -> dict[Path, Reader | str]:
    """Give each file to a reader. Return which has taken it, else the name of its format, or ""."""
    try:
        found = [path for path in _inside(paths) if path.is_file()]
    except OSError as error:
        raise refused(f"{error.filename}: cannot be read: {error.strerror}") from None
    taken: dict[Path, Reader | str] = {}
    for path in found:
        for name, data in _contents(path):
            took = (reader for reader in made if reader.take(name, data))
            taken[name] = next(took, None) or _not_read(data)
    return taken


def _not_read(data: bytes) -> str:
    """Return the name of a format that is not read yet; "" if it is not known."""
    schema = schema_of_nodes(data)
    if schema is not None:
        return f"a PyTorch execution trace of schema {schema}"
    names = (name for known, name in NOT_READ.items() if re.match(known, data, re.DOTALL))
    return next(names, "")


def notes(facts: Sequence[Imported]) -> list[str]:
    """Say what a trace was made from, and what that does not tell."""
    sources = Counter(fact.source for fact in facts)
    sentences = [f"{count_text(many, 'file')} made from {source}" for source, many in sources.items()]
    left_out, took_ns = sum(fact.unexplained for fact in facts), sum(fact.unexplained_ns for fact in facts)
    long = f", which took {took_ns / 1e6:,.3g} ms" * bool(took_ns)
    return sentences + [f"calls that do not say who sent what to whom: {left_out:,}{long}"] * bool(left_out)


def _contents(path: Path) -> Iterator[tuple[Path, bytes]]:
    """Yield the file, or what is packed in it (.gz, .tar, .tar.gz): unpacked in memory only."""
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
        why = getattr(error, "strerror", "") or error
        raise refused(f"{path}: cannot be read: {why}") from None


def _whole(stream: IO[bytes] | gzip.GzipFile, path: Path) -> bytes:
    data = stream.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise refused(f"{path} holds more than {MOST_BYTES:,} B: no such file does.")
    return data
