"""A server that takes gradients layer by layer, from any source: with a handshake, without one, and the third way.

Functions for `Cluster(...).run`, on gloo and on MPI; rank 0 is the server. A gradient travels as three messages, one
for each layer; the loss and the version follow the last one. Each layer has a tag of its own, so that its size fits
from any worker: only a checksum shows that the layers of an update came from two workers.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dlearn.lessons.sgd import LAYERS, LR, Learner, P, Update, answer, as_row, first_numbers, heard, layers

HELLO, READY, PARAMS, BYE, GO_ON = 1, 2, 3, 4, 5
GRAD = 10
"""Tags. The gradient of layer i has tag GRAD + i."""
PIECES = (*LAYERS[:-1], LAYERS[-1] + 2)
"""Numbers in each message of a gradient."""

Checksums = tuple[int, ...]


class Taken(NamedTuple):
    """One update of the server: the sender and the checksum of each layer."""

    workers: tuple[int, ...]
    checksums: Checksums


@dataclass(frozen=True)
class Protocol:
    """The result of a rank: the server's updates and parameters, or what a worker sent."""

    updates: tuple[Update, ...] = ()
    taken: tuple[Taken, ...] = ()
    sent: tuple[Checksums, ...] = ()
    numbers: Tensor | None = None


def mixed(taken: Sequence[Taken], sent: Sequence[Checksums]) -> list[int]:
    """Return the numbers of the updates whose layers are not all of one gradient."""
    known = set(sent)
    return [number for number, each in enumerate(taken) if each.checksums not in known]


def checksums(pieces: Sequence[Tensor]) -> Checksums:
    return tuple(zlib.crc32(piece.numpy().tobytes()) for piece in pieces)


# Two ways to take a gradient ------------------------------------------------------------------------------------------


def from_anyone() -> tuple[Taken, Tensor]:
    """Receive every layer from any worker."""
    pieces = empty_pieces()
    workers = tuple(dist.recv(piece, tag=GRAD + layer) for layer, piece in enumerate(pieces))
    return Taken(workers, checksums(pieces)), torch.cat(pieces)


def from_one() -> tuple[Taken, Tensor]:
    """Receive the first layer from any worker, the others from the same one."""
    first, *others = pieces = empty_pieces()
    worker = dist.recv(first, tag=GRAD)
    for layer, piece in enumerate(others, start=1):
        dist.recv(piece, src=worker, tag=GRAD + layer)
    return Taken((worker,) * len(pieces), checksums(pieces)), torch.cat(pieces)


def empty_pieces() -> list[Tensor]:
    return [torch.empty(size, dtype=torch.float64) for size in PIECES]


Take = Callable[[], tuple[Taken, Tensor]]


class Server:
    """The parameters and the log of a server; all three protocols send and receive through it."""

    def __init__(self) -> None:
        self._numbers, self._lr = first_numbers(), LR / (dist.get_world_size() - 1)
        self._updates: list[Update] = []
        self._taken: list[Taken] = []

    def page(self) -> Tensor:
        return torch.cat([self._numbers, as_row(len(self._updates))])

    def update(self, take: Take) -> int:
        """Make one update; return the worker whose first layer it was."""
        taken, note = take()
        self._updates.append(heard(taken.workers[0], note, len(self._updates)))
        self._taken.append(taken)
        self._numbers -= self._lr * note[:P]
        return taken.workers[0]

    def result(self) -> Protocol:
        return Protocol(tuple(self._updates), tuple(self._taken), numbers=self._numbers)


# With the handshake ---------------------------------------------------------------------------------------------------


def with_handshake(steps: int, slow_ms: float = 0) -> Protocol:
    """Say HELLO and wait for READY before each transfer, of parameters and of a gradient.

    The server takes every layer from any worker. Only one worker may speak to it at a time.
    """
    if dist.get_rank() == 0:
        return serve_one_at_a_time(steps)
    learner = Learner(dist.get_rank() - 1, dist.get_world_size() - 1, slow_ms)
    page, sent = torch.empty(P + 1, dtype=torch.float64), []
    for _ in range(steps):
        _greet(PARAMS)
        dist.recv(page, src=0, tag=PARAMS)
        pieces = layers(answer(learner, page), PIECES)
        _greet(GRAD)
        for layer, piece in enumerate(pieces):
            dist.send(piece, dst=0, tag=GRAD + layer)
        sent.append(checksums(pieces))
    dist.send(as_row(0), dst=0, tag=BYE)
    return Protocol(sent=tuple(sent))


