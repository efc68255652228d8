"""Names of other people's modules and classes that a hook replaces and gives back; and calls that it reports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.jit import _builtins

from dlearn.hooks import Undo
from dlearn.trace.source import Emit, byte_strings


class Patches:
    """Names that were replaced, and what stood there.

    TorchScript compiles a call of `dist_autograd.backward` into an operator of its own, which it finds by the id of the
    function. What stands there now has that operator, too: such code compiles and runs as it does without us. (What it
    sends is in the agent's log; that it began, no Python sees.)
    """

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = owner.__dict__[name]
        after = make(before)
        operator = _builtins._find_builtin(before)  # type: ignore[no-untyped-call]
        if operator is not None:
            _builtins._register_builtin(after, operator)
        self._replaced.append((owner, name, before, after))
        setattr(owner, name, after)

    def undo(self) -> None:
        while self._replaced:
            owner, name, before, after = self._replaced.pop()
            setattr(owner, name, before)
            # Its id may be another function's later.
            _builtins._get_builtin_table().pop(id(after), None)  # type: ignore[no-untyped-call]


def replaced(owner: Any, name: str, after: Any) -> Undo:
    """Put `after` in the place of a name that TorchScript does not know, until the returned function is called."""
    before = getattr(owner, name)
    setattr(owner, name, after)
    return partial(setattr, owner, name, before)


def reported(call: Callable[..., Any], emit: Emit, begins: Callable[..., int | None]) -> Callable[..., Any]:
    """Make a function that does what `call` does, and reports when it begins, and when it returns or raises.

    `begins` gets its arguments and returns the event's number, or None to pass over this call. What goes wrong in it
    never reaches the program.
    """

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        number = None
        try:
            number = begins(*args, **kwargs)
        except Exception as error:
            emit.failed("a call", error)
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            if number is not None:
                emit.end(number, by="return", error=type(error).__name__)
            raise
        if number is not None:
            try:
                emit.end(number, by="return", outputs=byte_strings(result))
            except Exception as error:
                emit.failed("the end of a call", error)
        return result

    return wrapper
