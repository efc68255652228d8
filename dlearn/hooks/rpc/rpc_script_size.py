"""How large TorchScript packs a call or a value: nobody in Python sees the bytes, but what they are made of.

A call of an operator ("builtin") or of a TorchScript function travels as one pickle (protocol 2): its arguments in the
order of its schema, and what is to be called (torch/csrc/jit/serialization/pickler.cpp, and script_call.cpp and
script_resp.cpp in torch/csrc/distributed/rpc). What has stood in a pickle once is only referred to again, a tensor too.
Counted are tensors, numbers, strings, None and remote references; of lists, tuples and dtypes the size is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._distributed_rpc import PyRRef

_RREF_ID = 2 * 2 + 1
"""Two small numbers in a tuple."""


def packed_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, remote: bool) -> int | None:
    """Bytes of a call without its tensors; None where they are not known."""
    schema, told = _callable(name, args, kwargs)
    arguments = schema.arguments
    given = {each.name: each.default_value for each in arguments if each.has_default_value()}
    given |= dict(zip([each.name for each in arguments], args, strict=False)) | dict(kwargs)
    values = [(given[each.name], str(each.type)) for each in arguments] + [(each, "") for each in told]
    count = len(values) + 2 * remote
    pickled = _pickled(values)
    # They are a tuple.
    return None if pickled is None else pickled + 2 * _RREF_ID * remote + (1 if count <= 3 else 2)


def _callable(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...]]:
    """The schema of what is called, and what tells the callee which it is. Of an operator it is the first that fits."""
    if not name.startswith("aten::"):
        function: Any = torch.jit._state._python_cu.find_function(name)
        return function.schema, (False, name)
    schema = next(each for each in torch._C._jit_get_schemas_for_operator(name) if _fits(each, args, kwargs))
    return schema, (str(schema), "torch.ops." + name.replace("::", "."))


def _fits(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        return torch._C._check_schema_allow_fake_script_object(schema, *args, **kwargs)
    except RuntimeError:
        return False


def packed_value(value: Any) -> int | None:
    """Bytes of a result without its tensors; None where they are not known."""
    return _pickled([(value, "")])


def _pickled(values: Sequence[tuple[Any, str]]) -> int | None:
    """Bytes of one pickle of these values, each with its type as the schema writes it; "" is any."""
    pickle = _Pickle()
    known = [pickle.add(value, type_) for value, type_ in values]
    return pickle.size if all(known) else None


class _Pickle:
    """The size of one pickle in bytes, as it grows."""

    def __init__(self) -> None:
        self.size = 3  # The protocol, and the end.
        self._seen: set[object] = set()

    def add(self, value: Any, type_: str) -> bool:
        """Add a value; returns whether its size is known."""
        if value is not None and "List[" in type_:
            return False
        match value:
            case torch.Tensor():
                if id(value) not in self._seen:
                    self._global("torch.jit._pickle", "build_tensor_from_id")
                self._once(id(value), 5)
            case None | bool():
                self.size += 1
            case int() if "float" not in type_:
                self.size += _whole_number(value)
            case int() | float():
                self.size += 9
            case str():
                self._once(value, 5 + len(value.encode()))
            case PyRRef() if type_.startswith("RRef["):
                self._global("torch.distributed.rpc", "rref")
                self._once(object(), 6 * 2 + 2)
                self.add(type_.removeprefix("RRef[")[:-1], "str")
            case _:
                return False
        return True

    def _global(self, module: str, name: str) -> None:
        self._once((module, name), 3 + len(module) + len(name))

    def _once(self, key: object, size: int) -> None:
        """Add what is referred to when it comes again: by a number, which stands behind it the first time."""
        self.size += 2 if key in self._seen else size + 2
        self._seen.add(key)


def _whole_number(value: int) -> int:
    return 2 if 0 <= value < 2**8 else 3 if 0 <= value < 2**16 else 5 if -(2**31) <= value < 2**31 else 10
