"""The family of distributed SGD, on the digits: one task, one model, five ways to share the work.

Each member is a function for `Cluster(...).run`, in ordinary PyTorch: the same one runs on gloo and on MPI (`hogwild`
needs RPC). Where there is a server, it is rank 0, and the other ranks are the workers. The span around each transfer
names its data: "parameters", "gradients" or "average". All five apply a gradient of one of n workers with LR / n: they
differ in when, and in who sends what.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from dlearn.lessons import digits
from dlearn.recorder import span

LR = 1.0
BATCH = 25  # Images in a batch of one worker.
LAYERS = (64 * 32, 32, 32 * 10)
P = sum(LAYERS)
"""2,400 numbers, 19,200 B in float64: what differs, differs for a reason. A ring of 2, 3 or 4 cuts them evenly."""


class Update(NamedTuple):
    """One gradient of worker 1, 2, ...; `staleness`: the updates that came between its parameters and itself."""

    worker: int
    loss: float
    staleness: int


@dataclass(frozen=True)
class Outcome:
    """The result of a rank: the updates that it made, in order, and the parameters if it keeps them."""

    updates: tuple[Update, ...] = ()
    numbers: Tensor | None = None
    threads: int = 1
    """Number of threads that wrote into the parameters."""


# The task -------------------------------------------------------------------------------------------------------------


def new_model() -> nn.Module:
    """Make the model 64 → 32 → 10, in float64; the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10, bias=False)).double()


def first_numbers() -> Tensor:
    """Return the parameters before training, flat: [P]."""
    return parameters_to_vector(new_model().parameters()).detach()


def layers(row: Tensor, sizes: Sequence[int] = LAYERS) -> tuple[Tensor, ...]:
    """Split a flat row into its layers."""
    return row.split(list(sizes))  # type: ignore[no-any-return,no-untyped-call]


def batch(worker: int, workers: int, step: int) -> tuple[Tensor, Tensor]:
    """Return images and labels of a worker's step; it iterates over its share again and again."""
    images, labels = digits.shard(worker, workers)
    batches = len(images) // BATCH
    part = slice(step % batches * BATCH, (step % batches + 1) * BATCH)
    return images[part].double(), labels[part]


