"""Ranks of this machine that reach each other through a chosen network, and nobody else."""

from __future__ import annotations

import os
from functools import partial

from dlearn.cluster.crew import kill_all
from dlearn.cluster.descriptors import receive_descriptor
from dlearn.cluster.enclosed_rank import EnclosedRank
from dlearn.cluster.launch import StackLine, StartMethod, start_rank
from dlearn.cluster.rank import Call
from dlearn.errors import SetupError
from dlearn.network.live import LiveNetwork, SwitchProcess
from dlearn.network.namespace import Seat, address, enter


class WiredRank(EnclosedRank):
    """A rank in a network of its own. With the last of them that is closed, the switch ends."""

    address = address(0)
    switch: SwitchProcess
    network: LiveNetwork
    living: list[WiredRank]
    """All ranks of this network that are not closed."""

    @property
    def lost(self) -> str:
        return "lost its network: the switch has ended" if self.switch.lost else super().lost

    def stack(self, call: Call) -> tuple[StackLine, ...]:
        self.network.let_compute()
        return super().stack(call)

    def pause(self) -> int:
        self.network.let_compute()  # Else the switch would let it go on.
        return super().pause()

    def close(self) -> None:
        super().close()
        self.living.remove(self)
        if not self.living:
            self.switch.close()


def start_ranks(network: LiveNetwork, count: int, start: StartMethod) -> list[WiredRank]:
    """Fresh ranks in networks of their own, and a switch between them. SetupError where that is not permitted."""
    ranks: list[WiredRank] = []
    devices: list[int] = []
    switch: SwitchProcess | None = None
    try:
        for rank in range(count):
            seat = Seat(rank, count, network.packet_bytes, network.asked.window_bytes)
            ranks.append(WiredRank(**vars(start_rank(start, partial(enter, seat)))))
        for each in ranks:
            devices.append(_device(each))
        pids = [each.pid for each in ranks if each.pid is not None]
        switch = network.connect(devices, pids, partial(kill_all, ranks))
        for each in ranks:
            each.switch, each.living, each.network = switch, ranks, network
    except BaseException:
        if switch is not None:
            switch.close()
        kill_all(ranks)
        for each in ranks:
            EnclosedRank.close(each)
        raise
    finally:
        for device in devices:
            os.close(device)
    return list(ranks)


def _device(rank: WiredRank) -> int:
    """The end of a rank's network device that the switch will hold."""
    if refused := rank.refused():
        raise SetupError(f"ranks cannot have a network of their own on this machine: {refused}.")
    return receive_descriptor(rank.control)
