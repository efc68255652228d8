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
_GRACE_SECONDS = 1.0
"""After one rank has failed: how long the other may take to notice."""


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
    """What they returned. Of several that fail, the one to tell of is that which failed first."""
    deadline, failed_at = time.monotonic() + _SECONDS, None
    while any(each.poll() is None for each in ranks):
        now = time.monotonic()
        if failed_at is None and any(each.poll() for each in ranks):
            failed_at = now
        if failed_at is not None and now > failed_at + _GRACE_SECONDS:
            break
        if now > deadline:
            raise DlearnError(f"the ranks over the cable were not done after {_SECONDS:.0f} s.")
        time.sleep(0.02)
    answers = {rank: _answer(each) for rank, each in enumerate(ranks) if each.poll() is not None}
    failed = {rank: answer for rank, answer in answers.items() if "error" in answer}
    if failed:
        first = min(failed, key=lambda rank: failed[rank]["at"])
        raise DlearnError(f"rank {first} failed over the cable: {failed[first]['error']}")
    return [answers[rank]["result"] for rank in range(len(ranks))]


def _answer(rank: subprocess.Popen[str]) -> dict[str, Any]:
    """Its last line. One that died under it failed before all others: these only noticed."""
    out, err = rank.communicate()
    lines = out.splitlines()
    if lines and lines[-1].startswith('{"'):
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {"error": (err.strip().splitlines() or [f"it ended with {rank.returncode}"])[-1], "at": 0.0}


def _start(host: Mapping[str, str], rank: int, job: Callable[..., Any], args: tuple[Any, ...]) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(ADDRESSES)),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": host["interface"],
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),  # It imports the job from where this process would.
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


def _rank(module: str, name: str, arguments: str) -> dict[str, Any]:
    """In the rank's own process: meet, run the job; what it returns, or what it raises and when."""
    import importlib

    import torch.distributed as dist

    try:
        job = getattr(importlib.import_module(module), name)
        dist.init_process_group("gloo")
        result = job(*json.loads(arguments))
        dist.destroy_process_group()
    except Exception as error:  # Whatever the job raises is for the one who asked.
        return {"error": f"{type(error).__name__}: {error}", "at": time.monotonic()}
    return {"result": result}


if __name__ == "__main__":
    answer = _rank(*sys.argv[1:])
    print(json.dumps(answer), flush=True)
    sys.exit("error" in answer)
