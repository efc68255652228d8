"""What a rank answers when its function is over: the value, or what was raised."""

from __future__ import annotations

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


def call_on_rank(function: Callable[..., Any], args: tuple[Any, ...], around: Environment) -> Any:
    """Call the function. A copy of this process that it forks ends here: only the rank answers."""
    rank = os.getpid()
    try:
        value = function(*args)
    except BaseException as error:
        if os.getpid() != rank:
            _end_copy(error, around)
        raise
    if os.getpid() != rank:
        _end_copy(SystemExit(), around)
    return value


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


def answer_of_value(value: Any) -> Returned | Raised:
    import cloudpickle

    try:
        return Returned(cloudpickle.dumps(value))
    except Exception as error:  # Any object's own __reduce__ may raise anything.
        message = f"the result, a {type(value).__name__}, cannot be sent back: {error}"
        return Raised(type(error).__name__, message, "", time.monotonic_ns())


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
    story = traceback.TracebackException.from_exception(error)
    _shorten(story)
    text = _cut("".join(story.format()))
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


def _shorten(story: traceback.TracebackException | None) -> None:
    """Keep the user's own lines and the last one: what lies between, torch's and ours, is a wall, not a story."""
    while story is not None:
        last = story.stack[-1:]
        told = [frame for frame in story.stack[:-1] if not is_installed(frame.filename)]
        story.stack = traceback.StackSummary.from_list(told + last)
        for member in story.exceptions or ():  # Of an ExceptionGroup.
            _shorten(member)
        story = story.__cause__ or story.__context__
