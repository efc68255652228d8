"""What readers share: the lines of a rank (header, groups, calls), tensors, and refusals."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec

from dlearn.errors import TraceError
from dlearn.events.event import FORMAT, Collective, Event, GroupFact, Header, Line, PointToPoint, TensorInfo
from dlearn.events.job_facts import DEFAULT, Imported, dimensions_of
from dlearn.events.printable import printable

Lines = tuple[Header, list[Line]]
Tensors = tuple[TensorInfo, ...]
DTYPES = {
    "Double": "float64", "Float": "float32", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
    "UInt16": "uint16", "UInt32": "uint32", "UInt64": "uint64",
    "double": "float64", "float": "float32", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "long int": "int64", "int": "int32", "short int": "int16",
    "signed char": "int8", "unsigned char": "uint8",
}  # fmt: skip
"""torch's scalar types, and those of C++, as Python names them."""
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "uint64": 8, "uint32": 4, "uint16": 2,
}  # fmt: skip
"""Of one element; all others have one byte."""
IN_PLACE = ("all_reduce", "broadcast", "reduce")  # What these get is what they were given.
OPS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_all_gather_base": "all_gather_single",
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "all_to_allv": "all_to_all_single",
}
"""torch's names of NCCL's calls where they are not those of torch.distributed."""
_numbers = msgspec.json.Decoder(tuple[Annotated[int, msgspec.Meta(ge=0, lt=10**15)], ...])


def tensor(shape: Sequence[int], dtype: str, device: str) -> TensorInfo:
    """Return a dense tensor of this type, by torch's name, C++'s or Python's."""
    dtype = DTYPES.get(dtype, dtype)
    size = ITEM_BYTES.get(dtype, 1) * math.prod(shape)
    return TensorInfo(tuple(shape), dtype, device, size, size)


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of "[0, 1]"; () where the list is not whole."""
    try:
        return _numbers.decode(text)
    except ValueError:
        return ()


class ForeignRank:
    """One rank that another tool recorded: its groups and calls become lines of our file."""

    def __init__(self, source: str, rank: int, world_size: int) -> None:
        self.source, self.rank, self.world_size = source, rank, world_size
        self.groups: dict[str, GroupFact] = {}
        self.facts: list[Line] = []
        self.events: list[Event] = []
        self.unexplained = 0  # Calls that do not say who sent what to whom.
        self._turns: Counter[tuple[str, str]] = Counter()

    def add_group(self, name: str, backend: str, ranks: Sequence[int], about: str) -> None:
        """Add a group of these global ranks, of which this rank is one, described as by torch."""
        self.groups[name] = GroupFact(
            name=name, backend=backend, rank=ranks.index(self.rank), size=len(ranks),
            ranks=tuple(ranks), default=about == DEFAULT, dimensions=dimensions_of(about),
        )  # fmt: skip

    def add(
        self, op: str, group: str, given: Tensors, got: Tensors, *,
        seq: int = -1, peer: int = -1, tag: int = 0, root: int | None = None,
        splits: tuple[int, ...] = (), **common: Any,
    ) -> None:  # fmt: skip
        kind = op if op in ("send", "recv") else ""
        self._turns[group, kind] += 1
        seq = seq if seq >= 0 else self._turns[group, kind]
        common = {"number": len(self.events), "op": op, "group": group, "seq": seq, **common}
        if kind:
            sent = given if kind == "send" else got
            other = peer if peer >= 0 else None
            self.events.append(PointToPoint(peer=other, tag=tag, tensors=sent, **common))
        else:
            got = () if given and op in IN_PLACE else got
            self.events.append(Collective(inputs=given, outputs=got, root=root, splits=splits, **common))

    def lines(
        self, *, details: str = "", complete: bool = False, took_ns: int = 0,
        host: str = "", pid: int = 0, start_ns: int = 0,
    ) -> Lines:  # fmt: skip
        """Return all lines. Calls that are unexplained took `took_ns` together."""
        header = Header(
            format=FORMAT, job=self.source, host=host, pid=pid, torch="", dlearn="",
            start_ns=start_ns, rank=self.rank, world_size=self.world_size,
        )  # fmt: skip
        limits = Imported(
            source=self.source + details, complete=complete,
            unexplained=self.unexplained, unexplained_ns=took_ns,
        )  # fmt: skip
        return header, [limits, *self.groups.values(), *self.facts, *self.events]


def refused(text: str) -> TraceError:
    """Return the error for a file that is not read: strangers may have written its name."""
    return TraceError(printable(text))


def unreadable(path: Path, what: str, why: object) -> TraceError:
    return refused(f"{path}: no {what} that can be read: {str(why)[:200].rstrip('.')}.")


@contextmanager
def readable(path: Path, what: str) -> Iterator[None]:
    """Refuse the file where what is done in the block shows that it is damaged."""
    try:
        yield
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise unreadable(path, what, error) from None


def of_two_jobs(path: Path, other: str, rank: int) -> TraceError:
    hint = "give the files of one step of one job"
    return refused(f"{other} and {path.name} are both of rank {rank}: {hint}.")
