"""PyTorch's execution traces, one file for each rank: what each call moved, with all splits; no times.

Beside the profiler's files of the same steps they tell what old kernels do not say. A record is joined to a kernel by
its place: the k-th call, waits left out, has launched the k-th kernel. So it counts only where both have as many.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from dlearn.errors import TraceError
from dlearn.trace.printable import printable

OF_CPP = {
    "float": "Float", "double": "Double", "int": "Int", "long int": "Long", "short int": "Short", "bool": "Bool",
    "unsigned char": "Byte", "signed char": "Char", "c10::Half": "Half", "c10::BFloat16": "BFloat16",
}  # fmt: skip


class RecordNode(msgspec.Struct):
    """A call of anything; of a communication the inputs are: tensors, number, group, rank, op, splits in and out."""

    name: str = ""
    inputs: list[Any] = []
    input_types: list[str] = []
    outputs: list[Any] = []


class Nodes(msgspec.Struct):
    """What is read of a rank's file."""

    schema: str
    nodes: list[RecordNode]


class Schema(msgspec.Struct):
    """The form of a file."""

    schema: str


class Moved(NamedTuple):
    """What a call gave and got, in elements of a type of C++, and its splits, if it had any."""

    op: str
    given: int
    got: int
    dtype: str
    splits: tuple[int, ...]
    group: str


READ = "1.0.1"
"""The schema with a list of inputs; later ones keep their values, shapes and types apart."""
_nodes = msgspec.json.Decoder(Nodes, strict=False)
_schema = msgspec.json.Decoder(Schema)


def schema(data: bytes) -> str | None:
    """ "1.0.1"; None where this is something else, or no whole JSON."""
    if b'"nodes"' not in data or b'"schema"' not in data or b'"traceEvents"' in data:
        return None
    try:
        return printable(_schema.decode(data).schema)
    except (ValueError, RecursionError):
        return None


def read(path: Path, data: bytes) -> dict[int, list[Moved]] | None:
    """The calls of a rank, in their order; None where this is something else. TraceError where it is damaged."""
    if schema(data) != READ:
        return None
    try:
        calls = [node for node in _nodes.decode(data).nodes if node.name == "record_param_comms"]
        told = [each for node in calls for each in _of(node)]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise TraceError(printable(f"{path}: no execution trace that can be read: {str(error)[:200]}.")) from None
    return {rank: [moved for of_rank, moved in told if of_rank == rank] for rank in {rank for rank, _ in told}}


def _of(node: RecordNode) -> Iterator[tuple[int, Moved]]:
    """One call and its rank; nothing for what waits for one."""
    place = next((i for i, value in enumerate(node.inputs) if isinstance(value, str)), 0)
    if place < 3 or node.inputs[place] == "wait":
        return
    kind, op = node.input_types[0], node.inputs[place]
    if op == "all_to_all" and not kind.startswith("GenericList"):
        op = "all_to_all_single"  # Of one tensor, in equal parts.
    dtype = kind.removeprefix("GenericList[").removeprefix("Tensor(").rstrip("])")
    splits = tuple(int(each) for each in node.inputs[place + 1])
    given, got = _elements(node.inputs[0]), _elements(node.outputs[0] if node.outputs else [])
    rank, group = int(node.inputs[place - 1]), str(node.inputs[place - 2])
    yield rank, Moved(op, given, got, OF_CPP.get(dtype, dtype), splits, group)


def _elements(value: list[Any]) -> int:
    """Of a tensor (its id, its storage, an offset, the number of its elements, ...), or of a list of them."""
    if value and isinstance(value[0], list):
        return sum(map(_elements, value))
    return int(value[3]) if value else 0
