"""Two ranks on two hosts with a cable of a given rate between them: network namespaces, on this machine.

On the loopback interface a transfer is copying, which takes the same cores as computing does. Over a cable it takes
time, and no core: only there is something to hide. Each host sees nothing but the cable, and nobody else sees it.
Needs Linux, root and iproute2.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

from dlearn.errors import DlearnError

ADDRESSES = ("10.78.0.1", "10.78.0.2")
_PORT = 29400
"""Free for sure: the hosts are new and have nothing that listens."""
_SECONDS = 120.0


@cache
def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"no {' and '.join(missing)} here (Debian: iproute2)"
    try:
        with two_hosts("100mbit"):
            return ""
    except DlearnError as error:
        return str(error)


def run_over(rate: str, job: Callable[..., Any], *args: Any) -> list[Any]:
    """What `job`, a module's function, returns as JSON on either rank; the cable carries `rate` ("100mbit") each way.

    DlearnError names the rank that fails, with its last line.
    """
    with two_hosts(rate) as hosts:
        ranks = [_start(host, rank, job, args) for rank, host in enumerate(hosts)]
        try:
            return _results(ranks)
        finally:
            for each in ranks:
                if each.poll() is None:
                    each.kill()
                each.communicate()


def _results(ranks: list[subprocess.Popen[str]]) -> list[Any]:
    """Their last lines. The first one that fails is the one to tell of, whichever it is."""
    deadline = time.monotonic() + _SECONDS
    while any(each.poll() is None for each in ranks) and not any(each.poll() for each in ranks):
        if time.monotonic() > deadline:
            raise DlearnError(f"the ranks over the cable were not done after {_SECONDS:.0f} s.")
        time.sleep(0.05)
    found: list[Any] = []
    for rank, each in sorted(enumerate(ranks), key=lambda pair: -(pair[1].poll() or 0)):
        out, err = each.communicate()
        if each.returncode:
            last = (err.strip().splitlines() or ["nothing said"])[-1]
            raise DlearnError(f"rank {rank} failed over the cable: {last}")
        found.append((rank, json.loads(out.splitlines()[-1])))
    return [result for _, result in sorted(found)]


def _start(host: Mapping[str, str], rank: int, job: Callable[..., Any], args: tuple[Any, ...]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(ADDRESSES)),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": host["interface"],
        "OMP_NUM_THREADS": "1",
    }
    call = [sys.executable, "-m", __name__, job.__module__, job.__qualname__, json.dumps(args)]
    return subprocess.Popen(
        ["ip", "netns", "exec", host["namespace"], *call],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextmanager
def two_hosts(rate: str) -> Iterator[tuple[Mapping[str, str], Mapping[str, str]]]:
    """Two namespaces and a cable; both are gone at the end of the block. DlearnError where that is not permitted."""
    a, b = ({"namespace": f"dlearn-{os.getpid()}{x}", "interface": f"dl{os.getpid()}{x}"} for x in "ab")
    try:
        for host in (a, b):
            _ip("netns", "add", host["namespace"])
        cable = ["type", "veth", "peer", "name", b["interface"], "netns", b["namespace"]]
        _ip("link", "add", a["interface"], "netns", a["namespace"], *cable)
        for host, address in zip((a, b), ADDRESSES, strict=True):
            _ip("-n", host["namespace"], "addr", "add", f"{address}/24", "dev", host["interface"])
            for interface in ("lo", host["interface"]):
                _ip("-n", host["namespace"], "link", "set", interface, "up")
            # A token bucket: the bytes that may go at once are as few as one large packet has, so that all wait.
            bucket = ["tbf", "rate", rate, "burst", "64kb", "latency", "1s"]
            _call("tc", "-n", host["namespace"], "qdisc", "add", "dev", host["interface"], "root", *bucket)
        yield a, b
    finally:
        for host in (a, b):
            subprocess.run(["ip", "netns", "del", host["namespace"]], capture_output=True, timeout=20)


def _ip(*arguments: str) -> None:
    _call("ip", *arguments)


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        said = done.stderr.strip() or f"exit status {done.returncode}"
        raise DlearnError(f"network namespaces are not permitted here: {' '.join(command[:3])}: {said}")


def _rank(module: str, name: str, arguments: str) -> None:
    """In the rank's own process: meet, run the job, print what it returns."""
    import importlib

    import torch.distributed as dist

    job = getattr(importlib.import_module(module), name)
    dist.init_process_group("gloo")
    try:
        print(json.dumps(job(*json.loads(arguments))))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _rank(*sys.argv[1:])
