"""PyTorch's execution traces, one file for each rank: what each call moved, with all splits; no times.

Beside the profiler's files of the same steps they tell what old kernels do not say. A record is
joined to a kernel by its place: the k-th call, waits left out, has launched the k-th kernel. So it
counts only where both have as many.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from dlearn.events.readers.rank_lines import unreadable


class RecordNode(msgspec.Struct):
    """A call of anything; inputs of a communication end with group, rank, op, splits in, out."""

    name: str = ""
    inputs: list[Any] = []
    input_types: list[str] = []
    outputs: list[Any] = []


class Schema(msgspec.Struct):
    """The form of a file."""

    schema: str


class Nodes(Schema):
    """What is read of a rank's file."""

    nodes: list[RecordNode]


class Said(msgspec.Struct):
    """What a kernel, or a record here, says of its call; sizes are counts of elements."""

    op: str = msgspec.field(default="", name="Collective name")
    given: int = msgspec.field(default=0, name="In msg nelems")
    got: int = msgspec.field(default=0, name="Out msg nelems")
    dtype: str = ""
    group: str = msgspec.field(default="", name="Process Group Name")
    about: str = msgspec.field(default="", name="Process Group Description")
    ranks: str = msgspec.field(default="", name="Process Group Ranks")
    splits: str = msgspec.field(default="", name="In split size")
    seq: int = msgspec.field(default=-1, name="Seq")
    peer: int = msgspec.field(default=-1, name="Rank")


READ = "1.0.1"
"""The schema with a list of inputs; later ones keep their values, shapes and types apart."""
_nodes = msgspec.json.Decoder(Nodes, strict=False)
_schema = msgspec.json.Decoder(Schema)


def schema(data: bytes) -> str | None:
    """Return "1.0.1"; None where this is something else, or no whole JSON."""
    if b'"nodes"' not in data or b'"schema"' not in data or b'"traceEvents"' in data:
        return None
    try:
        return _schema.decode(data).schema
    except (ValueError, RecursionError):
        return None


def read(path: Path, data: bytes) -> dict[int, list[Said]] | None:
    """Return the calls of each rank in a file, in their order; None where it is something else."""
    if schema(data) != READ:
        return None
    calls: dict[int, list[Said]] = defaultdict(list)
    try:
        for node in _nodes.decode(data).nodes:
            place = next((i for i, value in enumerate(node.inputs) if isinstance(value, str)), 0)
            is_call = node.name == "record_param_comms" and place >= 3
            if is_call and node.inputs[place] != "wait":
                calls[int(node.inputs[place - 1])].append(_said(node, place))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise unreadable(path, "execution trace", error) from None
    return calls


def _said(node: RecordNode, place: int) -> Said:
    """Return what a node says; the name of its op stands at this place of its inputs."""
    kind, op = node.input_types[0], node.inputs[place]
    if op == "all_to_all" and not kind.startswith("GenericList"):
        op = "all_to_all_single"  # Of one tensor, in equal parts.
    return Said(
        op=op,
        given=_elements(node.inputs[0]),
        got=_elements(node.outputs[0] if node.outputs else []),
        dtype=kind.removeprefix("GenericList[").removeprefix("Tensor(").rstrip("])"),
        group=str(node.inputs[place - 2]),
        splits=str(node.inputs[place + 1]),
    )


def _elements(value: list[Any]) -> int:
    """Count those of a tensor (its id, storage, an offset, their number, ...), or of a list."""
    if value and isinstance(value[0], list):
        return sum(map(_elements, value))
    return int(value[3]) if value else 0