class Learner:
    """Computes gradients from the parameters that it is given. Worker w of 0, 1, ... is (w + 1) · `slow_ms` slower."""

    def __init__(self, worker: int, workers: int, slow_ms: float = 0) -> None:
        self._worker, self._workers, self._seconds = worker, workers, (worker + 1) * slow_ms / 1e3
        self._model = new_model()
        self._step = itertools.count()

    def learn(self, numbers: Tensor) -> tuple[Tensor, float]:
        """Return the gradient of the next batch, flat, and the loss."""
        vector_to_parameters(numbers, self._model.parameters())
        self._model.zero_grad()
        images, labels = batch(self._worker, self._workers, next(self._step))
        loss = cross_entropy(self._model(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        time.sleep(self._seconds)
        gradients = [each.grad.flatten() for each in self._model.parameters() if each.grad is not None]
        return torch.cat(gradients), loss.item()


def alone(steps: int, workers: int) -> Tensor:
    """Train on one device with the batches of all workers as one; return the parameters."""
    model = new_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(steps):
        images, labels = zip(*(batch(worker, workers, step) for worker in range(workers)), strict=True)
        optimizer.zero_grad()
        cross_entropy(model(torch.cat(images)), torch.cat(labels)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


# 1. Synchronous, without a server -------------------------------------------------------------------------------------


def all_reduced(steps: int, slow_ms: float = 0) -> Outcome:
    """Train a model on every rank; all average their gradients, and take the same step."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    learner, numbers, log = Learner(rank, workers, slow_ms), first_numbers(), []
    for _ in range(steps):
        gradient, loss = learner.learn(numbers)
        with span("gradients"):
            dist.all_reduce(gradient)
        numbers -= LR * gradient / workers
        log.append(Update(rank + 1, loss, staleness=0))
    return Outcome(tuple(log), numbers)


# 2. Synchronous, with a server ----------------------------------------------------------------------------------------


class WholeModel:
    """A model and an optimizer, as in a program for one device."""

    def __init__(self) -> None:
        self._model = new_model()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LR)

    def numbers(self) -> Tensor:
        return parameters_to_vector(self._model.parameters()).detach()

    def step(self, gradient: Tensor) -> None:
        for parameter, part in zip(self._model.parameters(), layers(gradient), strict=True):
            parameter.grad = part.view_as(parameter)
        self._optimizer.step()


class BareList:
    """A list of tensors without the model, which only the workers know. Worker 1 fills it."""

    def __init__(self) -> None:
        self._list = [torch.empty(size, dtype=torch.float64) for size in LAYERS]
        with span("parameters"):
            for each in self._list:
                dist.recv(each, src=1)

    def numbers(self) -> Tensor:
        return torch.cat(self._list)

    def step(self, gradient: Tensor) -> None:
        for each, part in zip(self._list, layers(gradient), strict=True):
            each -= LR * part


Keeper = WholeModel | BareList
"""The state of a server."""


def gathered(steps: int, keeper: Callable[[], Keeper] = WholeModel, slow_ms: float = 0) -> Outcome:
    """Train: the server broadcasts the parameters, waits for all gradients and averages them."""
    if dist.get_rank() == 0:
        return gather_and_step(steps, keeper())
    if keeper is BareList and dist.get_rank() == 1:
        with span("parameters"):
            for part in layers(first_numbers()):
                dist.send(part, dst=0)
    learner = Learner(dist.get_rank() - 1, dist.get_world_size() - 1, slow_ms)
    for _ in range(steps):
        page = torch.empty(P + 1, dtype=torch.float64)
        with span("parameters"):
            dist.broadcast(page, src=0)
        note = answer(learner, page)
        with span("gradients"):
            dist.gather(note, dst=0)
    return Outcome()


def gather_and_step(steps: int, keeper: Keeper) -> Outcome:
    """Run the server's side."""
    log: list[Update] = []
    nothing = torch.zeros(P + 2, dtype=torch.float64)  # torch asks the server for a part, too
    for version in range(steps):
        with span("parameters"):
            dist.broadcast(torch.cat([keeper.numbers(), as_row(version)]), src=0)
        notes = [torch.empty_like(nothing) for _ in range(dist.get_world_size())]
        with span("gradients"):
            dist.gather(nothing, notes, dst=0)
        keeper.step(torch.stack(notes[1:])[:, :P].mean(dim=0))
        log += [heard(worker, note, version) for worker, note in enumerate(notes[1:], start=1)]
    return Outcome(tuple(log), keeper.numbers())


def answer(learner: Learner, page: Tensor) -> Tensor:
    """Turn a page (parameters, version) into a note: gradient, loss and that version."""
    gradient, loss = learner.learn(page[:P])
    return torch.cat([gradient, as_row(loss), page[P:]])


def heard(worker: int, note: Tensor, version: int) -> Update:
    """Read a note when the model has made `version` updates."""
    return Update(worker, note[P].item(), version - int(note[P + 1]))


def as_row(number: float) -> Tensor:
    return torch.tensor([number], dtype=torch.float64)


# 3. Asynchronous, with a server ---------------------------------------------------------------------------------------

STOP = -1  # Instead of a version: no more parameters.


def asynchronous(updates: int, slow_ms: float = 0) -> Outcome:
    """Train: the server applies any gradient on arrival, and answers that worker alone."""
    if dist.get_rank() == 0:
        return serve(updates)
    learner = Learner(dist.get_rank() - 1, dist.get_world_size() - 1, slow_ms)
    page = torch.empty(P + 1, dtype=torch.float64)
    while True:
        with span("parameters"):
            dist.recv(page, src=0)
        if page[P] == STOP:
            return Outcome()
        note = answer(learner, page)
        with span("gradients"):
            dist.send(note, dst=0)


def serve(updates: int) -> Outcome:
    """Run the server's side."""
    numbers, workers = first_numbers(), dist.get_world_size() - 1
    log: list[Update] = []
    for worker in range(1, workers + 1):
        _hand_out(numbers, 0 if worker <= updates else STOP, worker)
    for version in range(updates):
        note = torch.empty(P + 2, dtype=torch.float64)
        with span("gradients"):
            worker = dist.recv(note)  # from any source
        numbers -= LR / workers * note[:P]
        log.append(heard(worker, note, version))
        wanted = workers + version < updates  # another gradient, of these parameters
        _hand_out(numbers, version + 1 if wanted else STOP, worker)
    return Outcome(tuple(log), numbers)


def _hand_out(numbers: Tensor, version: int, worker: int) -> None:
    with span("parameters"):
        dist.send(torch.cat([numbers, as_row(version)]), dst=worker)


# 4. Without a lock (RPC) ----------------------------------------------------------------------------------------------


@dataclass
class WeightStore:
    """The state that the server's threads share without a lock. `log`: worker, loss, version, thread."""

    updates: int
    lr: float
    numbers: Tensor = field(default_factory=first_numbers)
    tickets: Iterator[int] = field(default_factory=itertools.count)
    log: list[tuple[int, float, int, int]] = field(default_factory=list)


store = WeightStore(0, 0)


def clear(updates: int, lr: float) -> None:
    """Begin anew, on the server."""
    global store
    store = WeightStore(updates, lr)


def pull() -> tuple[int, Tensor]:
    """Return version and parameters, on the server; others may be writing them meanwhile."""
    version = len(store.log) if next(store.tickets) < store.updates else STOP
    return version, store.numbers


def push(worker: int, gradient: Tensor, loss: float, version: int) -> None:
    """Apply a gradient, on the server, in the thread that runs the call."""
    store.numbers.sub_(gradient, alpha=store.lr)
    store.log.append((worker, loss, version, threading.get_ident()))


def end_of_run() -> Outcome:
    """Return the result, on the server, when no worker writes any more."""
    log = [Update(worker, loss, index - version) for index, (worker, loss, version, _) in enumerate(store.log)]
    return Outcome(tuple(log), store.numbers, threads=len({thread for *_, thread in store.log}))


def hogwild(updates: int, slow_ms: float = 0) -> Outcome:
    """Pull, learn and push, on each worker of `Cluster(["server", ...], rpc=True)`.

    Worker 1 returns the result of the server.
    """
    import torch.distributed.rpc as rpc

    rank, n = dist.get_rank(), dist.get_world_size()
    workers = dist.new_group(list(range(1, n)), use_local_synchronization=True)
    if rank == 1:
        rpc.rpc_sync("server", clear, (updates, LR / (n - 1)))
    dist.barrier(workers)
    learner = Learner(rank - 1, n - 1, slow_ms)
    while True:
        with span("parameters"):
            version, numbers = rpc.rpc_sync("server", pull)
        if version == STOP:
            break
        gradient, loss = learner.learn(numbers)
        with span("gradients"):
            rpc.rpc_sync("server", push, (rank, gradient, loss, version))
    dist.barrier(workers)
    outcome: Outcome = rpc.rpc_sync("server", end_of_run) if rank == 1 else Outcome()
    return outcome


# 5. Local steps -------------------------------------------------------------------------------------------------------


def local(steps: int, k: int, slow_ms: float = 0) -> Outcome:
    """Train each rank's own model; after each k steps average all parameters.

    `staleness` are the steps since the models were last one and the same: 0 to k - 1.
    """
    rank, workers = dist.get_rank(), dist.get_world_size()
    learner, numbers, log = Learner(rank, workers, slow_ms), first_numbers(), []
    for step in range(steps):
        gradient, loss = learner.learn(numbers)
        numbers -= LR * gradient
        log.append(Update(rank + 1, loss, staleness=step % k))
        if (step + 1) % k == 0:
            with span("average"):
                dist.all_reduce(numbers)
            numbers /= workers
    return Outcome(tuple(log), numbers)
