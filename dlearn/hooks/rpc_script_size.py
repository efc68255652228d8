"""How large TorchScript packs a call: nobody in Python sees the bytes, but what they are made of.

A call of a TorchScript function travels as a pickle (protocol 2) of its arguments, in the order of its schema, a flag
and its name (torch/csrc/jit/serialization/pickler.cpp, torch/csrc/distributed/rpc/script_call.cpp).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_rpc import PyRRef

_ENDS = 5
"""Protocol, mark, tuple, stop."""
_FLAG = 1
_MEMO = 2
_STRING = 5
_FIRST_TENSOR, _NEXT_TENSOR = 49, 9
_RREF = 28 + _MEMO + 1 + 6 * 2 + 2 + _MEMO
"""Its class, six small numbers in a tuple, the call that makes it; without the name of its type."""


def packed_bytes(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """Bytes of the payload without tensors; None for arguments of other kinds than those that are usual."""
    function: Any = torch.jit._state._python_cu.find_function(name)
    if function is None:
        return None
    size = _ENDS + _FLAG + _STRING + len(name.encode()) + _MEMO
    tensors = 0
    for place, argument in enumerate(function.schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name, argument.default_value)
        if isinstance(value, torch.Tensor):
            size += _NEXT_TENSOR if tensors else _FIRST_TENSOR
            tensors += 1
        elif isinstance(value, PyRRef):
            size += _RREF + _STRING + len(str(argument.type).removeprefix("RRef[").removesuffix("]")) + _MEMO
        else:
            known = _plain(value)
            if known is None:
                return None
            size += known
    return size


def _plain(value: object) -> int | None:
    match value:
        case bool() | None:
            return 1
        case int():
            return 2 if 0 <= value < 2**8 else 3 if 0 <= value < 2**16 else 5 if -(2**31) <= value < 2**31 else 10
        case float():
            return 9
        case str():
            return _STRING + len(value.encode()) + _MEMO
    return None
