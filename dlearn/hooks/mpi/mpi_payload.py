"""What a program hands to mpi4py: a buffer, or [buffer, count, type], and how many bytes of it travel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from mpi4py import MPI

from dlearn.trace.event import TensorInfo
from dlearn.trace.mpi_facts import PICKLED

_KINDS = {"f": "float", "i": "int", "u": "uint", "c": "complex", "b": "bool"}

Infos = tuple[TensorInfo, ...]


def described(spec: Any, *, blocks: int = 1) -> Infos:
    """The data of one argument; none of None and IN_PLACE. Of a single count each of `blocks` ranks has that much."""
    if spec is None or spec is MPI.IN_PLACE:
        return ()
    buffer, counts, datatype = _parts(spec)
    item_bytes, dtype = _type_of(buffer, datatype)
    if counts is None:
        count = _bytes_of(buffer) // max(item_bytes, 1)
    else:
        count = counts * blocks if isinstance(counts, int) else sum(map(int, counts))
    return (TensorInfo((count,), dtype, "cpu", count * item_bytes, count * item_bytes),)


def received(room: Infos, got_bytes: int) -> Infos:
    """Of a receive that is over: what has come, if that is not what there was room for."""
    if room and room[0].payload_bytes == got_bytes:
        return ()
    known = room[0] if room and room[0].shape[0] else None
    if known is None:
        return pickled(got_bytes)
    count = got_bytes * known.shape[0] // max(known.payload_bytes, 1)
    return (TensorInfo((count,), known.dtype, "cpu", got_bytes, got_bytes),)


def pickled(count: int) -> Infos:
    """Python objects, as the bytes that pickle has made of them."""
    return (TensorInfo((count,), PICKLED, "cpu", count, count),)


def _parts(spec: Any) -> tuple[Any, int | Sequence[int] | None, Any]:
    """Buffer, counts, type of `buffer`, [buffer, type], [buffer, count, type], [buffer, counts, displacements, type] or
    [buffer, (counts, displacements), type]."""
    if not isinstance(spec, list | tuple):
        return spec, None, None
    buffer, *rest = spec
    datatype = rest.pop() if rest and (isinstance(rest[-1], MPI.Datatype | str) or rest[-1] is None) else None
    counts = rest[0] if rest else None
    if isinstance(counts, tuple) and len(counts) == 2 and len(rest) == 1 and not isinstance(counts[0], int):
        counts = counts[0]
    return buffer, counts, datatype


def _type_of(buffer: Any, datatype: Any) -> tuple[int, str]:
    if isinstance(datatype, str):
        datatype = MPI.Datatype.fromcode(datatype)
    if datatype is not None:
        return datatype.Get_size(), _name(datatype.typestr)
    dtype = getattr(buffer, "dtype", None)
    if dtype is not None:
        return int(dtype.itemsize), str(dtype).removeprefix("torch.")
    view = memoryview(buffer)
    return view.itemsize, _name(MPI.Datatype.fromcode(view.format).typestr)


@cache
def _name(typestr: str) -> str:
    """ "f8" -> "float64", as numpy and torch call it; what neither has a name for is bytes."""
    kind, size = typestr[:1], typestr[1:]
    return f"{_KINDS[kind]}{int(size) * 8}" if kind in _KINDS and size.isdigit() else "bytes"


def _bytes_of(buffer: Any) -> int:
    return int(buffer.nbytes) if hasattr(buffer, "nbytes") else memoryview(buffer).nbytes
