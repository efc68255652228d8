"""Recorders that are no part of dlearn: how they are found, and what of them stays in a trace that others read."""

import os
import subprocess
import sys
from unittest.mock import patch

import pytest
from traces import Job

import dlearn
import dlearn.events.source as source
from dlearn import Trace, explain, messages, operations
from dlearn.analysis import hangs
from dlearn.errors import SetupError, TraceError
from dlearn.events.source import Kind, ServiceCall, Source, byte_strings, describe

OTHER = """
from dlearn.events.event import Event
from dlearn.events.source import Kind, Source

class Note(Event, tag="note", frozen=True, kw_only=True):
    text: str
    pages: tuple[int, ...] = ()

def install(emit):
    number = emit.event(Note, text="begin\\n", pages=(1, 2))
    emit.end(number, by="return")
    for _ in range(3):
        emit.failed("a note", RuntimeError("the hook is broken"))
    return lambda: emit.event(Note, text="end")

SOURCE = Source("notes", install, (Kind(Note),))
"""


class Asked(ServiceCall, tag="asked", frozen=True, kw_only=True):
    port: int


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """A package that offers the source "notes" is installed, as by pip."""
    metadata = tmp_path / "site" / "notes_recorder-1.0.dist-info"
    metadata.mkdir(parents=True)
    (tmp_path / "site" / "notes_recorder.py").write_text(OTHER)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: notes_recorder\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[dlearn.sources]\nnotes = notes_recorder:SOURCE\n")
    monkeypatch.syspath_prepend(tmp_path / "site")


@pytest.fixture(autouse=True)
def nothing_in_use():
    with patch.dict(source.in_use, clear=True):
        yield


@pytest.mark.parametrize("name", ["notes", "notes_recorder:SOURCE"])
def test_a_source_is_named_and_its_events_are_read_back(name, tmp_path, notes, capsys):
    with dlearn.record(tmp_path / "trace", sources=[name]), dlearn.span("step 0"):
        pass
    trace = Trace.load(tmp_path / "trace")
    begin, end = trace.where(kind="note").events
    assert (begin.text, begin.pages, begin.ended_by, end.text) == ("begin\\n", (1, 2), "return", "end")
    # What fails in a hook is told once, and counted; the program goes on.
    assert capsys.readouterr().err.count("dlearn: could not record a note (RuntimeError: the hook is broken)") == 1
    (problem,) = trace.problems
    assert "3 calls could not be recorded" in problem


@pytest.mark.slow
def test_in_a_forked_childs_own_file_the_source_is_named_again(tmp_path, notes, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    (tmp_path / "forks.py").write_text("import os, torch\nif os.fork():\n    os.wait()\n")
    command = [sys.executable, "-m", "dlearn", "run", "--sources", "notes", "--trace", "t", "forks.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    told = Trace.load(tmp_path / "t").where(kind="note").events
    assert [each.text for each in told] == ["begin\\n", "end", "end"]


def test_events_of_a_source_that_is_not_installed_are_counted(tmp_path, notes, monkeypatch):
    with dlearn.record(tmp_path / "trace", sources=["notes"]), dlearn.span("step 0"):
        pass
    source.in_use.clear()
    monkeypatch.undo()
    trace = Trace.load(tmp_path / "trace")
    assert trace.spans == ("step 0",)
    assert not any(hasattr(each, "pages") for each in trace.events)
    told = "2 events of the kind 'note' are left out: their source 'notes' is not installed here"
    assert told in trace.problems
    assert told in str(explain(trace))
    with pytest.raises(TraceError, match=r"no kind 'notes' of events; the kinds are: collective, p2p, "):
        trace.where(kind="notes")


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        (["tcpstore"], "no source 'tcpstore' is installed; there are:"),
        (["nowhere:SOURCE"], "cannot be loaded: No module named 'nowhere'"),
        (["dlearn:__version__"], r"names a str, and no dlearn\.events\.source\.Source"),
        ("tcp_store", "sources is a list of names"),
    ],
)
def test_nothing_of_that_name(sources, told):
    with pytest.raises(SetupError, match=told):
        dlearn.Cluster(2, sources=sources)


def test_a_source_says_whom_a_call_asks(tmp_path):
    """Rank 0 offers port 7; of port 8 nobody knows who does. A call that failed has no reply."""
    asked = Source(
        "asked",
        lambda emit: lambda: None,
        (Kind(Asked, "ask", "#123456"),),
        hosts=lambda trace: {(each.rank, each.number): 0 for each in trace.events if getattr(each, "port", 0) == 7},
    )
    job = Job(tmp_path, ranks=3)
    for file in job.files:
        file.append(describe(asked))
    facts = {"start_ns": 5, "end_ns": 50, "about": "key", "tensors": byte_strings(["key", "value"])}
    job.event(Asked, 1, op="ask get", port=7, outputs=byte_strings(b"1234"), **facts)
    job.event(Asked, 1, op="ask again", port=7, outputs=byte_strings(b"1234"), error="RuntimeError", **facts)
    job.event(Asked, 2, op="ask set", port=7, one_way=True, **facts)
    job.event(Asked, 2, op="ask get", port=8, **facts)
    job.event(Asked, 0, op="ask wait", port=7, **facts | {"end_ns": None})
    source.in_use["asked"] = asked
    trace = job.load()
    assert trace.problems == ()
    found = messages(trace)
    assert sorted((each.src, each.dst, each.op, each.payload_bytes, each.how) for each in found) == [
        (0, 0, "ask wait", 8, "observed"),
        (0, 1, "ask get", 4, "observed"),
        (1, 0, "ask again", 8, "observed"),
        (1, 0, "ask get", 8, "observed"),
        (2, 0, "ask set", 8, "observed"),
    ]
    ((alone, why),) = found.unexplained
    assert (alone.op, alone.sender, why) == ("ask get", 2, "which process offers the service is not known")
    assert [hang.waiting for hang in hangs(trace)] == [(0,)]
    assert "rank 1 asks rank 0: ask get key (8 B)" in str(explain(trace))
    assert [each.op for each in operations(trace.where(rank=1))] == ["ask get", "ask again"]


def test_a_source_gives_the_schedule_of_its_collectives_or_says_why_not(tmp_path):
    def around(calls, ranks):
        return [(0, rank, (rank + 1) % ranks, 0, calls[0].inputs[0].payload_bytes) for rank in range(ranks)]

    job = Job(tmp_path, ranks=3, backend="merry")
    job.collective("all_reduce", size=8)
    job.write()
    source.in_use["merry"] = Source("merry", lambda emit: lambda: None, schedule=around)
    found = messages(Trace.load(tmp_path))
    told = [(each.src, each.dst, each.payload_bytes, each.how) for each in found]
    assert told == [(0, 1, 8, "derived"), (1, 2, 8, "derived"), (2, 0, 8, "derived")]
    source.in_use["merry"] = Source("merry", lambda emit: lambda: None, schedule="it is a secret")
    ((_, why),) = messages(Trace.load(tmp_path)).unexplained
    assert why == "it is a secret"
