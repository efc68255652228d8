"""Names of other people's modules and classes that a hook replaces and gives back; and calls that it reports."""

import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch.jit import _builtins

from dlearn.events.source import Emit, byte_strings
from dlearn.hooks.private import untraced

_Watch = Callable[..., object] | None


class Patches(ExitStack):
    """Names of torch or mpi4py that are replaced until this is closed.

    TorchScript compiles a call of `dist_autograd.backward` into an operator of its own, which it
    finds by the id of the function. The replacement is registered for that operator, too: such code
    compiles and runs as without us. (Its messages are in the agent's log; no Python sees the start.)
    """

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace `owner.name` by what `make` makes of it."""
        before = owner.__dict__[name]
        after = make(before)
        operator = _builtins._find_builtin(before)  # type: ignore[no-untyped-call]
        if operator is not None:
            _builtins._register_builtin(after, operator)
            # Its id may be another function's later.
            table = _builtins._get_builtin_table()  # type: ignore[no-untyped-call]
            self.callback(table.pop, id(after), None)
        setattr(owner, name, after)
        self.callback(setattr, owner, name, before)

    def wrap(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        """Replace `owner.name` by a function that gives `call` the original and its arguments."""

        def make(original: Any) -> Any:
            @wraps(original)  # TorchScript reads the source of record_function behind it.
            @untraced
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                return call(original, *args, **kwargs)

            return staticmethod(wrapper) if isinstance(original, staticmethod) else wrapper

        self.replace(owner, name, make)

    def around(self, emit: Emit, owner: Any, name: str, *, before: _Watch = None, after: _Watch = None) -> None:
        """Call `before` with the arguments, `after` with result and arguments, both guarded."""

        def call(original: Any, *args: Any, **kwargs: Any) -> Any:
            if before is not None:
                guarded(emit, name, before, *args, **kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                guarded(emit, name, after, result, *args, **kwargs)
            return result

        self.wrap(owner, name, call)


def guarded(emit: Emit, where: str, do: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `do` returns; None if it raises, which is reported to `emit.failed`."""
    try:
        return do(*args, **kwargs)
    except Exception as error:
        emit.failed(where, error)


@contextmanager
def ended(emit: Emit, number: int | None) -> Iterator[dict[str, Any]]:
    """Report the end of event `number`, if any, with the facts put into the dict or the error."""
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
    """Make a function that does as `call`, and reports it where `begins` returns a number."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with ended(emit, guarded(emit, "a call", begins, *args, **kwargs)) as facts:
            result = call(*args, **kwargs)
            guarded(emit, "the end of a call", lambda: facts.update(outputs=byte_strings(result)))
        return result

    return wrapper


class AfterImport(MetaPathFinder):
    """Calls `then` once the program has imported a module, which dlearn never imports itself."""

    def __init__(self, module: str, then: Callable[[], None], emit: Emit) -> None:
        self._module, self._then, self._emit = module, then, emit
        self._asking = False
        if module in sys.modules:
            then()
        else:
            sys.meta_path.insert(0, self)

    @untraced
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._module or self._asking:
            return None
        self._asking = True  # mpi4py has a finder of its own, which looks for the MPI that is installed.
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(self._exec, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec

    def _exec(self, run: Callable[[ModuleType], None], module: ModuleType) -> None:
        run(module)
        if self in sys.meta_path:
            self.go()
            guarded(self._emit, self._module, self._then)

    def go(self) -> None:
        with suppress(ValueError):
            sys.meta_path.remove(self)
