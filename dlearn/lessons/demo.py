"""`dlearn demo`: train on handwritten digits on three real ranks, then say and draw who sent what to whom.

Only the ranks load torch (training.py); this process reads what they recorded.
"""

from __future__ import annotations

import html
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

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
    tell(f"The same net on a parameter server with two trainers, over RPC: {surprise(found)}.")
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
    from dlearn.play.page import page

    step = trace.within(explanation.part)
    served_played = play.player(served, messages=of_one_trainer(found), title=surprise(found))
    parts = (
        ("A step of DistributedDataParallel, message by message", play.player(step).snippet),
        ("All of the training; the stage above goes to what you choose of its step", play.strip(trace).snippet),
        ("In words", explanation._repr_html_()),
        (surprise(found), served_played.snippet),
        ("Go on", _GO_ON),
    )
    body = f'<style>{_STYLE}</style><p class="title">What a real job sends</p><p>{_FIRST}</p>'
    for title, content in parts:
        body += f"<section><h2>{html.escape(title)}</h2>{content}</section>"
    (folder / PAGE).write_text(page("dlearn: what a real job sends", body), encoding="utf-8")


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
main > .title { font-size: 2rem; font-weight: 700; }
section { margin-top: 3rem; }
img { max-width: 100%; }
table { border-collapse: collapse; }
td, th { padding: 0.1rem 0.6rem; }
code { overflow-wrap: anywhere; }
"""
_FIRST = (
    "Recorded just now on this machine: three ranks that train a small ConvNet on handwritten digits, and the same"
    " net on a parameter server. Nothing here was drawn by hand. Press the arrow keys in a picture to go on."
)
_GO_ON = (
    "<p>In a notebook: <code>from dlearn import Trace, draw, explain; trace = Trace.load('trace')</code>, then"
    " <code>explain(trace)</code> or <code>draw.timeline(trace.within('step 3'))</code>. Of a script of your own,"
    " without changing it: <code>dlearn run train.py</code>.</p>"
)


def surprise(found: Iteration) -> str:
    """Return "You were told 4 messages an iteration; it is 14"."""
    asked_for = [step for step in found.story if step.messages[0] is not None]
    return f"You were told {len(asked_for)} messages an iteration; it is {len(of_one_trainer(found))}"


def of_one_trainer(found: Iteration) -> list[Message]:
    """Return the messages of the first trainer; the other's are the same."""
    return [message for message in found.messages if found.drivers[0] in (message.src, message.dst)]
