"""`dlearn demo`: train on handwritten digits on three real ranks, then tell and draw who sent what to whom.

Only the ranks load torch (training.py); this process reads what they recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from dlearn.analysis import Explanation, Iteration, explain, iteration, messages, reconcile
from dlearn.analysis.telling.words import rpc_overview
from dlearn.analysis.volume.message_lines import csv_lines
from dlearn.cluster import Cluster
from dlearn.cluster.cluster import RUNS_KEPT
from dlearn.errors import SetupError
from dlearn.trace.trace import Trace

RANKS = 3

Tell = Callable[[str], None]


def run(folder: Path, *, tell: Tell) -> None:
    """Train, and leave words, a table and pictures in `folder`; `tell` gets a line for each thing that is done.

    Raises SetupError if a file cannot be written.
    """
    tell(f"Training a small ConvNet on handwritten digits, on {RANKS} ranks over gloo (they load torch first):")
    job = Cluster(RANKS).run(train)
    before, after, steps = job.results[0]
    tell(f"Right on held-out digits: {before:.1%} before, {after:.1%} after {steps} steps.\n")
    explanation = explain(job.trace)
    tell(f"{explanation}\n")
    tell("The same net on a parameter server with two trainers, over RPC:")
    served = Cluster(["ps", "trainer1", "trainer2"], rpc=True, measure="phase").run(
        {"trainer1": partial(serve, 0), "trainer2": partial(serve, 1)}
    )
    told = iteration(served.trace)
    tell(f"{rpc_overview(served.trace)}\n{told}\n")
    tell(f"Files, in {folder} (those of the same name are replaced):")
    try:
        for name, meaning in chain(write(folder, job.trace, explanation), write_served(folder, served.trace, told)):
            tell(f"  {name:<19} {meaning}")
    except OSError as error:
        raise SetupError(f"cannot write {error.filename}: {error.strerror}. Give another --out.") from error
    tell(f"The trace itself (the newest {RUNS_KEPT} runs are kept): dlearn.Trace.load({str(job.folder / 'trace')!r})\n")
    tell(reconcile(job.trace).sentence)


def train() -> tuple[float, float, int]:
    """On every rank."""
    from dlearn.lessons import training

    return training.train()


def serve(trainer: int) -> float:
    """On every trainer."""
    from dlearn.lessons import serving

    return serving.train(trainer)


# Files --------------------------------------------------------------------------------------------------------------


def write(folder: Path, trace: Trace, explanation: Explanation) -> Iterator[tuple[str, str]]:
    """Write one file after the other; yields the name and meaning of each when it is there."""
    step = trace.within(explanation.part)
    (folder / "explanation.txt").write_text(f"{explanation}\n", encoding="utf-8")
    yield "explanation.txt", "the words and the table above"
    found = messages(trace)
    (folder / "messages.csv").write_text("\n".join([*csv_lines(found), ""]), encoding="utf-8")
    yield "messages.csv", f"all {len(found):,} messages: from, to, bytes, what"
    from dlearn import draw  # matplotlib takes a moment

    pictures = {
        "timeline": (draw.timeline, f"{explanation.part}: when each rank was at what"),
        "traffic": (draw.traffic, f"{explanation.part}: bytes from each rank to each other"),
        "sequence": (draw.sequence, f"{explanation.part}: message by message"),
    }
    for name, (picture, meaning) in pictures.items():
        axes = picture(step)
        for ending in ("svg", "png"):
            draw.save(axes, folder / f"{name}.{ending}")
            yield f"{name}.{ending}", meaning


def write_served(folder: Path, trace: Trace, told: Iteration) -> Iterator[tuple[str, str]]:
    """The same for an iteration of the parameter server."""
    (folder / "server.txt").write_text(f"{told}\n", encoding="utf-8")
    yield "server.txt", "the parameter server's iteration, as above"
    from dlearn import play

    mine = [message for message in told.messages if told.drivers[0] in (message.src, message.dst)]
    story = [step for step in told.story if step.messages[0] is not None]
    title = f"You were told {len(story)} messages; it is {len(mine)}"
    play.player(trace, messages=mine, title=title).to_html(folder / "server-player.html")
    yield "server-player.html", "step through it, message by message, in a browser"
