"""What recording adds to a tiny rpc_sync between two workers on loopback: bare, the agent's log alone, all of it.

The ways alternate in one run, many times; a median of each round, then the median over the rounds and their spread.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.rpc as rpc
from measuring import median_text, seconds_of

from dlearn import Cluster, recorder
from dlearn.hooks.rpc.rpc_agent_log import AgentLog

ROUNDS, CALLS = 12, 300
WAYS = ("bare", "the agent's log alone", "recorded without the log", "recorded")

_on: list[Any] = []


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def set_way(way: str, folder: str, round_: int) -> None:
    """Turn recording off, then on as asked, in this process. Its files are real ones."""
    while _on:
        _on.pop()()
    rank = rpc.get_worker_info().id
    place = Path(folder, f"{round_} {way}")
    if way == "the agent's log alone":
        place.mkdir(parents=True, exist_ok=True)
        log = AgentLog(place / f"{rank}.log")
        log.open()
        _on.append(log.close)
    elif way.startswith("recorded"):
        open_log = AgentLog.open
        if way.endswith("without the log"):
            AgentLog.open = lambda self: "off"  # type: ignore[method-assign]
        try:
            recording = recorder.start(place, header=recorder.make_header(job="overhead", rank=rank, world_size=2))
        finally:
            AgentLog.open = open_log  # type: ignore[method-assign]
        _on.append(recording.stop)


def measure(folder: str) -> dict[str, list[float]]:
    """Microseconds of one call: a median for each way and round."""
    tensor = torch.ones(4)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for round_ in range(ROUNDS):
        for way in WAYS if round_ % 2 else WAYS[::-1]:
            rpc.rpc_sync("server", set_way, (way, folder, round_))
            set_way(way, folder, round_)
            call = partial(rpc.rpc_sync, "server", double, (tensor,))
            found[way].append(statistics.median(1e6 * seconds_of(call) for _ in range(CALLS)))
    rpc.rpc_sync("server", set_way, ("bare", folder, ROUNDS))
    set_way("bare", folder, ROUNDS)
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(["server", "client"], rpc=True, record=False)
        found = cluster.run({"client": measure}, folder, timeout=540).results["client"]
    bare = found["bare"]
    print(f"rpc_sync of 4 floats, {ROUNDS} alternating rounds of {CALLS} calls each, median (spread of the rounds):")
    for way in WAYS:
        own = found[way]
        ratio = statistics.median(a / b for a, b in zip(own, bare, strict=True))
        added = statistics.median(a - b for a, b in zip(own, bare, strict=True))
        spread = median_text(own, 0)
        print(f"  {way:26}{spread:>18} us   {added:+6.0f} us   {100 * (ratio - 1):+5.1f} %")


if __name__ == "__main__":
    main()
