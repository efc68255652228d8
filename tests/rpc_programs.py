"""Small RPC programs that, together, make torch send every kind of message it has. Light to import: every rank does.

Each is for `Cluster(program.names, rpc=True).run(program.functions)`; a name without a function only serves. Which
messages a program makes is the same in every run; when, and in which order, is not. `PROGRAMS` has them by name.
"""

from __future__ import annotations

import gc
import random
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import rpc_jobs
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch import nn

RRef = Any


@dataclass(frozen=True)
class Program:
    names: tuple[str, ...]
    functions: dict[str, Callable[[], object]]


# What the programs call -----------------------------------------------------------------------------------------------


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def nothing() -> None:
    """A call without arguments and without a result."""


with warnings.catch_warnings():
    warnings.filterwarnings("ignore", "`torch.jit.script`")  # It is deprecated; RPC still takes it.

    @torch.jit.script
    def scale(x: torch.Tensor, by: int) -> torch.Tensor:
        return x * by


def fail(text: str) -> None:
    raise ValueError(text)


@rpc.functions.async_execution
def fail_later(to: str) -> torch.futures.Future[torch.Tensor]:
    wrong = (torch.ones(2, 3), torch.ones(2, 3))
    return rpc.rpc_async(to, torch.mm, wrong).then(lambda other: other.wait() * 2)


