"""The order of a walk is causal: no rank acts on what it has not got, in recorded jobs and in any job by hand."""

import tempfile
import zipfile
from bisect import bisect_right
from collections import defaultdict
from itertools import accumulate
from pathlib import Path

import frozen_answers
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Job

from dlearn import Trace
from dlearn.analysis.walking.walkthrough import walkthrough

OPS = ("all_reduce", "broadcast", "reduce", "all_gather", "barrier")


@pytest.fixture(autouse=True)
def all_of_it(monkeypatch):
    """No walk is cut."""
    monkeypatch.setitem(walkthrough.__globals__, "MOST_MESSAGES", 10**9)
    monkeypatch.setitem(walkthrough.__globals__, "MOST_OWN_STEPS", 10**9)


def came_to(walk):
    """Rank -> in the order of their ends: the end of each call (or of a message's way), and the place of the last
    message that had come to this rank, or left it, by then."""
    found = defaultdict(list)
    for place, step in enumerate(walk.steps):
        message = step.message
        if message is None or message.how == "missing":
            continue
        if message.received_ns is not None:
            found[message.dst].append((message.received_ns, place))
        for end in message.operation.ends:
            if message.how == "derived" and end.rank in (message.src, message.dst) and end.end_ns is not None:
                found[end.rank].append((end.end_ns, place))
    return {
        rank: ([end for end, _ in sorted(each)], list(accumulate((place for _, place in sorted(each)), max)))
        for rank, each in found.items()
    }


def check_order(trace):
    """How many steps were held against what had come before them."""
    walk, checked = walkthrough(trace), 0
    came = came_to(walk)
    sent_last = defaultdict(int)  # (operation, rank) -> the step in which it sent last
    for place, step in enumerate(walk.steps):
        message, acts_ns = step.message, step.at_ns
        if message is not None and message.how == "derived" and message.sent_ns is not None:
            ends = {end.rank: end for end in message.operation.ends}
            sender, receiver = ends[message.src], ends[message.dst]
            assert sender.start_ns <= message.sent_ns < message.received_ns <= receiver.end_ns
            assert message.sent_ns <= sender.end_ns
            assert message.step >= sent_last[id(message.operation), message.dst]
            sent_last[id(message.operation), message.src] = message.step
            acts_ns = sender.start_ns  # What came later may have come too late for it.
        ended, last = came.get(step.rank, ([], []))
        until = bisect_right(ended, acts_ns)
        if until:
            checked += 1
            assert last[until - 1] <= place, (step, walk.steps[last[until - 1]])
    return checked


@pytest.mark.parametrize("name", frozen_answers.names())
def test_in_a_recorded_job_no_rank_acts_on_what_it_has_not_got(name, tmp_path):
    with zipfile.ZipFile(frozen_answers.HERE / f"{name}.zip") as archive:
        archive.extractall(tmp_path)
    assert sum(check_order(Trace.load(path)) for path in tmp_path.iterdir() if path.is_dir())


calls = st.tuples(
    st.sampled_from(OPS),
    st.lists(st.integers(1, 40), min_size=5, max_size=5),
    st.lists(st.integers(10, 90), min_size=5, max_size=5),
)


@settings(max_examples=60, deadline=None)
@given(ranks=st.integers(2, 5), made=st.lists(calls, min_size=1, max_size=4), words=st.integers(1, 50))
def test_in_any_job_no_rank_acts_on_what_it_has_not_got(ranks, made, words):
    """Each rank computes for a while, calls, and is done at any time after what it needs can have come."""
    with tempfile.TemporaryDirectory() as folder:
        job, now = Job(Path(folder), ranks=ranks), dict.fromkeys(range(ranks), 0)
        for op, computed, took in made:
            starts = {rank: now[rank] + 1000 * computed[rank] for rank in now}
            for rank in now:
                job.stretch(rank, "forward", now[rank], starts[rank])
            # A broadcast's tree leads from lower ranks to higher ones; a ring leads through all.
            needed = {rank: max(starts[each] for each in now if op != "broadcast" or each <= rank) for rank in now}
            ends = {rank: needed[rank] + 1000 * took[rank] for rank in now}
            root = {"root": 0} if op in ("broadcast", "reduce") else {}
            job.collective(op, size=0 if op == "barrier" else 8 * words, start_ns=starts, end_ns=ends, **root)
            now = ends
        for rank in now:
            job.stretch(rank, "optimizer", now[rank], now[rank] + 5)
        check_order(job.load())
