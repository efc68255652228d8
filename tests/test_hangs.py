"""Who waits for whom, and how it is told."""

import io
import sys

import pytest
from traces import Job

from dlearn.analysis import hangs, mismatches
from dlearn.analysis.hanging.hang_words import hang_sentence, tell, whereabouts
from dlearn.analysis.hanging.stuck import Pace, inside, pace
from dlearn.analysis.telling.words import story
from dlearn.recorder.hang_watch import HangWatch
from dlearn.trace.event import NOT_OBSERVED, REFUSED, End
from dlearn.trace.job_facts import Exit, Place, Stopped
from dlearn.trace.trace import Trace


def told(trace):
    return [hang_sentence(each, trace) for each in hangs(trace)]


def test_a_rank_that_never_called_it(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=4, start_ns=10, end_ns=20)
    job.collective("all_reduce", size=4, start_ns=30, end_ns=40)
    job.collective("all_reduce", size=4, ranks=[0], start_ns=50, end_ns=None, site="quickstart.py:14")
    trace = job.load(died=[0])
    (sentence,) = told(trace)
    assert sentence.startswith("rank 0 waits for rank 1 in all_reduce #3 (quickstart.py:14); rank 1 never called it")
    assert sentence.endswith(", it closed its recording, which a process that dies does not")
    assert whereabouts(trace, 0) == "was in all_reduce #3 (quickstart.py:14)"
    assert whereabouts(trace, 1) == ""


