"""Small RPC programs that, together, make torch send every kind of message it has. Light to import: every rank does.

A program has its workers' names, and functions for those that do not only serve. Which messages a program makes is the
same in every run; when, and in which order, is not. `PROGRAMS` has them by name.
"""

import gc
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import TestCase

import rpc_jobs
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc

RRef = Any


@dataclass(frozen=True)
class Program:
    names: tuple[str, ...]
    functions: dict[str, Callable[[], object]]
    crowded: bool = False
    """References are taken in and dropped at the same moment, or while a context ends: then one looks like another."""


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script`")  # It is deprecated; RPC still takes it.

    @torch.jit.script
    def scale(x: torch.Tensor, by: int) -> torch.Tensor:
        return x * by


def pass_on(route: list[str], x: torch.Tensor) -> torch.Tensor:
    """Through a function once at every worker of the route."""
    return torch.tanh(x) if not route else torch.tanh(rpc.rpc_sync(route[0], pass_on, (route[1:], x)))


@rpc.functions.async_execution
def later(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """The reply goes when a timer says so, not when the function returns."""
    answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    threading.Timer(0.01, lambda: answer.set_result(x + 1)).start()
    return answer


@rpc.functions.async_execution
def by_way_of(to: str, *args: Any) -> torch.futures.Future[torch.Tensor]:
    """The reply goes when another worker's has come, from the thread that took that one in."""
    return rpc.rpc_async(to, torch.add, args).then(lambda other: other.wait() * 2)


class Counter:
    """Lives on one worker, is counted up by others."""

    def __init__(self, value: int = 0) -> None:
        self.value, self._lock = value, threading.Lock()

    def add(self, number: int) -> int:
        with self._lock:
            self.value += number
            return self.value


def call_in_every_way(x: torch.Tensor, workers: str = "bca") -> torch.Tensor:
    """sync, async and remote; a Python function, a builtin, a TorchScript function; to others and to oneself."""
    found = []
    for to in workers:
        for function, args in ((double, (x,)), (torch.add, (x, 1)), (scale, (x, 3))):
            found.append(rpc.rpc_sync(to, function, args))
            found.append(rpc.rpc_async(to, function, args).wait())
            found.append(rpc.remote(to, function, args).to_here())
        rpc.rpc_sync(to, gc.collect)
        found.append(rpc.rpc_sync(to, later, (x,)))
        found.append(rpc.rpc_sync(to, by_way_of, ("b", x, 1)))
        counter = rpc.remote(to, Counter, (3,))
        counter.rpc_sync().add(1)
        counter.rpc_async().add(2).wait()
        assert counter.remote().add(4).to_here() == 10
    found.append(rpc.rpc_sync("b", pass_on, (["c", "a", "b"], x)))
    return torch.stack(found).sum()


def differentiate_everything() -> None:
    """In three contexts at the same time; in one that nobody else comes to know of; and in one whose call fails."""
    with ThreadPoolExecutor(3) as threads:
        list(threads.map(differentiate, (2, 3, 4)))
    with dist_autograd.context():
        torch.ones(2, requires_grad=True).sum()
    with dist_autograd.context() as context:  # The loss lives elsewhere, and so begins the backward pass.
        rpc.remote("c", torch.sum, (torch.ones(5, requires_grad=True),)).backward(context)
    with dist_autograd.context():
        raises(ValueError, rpc.rpc_sync, "b", fail, ("wrong",))


def differentiate(rows: int) -> None:
    with dist_autograd.context() as context:
        x = torch.full((rows, 8), 0.5, requires_grad=True)
        dist_autograd.backward(context, [call_in_every_way(x, "bc")])


def fail(text: str) -> None:
    raise ValueError(text)


raises = TestCase().assertRaises


def meet_failures() -> None:
    """Python's exceptions are values of a reply, those of C++ a kind of message. A reply may come too late."""
    wrong = (torch.ones(2, 3), torch.ones(4, 5))
    for to in ("b", "c", "a"):
        raises(ValueError, rpc.rpc_sync, to, fail, ("wrong",))
        raises(RuntimeError, rpc.rpc_sync, to, torch.mm, wrong)
        raises(ValueError, rpc.remote(to, fail, ("wrong",)).to_here)
        raises(RuntimeError, rpc.remote(to, torch.mm, wrong).to_here)
        raises(Exception, rpc.rpc_sync, to, Counter)  # It has a lock, which cannot be packed.
        raises(Exception, rpc.rpc_sync, to, by_way_of, (to, *wrong))
        raises(RuntimeError, rpc.rpc_sync, to, by_way_of, ("nobody", torch.ones(2)))
    raises(ValueError, rpc.rpc_sync, "b", rpc.rpc_sync, ("c", fail, ("wrong",)))
    in_time = [rpc.rpc_async("b", double, (torch.ones(2),)) for _ in range(5)]
    too_late = [rpc.rpc_async("b", time.sleep, (0.3,), timeout=0.05) for _ in range(3)]
    for each in too_late:
        raises(RuntimeError, each.wait)
    torch.futures.wait_all(in_time)
    time.sleep(0.5)  # Replies come that nobody waits for any more.


def value_of(counter: RRef) -> int:
    return counter.rpc_sync().add(0) if not counter.is_owner() else counter.local_value().value


def hand_on(counter: RRef, route: list[str]) -> int:
    """From user to user, and back to its owner if that is on the route."""
    return value_of(counter) if not route else rpc.rpc_sync(route[0], hand_on, (counter, route[1:]))


def as_given(*given: Any) -> Any:
    return given


def counter_at(owner: str, value: int) -> RRef:
    """An RRef whose owner is a third worker, as a result."""
    return rpc.remote(owner, Counter, (value,))


def share_references() -> None:
    """Handed to the owner, to a third, from user to user, as results, inside other RRefs, and to oneself."""
    counter, mine = rpc.remote("b", Counter, (7,)), rpc.RRef(Counter(5))
    for to in ("a", "b", "c"):
        assert rpc.rpc_sync(to, value_of, (counter,)) == 7
        assert rpc.rpc_sync(to, value_of, (mine,)) == 5
        assert rpc.rpc_sync(to, as_given, (counter, mine, counter))[0].rpc_sync().add(0) == 7
        assert rpc.rpc_sync(to, counter_at, ("d", 8)).rpc_sync().add(0) == 8
        assert rpc.rpc_sync(to, counter_at, ("a", 9)).local_value().value == 9
    assert rpc.rpc_sync("c", hand_on, (counter, ["d", "b"])) == 7  # on and on, and home
    assert rpc.rpc_sync("c", hand_on, (mine, ["d"])) == 5
    boxed = rpc.remote("c", counter_at, ("d", 1))  # an RRef of an RRef
    assert boxed.to_here().rpc_sync().add(0) == 1
    rpc.remote("c", hand_on, (counter, ["d"])).to_here()
    delete(("b", "c"))


def delete(others: tuple[str, ...]) -> None:
    """RRefs come and go, here by `del`, there by the garbage collector, while two threads call without a pause."""
    kept: list[RRef] = []
    with ThreadPoolExecutor(2) as threads:
        calling = threads.map(lambda to: rpc.rpc_sync(to, double, (torch.ones(2),)), others * 6)
        for number in range(16):
            kept.append(rpc.remote(others[number % 2], Counter, (number,)))
            around: list[object] = [rpc.remote(others[0], torch.add, (torch.ones(2), number))]
            around.append(around)  # Only the garbage collector finds it.
            if number % 4 == 3:
                rpc.rpc_sync(others[0], as_given, tuple(kept[-2:]))
                del kept[:2]
                gc.collect()
        kept.clear()
        list(calling)
    gc.collect()


DELETE = partial(delete, ("c", "a"))
TRAIN = partial(rpc_jobs.train, steps=10)
PROGRAMS = {
    "failures": Program(("a", "b", "c"), {"a": meet_failures}),
    "training": Program(("ps", "trainer1", "trainer2"), {"trainer1": TRAIN, "trainer2": TRAIN}),
    "graphs": Program(("w0", "w1", "w2"), {"w0": rpc_jobs.eight_cases}),
    "calls": Program(("a", "b", "c"), {"a": partial(call_in_every_way, torch.ones(3, 4))}),
    "contexts": Program(("a", "b", "c"), {"a": differentiate_everything}, crowded=True),
    "references": Program(("a", "b", "c", "d"), {"a": share_references, "d": DELETE}, crowded=True),
}
