"""Trace: load a folder, say what is missing or odd, and select parts of it."""

import pytest
from traces import Job, header

from dlearn import Trace, messages, operations
from dlearn.errors import TraceError
from dlearn.events.event import Span

MS = 1_000_000


def two_steps(folder):
    """Rank 0 marks its steps, rank 1 has no spans; each step holds one all_reduce."""
    job = Job(folder, ranks=2)
    for step in range(2):
        span = job.span(0, f"step {step}", start_ns=100 * step, end_ns=100 * step + 90)
        inner = job.span(0, "backward", start_ns=100 * step + 1, end_ns=100 * step + 80, parent=span)
        job.collective("all_reduce", size=8, ranks=[0], start_ns=100 * step + 5, end_ns=100 * step + 9, parent=inner)
        job.collective("all_reduce", size=8, ranks=[1], start_ns=100 * step + 6, end_ns=100 * step + 9)
    return job


def test_a_trace_says_what_is_in_it(tmp_path):
    trace = two_steps(tmp_path).load(died=[1])
    assert str(trace).splitlines() == [
        "Trace of 2 processes (rank 0, rank 1): 4 span, 4 collective",
        "  died, or still runs: rank 1",
    ]
    assert (trace.ranks, trace.spans, trace.problems) == ((0, 1), ("step 0", "backward", "step 1"), ())
    assert [event.start_ns for event in trace.events] == [0, 1, 5, 6, 100, 101, 105, 106]
    with pytest.raises(AttributeError):
        trace.events[0].start_ns = 5


def test_a_missing_process_is_named(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.collective("all_reduce", size=400)
    trace = job.load(without=[1])
    assert trace.problems == (
        f"3 of 4 processes left a file in {tmp_path}: that of rank 1 is missing"
        " (if it ran on another host, copy its file here)",
    )
    # What the others recorded still tells what happened, with rank 1 in it: nobody says that it never came.
    assert operations(trace)[0].missing == ()
    assert {message.how for message in messages(trace)} == {"derived"}
    assert {message.src for message in messages(trace)} == {0, 1, 2, 3}
    (tmp_path / "host-1001.jsonl").touch()
    assert Trace.load(tmp_path).problems[0] == "host-1001.jsonl is empty: its process died before it could write"


def test_what_is_no_trace_of_one_job_is_refused(tmp_path, job):
    for folder, why in ((tmp_path / "nowhere", "nowhere is no folder"), (tmp_path, "holds no trace")):
        with pytest.raises(TraceError, match=why):
            Trace.load(folder)
    with pytest.raises(TraceError, match="cannot be read: File name too long"):
        Trace.load("x" * 5000)
    job.headers[1] = header(1, job="yesterday")
    job.write()
    file = min(tmp_path.glob("*.jsonl"))
    with pytest.raises(TraceError, match=f"is the file of one process. Give its folder: {tmp_path}"):
        Trace.load(file)
    with pytest.raises(TraceError, match=r"2 jobs: host-1000\.jsonl is of 'job', host-1001\.jsonl of 'yesterday'"):
        Trace.load(tmp_path)


def test_a_rank_is_the_headers_or_the_default_groups_or_one_that_nobody_can_have(tmp_path):
    job = Job(tmp_path / "same", ranks=2)
    job.headers[1] = header(0, pid=7, world_size=2)
    job.collective("barrier")
    job.files[0].append(Span(number=1, start_ns=0, name="a file cannot speak for another rank", rank=1))
    trace = job.load()
    # 0 is taken, and 1 is somebody else's.
    assert (trace.ranks, trace.label(2), [event.rank for event in trace.events]) == ((0, 2), "host-7", [0, 0, 2])
    assert "host-7.jsonl: says that it is rank 0, as host-1000.jsonl does" in trace.problems
    job = Job(tmp_path / "none", ranks=2)
    job.headers = [header(None, pid=5), header(None, pid=4)]
    assert [(process.rank, process.header.pid) for process in job.load().processes] == [(0, 5), (1, 4)]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"kind": "colective"}, "no kind 'colective' of events; the kinds are: collective, p2p"),
        ({"op": "allreduce"}, "no op 'allreduce'; this trace has: all_reduce$"),
        ({"phase": "backwards"}, "no phase 'backwards'; the phases are: setup, forward, backward"),
        ({"rank": [0, 7]}, "no rank 7 in this trace; its ranks are: rank 0, rank 1"),
    ],
)
def test_what_there_cannot_be_is_refused_with_what_there_is(tmp_path, wrong, why):
    trace = two_steps(tmp_path).load()
    with pytest.raises(TraceError, match=why):
        trace.where(**wrong)
    assert not trace.where(op="broadcast", phase="optimizer", kind="rpc", rank=[]).events
    with pytest.raises(TraceError, match="no span 'step 2' in this trace; its spans are: step 0, backward, step 1"):
        trace.within("step 2")
    for end in (2.0, float("nan")):
        with pytest.raises(TraceError, match="ends before it begins: swap the two"):
            trace.between(5, end)


def test_within_a_span_are_its_descendants_and_the_ends_that_they_met(tmp_path):
    trace = two_steps(tmp_path).load()
    # The inner span, its all_reduce, and rank 1's end of it, though rank 1 opened no span.
    found = [(event.rank, event.start_ns) for event in trace.within("step 1").events]
    assert found == [(0, 101), (0, 105), (1, 106)]
    assert [event.rank for event in trace.where(kind="collective").within("step 0").events] == [0, 1]
    assert len(trace.within("backward").within("step 1").events) == 2


def test_a_part_keeps_its_operations_whole_and_has_them_where_the_first_rank_calls(tmp_path):
    """0 ms a broadcast; 10 ms an all_reduce that rank 1 calls at 14 ms; 20 ms a send that is awaited from 9 ms on."""
    job = Job(tmp_path, ranks=3)
    job.counters(0, 8, start_ns=-9 * MS)  # A sample is none: time begins with the broadcast.
    job.collective("broadcast", size=8, root=0, start_ns=0, end_ns=1 * MS)
    job.collective("all_reduce", size=12, start_ns={0: 10 * MS, 1: 14 * MS, 2: 11 * MS}, end_ns=15 * MS)
    job.message(0, 2, size=5, start_ns={0: 20 * MS, 2: 9 * MS}, end_ns={0: 21 * MS, 2: 22 * MS})
    trace = job.load()

    def ops(part):
        return [operation.op for operation in operations(part)]

    assert ops(trace.between(0, 5)) == ["broadcast"]
    assert ops(trace.between(5, 12)) == ["send", "all_reduce"]
    assert [event.rank for event in trace.between(10, 12).events] == [0, 2, 1]
    assert ops(trace.between(0, 10)) == ["broadcast", "send"]
    assert ops(trace.between(10)) == ["all_reduce"]
    assert trace.between(12, 100).events == trace.between(3, 3).events == ()
    mine = trace.where(rank="rank 1")
    assert [(each.op, each.ranks) for each in operations(mine)] == [("broadcast", (0, 1, 2)), ("all_reduce", (0, 1, 2))]
    assert len(messages(mine)) == len(messages(trace)) - 1
