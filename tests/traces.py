"""Traces by hand: say what each rank called, and when; the rest of the file is filled in.

job = Job(tmp_path, ranks=2)
job.collective("all_reduce", size=1000, start_ns={0: 10, 1: 30}, end_ns=50)
trace = job.load()
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import msgspec

import dlearn.events.event as seen
from dlearn import Trace, explain
from dlearn.events.writer import Writer

Number = int | None | Mapping[int, int | None]
"""Of all ranks, or by rank, as any other fact may be. None is a time that never came: the call hangs."""
Ranks = int | Iterable[int]


def header(rank: int | None = 0, **facts: Any) -> seen.Header:
    own: dict[str, Any] = {"job": "job", "host": "host", "pid": 1000 + (rank or 0), "rank": rank, "start_ns": 0}
    return seen.Header(**{"format": seen.FORMAT, "torch": "2.13.0", "dlearn": "0.1.0", **own, **facts})


def fact(kind: str, **columns: Any) -> seen.Line:
    """A line that no class of these tests' has: of another source, or about its process."""
    names = [(name, type(value)) for name, value in columns.items()]
    return msgspec.defstruct("Fact", names, bases=(seen.Line,), tag=kind, kw_only=True)(**columns)


def tensor(size: int, *, dtype: str = "uint8", payload: int | None = None) -> seen.TensorInfo:
    """A dense tensor of `size` bytes; with a `payload` a sparse one."""
    if payload is None:
        return seen.TensorInfo((size,), dtype, "cpu", size, size)
    return seen.TensorInfo((size,), dtype, "cpu", size, payload, sparse=True)


