"""Recorded traces, of torch's workloads, RPC, MPI and the lessons, and rare ones by hand: the answers about them are
those that were frozen, and what is true of all answers is true of these."""

import re
from collections import Counter, defaultdict
from itertools import accumulate, pairwise
from pathlib import Path

import frozen_answers
import pytest

from dlearn import analysis, messages, operations, play


@pytest.fixture(scope="module", params=frozen_answers.names())
def archive(request, tmp_path_factory):
    """Its name, and its traces by their names; loaded once for all tests."""
    return request.param, frozen_answers.traces(request.param, tmp_path_factory.mktemp(request.param))


def test_answers_are_those_that_were_frozen(archive):
    """A difference is a defect, or `python tests/frozen_answers.py write NAME` and the reason in the commit."""
    name, traces = archive
    assert list(frozen_answers.differences(name, traces)) == []


def test_sums_are_those_of_the_messages(archive):
    for name, trace in archive[1].items():
        sent, came = messages(trace), Counter()
        for message in sent:
            if message.how != "missing":
                came[message.src, message.dst] += message.payload_bytes or 0
        traffic = analysis.traffic(trace)
        assert {pair: size for pair, size in traffic.payload_bytes.items() if size} == +came, name
        for rank in trace.ranks:
            assert traffic.bytes_from(rank=rank) == sum(size for (src, _), size in came.items() if src == rank)
        alike = analysis.compare(trace, trace)
        assert not any((alike.total.added_bytes, alike.total.added_messages, alike.came, alike.went))
        assert {operation for operation, _ in sent.unexplained} <= {*sent.operations}
        for one, places in sent.operations.groups():
            said = {(each.op, each.what, each.ranks, each.problem) for each in sent.operations.at(places)}
            assert said == {(one.op, one.what, one.ranks, one.problem)}, name
        assert traffic.unexplained == len(sent.unexplained)


def test_the_parts_of_a_step_are_the_whole_step_and_lie_side_by_side(archive):
    for trace in archive[1].values():
        for each in analysis.breakdown(trace).items:
            parts = sorted((part.start_ns, part.end_ns) for part in each.parts if part.phase != "hidden")
            assert sum(end_ns - start_ns for start_ns, end_ns in parts) == each.total_ns
            assert all(before[1] <= after[0] for before, after in pairwise(parts))
        for step in analysis.overlap(trace).steps:
            assert all(leg.end_ns == after.start_ns for leg, after in pairwise(step.path))
            for share in step.shares:
                assert share.hidden is None or 0 <= share.hidden <= 1
                assert sum(share.waits.values()) >= share.length_ns("waiting") >= 0


def test_an_iteration_is_played_message_by_message_with_every_node_of_its_graph(archive):
    for trace in archive[1].values():
        if not analysis.iterations(trace):
            continue
        one = analysis.iteration(trace)
        walk = play.player(trace, messages=one.messages).walk
        assert [step.message for step in walk.steps if step.message] == list(one.messages)
        for place, graph in enumerate(walk.graphs):
            ran = {node.key for node in graph.nodes if node.start_ns is not None}
            shown = (step.highlighted for step in walk.steps if step.highlighted)
            nodes = [node for of, node in shown if of == place]
            assert {graph.nodes[node].key for node in nodes} == ran


def test_in_a_walk_no_rank_acts_on_what_it_has_not_got(archive):
    assert sum(check_order(play.player(trace).walk) for trace in archive[1].values())


def check_order(walk):
    """How many steps were held against what had come before them."""
    checked, came = 0, _came(walk)
    sent_last = defaultdict(int)  # (operation, rank) -> the step in which it sent last
    for place, step in enumerate(walk.steps):
        message, acts_ns = step.message, step.at_ns
        ends = {end.rank: end for end in message.operation.ends} if message is not None else {}
        sender, receiver = (ends.get(message.src), ends.get(message.dst)) if ends else (None, None)
        known = ends and message.how == "derived" and message.sent_ns is not None
        if known and sender and receiver and receiver.end_ns is not None:
            assert sender.start_ns <= message.sent_ns < message.received_ns <= receiver.end_ns
            assert sender.end_ns is None or message.sent_ns <= sender.end_ns
            assert message.step >= sent_last[id(message.operation), message.dst]
            sent_last[id(message.operation), message.src] = message.step
            acts_ns = sender.start_ns  # What came later may have come too late for it.
        before = [after for end_ns, after in came.get(step.rank, ()) if end_ns <= acts_ns]
        checked += bool(before)
        assert not before or before[-1] <= place, (step, walk.steps[before[-1]])
    return checked


def _came(walk):
    """Rank -> in the order of their ends: the end of each call (or of a message's way), and the place of the last
    message that had come to this rank, or left it, by then."""
    found = defaultdict(list)
    for place, step in enumerate(walk.steps):
        message = step.message
        if message is None or message.how == "missing":
            continue
        if message.received_ns is not None:
            found[message.dst].append((message.received_ns, place))
        for end in message.operation.ends if message.how == "derived" else ():
            if end.rank in (message.src, message.dst) and end.end_ns is not None:
                found[end.rank].append((end.end_ns, place))
    for rank, each in found.items():
        ends, places = zip(*sorted(each), strict=True)
        found[rank] = list(zip(ends, accumulate(places, max), strict=True))
    return found


def test_the_answers_of_the_page_own_questions_account_for_every_message_and_operation(tmp_path):
    frozen_answers.traces("lesson-ddp_step_by_step", tmp_path)
    answers = {}
    page = (Path(__file__).parents[1] / "docs" / "own-questions.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(block.replace("traces/ddp", str(tmp_path / "00")), answers)
    trace = answers["trace"]
    found, asked = messages(trace), operations(trace)
    payload = analysis.traffic(trace).total_bytes
    assert answers["by_line"]["count"].sum() == answers["known"].sum() == len(found)
    assert answers["by_line"]["sum"].sum() == answers["per_ms"].sum() == sum(answers["by_tensor"].values()) == payload
    assert answers["by_pair"].to_numpy().sum() == answers["sent_by"].sum() == payload > 0
    assert 0 < answers["longest_ns"] == max(each.received_ns - each.sent_ns for each in found)
    assert answers["waited"]["count"].sum() == len(asked)
    assert answers["last"].sum() == sum(each.op == "all_reduce" for each in asked)
