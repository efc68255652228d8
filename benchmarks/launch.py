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
from argparse import SUPPRESS
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from measuring import median_text, option_parser, today

RANKS = (2, 4)
SECONDS_AFTER_IMPORT = 5.0
MEASURE = "measure"


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
            client[engine].apply_sync(_set_variables, variables)
        while True:
            yield client[:].apply_sync(meet, folder) and None


def _set_variables(variables: dict[str, str]) -> None:
    import os

    os.environ.update(variables)


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
        os.write(answers, b"ready\n")
        for order in sys.stdin:
            if order.strip() == MEASURE:
                Path(folder, MEASURE).touch()
            start = time.perf_counter()
            next(calls)
            answer = time.perf_counter() - start
            if order.strip() == MEASURE:
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
    def __init__(self, way: str, ranks: int) -> None:
        self.way, self.ranks = way, ranks
        self.seconds: list[float] = []
        self.rank_bytes = self.waiting_bytes = 0.0
        self.failed = ""
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--drive", way, str(ranks)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if not self._process.stdout.readline():
            self.failed = self._last_words()

    def call(self) -> None:
        answer = self._order("call")
        if answer is not None:
            self.seconds.append(answer)

    def measure(self) -> None:
        self.rank_bytes, self.waiting_bytes = self._order(MEASURE) or (0.0, 0.0)

    def _order(self, order: str) -> Any:
        if self.failed:
            return None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self.failed = f"failed in call {len(self.seconds) + 1}: {self._last_words()}"
            return None
        return json.loads(answer)

    def _last_words(self) -> str:
        self._process.wait(timeout=60)
        self._errors.seek(0)
        return (self._errors.read().strip().splitlines() or ["no word"])[-1]

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)

    @property
    def later(self) -> float:
        return statistics.median(self.seconds[1:])


def main() -> None:
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="later calls of each (default 7)")
    parser.add_argument("--drive", nargs=2, metavar=("WAY", "RANKS"), help=SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(options.drive[0], int(options.drive[1]))
        return
    print(f"{today()}, first call {SECONDS_AFTER_IMPORT:g} s after the import")
    drivers = []
    for ranks in RANKS:
        for way in WAYS:
            show(f"first call: {way}, {ranks} ranks")
            driver = Driver(way, ranks)
            drivers.append(driver)
            time.sleep(SECONDS_AFTER_IMPORT)
            driver.call()
    for number in range(options.rounds):
        show(f"later calls: round {number + 1} of {options.rounds}")
        for driver in drivers:
            driver.call()
    for driver in drivers:
        driver.measure()
    show("")
    for driver in drivers:
        driver.close()
    report(drivers)


def show(progress: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{progress}", end="", file=sys.stderr, flush=True)


def report(drivers: list[Driver]) -> None:
    print(f"{'ranks':>5}  {'way':<30}{'first s':>8}{'later s, median (min-max)':>28}{'x dlearn':>10}{'MB/rank':>9}")
    ours = {driver.ranks: driver.later for driver in drivers if driver.way == "dlearn"}
    for driver in drivers:
        if driver.failed:
            print(f"{driver.ranks:>5}  {driver.way:<30}{driver.failed}")
            continue
        spread = median_text(driver.seconds[1:], 3)
        print(
            f"{driver.ranks:>5}  {driver.way:<30}{driver.seconds[0]:>8.2f}{spread:>28}"
            f"{driver.later / ours[driver.ranks]:>10.1f}{driver.rank_bytes / 1e6:>9.0f}"
        )
        if driver.way == "dlearn":
            held = f"{driver.waiting_bytes / 1e6:.0f} MB"
            print(f"{'':>7}between calls: a fork server and {driver.ranks} fresh ranks, {held} in all (PSS)")


if __name__ == "__main__":
    main()
