"""What a rank answers when its function is over: the value, or what was raised."""

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from dlearn.cluster.payload import Environment, is_installed

MOST_TEXT = 8000


@dataclass(frozen=True)
class Returned:
    """The function returned, or called `sys.exit()`. `value` is pickled, and None for a rank that only served."""

    value: bytes | None
    exited: bool = False


@dataclass(frozen=True)
class Raised:
    """The function raised: class, message and traceback as text."""

    type: str
    message: str
    traceback: str
    at_ns: int


def answer_of_call(
    function: Callable[..., Any] | None, args: tuple[Any, ...], around: Environment
) -> Returned | Raised:
    """Call the function. A copy of this process that it forks ends here: only the rank answers."""
    import cloudpickle

    if function is None:
        return Returned(None)
    rank = os.getpid()
    try:
        value = function(*args)
    except BaseException as error:
        if os.getpid() != rank:
            _end_copy(error, around)
        raise
    if os.getpid() != rank:
        _end_copy(SystemExit(), around)
    try:
        return Returned(cloudpickle.dumps(value))
    except Exception as error:  # Any object's own __reduce__ may raise anything.
        message = f"the result, a {type(value).__name__}, cannot be sent back: {error}"
        return Raised(type(error).__name__, message, "", time.monotonic_ns())


def _end_copy(error: BaseException, around: Environment) -> NoReturn:
    """End this process as Python does at the end of a script."""
    left = error.code if isinstance(error, SystemExit) else _traceback_text(error, around).rstrip()
    if left is not None and not isinstance(left, int):
        with suppress(Exception):  # See `flush`.
            print(left, file=sys.stderr)
        left = 1
    flush()
    os._exit((left or 0) & 0xFF)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The function may have closed them, or put anything in their place.
        with suppress(Exception):
            stream.flush()


def answer_of_exception(error: BaseException, around: Environment) -> Returned | Raised:
    """Return what ended the function; in a traceback cells have the names that the notebook shows."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return Returned(None, exited=True)
    text = _traceback_text(error, around)
    try:
        message = str(error)
    except Exception as failure:  # Any exception's own __str__ may raise anything.
        message = f"(its text cannot be made: {type(failure).__name__})"
    return Raised(type(error).__name__, _cut(message), text, time.monotonic_ns())


def _traceback_text(error: BaseException, around: Environment) -> str:
    whole = traceback.TracebackException.from_exception(error)
    _shorten(whole)
    text = _cut("".join(whole.format()))
    for file, (name, _) in around.cells.items():
        text = text.replace(f'File "{file}"', f"Cell {name}")
    return text


def name_of_end(outcome: Returned | Raised) -> str:
    """Return the class of the exception that ended the function; "" if it returned."""
    if isinstance(outcome, Raised):
        return outcome.type
    return SystemExit.__name__ if outcome.exited else ""


def _cut(text: str) -> str:
    """Return the text, or the beginning and the end of a long one."""
    if len(text) <= MOST_TEXT:
        return text
    half = MOST_TEXT // 2
    return f"{text[:half]}\n... {len(text) - MOST_TEXT:,} characters left out ...\n{text[-half:]}"


def _shorten(error: traceback.TracebackException | None) -> None:
    """Keep the user's own lines and the last one: leave out those of torch and dlearn between."""
    while error is not None:
        own = [frame for frame in error.stack[:-1] if not is_installed(frame.filename)]
        error.stack = traceback.StackSummary.from_list(own + error.stack[-1:])
        for member in error.exceptions or ():  # Of an ExceptionGroup.
            _shorten(member)
        error = error.__cause__ or error.__context__