def _greet(wish: int) -> None:
    dist.send(as_row(wish), dst=0, tag=HELLO)
    dist.recv(as_row(0), src=0, tag=READY)


def serve_one_at_a_time(steps: int) -> Protocol:
    """Serve one transfer after another."""
    server, workers, wish = Server(), dist.get_world_size() - 1, as_row(0)
    for _ in range(2 * steps * workers):
        worker = dist.recv(wish, tag=HELLO)
        dist.send(as_row(0), dst=worker, tag=READY)
        if wish == PARAMS:
            dist.send(server.page(), dst=worker, tag=PARAMS)
        else:
            server.update(from_anyone)
    for _ in range(workers):
        dist.recv(as_row(0), tag=BYE)
    return server.result()


# Without it -----------------------------------------------------------------------------------------------------------


def without_handshake(steps: int, take: Take = from_anyone, slow_ms: float = 0) -> Protocol:
    """Send `steps` gradients, each as soon as it is ready. `take` is how the server receives."""
    if dist.get_rank() == 0:
        return serve_all(steps, take)
    learner = Learner(dist.get_rank() - 1, dist.get_world_size() - 1, slow_ms)
    page, sent = torch.empty(P + 1, dtype=torch.float64), []
    for _ in range(steps):
        dist.recv(page, src=0, tag=PARAMS)
        pieces = layers(answer(learner, page), PIECES)
        for work in [_begin(piece, dst=0, tag=GRAD + layer) for layer, piece in enumerate(pieces)]:
            work.wait()
        sent.append(checksums(pieces))
    return Protocol(sent=tuple(sent))


def serve_all(steps: int, take: Take) -> Protocol:
    """Serve; a worker gets new parameters when its first layer is in an update."""
    server, workers = Server(), dist.get_world_size() - 1
    left = dict.fromkeys(range(1, workers + 1), steps)
    # Not send: a worker whose later layers are not taken yet does not receive, and both would wait for each other.
    under_way = [_begin(server.page(), dst=worker, tag=PARAMS) for worker in left]
    for _ in range(steps * workers):
        worker = server.update(take)
        left[worker] -= 1
        if left[worker]:
            under_way.append(_begin(server.page(), dst=worker, tag=PARAMS))
    for work in under_way:
        work.wait()
    return server.result()


def _begin(tensor: Tensor, *, dst: int, tag: int) -> dist.Work:
    work = dist.isend(tensor, dst=dst, tag=tag)
    assert work is not None  # it is on ranks outside of the group
    return work


# Always in the same order ---------------------------------------------------------------------------------------------


def interleaved(take: Take = from_anyone) -> Protocol:
    """Send a gradient from two workers: worker 1 its first layer early, worker 2 its others.

    After an update, the server lets both send what is left. Only a server that takes layers from
    any worker can make an update of what has arrived; for the other, worker 1 may go on at once.
    """
    rank = dist.get_rank()
    if rank == 0:
        server = Server()
        if take is from_one:
            dist.send(as_row(0), dst=1, tag=GO_ON)
        server.update(take)
        for worker in (2,) if take is from_one else (1, 2):
            dist.send(as_row(0), dst=worker, tag=GO_ON)
        server.update(take)
        return server.result()
    pieces = layers(answer(Learner(rank - 1, 2), torch.cat([first_numbers(), as_row(0)])), PIECES)
    early, late = ((0,), (1, 2)) if rank == 1 else ((1, 2), (0,))
    works = [_begin(pieces[layer], dst=0, tag=GRAD + layer) for layer in early]
    dist.recv(as_row(0), src=0, tag=GO_ON)
    works += [_begin(pieces[layer], dst=0, tag=GRAD + layer) for layer in late]
    for work in works:
        work.wait()
    return Protocol(sent=(checksums(pieces),))
