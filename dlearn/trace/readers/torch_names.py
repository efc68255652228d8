"""What torch's own files call things, and what they are called here."""

from __future__ import annotations

import math

from dlearn.trace.event import TensorInfo

DTYPES = {
    "Double": ("float64", 8), "Float": ("float32", 4), "Half": ("float16", 2), "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8), "Int": ("int32", 4), "Short": ("int16", 2), "Char": ("int8", 1), "Byte": ("uint8", 1),
    "Bool": ("bool", 1), "ComplexFloat": ("complex64", 8), "ComplexDouble": ("complex128", 16),
    "UInt16": ("uint16", 2), "UInt32": ("uint32", 4), "UInt64": ("uint64", 8),
}  # fmt: skip
"""Names of C++, those of Python, and the bytes of an element; all others (Float8_e4m3fn ...) have one byte."""
IN_PLACE = ("all_reduce", "broadcast", "reduce")
"""What these get is what they were given."""
OPS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "_all_gather_base": "all_gather_single",
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "all_to_allv": "all_to_all_single",
}
"""NCCL's names where they are not those of torch.distributed."""


def tensors(sizes: list[list[int]], dtypes: list[str], device: str) -> tuple[TensorInfo, ...]:
    """Of the sizes of each, and of their types in C++."""
    found = []
    for shape, of_cpp in zip(sizes, dtypes, strict=False):
        dtype, item_bytes = DTYPES.get(of_cpp, (of_cpp, 1))
        size = item_bytes * math.prod(shape)
        found.append(TensorInfo(tuple(shape), dtype, device, size, size))
    return tuple(found)


def title(name: str, description: str) -> str:
    """ "TENSOR_MODEL_PARALLEL_GROUP 41": what people call it, and its name, for several have one description."""
    return f"{description} {name}" if description and description not in ("default_pg", "undefined") else name