def slow(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def raises(error: type[Exception], call: Callable[[], object]) -> None:
    """The call must fail, as it is meant to."""
    try:
        call()
    except error:
        return
    raise AssertionError(f"no {error.__name__} from {call}")


def pass_on(route: list[str], x: torch.Tensor) -> torch.Tensor:
    """Doubled once at every worker of the route."""
    return double(x) if not route else double(rpc.rpc_sync(route[0], pass_on, (route[1:], x)))


@rpc.functions.async_execution
def later(x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """The reply goes when a timer says so, not when the function returns."""
    answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    threading.Timer(0.01, lambda: answer.set_result(x + 1)).start()
    return answer


@rpc.functions.async_execution
def by_way_of(to: str, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """The reply goes when another worker's has come, from the thread that took that one in."""
    return rpc.rpc_async(to, torch.add, (x, 1)).then(lambda other: other.wait() * 2)


class Counter:
    """Lives on one worker, is counted up by others."""

    def __init__(self, value: int = 0) -> None:
        self.value, self._lock = value, threading.Lock()

    def add(self, number: int) -> int:
        with self._lock:
            self.value += number
            return self.value

    def get(self) -> int:
        return self.value

    @rpc.functions.async_execution
    def add_later(self, number: int) -> torch.futures.Future[int]:
        answer: torch.futures.Future[int] = torch.futures.Future()
        answer.set_result(self.add(number))
        return answer


# Every way to call ----------------------------------------------------------------------------------------------------


def call_in_every_way() -> None:
    """sync, async and remote; a Python function, a builtin, a TorchScript function; to others and to oneself."""
    x = torch.ones(3, 4)
    for to in ("b", "c", "a"):
        for function, args in ((double, (x,)), (torch.add, (x, 1)), (scale, (x, 3))):
            rpc.rpc_sync(to, function, args)
            rpc.rpc_async(to, function, args).wait()
            rpc.remote(to, function, args).to_here()
        rpc.rpc_sync(to, nothing)
        rpc.rpc_sync(to, later, (x,))
        rpc.rpc_sync(to, by_way_of, ("b", x))
        rpc.rpc_sync(to, torch.add, args=(x, x), kwargs={"alpha": 2})
        counter = rpc.remote(to, Counter, (3,))
        counter.rpc_sync().add(1)
        counter.rpc_async().add(2).wait()
        counter.rpc_sync().add_later(3)
        assert counter.remote().add(4).to_here() == 13
    rpc.rpc_sync("b", pass_on, (["c", "a", "b"], x))
    torch.futures.wait_all([rpc.rpc_async("c", double, (torch.ones(size),)) for size in range(1, 11)])


# What goes wrong ------------------------------------------------------------------------------------------------------


def meet_failures() -> None:
    """Python's exceptions are values of a reply, those of C++ a kind of message. A reply may come too late."""
    wrong = (torch.ones(2, 3), torch.ones(2, 3))
    for to in ("server", "other", "client"):
        raises(ValueError, lambda to=to: rpc.rpc_sync(to, fail, ("wrong",)))
        raises(ValueError, lambda to=to: rpc.rpc_async(to, fail, ("wrong",)).wait())
        raises(ValueError, lambda to=to: rpc.remote(to, fail, ("wrong",)).to_here())
        raises(RuntimeError, lambda to=to: rpc.rpc_sync(to, torch.mm, wrong))
        raises(RuntimeError, lambda to=to: rpc.remote(to, torch.mm, wrong).to_here())
        raises(Exception, lambda to=to: rpc.rpc_sync(to, fail_later, (to,)))
        raises(Exception, lambda to=to: rpc.rpc_sync(to, Counter))  # It has a lock, which cannot be packed.
        raises(RuntimeError, lambda to=to: rpc.rpc_sync(to, by_way_of, ("nobody", torch.ones(2))))
        rpc.rpc_sync(to, double, (torch.ones(2),))
    raises(ValueError, lambda: rpc.rpc_sync("server", rpc.rpc_sync, ("other", fail, ("wrong",))))
    in_time = [rpc.rpc_async("server", double, (torch.ones(2),)) for _ in range(5)]
    too_late = [rpc.rpc_async("server", slow, (0.3,), timeout=0.05) for _ in range(3)]
    for each in too_late:
        raises(RuntimeError, each.wait)
    torch.futures.wait_all(in_time)
    time.sleep(0.5)  # Replies come that nobody waits for any more.
    counter = rpc.remote("other", Counter)
    raises(AttributeError, lambda: counter.rpc_sync().no_such_method())
    raises(TypeError, lambda: counter.rpc_sync().add())
    raises(Exception, counter.to_here)
    assert counter.rpc_sync().add(1) == 1


# Remote references ----------------------------------------------------------------------------------------------------


def value_of(counter: RRef) -> int:
    return counter.rpc_sync().get() if not counter.is_owner() else counter.local_value().get()


def look_at(*counters: RRef) -> int:
    return len(counters)


def hand_on(counter: RRef, route: list[str]) -> int:
    """From user to user, and back to its owner if that is on the route."""
    return value_of(counter) if not route else rpc.rpc_sync(route[0], hand_on, (counter, route[1:]))


def give_back(counter: RRef) -> RRef:
    return counter


def fetch(tensor: RRef) -> torch.Tensor:
    return tensor.to_here()


def own_number(value: int) -> RRef:
    """An RRef that the callee owns, as a result."""
    return rpc.RRef(value)


def counter_at(owner: str, value: int) -> RRef:
    """An RRef whose owner is a third worker, as a result."""
    return rpc.remote(owner, Counter, (value,))


def share_references() -> None:
    """Handed to the owner, to a third, from user to user, in lists, as results, inside other RRefs, and to oneself."""
    counter = rpc.remote("b", Counter, (7,))
    assert rpc.rpc_sync("b", value_of, (counter,)) == 7  # to its owner
    assert rpc.rpc_sync("c", value_of, (counter,)) == 7  # to a third
    assert rpc.rpc_sync("c", hand_on, (counter, ["d", "b"])) == 7  # on and on, and home
    assert rpc.rpc_sync("a", value_of, (counter,)) == 7  # to oneself
    mine = rpc.RRef(Counter(5))
    for to in ("b", "c", "a"):
        assert rpc.rpc_sync(to, value_of, (mine,)) == 5
    assert rpc.rpc_sync("c", hand_on, (mine, ["d"])) == 5
    for to in ("b", "c"):
        assert rpc.rpc_sync(to, give_back, (counter,)).rpc_sync().get() == 7
        assert rpc.rpc_sync(to, own_number, (6,)).to_here() == 6
        assert rpc.rpc_sync(to, counter_at, ("d", 8)).rpc_sync().get() == 8
        assert rpc.rpc_sync(to, counter_at, ("a", 9)).local_value().get() == 9
    assert rpc.rpc_sync("d", look_at, (counter, mine, counter)) == 3
    total = rpc.remote("b", torch.add, (torch.ones(4), 1))
    total.to_here()
    total.to_here()
    assert rpc.rpc_sync("c", fetch, (total,)).sum() == 8
    boxed = rpc.remote("c", counter_at, ("d", 1))  # an RRef of an RRef
    assert boxed.to_here().rpc_sync().get() == 1
    rpc.remote("c", hand_on, (counter, ["d"])).to_here()


def delete_at_random(others: tuple[str, ...], seed: int) -> None:
    """RRefs come and go, here by `del`, there by the garbage collector, while two threads call without a pause."""
    choose = random.Random(seed)
    done = threading.Event()
    kept: list[RRef] = []

    def keep_calling(to: str) -> None:
        for _ in range(6):
            rpc.rpc_sync(to, double, (torch.ones(2),))
        done.wait()

    threads = [threading.Thread(target=keep_calling, args=(other,)) for other in others]
    for thread in threads:
        thread.start()
    for number in range(16):
        kept.append(rpc.remote(others[number % 2], Counter, (number,)))
        if number % 4 == 3:
            rpc.rpc_sync(others[0], look_at, tuple(kept[-2:]))
        if choose.random() < 0.5:
            del kept[choose.randrange(len(kept))]
        if choose.random() < 0.3:
            around: list[object] = [rpc.remote(others[0], torch.add, (torch.ones(2), number))]
            around.append(around)  # Only the garbage collector finds it.
            del around
        if choose.random() < 0.2:
            gc.collect()
        time.sleep(choose.random() / 500)
    kept.clear()
    done.set()
    for thread in threads:
        thread.join()
    gc.collect()


# Distributed autograd, in all shapes ----------------------------------------------------------------------------------


def tanh(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def tanh_along(route: list[str], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) if not route else torch.tanh(rpc.rpc_sync(route[0], tanh_along, (route[1:], x)))


def tanh_of(x: RRef) -> torch.Tensor:
    return torch.tanh(x.to_here())


def sum_of(x: RRef) -> torch.Tensor:
    return x.to_here().sum()


def differentiate(make_loss: Callable[[torch.Tensor], torch.Tensor], *, rows: int = 5) -> float:
    """One context around a loss and its backward pass; the sum of the gradient of its input."""
    with dist_autograd.context() as context:
        x = torch.full((rows, 8), 0.5, requires_grad=True)
        dist_autograd.backward(context, [make_loss(x)])
        return float(dist_autograd.get_gradients(context)[x].sum())


def twice_here(x: torch.Tensor) -> torch.Tensor:
    remote = rpc.remote("b", tanh, (x,))
    return (remote.to_here() + remote.to_here()).sum()


def loss_here(x: torch.Tensor) -> torch.Tensor:
    """Every kind of call with a tensor that needs a gradient, then some with one that needs none."""
    found = [
        rpc.rpc_sync("b", tanh, (x,)),
        rpc.rpc_async("c", tanh, (x,)).wait(),
        rpc.rpc_sync("b", torch.mul, (x, 2)),
        rpc.rpc_sync("c", scale, (x, 2)),
        rpc.rpc_sync("b", later, (x,)),
        rpc.remote("c", torch.mul, (x, 3)).to_here(),
        rpc.rpc_sync("a", tanh, (x,)),
    ]
    rpc.rpc_sync("b", double, (torch.ones(3),))
    rpc.rpc_sync("b", torch.add, (torch.ones(3), 1))
    rpc.remote("b", double, (torch.ones(3),)).to_here()
    rpc.remote("b", torch.add, (torch.ones(3), 1)).to_here()
    rpc.rpc_sync("c", scale, (torch.ones(3), 2))
    return torch.stack(found).sum()


def differentiate_everything() -> None:
    differentiate(loss_here)
    differentiate(twice_here)
    differentiate(lambda x: rpc.rpc_sync("b", tanh_along, (["c"], x)).sum())
    differentiate(lambda x: rpc.rpc_sync("b", tanh_along, (["a", "c"], x)).sum())  # There and back again.
    differentiate(lambda x: rpc.rpc_sync("c", tanh_of, (rpc.remote("b", tanh, (x,)),)).sum())  # Handed on.
    with ThreadPoolExecutor(3) as threads:  # Three contexts at the same time.
        list(threads.map(lambda rows: differentiate(twice_here, rows=rows), (2, 3, 4)))
    with dist_autograd.context():  # Nobody else comes to know of this one.
        torch.ones(2, requires_grad=True).sum()
    with dist_autograd.context() as context:  # The loss lives elsewhere, and so begins the backward pass.
        x = torch.full((5, 8), 0.5, requires_grad=True)
        rpc.remote("c", sum_of, (rpc.remote("b", tanh, (x,)),)).backward(context)
    with dist_autograd.context() as context:  # The loss is an RRef of one's own.
        x = torch.full((5, 8), 0.5, requires_grad=True)
        rpc.RRef(rpc.rpc_sync("b", tanh_along, (["c"], x)).sum()).backward(context)
    with dist_autograd.context():
        raises(ValueError, lambda: rpc.rpc_sync("b", fail, ("wrong",)))


# Modules on other workers ---------------------------------------------------------------------------------------------


def import_remote_modules() -> None:
    """Makes the module that RemoteModule's calls are pickled by the name of."""
    import torch.distributed.nn  # noqa: F401


def train(parameters: list[RRef], loss: Callable[[], Any], steps: int, by: Any = None) -> None:
    """By SGD, or else `by` another optimizer."""
    from torch.distributed.optim import DistributedOptimizer

    optimizer = DistributedOptimizer(by or torch.optim.SGD, parameters, lr=0.1)
    for _ in range(steps):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [loss()])
            optimizer.step(context)


def use_remote_modules() -> None:
    """A pipeline of two RemoteModules, first called outside of a context, then trained."""
    from torch.distributed.nn import RemoteModule

    for to in ("b", "c"):  # A RemoteModule does not wait until its owner has made it: a call could come too early.
        rpc.rpc_sync(to, import_remote_modules)
    torch.manual_seed(0)
    first, second = RemoteModule("b/cpu", nn.Linear, (8, 4)), RemoteModule("c/cpu", nn.Linear, (4, 2))
    x = torch.full((5, 8), 0.5)
    second.forward(first.forward(x))
    second.forward_async(first.forward_async(x).wait()).wait()
    rpc.rpc_sync("b", look_at, (second.get_module_rref(),))
    parameters = first.remote_parameters() + second.remote_parameters()
    train(parameters, lambda: second.forward(first.forward(x)).square().mean(), 2, torch.optim.Adam)


# A module handed on, micro-batches, two servers' worth of calls ------------------------------------------------------


def train_on(module: Any) -> None:
    """Train a RemoteModule that another worker has made and handed on, with a head of one's own."""
    torch.manual_seed(1)
    head = nn.Linear(4, 3)
    parameters = [*module.remote_parameters(), *(rpc.RRef(each) for each in head.parameters())]
    train(parameters, lambda: head(module.forward(torch.randn(5, 6))).square().mean(), steps=4)


def hand_a_module_on() -> None:
    """The master makes the module on the server, the trainers train it."""
    from torch.distributed.nn import RemoteModule

    for to in ("ps", "trainer1", "trainer2"):
        rpc.rpc_sync(to, import_remote_modules)
    module = RemoteModule("ps/cpu", nn.Linear, (6, 4))
    torch.futures.wait_all([rpc.rpc_async(to, train_on, (module,)) for to in ("trainer1", "trainer2")])


class Stage(nn.Module):
    """Fetches its input from wherever that is; B x 6 in, B x 6 out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self._lock = nn.Linear(6, 6), threading.Lock()

    def forward(self, x: RRef) -> torch.Tensor:
        value = x.to_here()
        with self._lock:
            return torch.tanh(self.linear(value))


def call_stage(stage: RRef, x: RRef) -> torch.Tensor:
    return stage.local_value()(x)


def parameters_of(stage: RRef) -> list[RRef]:
    return [rpc.RRef(each) for each in stage.local_value().parameters()]


def pipe_micro_batches() -> None:
    """Two stages; each micro-batch is fetched from the stage before it, while others are on their way."""
    first, second = rpc.remote("stage1", Stage), rpc.remote("stage2", Stage)
    rrefs = [each for stage in (first, second) for each in rpc.remote(stage.owner(), parameters_of, (stage,)).to_here()]

    def loss() -> torch.Tensor:
        waiting = []
        for x in torch.randn(8, 6).split(2):
            y = rpc.remote(first.owner(), call_stage, (first, rpc.RRef(x)))
            waiting.append(rpc.rpc_async(second.owner(), call_stage, (second, y)))
        return torch.cat(torch.futures.wait_all(waiting)).square().mean()

    train(rrefs, loss, steps=3)


def train_between_calls() -> None:
    """A layer of the trainer's own between two calls to the server in each iteration."""
    below, above = rpc.remote("ps", nn.Linear, (6, 4)), rpc.remote("ps", nn.Linear, (4, 3))
    middle = nn.Linear(4, 4)
    remote = [each for net in (below, above) for each in rpc.rpc_sync("ps", parameters_of, (net,))]

    def loss() -> torch.Tensor:
        hidden = middle(rpc.rpc_sync("ps", call_stage, (below, torch.randn(5, 6))))
        return rpc.rpc_sync("ps", call_stage, (above, hidden)).square().mean()

    train(remote + [rpc.RRef(each) for each in middle.parameters()], loss, steps=10)


# Many at the same time ------------------------------------------------------------------------------------------------


def call_from_threads(others: tuple[str, ...]) -> None:
    """Three threads, each with calls of all sorts of its own, all at once."""

    def work(number: int) -> None:
        to, third = others[number % 2], others[(number + 1) % 2]
        x = torch.ones(number + 1, 2)
        counter = rpc.remote(to, Counter)
        for step in range(2):
            rpc.rpc_sync(to, pass_on, ([third], x))
            waiting = [rpc.rpc_async(third, later, (x,)), counter.rpc_async().add(step)]
            rpc.rpc_sync(to, torch.add, (x, x))
            torch.futures.wait_all(waiting)
        rpc.rpc_sync(third, value_of, (counter,))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))


# A learner and its observers ------------------------------------------------------------------------------------------


class Learner:
    """Asks observers to play; they call it for every action, and it answers a whole batch of them together."""

    def __init__(self, observers: tuple[str, ...]) -> None:
        self.me = rpc.RRef(self)
        self.observers = [rpc.remote(name, Observer) for name in observers]
        self.rewards: list[float] = []
        self._states: list[torch.Tensor] = []
        self._actions: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._lock = threading.Lock()

    @staticmethod
    @rpc.functions.async_execution
    def action(learner: RRef, state: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        self = learner.local_value()
        with self._lock:
            mine, place = self._actions, len(self._states)
            self._states.append(state)
            full = len(self._states) == len(self.observers)
            states = torch.stack(self._states)
            if full:
                self._states, self._actions = [], torch.futures.Future()
        answer = mine.then(lambda actions: actions.wait()[place])
        if full:
            mine.set_result(states.mean(1))
        return answer

    def reward(self, reward: float) -> None:
        self.rewards.append(reward)

    def play(self) -> None:
        playing = [observer.rpc_async().play(self.me, steps=4) for observer in self.observers]
        torch.futures.wait_all(playing)


class Observer:
    def play(self, learner: RRef, steps: int) -> None:
        for step in range(steps):
            action = rpc.rpc_sync(learner.owner(), Learner.action, (learner, torch.full((6,), float(step))))
            learner.rpc_sync().reward(float(action))


def learn() -> list[float]:
    learner = Learner(("observer1", "observer2"))
    for _ in range(2):
        learner.play()
    return sorted(learner.rewards)


# A server of embeddings -----------------------------------------------------------------------------------------------


class Embeddings(nn.Module):
    """1000 rows of 16; a batch touches few of them, so gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.EmbeddingBag(1000, 16, mode="sum", sparse=True)
        self._lock = threading.Lock()

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.rows(indices, offsets)

    def parameter_rrefs(self) -> list[RRef]:
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def pull(self, indices: torch.Tensor) -> torch.Tensor:
        return self.rows.weight.detach()[indices]

    def push(self, gradient: torch.Tensor) -> int:
        """Apply a gradient, sparse or dense; the number of values it has."""
        with self._lock, torch.no_grad():
            self.rows.weight.add_(gradient, alpha=-0.1)
        return int(gradient._values().numel() if gradient.is_sparse else gradient.numel())

    def last_gradient(self, context: int) -> torch.Tensor:
        """A sparse tensor as a result."""
        return dist_autograd.get_gradients(context)[self.rows.weight]


def train_embeddings() -> None:
    from torch.distributed.optim import DistributedOptimizer

    table = rpc.remote("embeddings", Embeddings)
    optimizer = DistributedOptimizer(torch.optim.SGD, table.rpc_sync().parameter_rrefs(), lr=0.1)
    indices, offsets = torch.arange(0, 240, 10), torch.arange(0, 24, 4)
    for _ in range(3):
        with dist_autograd.context() as context:
            out = table.rpc_sync().forward(indices, offsets)
            dist_autograd.backward(context, [out.square().sum()])
            assert table.rpc_sync().last_gradient(context).is_sparse
            optimizer.step(context)
    for _ in range(3):  # The same by hand: 24 rows come and go.
        rows = table.rpc_sync().pull(indices)
        gradient = torch.sparse_coo_tensor(indices.view(1, -1), rows, (1000, 16), check_invariants=True)
        assert table.rpc_sync().push(gradient) == 24 * 16
        assert table.rpc_async().push(gradient.coalesce()).wait() == 24 * 16
    assert table.rpc_sync().push(torch.zeros(1000, 16)) == 16000


PROGRAMS = {
    "every way to call": Program(("a", "b", "c"), {"a": call_in_every_way}),
    "failures": Program(("server", "client", "other"), {"client": meet_failures}),
    "references": Program(("a", "b", "c", "d"), {"a": share_references}),
    "deletions": Program(
        ("a", "b", "c"),
        {
            "a": partial(delete_at_random, ("b", "c"), seed=1),
            "b": partial(delete_at_random, ("c", "a"), seed=2),
        },
    ),
    "parameter server": Program(
        ("ps", "trainer1", "trainer2"),
        dict.fromkeys(("trainer1", "trainer2"), partial(rpc_jobs.train, steps=4)),
    ),
    "autograd": Program(("a", "b", "c"), {"a": differentiate_everything}),
    "remote modules": Program(("a", "b", "c"), {"a": use_remote_modules}),
    "module handed on": Program(("master", "trainer1", "trainer2", "ps"), {"master": hand_a_module_on}),
    "micro-batches": Program(("master", "stage1", "stage2"), {"master": pipe_micro_batches}),
    "between calls": Program(("ps", "trainer"), {"trainer": train_between_calls}),
    "threads": Program(
        ("a", "b", "c"),
        {"a": partial(call_from_threads, ("b", "c")), "b": partial(call_from_threads, ("c", "a"))},
    ),
    "learner": Program(("learner", "observer1", "observer2"), {"learner": learn}),
    "embeddings": Program(
        ("embeddings", "trainer1", "trainer2"), {"trainer1": train_embeddings, "trainer2": train_embeddings}
    ),
}
