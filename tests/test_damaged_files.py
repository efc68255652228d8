"""Whatever happens to a trace's files: it is read in part, or refused with a TraceError, and nothing else."""

import json
import pickle
import tempfile
import zipfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import frozen_answers
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlearn import Trace, explain, messages, operations
from dlearn.analysis import reconcile, traffic
from dlearn.errors import TraceError
from dlearn.events.event import Collective, PointToPoint

Files = dict[str, list[bytes]]
GOOD = {
    "a hang": ("lesson-museum_of_hangs", "21"),
    "a step of DDP": ("lesson-sum_or_average", "05"),
    "a ring in glass": ("lesson-trees_and_rings", "01"),
    "RPC": ("lesson-parameter_server", "10"),
    "distributed autograd": ("lesson-model_parallel", "02"),
    "MPI": ("mpi", "12"),
}


@cache
def good(name: str) -> tuple[tuple[str, tuple[bytes, ...]], ...]:
    """The lines of each file of a trace."""
    archive, folder = GOOD[name]
    with zipfile.ZipFile(frozen_answers.HERE / f"{archive}.zip") as packed:
        found = sorted(each for each in packed.namelist() if each.startswith(f"{folder}/"))
        return tuple((Path(each).name, tuple(packed.read(each).splitlines(keepends=True))) for each in found)


ABSURD = [
    None, True, -1, 0, 1, 257, 2**40, 2**53 + 1, -(2**62), 2**63, 10**400, 0.5, 1e308,
    "", "0", "gloo", "nccl", "step 1", "recv", "all_reduce", "broadcast", "reducer", "backward",
    "<b>\n\x1b[2J\u202e", "\ud7ff", "x" * 5000, [], [0, 0], [2, 1, 0], ["a"], [[]], {"kind": "end"}, list(range(3000)),
    [{"shape": [], "dtype": "", "device": "", "logical_bytes": 0, "payload_bytes": 0}] * 1000,
    [{"shape": [2**40], "dtype": "float32", "device": "cpu", "logical_bytes": 2**53, "payload_bytes": 2**53}] * 8,
]  # fmt: skip

WIDE = ",".join(map(str, range(20_000)))
HOSTILE_LINES = [
    b"\n",
    b"\x00" * 100 + b"\n",
    b"[" * 50_000 + b"\n",
    b"x" * (1 << 20) + b"\n",
    b'{"kind":"span","number":1,"number":2,"start_ns":0,"name":"a","name":"step 1"}\n',
    b'{"kind":"end","event":0,"by":"wait","at_ns":4611686018427387904,"peer":9007199254740992}\n',
    b'{"kind":"footer","at_ns":0,"lines":9007199254740992,"not_written":9007199254740992}\n',
    b'{"kind":"group","name":"huge","backend":"gloo","rank":0,"size":1048576,"default":true}\n' * 100,
    b'{"kind":"group","name":"far","backend":"gloo","rank":0,"size":2,"ranks":[9007199254740992,1]}\n'
    b'{"kind":"p2p","number":900,"start_ns":5,"op":"send","group":"far","peer":0,"tag":-1,"seq":0}\n'
    b'{"kind":"collective","number":901,"start_ns":-9,"op":"barrier","group":"far","seq":0}\n',
    f'{{"kind":"group","name":"wide","backend":"gloo","rank":0,"size":20000,"ranks":[{WIDE}]}}\n'.encode()
    + b'{"kind":"collective","number":903,"start_ns":5,"op":"all_reduce","group":"wide","seq":1}\n'
    b'{"kind":"p2p","number":904,"start_ns":5,"op":"send","group":"wide","peer":19999,"tag":0,"seq":1}\n',
    b'{"kind":"counters","number":905,"start_ns":5,"sent_bytes":[' + b"9007199254740992," * 3000 + b"0]}\n",
    b'{"kind":"clock","at_ns":0,"offset_ns":4611686018427387904,"error_ns":0,"reference":"a","rounds":1}\n'
    b'{"kind":"clock","at_ns":4611686018427387904,"offset_ns":-4611686018427387904,"error_ns":0,"reference":"a"}\n',
    b'{"kind":"peer","rank":9007199254740992,"host":"\\n<b>","path":"/a\\n\\u001b[2J/../b.jsonl"}\n',
    b'{"kind":"exit","status":9007199254740992}\n' * 2000,
    b'{"kind":"place","at_ns":4611686018427387904,"site":"\\u001b[2J<b>"}\n',
]
Edit = tuple[str, int, int, int, Any]


