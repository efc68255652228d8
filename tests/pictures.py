"""Every drawing of dlearn.draw, of traces by hand. As a script it saves them all: python pictures.py FOLDER

Several tests ask something of every drawing; one that is new has to be added here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import msgspec
from matplotlib.axes import Axes
from traces import Job, tensor

from dlearn import draw
from dlearn.sources.memory import SOURCE
from dlearn.trace.event import AutogradNode, AutogradRun
from dlearn.trace.memory_held import MemoryHeld
from dlearn.trace.source import describe
from dlearn.trace.trace import Trace
from dlearn.trace.wiring import ChannelLink, Ring, Wired

US = 1000
ENDINGS = ("svg", "png", "pdf")


def drawings(folder: Path, *, name: str = "") -> dict[str, Axes]:
    """By their names in dlearn.draw. `name` is that of rank 1."""
    trace = training(folder / "training", name)
    return {
        "autograd": draw.autograd(graph(folder / "graph", name)),
        "bandwidth": draw.bandwidth(trace),
        "breakdown": draw.breakdown(trace),
        "buckets": draw.buckets(trace),
        "compare": draw.compare(sends(folder / "a", 12), sends(folder / "b", 40), names=("a", name or "b")),
        "groups": draw.groups(trace),
        "memory": draw.memory(memory(folder / "memory", name)),
        "reconcile": draw.reconcile(trace),
        "scaling": draw.scaling({size: sends(folder / str(size), 12 * size, name) for size in (1, 8, 32)}),
        "sequence": draw.sequence(trace),
        "steps": draw.steps(trace),
        "timeline": draw.timeline(trace),
        "topology": draw.topology(wired(folder / "wired", name)),
        "traffic": draw.traffic(trace),
        "traffic_graph": draw.traffic_graph(trace),
    }


def training(folder: Path, name: str = "") -> Trace:
    """A step of DDP on two ranks, two buckets, rank 1 late; rank 1 has written 200 B more than its messages say."""
    job = ranks(folder, name)
    job.connect()
    for rank in range(2):
        job.counters(rank, 0)
        job.bucket(rank, 0, {"b": 40}, count=2)
        job.bucket(rank, 1, {"a": 60}, count=2)
        job.span(rank, "step 1", end_ns=400 * US)
        job.stretch(rank, "forward", 0, 100 * US)
        for parameter, ready in (("b", 150), ("a", 250)):
            job.gradient(rank, parameter, at_ns=(ready + 30 * rank) * US)
    for size, at in ((40, 151), (60, 251)):
        facts = {"launcher": "reducer", "backward": 0, "phase": "backward", "inputs": (tensor(size),)}
        job.collective("all_reduce", start_ns={0: at * US, 1: (at + 30) * US}, end_ns=(at + 60) * US, **facts)
    for rank in range(2):
        job.stretch(rank, "backward", 110 * US, 350 * US)
        job.stretch(rank, "optimizer", 360 * US, 380 * US)
        job.counters(rank, 1252 + 200 * rank)
    return job.load()


def wired(folder: Path, name: str = "") -> Trace:
    """Two hosts of a rank each, and NCCL's ring of them."""
    job = ranks(folder, name)
    for rank, lines in enumerate(job.files):
        link = ChannelLink(0, 1 - rank, f"NET/{name}/0", "ring")
        rings = (Ring((0, 1), (0,)),) if rank == 0 else ()
        lines.append(Wired(group="world", host=f"host {rank}{name}", device=0, channels=1, links=(link,), rings=rings))
    return job.load()


def memory(folder: Path, name: str = "") -> Trace:
    """Rank 1 holds the optimizer's state, too."""
    job = ranks(folder, name)
    facts = {"gathered": 0, "buckets": 100, "model": 100, "optimizers": "Adam", "way": "DDP", "ranks": 2}
    for rank, lines in enumerate(job.files):
        lines.append(describe(SOURCE))
        for at in range(3):
            more = {"parameters": 100, "gradients": 100 * (at > 1), "state": 200 * rank, "activations": 40 * (at == 1)}
            job.event(MemoryHeld, rank, start_ns=at * US, **facts, **more)
    return job.load()


def sends(folder: Path, size: int, name: str = "") -> Trace:
    job = ranks(folder, name)
    job.send(0, 1, size=size)
    job.recv(1, 0, size=size)
    return job.load()


def graph(folder: Path, name: str = "") -> Trace:
    """A call by RPC: the gradient goes from rank 0's recv to rank 1's send."""
    job = ranks(folder, name)
    job.event(AutogradNode, 0, context=1, node=0, name="RecvRpcBackward", shapes=((8,),), message=7)
    job.event(AutogradRun, 0, context=1, node=0, tensors=(tensor(32),), end_ns=20)
    job.event(AutogradNode, 1, context=1, node=0, name="SendRpcBackward", shapes=((8,),), message=7, next=(1,))
    job.event(AutogradNode, 1, context=1, node=1, name="AccumulateGrad", shapes=((8,),), parameter="weight")
    return job.load()


def ranks(folder: Path, name: str) -> Job:
    folder.mkdir()
    job = Job(folder, ranks=2)
    if name:
        job.headers[1] = msgspec.structs.replace(job.headers[1], name=name)
    return job


if __name__ == "__main__":
    matplotlib.use("agg")
    out = Path(sys.argv[1])
    out.mkdir()
    for kind, ax in drawings(out).items():
        for ending in ENDINGS:
            draw.save(ax, out / f"{kind}.{ending}")
    assert "torch" not in sys.modules
