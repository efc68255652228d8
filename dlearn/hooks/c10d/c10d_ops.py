"""The communication ops of torch.distributed: their names, and where their arguments stand in the installed torch."""

from __future__ import annotations

import ctypes
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import Work

from dlearn.events.event import TensorInfo
from dlearn.hooks.private import unfit


@dataclass(frozen=True)
class Op:
    """One c10d op: its name at the dispatcher and in `torch.distributed`, and the names of its arguments."""

    schema: str
    name: str
    gives: str = ""
    gets: str = ""
    group: str = "process_group"
    new: bool = False
    """Whether only the newest versions of torch have it."""


COLLECTIVES = (
    Op("allreduce_", "all_reduce", gives="tensors"),
    Op("allreduce_coalesced_", "all_reduce_coalesced", gives="tensors"),
    Op("broadcast_", "broadcast", gives="tensors"),
    Op("reduce_", "reduce", gives="tensors"),
    Op("allgather_", "all_gather", gives="input_tensors", gets="output_tensors"),
    Op("_allgather_base_", "all_gather_single", gives="input_tensor", gets="output_tensor"),
    Op("allgather_coalesced_", "all_gather_coalesced", gives="input_list", gets="output_lists"),
    Op("allgather_into_tensor_coalesced_", "all_gather_single_coalesced", gives="inputs", gets="outputs"),
    Op("reduce_scatter_", "reduce_scatter", gives="input_tensors", gets="output_tensors"),
    Op("_reduce_scatter_base_", "reduce_scatter_single", gives="input_tensor", gets="output_tensor"),
    Op("reduce_scatter_tensor_coalesced_", "reduce_scatter_single_coalesced", gives="inputs", gets="outputs"),
    Op("gather_", "gather", gives="input_tensors", gets="output_tensors"),
    Op("gather_into_tensor_", "gather_single", gives="input_tensor", gets="output_tensor", new=True),
    Op("scatter_", "scatter", gives="input_tensors", gets="output_tensors"),
    Op("alltoall_", "all_to_all", gives="input_tensors", gets="output_tensors"),
    Op("alltoall_base_", "all_to_all_single", gives="input", gets="output"),
    Op("barrier", "barrier"),
    Op("monitored_barrier_", "monitored_barrier"),
)
POINT_TO_POINT = (
    Op("send", "send", gives="tensors"),
    Op("recv_", "recv", gives="tensors"),
    Op("recv_any_source_", "recv", gives="tensors"),
)
ALL = [op for op in (*COLLECTIVES, *POINT_TO_POINT) if not op.new or hasattr(torch.ops.c10d, op.schema)]
"""The ops that the installed torch should have."""