def test_several_wait_for_several(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.collective("barrier", ranks=[0, 2], end_ns=None)
    assert told(job.load()) == [
        "rank 0 and rank 2 wait for rank 1 and rank 3 in barrier #1; rank 1 never called it; rank 3 never called it"
    ]


def test_many_wait_for_many_in_one_readable_sentence(tmp_path):
    job = Job(tmp_path, ranks=100)
    job.collective("barrier", ranks=range(50), end_ns=None)
    (sentence,) = told(job.load())
    assert sentence.startswith("50 ranks wait for rank 50, rank 51, ")
    assert sentence.endswith("rank 57 never called it; and 42 more")


def test_a_rank_that_is_elsewhere(tmp_path):
    """Rank 1 skipped the all_reduce in a group of its own, and waits in a recv that nobody answers."""
    job = Job(tmp_path, ranks=2)
    job.group("pair", [0, 1])
    job.collective("all_reduce", ranks=[0], start_ns=10, end_ns=None, site="a.py:1")
    job.recv(1, 0, start_ns=20, end_ns=None, group="pair", site="a.py:9")
    first, second = told(job.load())
    assert first == (
        "rank 0 waits for rank 1 in all_reduce #1 (a.py:1); rank 1 never called it,"
        " it is in recv #1 of the group of rank 0 and rank 1 (a.py:9)"
    )
    assert (
        second == "rank 1 waits for rank 0 in recv #1 of the group of rank 0 and rank 1 (a.py:9); rank 0 never sent it,"
        " it is in all_reduce #1 of the default group (a.py:1)"
    )


def test_a_send_that_nobody_receives(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, end_ns=None, site="a.py:1")
    assert told(job.load()) == ["rank 0 waits for rank 1 in send #1 (a.py:1); rank 1 never received it"]


def test_a_recv_from_any_source(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.recv(0, None, end_ns=None)
    assert told(job.load()) == ["rank 0 waits in recv #1; no message has come for it, from any rank"]


def test_all_came_and_it_does_not_end(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", end_ns={0: 20, 1: None})
    assert told(job.load()) == ["rank 1 waits in all_reduce #1; all ranks called it, and it does not end"]


def test_nobody_is_blamed_whose_file_is_not_here(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", ranks=[0], end_ns=None)
    assert told(job.load(without=[1])) == [
        "rank 0 waits in all_reduce #1; the file of rank 1 is not here or not whole, so nobody knows whether it came"
    ]


def test_where_lines_are_lost_ends_may_be_among_them(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.collective("all_reduce", end_ns=None)
    path = job.write()[0]
    path.write_bytes(path.read_bytes() + b"{damage}\n")
    assert hangs(Trace.load(tmp_path)) == ()


def test_what_failed_because_a_rank_never_came_is_told_like_a_hang(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", ranks=[0], end_ns=None)
    job.files[0].append(End(event=0, at_ns=99, by="callback", error="RuntimeError"))
    assert told(job.load()) == ["rank 0 waits for rank 1 in all_reduce #1; rank 1 never called it"]


def test_a_broken_connection_is_no_hang(tmp_path):
    """All ranks came and it failed: something below broke, and nobody waits for a call."""
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", end_ns=None)
    for file in job.files:
        file.append(End(event=0, at_ns=99, by="callback", error="RuntimeError"))
    assert hangs(job.load()) == ()


def test_a_call_that_was_refused_is_no_wait(tmp_path):
    """All ranks got an error at once, because their sizes do not fit: nobody waits, and the program goes on."""
    job = Job(tmp_path, ranks=2)
    for rank in (0, 1):
        job.collective("all_gather", size=4 + rank, ranks=[rank], by=REFUSED, error="RuntimeError")
    job.collective("all_reduce", size=4)
    trace = job.load()
    assert hangs(trace) == mismatches(trace) == ()
    assert inside(trace, 0) is None


def test_who_waits_for_a_rank_whose_call_was_refused(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_gather", ranks=[0], by=REFUSED, error="RuntimeError", site="a.py:5")
    job.collective("all_gather", ranks=[1, 2], end_ns=None, site="a.py:7")
    assert told(job.load()) == [
        "rank 1 and rank 2 wait for rank 0 in all_gather #1 (a.py:7);"
        " rank 0 never came to it, its all_gather #1 (a.py:5) was refused at once: RuntimeError"
    ]


def test_nothing_hangs_where_all_has_ended_or_nobody_watched(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce")
    job.send(0, 1, by=NOT_OBSERVED)
    job.bucket(0, 0, {"a": 4})
    job.gradient(0, "a")
    trace = job.load()
    assert hangs(trace) == ()
    assert inside(trace, 0) is None


def test_a_selection_sees_where_the_others_are(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", ranks=[0], end_ns=None)
    job.recv(1, 0, end_ns=None)
    trace = job.load().where(rank=0, kind="collective")
    (hang,) = hangs(trace)
    assert hang_sentence(hang, trace).endswith("rank 1 never called it, it is in recv #1")


def test_what_waits_behind_a_hang_is_told_with_it(tmp_path):
    """Rank 0 has three calls under way; rank 1 is stuck in another of the same number, so the third has no chance."""
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=4, end_ns=None, start_ns={0: 10, 1: 11}, site="a.py:1")
    job.collective("all_reduce", size=8, ranks=[0], end_ns=None, start_ns=20)
    job.collective("all_reduce", size=8, ranks=[0], end_ns=None, start_ns=30)
    trace = job.load()
    assert [each.sentence for each in tell(hangs(trace), trace)] == [
        "rank 0 and rank 1 wait in all_reduce #1 (a.py:1); all ranks called it, and it does not end;"
        " behind it wait all_reduce #2 and all_reduce #3"
    ]


def test_three_ranks_in_a_circle_are_told_once(tmp_path):
    job = Job(tmp_path, ranks=3)
    for rank in (1, 0, 2):
        job.send(rank, (rank + 1) % 3, end_ns=None, site="a.py:1")
    trace = job.load()
    assert [each.sentence for each in tell(hangs(trace), trace)] == [
        "rank 0, rank 1 and rank 2 wait in a circle: rank 0 for rank 1 in send #1 (a.py:1), rank 1 for rank 2 in"
        " send #1 (a.py:1), rank 2 for rank 0 in send #1 (a.py:1)"
    ]


def reducer(job, rank, *parameters, launch, backward):
    """A backward pass: these gradients become ready; the bucket is sent, or not."""
    for name in parameters:
        job.gradient(rank, name, backward=backward)
    if launch:
        facts = {"launcher": "reducer", "phase": "backward", "backward": backward, "site": "a.py:5"}
        job.collective("all_reduce", size=8, ranks=[rank], end_ns=launch, **facts)


def test_the_gradients_that_never_came_are_named(tmp_path):
    job = Job(tmp_path, ranks=2)
    for rank in (0, 1):
        job.bucket(rank, 0, {"b.weight": 4, "b.bias": 4})
        reducer(job, rank, "b.weight", "b.bias", launch=20, backward=7 + rank)
    job.gradient(0, "b.weight", backward=9)
    job.gradient(0, "b.bias", backward=9)
    facts = {"launcher": "reducer", "phase": "backward", "backward": 9, "site": "a.py:5"}
    job.collective("all_reduce", size=8, ranks=[0], end_ns=None, start_ns=30, **facts)
    job.gradient(1, "b.weight", backward=3)
    job.files[1].append(Place(at_ns=50, ended="returned"))
    assert told(job.load()) == [
        "rank 0 waits for rank 1 in all_reduce #2 (bucket 0: b.weight, b.bias; a.py:5); rank 1 never produced the"
        " gradients of b.bias in backward pass 2, it has returned from its function"
    ]


def test_a_rank_that_never_began_the_backward_pass(tmp_path):
    job = Job(tmp_path, ranks=2)
    for rank in (0, 1):
        job.bucket(rank, 0, {"w": 8})
    job.gradient(0, "w", backward=1)
    facts = {"launcher": "reducer", "phase": "backward", "backward": 1}
    job.collective("all_reduce", size=8, ranks=[0], end_ns=None, **facts)
    job.files[1].append(Place(at_ns=50, ended="ValueError"))
    assert told(job.load()) == [
        "rank 0 waits for rank 1 in all_reduce #1 (bucket 0: w); rank 1 never began backward pass 1,"
        " it has raised ValueError"
    ]


MS = 1_000_000


def stopped_after(tmp_path, calls, *, ms, last_ms=1):
    """Two ranks whose calls took 1 ms each, one after the other; then one that began `last_ms` before they stopped."""
    job = Job(tmp_path, ranks=2)
    for number in range(calls):
        job.collective("all_reduce", size=4, start_ns=number * MS, end_ns=(number + 1) * MS)
    job.collective("all_reduce", size=4, ranks=[0], start_ns=(ms - last_ms) * MS, end_ns=None)
    for file in job.files:
        file.append(Stopped(at_ns=ms * MS))
    return job.load(died=[0, 1])


def test_a_job_that_went_on_until_it_was_stopped_is_slow_and_does_not_hang(tmp_path):
    trace = stopped_after(tmp_path, 1000, ms=1002)
    assert told(trace) == []
    assert pace(trace) == Pace(ended=1000, duration_ns=1002 * MS, silence_ns=2 * MS, slow=True)
    assert story(trace) == [
        "rank 0 was still at work when its cluster stopped it; it was in all_reduce #1001.",
        "rank 1 was still at work when its cluster stopped it.",
        "It was slow, not hung: 1,000 operations in 1 s, 998 a second; the last ended 2 ms before the end.",
    ]


def test_a_call_that_takes_longer_than_the_others_hangs(tmp_path):
    trace = stopped_after(tmp_path, 1000, ms=3000, last_ms=2000)
    assert told(trace) == ["rank 0 waits for rank 1 in all_reduce #1001; rank 1 never called it"]
    went = pace(trace)
    assert went is not None
    assert not went.slow


def test_which_wait_is_usual_is_not_known_of_a_few_calls(tmp_path):
    assert len(told(stopped_after(tmp_path, 9, ms=20))) == 1


def test_a_wait_as_long_as_others_before_it_is_no_hang(tmp_path):
    """Rank 1 computes for 2 s before each of its calls."""
    job = Job(tmp_path, ranks=2)
    for step in range(10):
        times = {"start_ns": {0: step * 2000 * MS, 1: (step + 1) * 2000 * MS}, "end_ns": (step + 1) * 2000 * MS}
        job.collective("all_reduce", size=4, **times)
    job.collective("all_reduce", size=4, ranks=[0], start_ns=20_000 * MS, end_ns=None)
    for file in job.files:
        file.append(Stopped(at_ns=21_900 * MS))
    assert told(job.load(died=[0, 1])) == []


def test_a_job_that_nobody_stopped_claims_no_pace(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=4)
    assert pace(job.load()) is None


def test_how_a_rank_died_is_the_last_word_about_it(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("barrier", ranks=[0], end_ns=None)
    job.files[1] += [Place(at_ns=50, site="a.py:3"), Exit(status=-9)]
    assert told(job.load(died=[0, 1])) == [
        "rank 0 waits for rank 1 in barrier #1; rank 1 never called it, it was killed by SIGKILL"
    ]


def test_who_called_what_where_if_it_does_not_fit_together(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=8, ranks=[0], end_ns=None, site="a.py:1")
    job.collective("broadcast", size=8, ranks=[1], root=0, end_ns=None, site="a.py:2")
    (sentence,) = told(job.load())
    assert sentence.endswith(
        "called different operations: all_reduce, broadcast; rank 0 called all_reduce at a.py:1, rank 1 broadcast at"
        " a.py:2"
    )


@pytest.mark.parametrize("is_terminal", [True, False])
def test_on_a_terminal_a_hang_is_told_in_a_line_of_its_own(is_terminal, tmp_path, monkeypatch):
    """The line that is open there may hold a bar of progress."""
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=8, ranks=[0], end_ns=None)
    job.write(died=[0, 1])
    terminal = io.StringIO("100 %")
    terminal.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stderr", terminal)
    terminal.read()
    HangWatch(None, min(tmp_path.glob("*.jsonl")), after=1.0)._tell(5.0)
    assert terminal.getvalue().startswith("100 %\ndlearn: nothing" if is_terminal else "100 %dlearn: nothing")
