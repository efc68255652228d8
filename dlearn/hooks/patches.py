"""Names of other people's modules and classes that a hook replaces and gives back; and calls that it reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.jit import _builtins

from dlearn.events.source import Emit, byte_strings
from dlearn.hooks.private import untraced

_Watch = Callable[..., object] | None


class Patches(ExitStack):
    """Names that were replaced, until it is closed.

    TorchScript compiles a call of `dist_autograd.backward` into an operator of its own, which it finds by the id of the
    function. What stands there now has that operator, too: such code compiles and runs as it does without us. (What it
    sends is in the agent's log; that it began, no Python sees.)
    """

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put what `make` makes of what stands there in its place."""
        before = owner.__dict__[name]
        after = make(before)
        operator = _builtins._find_builtin(before)  # type: ignore[no-untyped-call]
        if operator is not None:
            _builtins._register_builtin(after, operator)
            # Its id may be another function's later.
            self.callback(_builtins._get_builtin_table().pop, id(after), None)  # type: ignore[no-untyped-call]
        setattr(owner, name, after)
        self.callback(setattr, owner, name, before)

    def around(self, emit: Emit, owner: Any, name: str, *, before: _Watch = None, after: _Watch = None) -> None:
        """Call `before` with a call's arguments, `after` with its result and these; neither can break it."""

        def make(original: Any) -> Any:
            @untraced
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                if before is not None:
                    guarded(emit, name, before, *args, **kwargs)
                result = original(*args, **kwargs)
                if after is not None:
                    guarded(emit, name, after, result, *args, **kwargs)
                return result

            return wrapper

        self.replace(owner, name, make)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Put this in its place."""
        self.replace(owner, name, lambda _: value)


def guarded(emit: Emit, where: str, do: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """Call `do`; what goes wrong in it never reaches the program."""
    try:
        do(*args, **kwargs)
    except Exception as error:
        emit.failed(where, error)


@contextmanager
def ended(emit: Emit, number: int | None) -> Iterator[dict[str, Any]]:
    """Report the end of event `number`, if it is one: with what was put into the dict, or with the error."""
    facts: dict[str, Any] = {}
    try:
        yield facts
    except BaseException as error:
        facts = {"error": type(error).__name__}
        raise
    finally:
        if number is not None:
            emit.end(number, by="return", **facts)


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
        with ended(emit, number) as facts:
            result = call(*args, **kwargs)
            guarded(emit, "the end of a call", lambda: facts.update(outputs=byte_strings(result)))
        return result

    return wrapper