class Signature:
    """Where an op's arguments and its Work stand, read from the schema of the installed torch."""

    def __init__(self, op: Op) -> None:
        packet = getattr(torch.ops.c10d, op.schema, None)
        if packet is None:
            raise unfit(f"it has no op c10d::{op.schema}")
        overload = packet.default
        names = [argument.name for argument in overload._schema.arguments]
        for name in (op.gives, op.gets, op.group):
            if name and name not in names:
                raise unfit(f"its c10d::{op.schema} has no argument {name!r}")
        index = {name: number for number, name in enumerate(names)}
        self.op = op
        self.group = index[op.group]
        self.gives, self.gets = index.get(op.gives), index.get(op.gets)
        self.root, self.peer = index.get("root_rank"), index.get("dst", index.get("src"))
        self.tag = index.get("tag", -1)
        self.splits, self._async_op = index.get("input_split_sizes"), index.get("async_op")
        self.redispatch = overload._handle.redispatch_boxed
        returns = [str(each.type).endswith("c10d.Work") for each in overload._schema.returns]
        self._returns = len(returns)
        self.work = returns.index(True) if True in returns else None

    def tensors(self, args: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Return all that the call gives and gets: a Work of it keeps them alive."""
        return (*tensors_of(args, self.gives), *tensors_of(args, self.gets))

    def output(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        """Return the first tensor that the call fills."""
        return next(iter(tensors_of(args, self.gives if self.gets is None else self.gets)), None)

    def is_traced(self, args: tuple[Any, ...]) -> bool:
        """Return whether it is only planned: on tensors without data (fake, or on "meta")."""
        for where in (self.gives, self.gets, 0):  # A barrier's first is a tensor, too.
            for tensor in tensors_of(args, where):
                return tensor.is_meta
        return False

    def waits_at_once(self, args: tuple[Any, ...]) -> bool:
        """Return whether the caller waits for the Work before it does anything else: `async_op=False`."""
        # An argument that equals its default is not passed on, and this one's is True.
        where = self._async_op
        return where is not None and where < len(args) and args[where] is False

    def work_of(self, result: Any) -> Work | None:
        """Return the Work in what the op has returned; None of an op without one."""
        if self.work is None:
            return None
        return Work.unbox(result if self._returns == 1 else result[self.work])


def split_bytes(args: tuple[Any, ...], signature: Signature) -> tuple[int, ...]:
    """Return the bytes for each group rank, of an all-to-all that is given sizes; else nothing."""
    where = signature.splits
    rows = args[where] if where is not None and where < len(args) else ()
    if not rows or signature.gives is None:
        return ()
    (tensor,) = tensors_of(args, signature.gives)
    row_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
    return tuple(int(count) * row_bytes for count in rows)


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return offset and size in bytes of a tensor's storage; (0, 0) if it is all of it."""
    if tensor.is_sparse:
        return 0, 0
    whole = tensor.untyped_storage().nbytes()
    if whole == tensor.numel() * tensor.element_size():
        return 0, 0
    return int(tensor.storage_offset()) * tensor.element_size(), whole


def checksum(tensor: torch.Tensor) -> int | None:
    """Return the CRC-32 of the bytes as they are sent; None of a tensor on a device."""
    if tensor.device.type != "cpu" or tensor.is_sparse or not tensor.is_contiguous():
        return None
    size = tensor.numel() * tensor.element_size()
    return zlib.crc32((ctypes.c_ubyte * size).from_address(tensor.data_ptr())) if size else 0


def checksum_given(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return one for all tensors that a rank gives to a collective; None if any has none."""
    sums = [checksum(tensor) for tensor in tensors]
    if len(sums) == 1:
        return sums[0]
    return zlib.crc32(repr(sums).encode()) if sums and None not in sums else None


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Count the logical bytes of the tensors together."""
    return sum(each.numel() * each.element_size() for each in tensors)


def tensors_of(args: tuple[Any, ...], index: int | None) -> Sequence[torch.Tensor]:
    """Return the tensors in an argument, which is absent where it equals its default."""
    if index is None or index >= len(args):
        return ()
    argument = args[index]
    if isinstance(argument, torch.Tensor):
        return (argument,)
    if argument and not isinstance(argument[0], torch.Tensor):
        return [tensor for each in argument for tensor in each]
    return argument  # type: ignore[no-any-return]


def describe_one(tensor: torch.Tensor) -> TensorInfo:
    """Describe a tensor's shape, dtype, device and bytes."""
    whole = _describe_whole(tensor.shape, tensor.dtype, tensor.device)
    if not tensor.is_sparse:
        return whole
    indices, values = tensor._indices(), tensor._values()
    indices_bytes = indices.numel() * indices.element_size()
    return msgspec.structs.replace(
        whole,
        payload_bytes=indices_bytes + values.numel() * values.element_size(),
        indices_bytes=indices_bytes if tensor.is_coalesced() else None,
        sparse=True,
    )


@lru_cache(4096)
def _describe_whole(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> TensorInfo:
    """Describe a tensor that is not sparse. Cached: a program repeats its shapes."""
    size = math.prod(shape) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return TensorInfo(tuple(shape), dtype=name, device=str(device), logical_bytes=size, payload_bytes=size)
