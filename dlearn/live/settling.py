"""When no rank of a held job will come to the gate by itself: read off what each rank says that it does."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from dlearn.live.keeper import Keeper
from dlearn.live.schedule import Name

QUIET_SECONDS = 0.5  # In which nothing happens, before a rank inside a call is believed.
ACTIVE_SHARE = 0.2  # Of that time: a rank whose threads run longer is on its way out of its call.
LOCKED_SECONDS = 5.0  # After which a function that runs for another rank is taken to wait at a lock.
TELL_SECONDS = 2.0  # After which it is said which ranks are waited for.

Activity = dict[str, Any]  # As dlearn/hooks/gate.py has it.
_numbers = itertools.count(1)


def settle(keeper: Keeper, enough: Callable[[float], object]) -> frozenset[Name] | None:
    """Wait until each rank waits at the gate, has ended, or is inside a call; return those that are inside.

    None as soon as `enough`, asked with the seconds that have passed, says so, or when there is trouble.
    """
    began = changed = time.monotonic()
    said, last = False, keeper.changes

    def is_over() -> bool:
        return bool(enough(time.monotonic() - began) or keeper.trouble)

    while not is_over():
        if keeper.all_wait():
            return frozenset()
        seen = keeper.changes
        before = _ask(keeper, is_over)
        _wait_for_quiet(keeper, seen, is_over)
        after = _ask(keeper, is_over)
        if seen != last:
            changed, last = time.monotonic(), seen
        with keeper.changed:
            # With something at the gate, it may be what the function waits for.
            locked = bool(keeper.calls) or time.monotonic() - changed >= LOCKED_SECONDS
            here = keeper.ended | {call.rank for call in keeper.calls}
            others = [name for name in keeper.names if name not in here]
            busy = [name for name in others if _may_come(before.get(name), after.get(name), locked)]
            if threading.get_ident() not in keeper.judged:  # Else a condition wants to know this.
                busy += [call.rank for call in dict(keeper.judged).values()]
            if keeper.changes == seen and keeper.names and not busy and not is_over():
                return frozenset(keeper.names) - here
        if busy and not said and time.monotonic() - began >= TELL_SECONDS:
            who = ", ".join(f"rank {name}" if isinstance(name, int) else name for name in busy)
            told = f"dlearn: waiting until {who} calls something (an interrupt ends this wait only)"
            print(told, file=sys.stderr, flush=True)
            said = True
    return None


def _wait_for_quiet(keeper: Keeper, seen: int, is_over: Callable[[], bool]) -> None:
    with keeper.changed:
        keeper.changed.wait_for(lambda: keeper.changes != seen or is_over(), QUIET_SECONDS)


def _ask(keeper: Keeper, is_over: Callable[[], bool]) -> dict[Name, Activity]:
    """Ask each rank what it does. One that has not answered in time computes, and lets no thread in."""
    number = next(_numbers)
    with keeper.changed:
        answers = keeper.answers[number] = {}
        asked = keeper.ask(number)
        keeper.changed.wait_for(lambda: is_over() or asked <= answers.keys() | keeper.ended, QUIET_SECONDS)
        return keeper.answers.pop(number)


def _may_come(before: Activity | None, after: Activity | None, locked: bool) -> bool:
    if before is None or after is None:
        return True
    active_ns = after["active_ns"] - before["active_ns"]
    serves = after["serves"] and not locked
    return bool(after["computes"] or serves or active_ns > ACTIVE_SHARE * QUIET_SECONDS * 1e9)
