"""Two ranks on two hosts with a cable of a given rate between them: network namespaces, on this machine.

On the loopback interface a transfer is copying, which takes the same cores as computing does. Over a cable it takes
time, and no core: only there is something to hide. Each host sees nothing but the cable, and nobody else sees it. A
host is its rank's own namespace and has no name: it is gone when the rank is, and the rank when we are, however we end.
Needs Linux, root, iproute2 and util-linux.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from dlearn.errors import DlearnError

Host = subprocess.Popen[str]
"""A rank, which is the only process of its host."""

ADDRESSES = ("10.78.0.1", "10.78.0.2")
CABLE = "cable"
_PORT = 29400
"""Free for sure: the hosts are new and have nothing that listens."""
_SECONDS = 120.0
_GRACE_SECONDS = 1.0
"""After one rank has failed: how long the other may take to notice."""


@cache
def why_not() -> str:
    """Why there can be no such hosts here; empty if there can."""
    missing = [tool for tool in ("ip", "tc", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        return f"no {' and '.join(missing)} here (Debian: iproute2, util-linux)"
    try:
        with two_hosts("100mbit", ["cat"]):
            return ""
    except DlearnError as error:
        return str(error)


def run_over(rate: str, job: Callable[..., Any], *args: Any) -> list[Any]:
    """What `job`, a module's function, returns as JSON on either rank; the cable carries `rate` ("100mbit") each way.

    DlearnError names the rank that failed first, with its error.
    """
    with two_hosts(rate, [sys.executable, "-m", __name__, job.__module__, job.__qualname__, json.dumps(args)]) as ranks:
        return _results(ranks)


def _results(ranks: Sequence[Host]) -> list[Any]:
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


def _answer(rank: Host) -> dict[str, Any]:
    """Its last line. One that died under it failed before all others: these only noticed."""
    out, err = rank.communicate()
    lines = out.splitlines()
    if lines and lines[-1].startswith('{"'):
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    return {"error": (err.strip().splitlines() or [f"it ended with {rank.returncode}"])[-1], "at": 0.0}


@contextmanager
def two_hosts(rate: str, command: Sequence[str]) -> Iterator[tuple[Host, Host]]:
    """`command` once on each of two hosts; both are ended with the block. It may begin when it has read a line.

    DlearnError where that is not permitted.
    """
    a, b = hosts = _start(0, command), _start(1, command)
    try:
        for host in hosts:
            _wait_until_apart(host)
        _inside(a, "ip", "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", str(b.pid))
        for host, address in zip(hosts, ADDRESSES, strict=True):
            _inside(host, "ip", "addr", "add", f"{address}/24", "dev", CABLE)
            for interface in ("lo", CABLE):
                _inside(host, "ip", "link", "set", interface, "up")
            # A token bucket: the bytes that may go at once are as few as one large packet has, so that all wait.
            bucket = ["tbf", "rate", rate, "burst", "64kb", "latency", "1s"]
            _inside(host, "tc", "qdisc", "add", "dev", CABLE, "root", *bucket)
        for host in hosts:
            assert host.stdin is not None
            host.stdin.write("begin\n")
            host.stdin.flush()
        yield a, b
    finally:
        for host in hosts:
            if host.poll() is None:
                host.kill()
            host.communicate()


def _start(rank: int, command: Sequence[str]) -> Host:
    """In a network namespace of its own; its pid is that of the command."""
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(len(ADDRESSES)),
        "MASTER_ADDR": ADDRESSES[0],
        "MASTER_PORT": str(_PORT),
        "GLOO_SOCKET_IFNAME": CABLE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),  # It imports the job from where this process would.
    }
    pipe = subprocess.PIPE
    return subprocess.Popen(
        ["unshare", "--net", *command], env=environment, text=True, stdin=pipe, stdout=pipe, stderr=pipe
    )


def _wait_until_apart(host: Host) -> None:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if host.poll() is not None:
            _, said = host.communicate()
            raise DlearnError(f"network namespaces are not permitted here: {said.strip() or host.returncode}")
        if os.readlink(f"/proc/{host.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
            return
        time.sleep(0.01)
    raise DlearnError("network namespaces are not permitted here: no new one came up.")


def _inside(host: Host, *command: str) -> None:
    call = ["nsenter", "--net", "--target", str(host.pid), *command]
    done = subprocess.run(call, capture_output=True, text=True, timeout=20)
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


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)  # Whoever held the other end is gone.


if __name__ == "__main__":
    sys.stdin.readline()  # The cable is there.
    threading.Thread(target=_end_with_parent, daemon=True).start()
    answer = _rank(*sys.argv[1:])
    print(json.dumps(answer), flush=True)
    os._exit("error" in answer)  # An orderly exit would wait for the thread that reads.
