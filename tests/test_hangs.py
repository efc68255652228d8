"""Who waits for whom, and how it is told."""

from traces import Job

from dlearn.analysis import hangs
from dlearn.analysis.hang_words import hang_sentence, whereabouts
from dlearn.analysis.hangs import inside
from dlearn.trace.event import NOT_OBSERVED, End
from dlearn.trace.trace import Trace


def told(trace):
    return [hang_sentence(each, trace) for each in hangs(trace)]


def test_a_rank_that_never_called_it(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=4, start_ns=10, end_ns=20)
    job.collective("all_reduce", size=4, start_ns=30, end_ns=40)
    job.collective("all_reduce", size=4, ranks=[0], start_ns=50, end_ns=None, site="quickstart.py:14")
    trace = job.load(died=[0])
    assert told(trace) == ["rank 0 waits for rank 1 in all_reduce #3 (quickstart.py:14); rank 1 never called it"]
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
    assert "rank 6, rank 7 and 42 more wait for rank 50, " in sentence
    assert sentence.endswith("rank 57 never called it; and 42 more")


def test_a_rank_that_is_elsewhere(tmp_path):
    """Rank 1 skipped the all_reduce in a group of its own, and waits in a recv that nobody answers."""
    job = Job(tmp_path, ranks=2)
    job.group("pair", [0, 1])
    job.collective("all_reduce", ranks=[0], start_ns=10, end_ns=None, site="a.py:1")
    job.recv(1, 0, start_ns=20, end_ns=None, group="pair", site="a.py:9")
    first, second = told(job.load())
    assert first == (
        "rank 0 waits for rank 1 in all_reduce #1 (a.py:1); rank 1 never called it, it is in recv #1 (a.py:9)"
    )
    assert (
        second == "rank 1 waits for rank 0 in recv #1 (a.py:9); rank 0 never sent it, it is in all_reduce #1 (a.py:1)"
    )


def test_a_send_that_nobody_receives(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, end_ns=None, site="a.py:1")
    assert told(job.load()) == ["rank 0 waits for rank 1 in send #1 (a.py:1); rank 1 never received it"]


def test_a_recv_from_any_source(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.recv(0, None, end_ns=None)
    assert told(job.load()) == ["rank 0 waits in recv #1; no message has come for it, from any rank"]


def test_all_came_and_called_different_things(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", ranks=[0], end_ns=None)
    job.collective("broadcast", ranks=[1], root=0, end_ns=None)
    assert told(job.load()) == [
        "rank 0 and rank 1 wait in all_reduce #1; the ranks called different operations: all_reduce, broadcast"
    ]


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
    (hang,) = hangs(job.load().where(rank=0, kind="collective"))
    assert hang.elsewhere[1] is not None
    assert hang.elsewhere[1].op == "recv"
