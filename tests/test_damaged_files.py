"""Whatever happens to a trace's files: it is read in part, or refused with a TraceError; quickly, and nothing else."""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from traces import Job, tensor

from dlearn.analysis import explain, hangs, messages, operations, reconcile, traffic
from dlearn.analysis.hanging.hang_words import hang_sentence, whereabouts
from dlearn.errors import TraceError
from dlearn.trace import store
from dlearn.trace.job_facts import ClockReading, Joined, Peer, Place
from dlearn.trace.trace import Trace

SECONDS = 5.0
"""Of the processor: a value that makes work without end is found, and a busy machine makes none."""

Files = list[list[bytes]]


def good_files() -> Files:
    """Three ranks, two steps: collectives, a subgroup, sends, a glass-box step, counters, a bucket, a hang."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), ranks=3)
        for rank, lines in enumerate(job.files):
            lines.append(Joined(job="met"))
            lines.append(Peer(rank=(rank + 1) % 3, host="host", path="/traces/host-1.jsonl"))
        job.files[2].append(ClockReading(at_ns=0, offset_ns=7, error_ns=3, reference="a", rounds=9))
        job.files[2].append(ClockReading(at_ns=2**31, offset_ns=9, error_ns=4, reference="a", rounds=9))
        job.files[2].append(Place(at_ns=1, site="a.py:9"))
        job.group("pair", [2, 0])
        job.group("steps", [0, 1, 2], within="world")
        job.connect()
        for rank in range(3):
            job.counters(rank, 8, 8, still=True)
        job.collective("broadcast", size=100, root=0, phase="setup")
        job.collective("all_to_all_single", size=10, splits=(2, 3, 5))
        outer = job.collective("all_reduce", size=64)
        job.send(0, 1, size=32, group="steps", parent=outer[0], offset_bytes=32, whole_bytes=64, step=1, checksum=7)
        job.recv(1, 0, size=32, group="steps", parent=outer[1])
        job.bucket(0, 0, {"fc.weight": 60, "fc.bias": 4})
        for step in range(2):
            spans = [job.span(rank, f"step {step}") for rank in range(3)]
            job.gradient(0, "fc.weight", backward=step)
            job.gradient(0, "fc.bias", backward=step)
            for rank, span in enumerate(spans):
                facts = {"phase": "backward", "launcher": "reducer", "backward": step, "parent": span, "site": "a.py:3"}
                job.collective("all_reduce", size=64, ranks=[rank], **facts)
            job.send(0, 1, parent=spans[0])
            job.recv(1, 0, parent=spans[1])
            for rank in range(3):
                job.counters(rank, 8 + 100 * step, None if step else 50, parent=spans[rank])
            job.collective("all_gather", group="pair", inputs=(tensor(5),), outputs=(tensor(5), tensor(5)))
        job.recv(1, None, end_ns=None)
        job.collective("all_reduce", size=8, ranks=[0, 2], end_ns=None)
        files = [path.read_bytes().splitlines(keepends=True) for path in job.write(died=[2])]
        files[2].append(json.dumps({"kind": "exit", "status": -9}).encode() + b"\n")
        return files


GOOD = good_files()

ABSURD = [
    None, True, -1, 0, 1, 2, 7, 256, 257, 2**20, 2**40, 2**53, 2**53 + 1, -(2**62), 2**62, 2**63, 2**64, 10**400,
    0.5, 1e308, "", "0", "world", "pair", "gloo", "nccl", "unknown", "step 1", "send", "recv", "all_reduce",
    "broadcast", "all_gather", "reducer", "comm hook", "backward", "not observed",
    "<b>\n\x1b[2J\u202e", "\ud7ff", "x" * 5000,
    [], [0], [0, 0], [2, 1, 0], ["a"], [[]], {}, {"kind": "end"}, list(range(3000)),
    [{"shape": [], "dtype": "", "device": "", "logical_bytes": 0, "payload_bytes": 0}] * 1000,
    [{"shape": [2**40], "dtype": "float32", "device": "cpu", "logical_bytes": 2**53, "payload_bytes": 2**53}] * 8,
    [{"shape": [2**32], "dtype": "float32", "device": "cpu", "logical_bytes": 2**34, "payload_bytes": 2**34}],
]  # fmt: skip

HOSTILE_LINES = [
    b"\n",
    b"\x00" * 100 + b"\n",
    b"[" * 50_000 + b"\n",
    b'{"kind":"span","number":1,"number":2,"start_ns":0,"name":"a","name":"step 1"}\n',
    b'{"kind":"end","event":0,"by":"wait","at_ns":4611686018427387904,"peer":9007199254740992}\n',
    b'{"kind":"footer","at_ns":0,"lines":9007199254740992,"not_written":9007199254740992}\n',
    b'{"kind":"group","name":"huge","backend":"gloo","rank":0,"size":1048576,"default":true}\n',
    b'{"kind":"group","name":"far","backend":"gloo","rank":0,"size":2,"ranks":[9007199254740992,1]}\n',
    b'{"kind":"p2p","number":900,"start_ns":5,"op":"send","group":"far","peer":0,"tag":-1,"seq":0}\n',
    b'{"kind":"collective","number":901,"start_ns":-9,"op":"barrier","group":"far","seq":0}\n',
    b'{"kind":"bucket","number":902,"start_ns":5,"model":0,"index":0,"count":0,"bytes":0,"parameters":[],"built":""}\n',
    b'{"kind":"group","name":"wide","backend":"gloo","rank":0,"size":20000,"ranks":['
    + b",".join(str(rank).encode() for rank in range(20_000))
    + b"]}\n",
    b'{"kind":"collective","number":903,"start_ns":5,"op":"all_reduce","group":"wide","seq":1}\n',
    b'{"kind":"p2p","number":904,"start_ns":5,"op":"send","group":"wide","peer":19999,"tag":0,"seq":1}\n',
    b'{"kind":"socket","id":0,"group":"pair","local":"127.0.0.1 1","remote":""}\n',
    b'{"kind":"socket","id":9007199254740992,"group":"?","local":"a","remote":"a"}\n',
    b'{"kind":"not measured","reason":"\\u001b[2J<b>"}\n',
    b'{"kind":"counters","number":905,"start_ns":5,"sent_bytes":[' + b"9007199254740992," * 3000 + b"0]}\n",
    b'{"kind":"counters","number":0,"start_ns":5,"sent_bytes":[]}\n',
    b'{"kind":"clock","at_ns":0,"offset_ns":4611686018427387904,"error_ns":0,"reference":"a","rounds":1}\n',
    b'{"kind":"clock","at_ns":4611686018427387904,"offset_ns":-4611686018427387904,"error_ns":0,"reference":"a","rounds":1}\n',
    b'{"kind":"clock","at_ns":5,"offset_ns":5,"error_ns":9007199254740992,"reference":"elsewhere","rounds":0}\n',
    b'{"kind":"peer","rank":9007199254740992,"host":"\\n<b>","path":"/a\\n\\u001b[2J/../b.jsonl"}\n',
    b'{"kind":"joined","job":""}\n{"kind":"joined","job":"elsewhere"}\n',
    b'{"kind":"exit","status":9007199254740992}\n' * 2000,
    b'{"kind":"exit","status":-64}\n',
    b'{"kind":"place","at_ns":4611686018427387904,"site":"\\u001b[2J<b>"}\n',
    b"x" * (1 << 20) + b"\n",
]

Edit = Callable[[Files], None]


def at(lines: list[bytes], where: int) -> int:
    return where % len(lines) if lines else 0


def flip(file: int, line: int, byte: int, to: int) -> Edit:
    def edit(files: Files) -> None:
        lines = files[file]
        if lines and lines[i := at(lines, line)]:
            changed = bytearray(lines[i])
            changed[byte % len(changed)] = to
            lines[i] = bytes(changed)

    return edit


def delete(file: int, line: int, count: int) -> Edit:
    def edit(files: Files) -> None:
        i = at(files[file], line)
        del files[file][i : i + count]

    return edit


def copy(file: int, line: int, to_file: int, to_line: int) -> Edit:
    def edit(files: Files) -> None:
        if files[file]:
            files[to_file].insert(at(files[to_file], to_line), files[file][at(files[file], line)])

    return edit


def swap(file: int, line: int, other: int) -> Edit:
    def edit(files: Files) -> None:
        lines = files[file]
        if lines:
            i, j = at(lines, line), at(lines, other)
            lines[i], lines[j] = lines[j], lines[i]

    return edit


def cut(file: int, line: int, byte: int) -> Edit:
    def edit(files: Files) -> None:
        if files[file]:
            i = at(files[file], line)
            files[file][i:] = [files[file][i][: byte % len(files[file][i] + b"x")]]

    return edit


def insert(file: int, line: int, content: bytes) -> Edit:
    return lambda files: files[file].insert(at(files[file], line), content)


def absurd(file: int, line: int, field: int, value: object) -> Edit:
    """Give one field of one line, or of all lines of its kind, another value."""

    def edit(files: Files) -> None:
        lines = files[file]
        if not lines:
            return
        i = at(lines, line)
        try:
            fields = json.loads(lines[i])
        except (ValueError, RecursionError):
            return
        if isinstance(fields, dict) and fields:
            key = list(fields)[field % len(fields)]
            if key != "kind":
                lines[i] = json.dumps({**fields, key: value}).encode() + b"\n"

    return edit


FILE, LINE, BYTE = st.integers(0, 2), st.integers(0, 60), st.integers(0, 400)
EDITS = st.lists(
    st.one_of(
        st.builds(absurd, FILE, LINE, st.integers(0, 12), st.sampled_from(ABSURD)),
        st.builds(absurd, FILE, LINE, st.integers(0, 12), st.sampled_from(ABSURD)),
        st.builds(insert, FILE, LINE, st.sampled_from(HOSTILE_LINES)),
        st.builds(flip, FILE, LINE, BYTE, st.integers(0, 255)),
        st.builds(delete, FILE, LINE, st.integers(1, 5)),
        st.builds(copy, FILE, LINE, FILE, LINE),
        st.builds(swap, FILE, LINE, LINE),
        st.builds(cut, FILE, LINE, BYTE),
    ),
    min_size=1,
    max_size=8,
)


def look_at_everything(trace: Trace) -> None:
    """All that a person can ask of a trace."""
    part = trace.within(trace.spans[-1]) if trace.spans else trace
    for each in (trace, part, trace.where(kind="p2p"), trace.where(op="all_reduce", rank=0)):
        asked = operations(each)
        found = messages(each)
        assert all(text.isprintable() for text in str(found).splitlines())
        explained = {id(message.operation) for message in found}
        assert len(explained) + len(found.unexplained) <= len(asked)
        assert traffic(each).total_bytes == sum(m.payload_bytes for m in found if m.how != "missing")
        assert [hang_sentence(hang, each).isprintable() for hang in hangs(each)] == [True] * len(hangs(each))
        explanation = explain(each)
        assert str(reconcile(each)).replace("\n", "").isprintable()
        assert all(sentence.isprintable() for sentence in explanation.sentences)
        assert "\x1b" not in str(each) + str(explanation) + explanation._repr_html_() + each._repr_html_()
    calls = [
        (event.rank, event.number) for event in trace.events if type(event).__name__ in ("Collective", "PointToPoint")
    ]
    found_operations = [each for top in operations(trace) for each in (top, *top.steps)]
    ends = [(end.rank, end.number) for operation in found_operations for end in operation.ends]
    assert sorted(ends) == sorted(calls)
    for rank in trace.ranks:
        whereabouts(trace, rank)


LOOKED_AT: set[bytes] = set()


def survives(edits: list[Edit]) -> None:
    """A value that the reader refuses leaves the trace that any refused value leaves: it is looked at once."""
    files = [list(lines) for lines in GOOD]
    for edit in edits:
        edit(files)
    with tempfile.TemporaryDirectory() as folder:
        for number, lines in enumerate(files):
            (Path(folder) / f"host-{number}.jsonl").write_bytes(b"".join(lines))
        start, read = time.process_time(), b""
        with suppress(TraceError):
            trace = Trace.load(folder)
            assert all(problem.isprintable() for problem in trace.problems)
            read = pickle.dumps((trace.processes, trace.events)).replace(Path(folder).name.encode(), b"")
            if read not in LOOKED_AT:
                look_at_everything(trace)
        assert time.process_time() - start < SECONDS
    LOOKED_AT.add(read)


@given(EDITS)
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_damaged_files_are_read_in_part_or_refused(edits):
    survives(edits)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(EDITS)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many_more_damaged_files(edits):
    survives(edits)


def test_the_good_files_are_good(tmp_path):
    """Otherwise nothing above was tested."""
    for number, lines in enumerate(GOOD):
        (tmp_path / f"host-{number}.jsonl").write_bytes(b"".join(lines))
    trace = Trace.load(tmp_path)
    assert trace.problems == ()
    assert {message.how for message in messages(trace)} == {"derived", "observed", "missing"}
    assert len(hangs(trace)) == 2
    look_at_everything(trace)


@pytest.mark.parametrize("damage", [b"{}\n", b"\n", b"[\n", b"x" * 100 + b"\n"])
def test_a_file_of_damaged_lines_is_not_read_to_its_end(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "MOST_DAMAGED", 100)
    before, behind = GOOD[0][:-20], GOOD[0][-20:]
    (tmp_path / "host-0.jsonl").write_bytes(b"".join([*before, damage * 1_000, *behind]))
    trace = Trace.load(tmp_path)
    assert "host-0.jsonl: 100 damaged lines were left out (line " in trace.problems[0]
    assert trace.problems[1] == "host-0.jsonl: what follows them was not read"
    assert not trace.processes[0].closed


def test_many_giant_operations_are_summed_and_not_unrolled(tmp_path):
    """400 all-reduces of 19,200 messages each: 7.7 million, told in a moment; `messages` holds the first million."""
    job = Job(tmp_path, ranks=2)
    for _ in range(400):
        job.collective("all_reduce", inputs=(tensor(9600 << 20),))
    trace = job.load()
    start = time.process_time()
    assert traffic(trace).message_count == {(0, 1): 400 * 9600, (1, 0): 400 * 9600}
    assert "7,680,000 messages" in explain(trace).sentences[0]
    assert time.process_time() - start < SECONDS


KINDS = {json.loads(line)["kind"]: (file, i) for file, lines in enumerate(GOOD) for i, line in enumerate(lines)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.slow)])
def test_each_absurd_value_in_each_field(kind, every):
    """Every field of every kind of line, one at a time; the quick test takes an eighth of the values in turn."""
    file, line = KINDS[kind]
    for field in range(1, len(json.loads(GOOD[file][line]))):
        for value in ABSURD[field % every :: every]:
            survives([absurd(file, line, field, value)])