class Job:
    """`ranks` processes with a default group "world"; `files[rank]` holds the lines of each.

    All are closed, but for those that `died`: they have no footer.
    """

    def __init__(self, folder: Path, *, ranks: int, backend: str = "gloo", names: Sequence[str] = ()) -> None:
        self.folder = folder
        self.died: Iterable[int] = ()
        names = names or [""] * ranks
        self.headers = [header(rank, world_size=ranks, name=names[rank]) for rank in range(ranks)]
        self.files: list[list[seen.Line]] = [[] for _ in range(ranks)]
        self._members: dict[str, tuple[int, ...]] = {}
        self._numbers = [0] * ranks
        self._seqs: dict[tuple[int, str, type], int] = {}
        self.group("world", range(ranks), backend=backend, default=True)

    def group(self, name: str, members: Iterable[int], *, backend: str = "gloo", **facts: Any) -> None:
        """A process group; group rank i is `members[i]`."""
        ranks = tuple(members)
        self._members[name] = ranks
        for index, rank in enumerate(ranks):
            own: dict[str, Any] = {"name": name, "backend": backend, "rank": index, "size": len(ranks)}
            self.files[rank].append(seen.GroupFact(**own, ranks=ranks, **facts))

    def collective(
        self,
        op: str | Mapping[int, str],
        *,
        size: Number = 0,
        ranks: Iterable[int] | None = None,
        group: str = "world",
        start_ns: Number = 10,
        end_ns: Number = 20,
        **facts: Any,
    ) -> dict[int, int]:
        """Called by `ranks` of the group (else by all its members) with `size` bytes each. Rank -> its number."""
        numbers = {}
        for rank in self._members[group] if ranks is None else ranks:
            inputs = (tensor(_at(size, rank)),) if size else ()
            own = {"inputs": inputs, "seq": self._next(rank, group, seen.Collective), **facts}
            numbers[rank] = self.event(
                seen.Collective, rank, op=op, group=group, start_ns=start_ns, end_ns=end_ns, **own
            )
        return numbers

    def send(self, src: int, dst: int, *, size: Number = 4, group: str = "world", tag: int = 0, **facts: Any) -> int:
        return self._p2p("send", src, self._members[group].index(dst), size, group=group, tag=tag, **facts)

    def recv(
        self, dst: int, src: int | None, *, size: Number = 4, group: str = "world", tag: int = 0, **facts: Any
    ) -> int:
        peer = self._members[group].index(src) if src is not None else None
        return self._p2p("recv", dst, peer, size, group=group, tag=tag, **facts)

    def message(self, src: int, dst: int, **facts: Any) -> None:
        """A send and the recv that takes it in, both with these facts, or with those of their rank."""
        self.send(src, dst, **facts)
        self.recv(dst, src, **facts)

    def _p2p(self, op: str, rank: int, peer: int | None, size: Number, **facts: Any) -> int:
        seq = self._next(rank, facts["group"], seen.PointToPoint)
        own = {"tensors": (tensor(_at(size, rank)),), "seq": seq, "start_ns": 10, "end_ns": 20, **facts}
        return self.event(seen.PointToPoint, rank, op=op, peer=peer, **own)

    def span(self, ranks: Ranks, name: str, **facts: Any) -> int:
        """Returns its number, the `parent` of what is inside."""
        return self.event(seen.Span, ranks, name=name, **{"start_ns": 0, "end_ns": 100, **facts})

    def bucket(self, ranks: Ranks, index: int, parameters: Mapping[str, int], *, count: int = 1, **facts: Any) -> None:
        """Bucket `index` of `count`; `parameters` gives the bytes of each."""
        facts = {"model": 0, "index": index, "count": count, "built": "first", "start_ns": 0} | facts
        self.event(seen.Bucket, ranks, bytes=sum(parameters.values()), parameters=tuple(parameters), **facts)

    def gradient(self, ranks: Ranks, parameter: str, *, backward: int = 0, at_ns: Number = 10) -> None:
        own: dict[str, Any] = {"model": 0, "bytes": 4, "backward": backward, "start_ns": at_ns}
        self.event(seen.Gradient, ranks, parameter=parameter, **own)

    def stretch(self, ranks: Ranks, phase: str, start_ns: Number, end_ns: Number, **facts: Any) -> None:
        self.event(seen.PhaseSpan, ranks, phase=phase, start_ns=start_ns, end_ns=end_ns, **facts)

    def connect(self, *, known: bool = True) -> None:
        """A connection between every two ranks, as gloo makes them for "world", or, if it is not `known`, beside it."""
        first, group = (10_000, "world") if known else (10_500, "")
        for rank, peer in permutations(range(len(self.files)), 2):
            here, there = (f"127.0.0.1 {first + 10 * one + other}" for one, other in ((rank, peer), (peer, rank)))
            id = sum(isinstance(line, seen.Socket) for line in self.files[rank])
            self.files[rank].append(seen.Socket(id=id, group=group, local=here, remote=there))

    def counters(self, ranks: Ranks, *sent: int | None, **facts: Any) -> None:
        """A sample: bytes written into each socket, in the order of `connect`."""
        self.event(seen.Counters, ranks, sent_bytes=sent, still=None, **facts)

    def event(
        self,
        kind: type[seen.Event],
        ranks: Ranks,
        /,
        *,
        start_ns: Number = 10,
        end_ns: Number = None,
        by: str = "return",
        **facts: Any,
    ) -> int:
        """One line for its start, one for its end (with its `error`). `by=seen.NOT_OBSERVED`: nobody saw the end.

        Returns its number, of several ranks that of the last.
        """
        for rank in [ranks] if isinstance(ranks, int) else ranks:
            number = self._numbers[rank]
            self._numbers[rank] += 1
            start, end = _at(start_ns, rank), _at(end_ns, rank)
            own = {name: _at(fact, rank) for name, fact in facts.items()}
            assert start is not None
            self.files[rank].append(kind(number=number, start_ns=start, **own))
            if end is not None or by == seen.NOT_OBSERVED:
                self.files[rank].append(seen.End(event=number, at_ns=end, by=by, error=own.get("error", "")))
        return number

    def _next(self, rank: int, group: str, kind: type) -> int:
        seq = self._seqs[rank, group, kind] = self._seqs.get((rank, group, kind), 0) + 1
        return seq

    def write(self, *, died: Iterable[int] = (), without: Iterable[int] = ()) -> list[Path]:
        """Write the files: no footer for the ranks that died, no file of those in `without`."""
        paths = []
        for rank, lines in enumerate(self.files):
            if rank in without:
                continue
            own = self.headers[rank]
            writer = Writer(self.folder / f"{own.host}-{own.pid}.jsonl", max_bytes=1 << 30)
            for line in (own, *lines):
                writer.write(line)
            if rank not in {*died, *self.died}:
                writer.write(seen.Footer(at_ns=1000, lines=writer.lines))
            writer.close()
            paths.append(writer.path)
        return paths

    def load(self, *, died: Iterable[int] = (), without: Iterable[int] = ()) -> Trace:
        self.write(died=died, without=without)
        return Trace.load(self.folder)

    def says(self, *told: str) -> str:
        """Assert that all this is told in the sentences about its trace, and return them."""
        said = "\n".join(explain(self.load()).sentences)
        assert [each for each in told if each not in said] == [], said
        return said


def _at(fact: Any, rank: int) -> Any:
    return fact.get(rank) if isinstance(fact, Mapping) else fact
