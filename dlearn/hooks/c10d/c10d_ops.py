"""The communication ops of torch.distributed: their names, and where their arguments stand in the installed torch."""

import ctypes
import math
import zlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
import torch
from torch._C._distributed_c10d import Work

from dlearn.events.event import TensorInfo
from dlearn.hooks.private import unfit

NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_single",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_single_coalesced",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_single_coalesced",
    "gather_": "gather",
    "gather_into_tensor_": "gather_single",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier_": "monitored_barrier",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}
if not hasattr(torch.ops.c10d, "gather_into_tensor_"):  # Only the newest versions of torch have it.
    del NAMES["gather_into_tensor_"]


class Signature:
    """Where an op's arguments and its Work stand, read from the schema of the installed torch."""

    def __init__(self, schema: str) -> None:
        packet = getattr(torch.ops.c10d, schema, None)
        if packet is None:
            raise unfit(f"it has no op c10d::{schema}")
        overload = packet.default
        self.name = NAMES[schema]
        arguments = overload._schema.arguments
        index = {argument.name: number for number, argument in enumerate(arguments)}
        data = [argument.name for argument in arguments if "Tensor" in str(argument.type)]
        gives = (index[name] for name in data if name.startswith(("tensors", "input")))
        gets = (index[name] for name in data if name.startswith("output"))
        self.gives, self.gets = next(gives, None), next(gets, None)
        is_known = "tensors" in index or "barrier" in schema or None not in (self.gives, self.gets)
        if not is_known or "process_group" not in index:
            raise unfit(f"its c10d::{schema} has other arguments: {', '.join(index)}")
        self.group = index["process_group"]
        self.root, self.peer = index.get("root_rank"), index.get("dst", index.get("src"))
        self.tag, self.is_p2p = index.get("tag", -1), "tag" in index
        splits, takes = index.get("input_split_sizes"), index.get("output_split_sizes")
        self._parts = {"splits": (splits, self.gives), "takes": (takes, self.gets)}
        self._async_op = index.get("async_op")
        self.redispatch = overload._handle.redispatch_boxed
        returns = [str(value.type).endswith("c10d.Work") for value in overload._schema.returns]
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

    def parts(self, args: tuple[Any, ...]) -> dict[str, tuple[int, ...]]:
        """Return the bytes for (`splits`) and from (`takes`) each group rank, where given, of an all-to-all."""
        found = {}
        for name, (rows, where) in self._parts.items():
            counts = args[rows] if rows is not None and rows < len(args) else ()
            if counts:
                (tensor,) = tensors_of(args, where)
                row_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
                found[name] = tuple([int(count) * row_bytes for count in counts])
        return found

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


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return offset and size in bytes of a tensor's storage; (0, 0) if it is all of it."""
    if tensor.is_sparse:
        return 0, 0
    whole = tensor.untyped_storage().nbytes()
    if whole == tensor.numel() * tensor.element_size():
        return 0, 0
    return int(tensor.storage_offset()) * tensor.element_size(), whole


def checksum(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the CRC-32 of dense tensors on the CPU as they are sent, of several of their sums."""
    sums = []
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.is_sparse or not tensor.is_contiguous():
            return None
        size = bytes_of([tensor])
        data = (ctypes.c_ubyte * size).from_address(tensor.data_ptr()) if size else b""
        sums.append(zlib.crc32(data))
    if len(sums) > 1:
        return zlib.crc32(repr(sums).encode())
    return sums[0] if sums else None


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Count the logical bytes of the tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def tensors_of(args: tuple[Any, ...], index: int | None) -> Sequence[torch.Tensor]:
    """Return the tensors in an argument, which is absent where it equals its default."""
    if index is None or index >= len(args):
        return ()
    argument = args[index]
    if isinstance(argument, torch.Tensor):
        return (argument,)
    if argument and not isinstance(argument[0], torch.Tensor):
        return [tensor for tensors in argument for tensor in tensors]
    return argument  # type: ignore[no-any-return]


def describe_one(tensor: torch.Tensor) -> TensorInfo:
    whole = _describe_whole(tensor.shape, tensor.dtype, tensor.device)
    if not tensor.is_sparse:
        return whole
    indices, values = tensor._indices(), tensor._values()
    return msgspec.structs.replace(
        whole,
        payload_bytes=indices.nbytes + values.nbytes,
        indices_bytes=indices.nbytes if tensor.is_coalesced() else None,
        sparse=True,
    )


@lru_cache(4096)
def _describe_whole(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> TensorInfo:
    """Describe a tensor that is not sparse. Cached: a program repeats its shapes."""
    size = math.prod(shape) * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    return TensorInfo(tuple(shape), dtype=name, device=str(device), logical_bytes=size, payload_bytes=size)
