"""Jobs to draw, recorded ones and those that no run gives; and every drawing of dlearn.draw, of traces by hand.

As a script it saves the drawings: python pictures.py FOLDER. One that is new has to be added here.
"""

import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.text import Text
from traces import Job, fact, tensor

from dlearn import Trace, draw
from dlearn.events.event import NOT_OBSERVED, AutogradNode, AutogradRun

US, MS = 1000, 1_000_000
ENDINGS = ("svg", "png", "pdf")
HOSTILE = "</title><script>alert(1)</script>\"'&amp;(]]>\\"
STRANGE = ["a$b$", HOSTILE, "long " * 60, "日本\n\u202e\x00%s{}", "W" * 200]


def title(ax: Axes) -> str:
    return " ".join(ax.get_title(loc="left").split())


def texts(ax: Axes) -> list[str]:
    return [" ".join(text.get_text().split()) for text in ax.texts]


def words(ax: Axes) -> str:
    """Everything that is written in its figure, on one line."""
    return " ".join(" ".join(text.get_text() for text in ax.figure.findobj(Text)).split())


def lanes(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def parts(ax: Axes, gid: str) -> list[Artist]:
    return [artist for artist in (*ax.patches, *ax.collections, *ax.lines) if artist.get_gid() == gid]


RECORDED = {
    "DDP": "lesson-quickstart/00",
    "DDP over a glass box": "lesson-ring_all_reduce/06",
    "DDP and RPC": "lesson-quickstart/04",
    "sharded": "lesson-sharding/04",
    "collectives": "lesson-collectives/01",
    "pipeline": "lesson-pipeline/02",
    "RPC": "lesson-parameter_server/00",
    "distributed autograd": "lesson-distributed_autograd/02",
    "MPI": "lesson-mpi_sgd/08",
    "MPI's own algorithms": "mpi/00",
    "hang": "lesson-museum_of_hangs/10",
    "hang of a bucket": "lesson-museum_of_hangs/03",
    "hang of RPC": "lesson-museum_of_hangs/04",
}
"""Of each kind a trace out of tests/frozen."""


def recorded_job(name: str, folder: Path) -> Trace:
    """As it was recorded; `folder` holds its files."""
    archive, _, place = RECORDED[name].partition("/")
    with zipfile.ZipFile(Path(__file__).parent / "frozen" / f"{archive}.zip") as files:
        files.extractall(folder, [each for each in files.namelist() if each.startswith(f"{place}/")])
    return Trace.load(folder / place)


def many_ranks(folder: Path) -> Job:
    """30 ranks, more than have lanes; a large ring, a small one, and a barrier."""
    job = Job(folder, ranks=30)
    for i, op in enumerate(["all_reduce", "all_gather", "barrier"]):
        late = {rank: (10 * i + rank / 4) * MS for rank in range(30)}
        job.collective(op, size=0 if op == "barrier" else 10 ** (3 * i + 3), start_ns=late, end_ns=(10 * i + 9) * MS)
    return job


def strange_names(folder: Path) -> Job:
    job = Job(folder, ranks=5, names=STRANGE)
    for rank, name in enumerate(STRANGE):
        job.span(rank, name, start_ns=0, end_ns=90 * MS)
        job.span(rank, name, start_ns=10 * MS, end_ns=80 * MS)
    job.group("a group with a long name " * 3, [1, 2, 4])
    job.collective("all_reduce", size=1_234_567, start_ns=MS, end_ns=40 * MS)
    job.collective(
        "broadcast", size=10, group="a group with a long name " * 3, root=1, start_ns=50 * MS, end_ns=51 * MS
    )
    return job


def broken(folder: Path) -> Job:
    """A hang of a group, a call that fits no other, a receive from anyone, an end that nobody saw."""
    job = Job(folder, ranks=8)
    job.collective("all_reduce", size=1000, start_ns=0, end_ns=10 * MS)
    job.collective("all_reduce", size=1000, ranks=[0, 2, 3, 4, 5, 6], start_ns=20 * MS, end_ns=None)
    job.recv(7, None, start_ns=12 * MS, end_ns=None)
    job.send(1, 7, start_ns=12 * MS, end_ns=None, by=NOT_OBSERVED, tag=123456)
    return job


def tagged(folder: Path) -> Job:
    """Messages in both directions at the same time, whose tags tell them apart."""
    job = Job(folder, ranks=3)
    for i, (src, dst, tag) in enumerate([(0, 1, 7), (1, 0, 8), (0, 2, 7), (2, 0, 8), (0, 1, 1_000_000)]):
        job.message(src, dst, tag=tag, size=1000 * i + 1, start_ns=i * MS, end_ns=(i + 1) * MS)
    return job


def ring(folder: Path, *, ranks: int = 3, count: int = 9, names: Sequence[str] = ()) -> Job:
    """Message i of `count` goes from rank i to its next one and carries (i + 1) x 100 bytes."""
    job = Job(folder, ranks=ranks, names=names)
    for i in range(count):
        times = {"start_ns": 10_000 * i, "end_ns": 10_000 * i + 5000}
        job.message(i % ranks, (i + 1) % ranks, size=100 * (i + 1), **times)
    return job


BY_HAND: list[Callable[[Path], Job]] = [many_ranks, strange_names, broken, tagged]


def drawings(folder: Path, *, name: str = "") -> dict[str, Axes]:
    """By their names in dlearn.draw. `name` is that of rank 1."""
    trace = training(folder / "training", name)
    return {
        "autograd": draw.autograd(graph(folder / "graph", name)),
        "breakdown": draw.breakdown(trace),
        "buckets": draw.buckets(trace),
        "film": draw.film(trace),
        "groups": draw.groups(grouped(folder / "grouped", name)),
        "memory": draw.memory(memory(folder / "memory", name)),
        "pipeline": draw.pipeline(pipeline(folder / "pipeline", name)),
        "scaling": draw.scaling({size: sends(folder / str(size), 12 * size, name) for size in (1, 8, 32)}),
        "sequence": draw.sequence(trace),
        "steps": draw.steps(training(folder / "steps", name, steps=4)),
        "timeline": draw.timeline(trace),
        "topology": draw.topology(wired(folder / "wired", name)),
        "traffic": draw.traffic(trace),
        "traffic_graph": draw.traffic_graph(trace),
    }


def training(folder: Path, name: str = "", *, steps: int = 1) -> Trace:
    """Steps of DDP on two ranks, two buckets, rank 1 late; rank 1 has written 200 B more than its messages say."""
    job = ranks(folder, name)
    job.connect()
    job.counters((0, 1), 0)
    ddp_buckets(job)
    for step in range(steps):
        job.span((0, 1), f"step {step + 1}", start_ns=400 * step * US, end_ns=400 * (step + 1) * US)
        ddp_step(job, 400 * step, late=30, backward=step)
    for rank in range(2):
        job.counters(rank, 1252 + 200 * rank)
    return job.load()


def ddp_buckets(job: Job) -> None:
    job.bucket((0, 1), 0, {"b": 40}, count=2)
    job.bucket((0, 1), 1, {"a": 60}, count=2)


def ddp_step(job: Job, at: int = 0, *, late: int = 0, backward: int = 0) -> None:
    """A step on two ranks, in µs from `at`; rank 1's backward pass begins `late` later, its forward does, too.

    forward 0-100, backward 110-300, optimizer 310-330. Gradients "b" at 150, "a" at 250. Bucket 0 (40 B) is launched
    at 151 and done at 211, bucket 1 (60 B) at 251 and 291: on rank 0 with `late=0` 60 µs hidden, 40 µs exposed.
    """
    for rank in range(2):
        shift = at + late * rank
        job.stretch(rank, "forward", shift * US, (shift + 100) * US)
        for name, ready in (("b", 150), ("a", 250)):
            job.gradient(rank, name, at_ns=(shift + ready) * US, backward=backward)
    for size, launched, took in ((40, 151, 60), (60, 251, 40)):
        starts = {0: (at + launched) * US, 1: (at + launched + late) * US}
        facts = {"launcher": "reducer", "backward": backward, "phase": "backward", "inputs": (tensor(size),)}
        job.collective("all_reduce", start_ns=starts, end_ns=starts[1] + took * US, **facts)
    for rank in range(2):
        job.stretch(rank, "backward", (at + 110 + late * rank) * US, (at + 300 + late) * US)
        job.stretch(rank, "optimizer", (at + 310 + late) * US, (at + 330 + late) * US)


def grouped(folder: Path, name: str = "") -> Trace:
    job = ranks(folder, name)
    job.group("alone", [1])
    return job.load()


def wired(folder: Path, name: str = "") -> Trace:
    """Two hosts of a rank each, and NCCL's ring of them."""
    job = ranks(folder, name)
    for rank in range(2):
        link = {"channel": 0, "to": 1 - rank, "via": f"NET/{name}/0", "use": "ring"}
        own = {"group": "world", "host": f"host {rank}{name}", "device": 0, "channels": 1}
        rings = [{"order": [0, 1], "channels": [0]}] * (rank == 0)
        job.files[rank].append(fact("wired", **own, links=[link], rings=rings))
    return job.load()


def memory(folder: Path, name: str = "") -> Trace:
    """Rank 1 holds the optimizer's state, too."""
    columns = ["parameters", "gathered", "gradients", "buckets", "state", "activations", "model"]
    facts = {"optimizers": "Adam", "way": "DDP", "ranks": 2}
    common = ["number", "start_ns", "end_ns", "ended_by", "error", "parent", "thread", "phase", "site", "rank"]
    kinds = {"memory": {"columns": [*common, *columns, *facts], "ends": False}}
    job = ranks(folder, name)
    for rank, file in enumerate(job.files):
        file.append(fact("source", name="memory", kinds=kinds))
        for at in range(3):
            sizes = (100, 0, 100 * (at > 1), 100, 200 * rank, 40 * (at == 1), 100)
            own = dict(zip(columns, sizes, strict=True))
            file.append(fact("memory", number=at, start_ns=at * US, **own, **facts))
    return job.load()


def pipeline(folder: Path, name: str = "", *, stages: int = 2, micro_batches: int = 2, slow: int = 1) -> Trace:
    """A step of GPipe: a forward pass takes 10 ms, a backward pass 20 ms, on the last rank `slow` times as long."""
    folder.mkdir(parents=True)
    job, free = Job(folder, ranks=stages, names=["", name, *[""] * (stages - 2)]), [0] * stages
    for kind, order, took in (("F", range(stages), 10), ("B", range(stages)[::-1], 20)):
        for micro_batch in range(micro_batches):
            over = 0
            for before, rank in zip([None, *order[:-1]], order, strict=True):
                begin = max(over, free[rank])
                over = free[rank] = begin + took * (slow if rank == stages - 1 else 1)
                job.span(rank, f"{kind}{micro_batch}", start_ns=begin * MS, end_ns=over * MS)
                if before is not None:
                    job.message(before, rank, size=1000, start_ns=begin * MS, end_ns=begin * MS + 1)
    return job.load()


def sends(folder: Path, size: int, name: str = "") -> Trace:
    job = ranks(folder, name)
    job.message(0, 1, size=size)
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
    folder.mkdir(parents=True)
    return Job(folder, ranks=2, names=("", name))


def save(folder: Path) -> None:
    """A bar, an arrow, a number, an area, a dot: what drawings are made of, in files of each kind."""
    trace, held = training(folder / "training"), memory(folder / "memory")
    for picture in (draw.timeline, draw.sequence, draw.traffic, draw.memory):
        ax = picture(held if picture is draw.memory else trace)
        for ending in ENDINGS:
            draw.save(ax, folder / f"{picture.__name__}.{ending}")


if __name__ == "__main__":
    matplotlib.use("agg")
    save(Path(sys.argv[1]))
    assert "torch" not in sys.modules
