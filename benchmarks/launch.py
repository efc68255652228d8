"""How long until ranks have met? dlearn against torch.multiprocessing.spawn, accelerate and ipyparallel.

    python benchmarks/launch.py [--rounds 7]

A call is timed until it returns, every rank having finished an all_reduce over gloo. Each way of launching, and each
number of ranks, has a driver process of its own; their calls alternate in rounds, so that a slow moment of the machine
hits all of them. Shown are the first call (5 s after the import), the median of the later ones with their
spread, and the memory that a rank has for itself (USS). More ranks than cores is slow for everybody.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import median_text, options, seconds_of, today

RANKS = (2, 4)
SECONDS_AFTER_IMPORT = 5.0
DRIVE, MEASURE = "--drive", "measure"


def meet(folder: str) -> None:
    """What every rank does: join a group if it has none, and all-reduce. In a last, untimed call, note its memory."""
    # ipyparallel sends this function alone, without the names around it.
    from pathlib import Path

    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    total = torch.ones(1024)
    dist.all_reduce(total)
    assert total[0].item() == dist.get_world_size()
    if Path(folder, "measure").exists():
        import psutil

        Path(folder, str(dist.get_rank())).write_text(str(psutil.Process().memory_full_info().uss))


# The ways of launching: each is a generator that, after its import, makes one call for each `next` --------------------


def dlearn(ranks: int, folder: str) -> Iterator[None]:
    """Fresh processes, recorded, in every call."""
    from dlearn import Cluster

    yield
    while True:
        yield Cluster(ranks).run(meet, folder) and None


def dlearn_kept(ranks: int, folder: str) -> Iterator[None]:
    """The same ranks in every call: `with Cluster(n) as c`."""
    from dlearn import Cluster

    yield
    with Cluster(ranks) as cluster:
        while True:
            yield cluster.run(meet, folder) and None


def spawn(ranks: int, folder: str) -> Iterator[None]:
    import torch.multiprocessing

    yield
    while True:
        _use_free_port()
        yield torch.multiprocessing.spawn(_spawned, (ranks, folder), nprocs=ranks)


def _spawned(rank: int, ranks: int, folder: str) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks))
    meet(folder)
    # Without this, the interpreter's exit aborts every now and then, on threads of gloo's.
    dist.destroy_process_group()


def accelerate(ranks: int, folder: str) -> Iterator[None]:
    from accelerate import notebook_launcher

    yield
    while True:
        port = _use_free_port()
        yield notebook_launcher(meet, (folder,), num_processes=ranks, use_port=port)


def ipyparallel(ranks: int, folder: str) -> Iterator[None]:
    """Engines, and their process group, are kept; the first call starts them."""
    import ipyparallel

    yield
    with ipyparallel.Cluster(n=ranks, log_level=40) as client:
        port = _use_free_port()
        for rank, engine in enumerate(client.ids):
            variables = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            client[engine].execute(f"import os; os.environ.update({variables})", block=True)
        while True:
            yield client[:].apply_sync(meet, folder) and None


def _use_free_port() -> str:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    return port


WAYS: dict[str, Callable[[int, str], Iterator[None]]] = {
    "dlearn": dlearn,
    "dlearn, kept ranks": dlearn_kept,
    "torch.multiprocessing.spawn": spawn,
    "accelerate.notebook_launcher": accelerate,
    "ipyparallel, kept engines": ipyparallel,
}


# Drivers: one process for each way and number of ranks ----------------------------------------------------------------


def drive(way: str, ranks: int) -> None:
    """Import; then, for each line on stdin, make a call and print what it took as JSON."""
    answers = os.dup(1)
    os.dup2(2, 1)  # What the launchers print is not an answer.
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        calls = WAYS[way](ranks, folder)
        next(calls)
        os.write(answers, b'"ready"\n')
        for order in sys.stdin:
            measures = order.strip() == MEASURE
            if measures:
                Path(folder, MEASURE).touch()
            answer: object = seconds_of(lambda: next(calls))
            if measures:
                of_ranks = [int(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
                answer = (statistics.median(of_ranks), bytes_between_runs())
            os.write(answers, json.dumps(answer).encode() + b"\n")
        calls.close()


def bytes_between_runs() -> int:
    """What the processes that wait for the next call hold in all, shared pages counted once (PSS)."""
    import psutil

    time.sleep(1)  # Fresh ranks are started after the call.
    return sum(child.memory_full_info().pss for child in psutil.Process().children(recursive=True))


class Driver:
    """A process that launches in one way, so many ranks; `failed` says where its calls came to an end."""

    def __init__(self, way: str, ranks: int) -> None:
        self.way, self.ranks = way, ranks
        self.seconds: list[float] = []
        self.failed = ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        command = [sys.executable, __file__, DRIVE, way, str(ranks)]
        self._process = subprocess.Popen(command, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
        self._answer()

    def call(self) -> None:
        answer = self.order("call")
        if answer is not None:
            self.seconds.append(answer)

    def order(self, order: str) -> Any:
        """Return its answer; None if it failed, now or before."""
        if self.failed:
            return None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        answer = self._process.stdout.readline()
        if answer:
            return json.loads(answer)
        self._process.wait(timeout=60)
        self._errors.seek(0)
        last_words = (self._errors.read().strip().splitlines() or ["no word"])[-1]
        self.failed = f"failed in call {len(self.seconds) + 1}: {last_words}"
        return None

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)

    @property
    def later(self) -> float:
        return statistics.median(self.seconds[1:])


def main() -> None:
    if sys.argv[1:2] == [DRIVE]:
        drive(sys.argv[2], int(sys.argv[3]))
        return
    rounds = options(__doc__, rounds=7).rounds
    print(f"{today()}, first call {SECONDS_AFTER_IMPORT:g} s after the import", flush=True)
    drivers = []
    for ranks in RANKS:
        for way in WAYS:
            driver = Driver(way, ranks)
            drivers.append(driver)
            time.sleep(SECONDS_AFTER_IMPORT)
            driver.call()
    for _ in range(rounds):
        for driver in drivers:
            driver.call()
    memory = [driver.order(MEASURE) for driver in drivers]
    for driver in drivers:
        driver.close()
    print(f"{'ranks':>5}  {'way':<30}{'first s':>8}{'later s, median (min-max)':>28}{'x dlearn':>10}{'MB/rank':>9}")
    ours = {driver.ranks: driver.later for driver in drivers if driver.way == "dlearn"}
    for driver, measured in zip(drivers, memory, strict=True):
        named = f"{driver.ranks:>5}  {driver.way:<30}"
        if driver.failed:
            print(f"{named}{driver.failed}")
            continue
        (of_a_rank, between_runs), spread = measured, median_text(driver.seconds[1:], 3)
        times = driver.later / ours[driver.ranks]
        print(f"{named}{driver.seconds[0]:>8.2f}{spread:>28}{times:>10.1f}{of_a_rank / 1e6:>9.0f}")
        if driver.way == "dlearn":
            held = f"{between_runs / 1e6:.0f} MB"
            print(f"{'':>7}between calls: a fork server and {driver.ranks} fresh ranks, {held} in all (PSS)")


if __name__ == "__main__":
    main()
