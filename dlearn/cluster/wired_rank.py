"""Ranks of this machine that reach each other through a chosen network, and nobody else."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection

from dlearn.cluster.descriptors import receive_descriptor
from dlearn.cluster.launch import RankProcess, StartMethod, start_rank
from dlearn.cluster.rank import Listen
from dlearn.errors import SetupError
from dlearn.network.live import LiveNetwork, SwitchProcess
from dlearn.network.namespace import Seat, address

SEAT_SECONDS = 60.0
"""How long a rank may take to come into its network: one that is spawned loads torch before."""


class WiredRank(RankProcess):
    """A rank in a network of its own. With the last of them that is closed, the switch ends."""

    leaves_a_spare = False
    switch: SwitchProcess
    living: list[WiredRank]
    """All ranks of this network that are not closed."""

    @property
    def lost(self) -> str:
        return "lost its network: the switch has ended" if self.switch.lost else super().lost

    def listen(self, backlog: int, address: str = address(0)) -> tuple[str, int]:
        """Have the rank itself open the socket: from here, its network cannot be reached."""
        with suppress(OSError, EOFError):  # It has ended; following it will tell.
            self.control.send(Listen(backlog))
            if self.control.poll(SEAT_SECONDS):
                found: tuple[str, int] = self.control.recv()
                return found
        return address, 0

    def close(self) -> None:
        super().close()
        self.living.remove(self)
        if not self.living:
            self.switch.close()


def start_ranks(network: LiveNetwork, count: int, start: StartMethod) -> list[WiredRank]:
    """Fresh ranks in networks of their own, and a switch between them. SetupError where that is not permitted."""
    ranks: list[WiredRank] = []
    devices: list[int] = []
    try:
        for rank in range(count):
            seat = Seat(rank, count, network.packet_bytes, network.asked.window_bytes)
            ranks.append(WiredRank(**vars(start_rank(start, seat))))
        for each in ranks:
            devices.append(_device(each.control))
        switch = network.connect(devices, partial(_end, ranks))
    except BaseException:
        _end(ranks)
        for each in ranks:
            RankProcess.close(each)
        raise
    finally:
        for device in devices:
            os.close(device)
    for each in ranks:
        each.switch, each.living = switch, ranks
    return list(ranks)


def _end(ranks: list[WiredRank]) -> None:
    for rank in list(ranks):
        rank.kill()


def _device(control: Connection) -> int:
    """The end of a rank's network device that the switch will hold."""
    refused = "a rank did not come into its network"
    with suppress(EOFError, ConnectionResetError):
        if control.poll(SEAT_SECONDS):
            refused = control.recv()
    if refused:
        raise SetupError(f"ranks cannot have a network of their own on this machine: {refused}.")
    return receive_descriptor(control)
