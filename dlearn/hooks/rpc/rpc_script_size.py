"""How large TorchScript packs a call or a value: nobody in Python sees the bytes, but what they are made of.

A call of an operator ("builtin") or of a TorchScript function travels as one pickle (protocol 2): its arguments in the
order of its schema, and what is to be called (torch/csrc/jit/serialization/pickler.cpp, and script_call.cpp and
script_resp.cpp in torch/csrc/distributed/rpc). What has stood in a pickle once is only referred to again, a tensor too.
Counted are tensors, numbers, strings, None and remote references; of lists, tuples and dtypes the size is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch._C._distributed_rpc import PyRRef

_RREF_ID = 2 * 2 + 1
"""Two small numbers in a tuple."""
_OPERATORS = "torch.ops."
_REQUIRED = object()


def packed_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, remote: bool) -> int | None:
    """Bytes of a call without its tensors; None for arguments that are not counted."""
    for arguments, what in _callables(name):
        if len(args) > len(arguments) or not kwargs.keys() <= {argument for argument, _, _ in arguments}:
            continue
        pickle = _Pickle()
        try:
            for place, (argument, type_, default) in enumerate(arguments):
                pickle.add(args[place] if place < len(args) else kwargs.get(argument, default), type_)
        except _Unusual:
            continue  # Another overload is meant, or a kind of value that is not known here.
        for each in what:
            pickle.add(each)
        count = len(arguments) + len(what) + 2 * remote
        size = pickle.size + 2 * _RREF_ID * remote + (1 if count <= 3 else 2)  # A tuple of them.
        return size if pickle.counted else None
    return None


def packed_value(value: Any) -> int | None:
    """Bytes of a result without its tensors; None for values that are not counted."""
    pickle = _Pickle()
    try:
        pickle.add(value)
    except _Unusual:
        return None
    return pickle.size


@lru_cache(1024)
def _callables(name: str) -> list[tuple[list[tuple[str, str, Any]], tuple[Any, ...]]]:
    """For each overload its arguments (name, type, default), and what tells the callee which it is."""
    if name.startswith("aten::"):
        schemas = torch._C._jit_get_schemas_for_operator(name)
        told: list[tuple[Any, ...]] = [(str(schema), _OPERATORS + name.replace("::", ".")) for schema in schemas]
    else:
        function: Any = torch.jit._state._python_cu.find_function(name)
        schemas = [function.schema] if function is not None else []
        told = [(False, name) for _ in schemas]
    return list(zip(map(_arguments, schemas), told, strict=True))


def _arguments(schema: Any) -> list[tuple[str, str, Any]]:
    defaults = [each.default_value if each.has_default_value() else _REQUIRED for each in schema.arguments]
    return [(each.name, str(each.type), default) for each, default in zip(schema.arguments, defaults, strict=True)]


class _Unusual(Exception):
    """A value whose size is not known here, or that is not of the type that was asked for."""


class _Pickle:
    """The size of one pickle in bytes, as it grows."""

    def __init__(self) -> None:
        self.size, self.counted = 3, True  # The protocol, and the end.
        self._seen: set[object] = set()

    def add(self, value: Any, type_: str = "") -> None:
        """A value, of the type as the schema writes it; "" is any."""
        if type_.startswith("Optional[") and value is not None:
            type_ = type_[len("Optional[") : -1]
        match value:
            case torch.Tensor() if type_ in ("", "Tensor"):
                if not self._again(id(value)):
                    self._global("torch.jit._pickle", "build_tensor_from_id")
                    self.size += 5
                    self._remember(id(value))
            case None if type_ in ("", "NoneType") or type_.startswith("Optional["):
                self.size += 1
            case bool() if type_ in ("", "bool"):
                self.size += 1
            case int() | float() if type_ == "float" or (isinstance(value, float) and type_ in ("", "number")):
                self.size += 9
            case int() if type_ in ("", "int", "number") and not isinstance(value, bool):
                self.size += _whole_number(value)
            case str() if type_ in ("", "str"):
                if not self._again(value):
                    self.size += 5 + len(value.encode())
                    self._remember(value)
            case PyRRef() if type_.startswith("RRef["):
                self._global("torch.distributed.rpc", "rref")
                self.size += 6 * 2 + 2
                self.add(type_[len("RRef[") : -1], "str")
                self._remember(object())
            case list() if type_.startswith("List["):
                self.counted = False
            case _:
                raise _Unusual

    def _global(self, module: str, name: str) -> None:
        if not self._again((module, name)):
            self.size += 3 + len(module) + len(name)
            self._remember((module, name))

    def _again(self, key: object) -> bool:
        if key in self._seen:
            self.size += 2
        return key in self._seen

    def _remember(self, key: object) -> None:
        self.size += 2
        self._seen.add(key)


def _whole_number(value: int) -> int:
    return 2 if 0 <= value < 2**8 else 3 if 0 <= value < 2**16 else 5 if -(2**31) <= value < 2**31 else 10
