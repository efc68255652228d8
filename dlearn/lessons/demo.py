"""`dlearn demo`: train on handwritten digits on three real ranks, then say and draw who sent what to whom.

Only the ranks load torch (training.py); this process reads what they recorded.
"""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from markupsafe import Markup

from dlearn.analysis import Explanation, Iteration, explain, iteration, messages, reconcile
from dlearn.analysis.findings import traffic_finding
from dlearn.analysis.telling.explanations import rpc_overview
from dlearn.analysis.volume.message_lines import csv_lines
from dlearn.cluster import Cluster
from dlearn.errors import SetupError
from dlearn.join.tables.message_table import Message
from dlearn.trace import Trace

RANKS = 3
PAGE = "index.html"

Tell = Callable[[str], None]


def run(folder: Path, *, tell: Tell) -> None:
    """Train, and leave a page, words, a table, pictures and both traces in `folder`; `tell` gets each line of news.

    Raises SetupError if a file cannot be written.
    """
    tell(f"Training a small ConvNet on handwritten digits, on {RANKS} ranks over gloo (they load torch first):")
    job = Cluster(RANKS).run(train)
    before, after, steps = job.results[0]
    tell(f"Right on held-out digits: {before:.1%} before, {after:.1%} after {steps} steps.")
    explanation = explain(job.trace)
    sent = traffic_finding(explanation.traffic)
    tell(f"In {explanation.part} {sent[:1].lower()}{sent[1:]}.")
    tell(reconcile(job.trace).sentence)
    served = Cluster(["ps", "trainer1", "trainer2"], rpc=True, measure="phase").run(
        {"trainer1": partial(serve, 0), "trainer2": partial(serve, 1)}
    )
    found = iteration(served.trace)
    tell(f"The same net with two trainers, over RPC. {surprise(found)}.")
    try:
        keep(job.folder / "trace", folder / "trace")
        keep(served.folder / "trace", folder / "server-trace")
        write(folder, job.trace, explanation)
        words = f"{rpc_overview(served.trace)}\n{found}\n"
        (folder / "server.txt").write_text(words, encoding="utf-8")
        write_page(folder, job.trace, explanation, served.trace, found)
    except OSError as error:
        raise SetupError(f"cannot write {error.filename}: {error.strerror}. Give another --out.") from error
    tell(f"Open {folder / PAGE} in a browser: both jobs, message by message.")
    tell("Beside it the same as words (.txt), all messages as a table (.csv), pictures (.svg), and the recordings:")
    tell(f"dlearn.Trace.load({str(folder / 'trace')!r}) and {str(folder / 'server-trace')!r}")


def train() -> tuple[float, float, int]:
    """Train on a rank, which loads torch."""
    from dlearn.lessons import training

    return training.train()


def serve(trainer: int) -> float:
    """Train on a trainer, which loads torch."""
    from dlearn.lessons import serving

    return serving.train(trainer)


# Files --------------------------------------------------------------------------------------------------------------


def keep(recorded: Path, kept: Path) -> None:
    """Put a recording beside the pictures: of all runs only the newest stay where they were made."""
    if kept.exists():
        shutil.rmtree(kept)
    shutil.copytree(recorded, kept)


def write(folder: Path, trace: Trace, explanation: Explanation) -> None:
    """Write words, table and pictures of the training."""
    (folder / "explanation.txt").write_text(f"{explanation}\n", encoding="utf-8")
    (folder / "messages.csv").write_text("\n".join([*csv_lines(messages(trace)), ""]), encoding="utf-8")
    from dlearn import draw  # matplotlib takes a moment

    step = trace.within(explanation.part)
    for picture in (draw.timeline, draw.traffic, draw.sequence):
        draw.save(picture(step), folder / f"{picture.__name__}.svg")


def write_page(folder: Path, trace: Trace, explanation: Explanation, served: Trace, found: Iteration) -> None:
    """Write one page that needs nothing else: both jobs to step through, and what happened in words."""
    from dlearn import play  # matplotlib takes a moment
    from dlearn.play.page import render

    step, name = trace.within(explanation.part), served.label(found.drivers[0])
    told = play.player(served, messages=of_one_trainer(found), title=f"An iteration of {name}")
    docs = Path(__file__).parents[2] / "docs"  # In a copy of the repository.
    page = render(
        "demo.html", package="dlearn.lessons", title="dlearn: what a real job sends",
        ranks=RANKS, steps=len(trace.spans), part=explanation.part, trainer=name,
        step=Markup(play.player(step)._repr_html_()), strip=Markup(play.strip(trace).snippet),
        words=Markup(explanation._repr_html_()), served=Markup(told.snippet),
        surprise=surprise(found), docs=docs.as_uri() if docs.is_dir() else "",
    )  # fmt: skip
    (folder / PAGE).write_text(page, encoding="utf-8")


def surprise(found: Iteration) -> str:
    """Return "One iteration with a parameter server takes 14 messages, not 4"."""
    asked_for = [step for step in found.story if step.messages[0] is not None]
    sent = len(of_one_trainer(found))
    return f"One iteration with a parameter server takes {sent} messages, not {len(asked_for)}"


def of_one_trainer(found: Iteration) -> list[Message]:
    """Return the messages of the first trainer; the other's are the same."""
    return [message for message in found.messages if found.drivers[0] in (message.src, message.dst)]
