"""Trace: load a folder, select from it, say what is missing."""

import html

import msgspec
import pytest
from traces import Job, header

from dlearn.analysis import messages
from dlearn.errors import TraceError
from dlearn.trace.event import GroupFact, Span
from dlearn.trace.trace import Trace


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
    trace = two_steps(tmp_path).load()
    assert str(trace) == "Trace of 2 processes (rank 0, rank 1): 4 span, 4 collective"
    assert (trace.ranks, trace.spans, trace.problems) == ((0, 1), ("step 0", "backward", "step 1"), ())
    assert [event.start_ns for event in trace.events] == [0, 1, 5, 6, 100, 101, 105, 106]


def test_of_copies_of_a_file_the_longest_counts(tmp_path):
    whole = two_steps(tmp_path / "whole").load()
    (tmp_path / "old").mkdir()
    for path in (tmp_path / "whole").glob("*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        (tmp_path / "old" / path.name).write_text("".join(lines[:4]))
    for folders in (("whole", "old"), ("old", "whole")):
        assert len(Trace.load(*(tmp_path / each for each in folders)).events) == len(whole.events)


def test_a_large_trace_shows_itself_in_a_few_lines(tmp_path):
    job = Job(tmp_path, ranks=1)
    for _ in range(1000):
        job.collective("barrier")
    assert len(repr(job.load())) < 200


def test_where_selects_by_kind_op_and_rank(tmp_path):
    job = two_steps(tmp_path)
    job.collective("broadcast", size=4, root=0)
    trace = job.load()
    assert len(trace.where(kind="collective").events) == 6
    assert len(trace.where(op="all_reduce", rank=1).events) == 2
    assert len(trace.where(kind="span", rank=1).events) == 0
    assert len(trace.where(op="broadcast").where(rank=0).events) == 1
    with pytest.raises(TraceError, match="no kind 'colective' of events; the kinds are: collective, p2p"):
        trace.where(kind="colective")


def test_within_a_span_are_its_descendants_and_the_ends_that_they_met(tmp_path):
    trace = two_steps(tmp_path).load()
    step = trace.within("step 1")
    # The inner span, its all_reduce, and rank 1's end of it, though rank 1 opened no span.
    assert [(event.rank, event.start_ns) for event in step.events] == [(0, 101), (0, 105), (1, 106)]
    assert len(step.matches) == 1
    assert [event.rank for event in trace.where(kind="collective").within("step 0").events] == [0, 1]
    assert len(trace.within("backward").within("step 1").events) == 2
    with pytest.raises(TraceError, match=r"no span .step 2. in this trace; its spans are: step 0, backward, step 1"):
        trace.within("step 2")


def test_parents_that_go_in_circles_enclose_nothing(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.span(0, "a", parent=1)
    job.span(0, "b", parent=0)
    job.span(0, "self", parent=2)
    trace = job.load()
    assert [event.number for event in trace.within("a").events] == [1]
    assert trace.within("b").events == ()
    assert trace.within("self").events == ()


def test_a_missing_process_is_named(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.collective("all_reduce", size=400)
    trace = job.load(without=[1])
    assert trace.problems == (
        f"3 of 4 processes left a file in {tmp_path}: that of rank 1 is missing"
        " (if it ran on another host, copy its file here)",
    )
    # What the others recorded still tells what happened, with rank 1 in it: nobody says that it never came.
    assert trace.matches[0].missing == ()
    assert {message.how for message in messages(trace)} == {"derived"}
    assert {message.src for message in messages(trace)} == {0, 1, 2, 3}


def test_any_number_of_missing_processes_is_one_sentence(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.headers[0] = header(0, world_size=2**53)
    (problem,) = job.load().problems
    assert problem.startswith("1 of 9,007,199,254,740,992 processes left a file")
    assert "those of ranks 1, 2, 3, 4, 5, 6, 7, 8, ... are missing" in problem


def test_a_process_that_died_is_named(tmp_path):
    trace = two_steps(tmp_path).load(died=[1])
    assert [process.closed for process in trace.processes] == [True, False]
    assert "died, or still runs: rank 1" in str(trace)


def test_a_process_that_died_before_its_first_line(tmp_path):
    paths = two_steps(tmp_path).write()
    paths[1].write_bytes(b"")
    problems = Trace.load(tmp_path).problems
    assert problems[0] == "host-1001.jsonl is empty: its process died before it could write"
    assert "that of rank 1 is missing" in problems[1]


def test_two_jobs_in_one_folder_are_refused(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.headers[1] = header(1, job="yesterday")
    job.write()
    with pytest.raises(TraceError, match=r"2 jobs: host-1000\.jsonl is of 'job', host-1001\.jsonl of 'yesterday'"):
        Trace.load(tmp_path)


def test_what_is_no_trace_is_refused(tmp_path):
    with pytest.raises(TraceError, match="nowhere is no folder"):
        Trace.load(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="holds no trace"):
        Trace.load(tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(TraceError, match="holds no trace"):
        Trace.load(tmp_path)
    (tmp_path / "empty.jsonl").unlink()
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(TraceError, match=r"x\.jsonl is no file"):
        Trace.load(tmp_path)
    with pytest.raises(TraceError, match="cannot be read: File name too long"):
        Trace.load("x" * 5000)


def test_a_file_that_is_no_trace_beside_one(tmp_path):
    two_steps(tmp_path).write()
    (tmp_path / "notes.jsonl").write_bytes(b'{"text": "bought milk"}\n')
    with pytest.raises(TraceError, match=r"notes\.jsonl, line 1: no trace header"):
        Trace.load(tmp_path)


def test_names_of_strangers_are_harmless_in_a_terminal_and_in_html(tmp_path):
    job = two_steps(tmp_path)
    job.headers[0] = header(0, world_size=2, name="<script>alert(1)</script>\x1b[2J")
    (tmp_path / "a\nb<i>.jsonl").touch()
    trace = job.load()
    assert "\x1b" not in str(trace)
    assert str(trace).count("\n") == len(trace.problems)
    assert "<script>" not in trace._repr_html_()
    assert html.escape("<script>alert(1)</script>\\x1b[2J") in trace._repr_html_()


def test_two_processes_with_the_same_rank_are_both_kept(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.headers[1] = header(0, pid=7, world_size=2)
    job.collective("barrier")
    trace = job.load()
    # 0 is taken, and 1 is somebody else's: the second gets the first number that nobody can have.
    assert (trace.ranks, trace.label(2)) == ((0, 2), "host-7")
    assert "host-7.jsonl: says that it is rank 0, as host-1000.jsonl does" in trace.problems
    assert len(trace.events) == 2


def test_rank_without_a_cluster_is_that_of_the_default_group(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.headers = [header(None, pid=5), header(None, pid=4)]
    job.collective("barrier", ranks=[1])
    trace = job.load()
    assert [(process.rank, process.header.pid) for process in trace.processes] == [(0, 5), (1, 4)]
    assert [event.rank for event in trace.events] == [1]


def test_the_rank_of_an_event_is_that_of_its_file(tmp_path):
    """A file cannot speak for another rank."""
    job = Job(tmp_path, ranks=2)
    job.files[0].append(Span(number=0, start_ns=0, name="mine", rank=1))
    assert [event.rank for event in job.load().events] == [0]


def test_processes_on_several_hosts_have_several_clocks(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.headers[1] = header(1, host="other", world_size=2)
    job.collective("all_reduce", size=8, start_ns={0: 1000, 1: 10}, end_ns={0: 1100, 1: 100})
    trace = job.load()
    assert "the clock of host other was never compared with that of the others" in trace.problems[0]
    assert all(message.sent_ns <= message.received_ns for message in messages(trace))


def test_groups_of_strangers_are_small_or_name_their_members(tmp_path):
    """A line of 80 bytes must not cost a million numbers."""
    job = Job(tmp_path, ranks=1)
    job.files[0] += [
        GroupFact(name=f"huge {i}", backend="gloo", rank=0, size=1 << 20, default=True) for i in range(100)
    ]
    trace = job.load()
    assert "100 damaged lines were left out" in trace.problems[0]
    assert "group 'huge 0' has 1,048,576 members and does not say which" in trace.problems[0]


def test_events_are_frozen(tmp_path):
    event = two_steps(tmp_path).load().events[0]
    with pytest.raises(AttributeError):
        event.start_ns = 5
    assert msgspec.structs.replace(event, start_ns=5).start_ns == 5