def change(files: Files, edit: Edit) -> None:
    """What is done, in which file, at which line; then another line, byte or field, and what is put there."""
    what, file, line, other, value = edit
    lines = files[sorted(files)[file % len(files)]]
    if not lines:
        return
    i, j = line % len(lines), other % len(lines)
    match what:
        case "flip" if lines[i]:
            k = other % len(lines[i])
            lines[i] = lines[i][:k] + bytes([value]) + lines[i][k + 1 :]
        case "delete":
            del lines[i : i + 1 + other % 5]
        case "copy":
            files[sorted(files)[value % len(files)]].insert(j, lines[i])
        case "swap":
            lines[i], lines[j] = lines[j], lines[i]
        case "cut":
            lines[i:] = [lines[i][: other % (len(lines[i]) + 1)]]
        case "insert":
            lines.insert(i, value)
        case "absurd":
            with suppress(ValueError, RecursionError):
                fields = json.loads(lines[i])
                if isinstance(fields, dict) and fields:
                    key = list(fields)[other % len(fields)]
                    lines[i] = json.dumps(fields | ({key: value} if key != "kind" else {})).encode() + b"\n"


def edit(whats: list[str], values: st.SearchStrategy[Any]) -> st.SearchStrategy[Edit]:
    return st.tuples(st.sampled_from(whats), st.integers(0, 3), st.integers(0, 80), st.integers(0, 400), values)


ABSURD_EDITS = edit(["absurd"], st.sampled_from(ABSURD))
INSERTS = edit(["insert"], st.sampled_from(HOSTILE_LINES))
OTHERS = edit(["flip", "delete", "copy", "swap", "cut"], st.integers(0, 255))


def look_at_everything(trace: Trace) -> None:
    """All that a person can ask of a trace."""
    part = trace.within(trace.spans[-1]) if trace.spans else trace
    for each in (trace, part, trace.where(kind="p2p"), trace.where(op="all_reduce", rank=trace.ranks[:1])):
        asked, found = operations(each), messages(each)
        explained = {id(message.operation) for message in found}
        assert len(explained) + len(found.unexplained) <= sum(1 + len(one.steps) for one in asked)
        assert traffic(each).total_bytes == sum(m.payload_bytes or 0 for m in found if m.how != "missing")
        explanation = explain(each)
        shown = [str(each), str(found), str(asked), str(reconcile(each)), *explanation.sentences]
        assert all(text.replace("\n", "").isprintable() for text in shown)
        assert "\x1b" not in explanation._repr_html_() + each._repr_html_()
    ends = [end for top in operations(trace) for one in (top, *top.steps) for end in one.ends]
    called = [(end.rank, end.number) for end in ends if isinstance(end, Collective | PointToPoint)]
    assert sorted(called) == sorted((event.rank, event.number) for event in trace.of(Collective, PointToPoint))


LOOKED_AT: set[bytes] = set()


def survives(name: str, edits: list[Edit]) -> None:
    """A value that the reader refuses leaves the trace that any refused value leaves: it is looked at once."""
    files = {file: list(lines) for file, lines in good(name)}
    for edit in edits:
        change(files, edit)
    with tempfile.TemporaryDirectory() as folder:
        for file, lines in files.items():
            (Path(folder) / file).write_bytes(b"".join(lines))
        with suppress(TraceError):
            trace = Trace.load(folder)
            assert all(problem.isprintable() for problem in trace.problems)
            read = pickle.dumps((trace.processes, list(trace.events))).replace(Path(folder).name.encode(), b"")
            if read not in LOOKED_AT:
                look_at_everything(trace)
                LOOKED_AT.add(read)


@given(st.sampled_from(list(GOOD)), st.lists(ABSURD_EDITS | INSERTS | OTHERS, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_damaged_files_are_read_in_part_or_refused(name, edits):
    survives(name, edits)


@pytest.mark.parametrize("line", HOSTILE_LINES, ids=range(len(HOSTILE_LINES)))
def test_each_hostile_line(line):
    survives("a hang", [("insert", 0, 12, 0, line)])


def test_absurd_values_in_each_field_of_every_kind_of_line():
    """One at a time, with a twelfth of the values in turn."""
    places = {}
    for name in GOOD:
        for file, (_, lines) in enumerate(good(name)):
            for at, line in enumerate(lines):
                fields = json.loads(line) if line.startswith(b'{"kind"') else {"kind": ""}
                places.setdefault(fields["kind"], (name, file, at, len(fields)))
    assert {"header", "footer", "group", "collective", "p2p", "counters", "bucket", "rpc call", "end"} <= places.keys()
    for name, file, at, count in places.values():
        for field in range(1, count):
            for value in ABSURD[field % 12 :: 12]:
                survives(name, [("absurd", file, at, field, value)])


def test_a_file_of_damaged_lines_is_not_read_to_its_end(tmp_path):
    name, lines = good("a hang")[0]
    (tmp_path / name).write_bytes(b"".join([*lines[:9], b"[\n" * 5_000, b"{}\n" * 6_000, *lines[9:]]))
    trace = Trace.load(tmp_path)
    assert f"{name}: 10,000 damaged lines were left out (line " in trace.problems[0]
    assert trace.problems[1] == f"{name}: what follows them was not read"
    assert not trace.processes[0].closed
