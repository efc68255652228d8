"""What holds of every trace, of jobs that real ranks ran just now and of the archives of recorded ones: of torch's
workloads, RPC, MPI and the lessons, and rare ones by hand. Of these the answers are those that were frozen, too."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path

import frozen_answers
import msgspec
import pytest
import rpc_jobs
import workloads

from dlearn import Event, Trace, analysis, messages, operations, play
from dlearn.events.event import FORMAT, RpcReply
from dlearn.events.source import describe, find
from dlearn.events.writer import Writer


@pytest.fixture(scope="module", params=[*frozen_answers.names(), "just now"])
def archive(request, tmp_path_factory) -> tuple[str, dict[str, Trace]]:
    """Its name, and its traces by their names; loaded once for all tests."""
    name = request.param
    if name == "just now":
        recorded, workers = request.getfixturevalue("recorded"), ["ps", "trainer1", "trainer2"]
        by_rpc = recorded(rpc_jobs.serve_and_train, workers, rpc=True, measure="phase")
        return name, {"p2p": recorded(workloads.point_to_point), "rpc": by_rpc}
    return name, frozen_answers.traces(name, tmp_path_factory.mktemp(name))


@pytest.fixture
def traces(archive) -> list[Trace]:
    return [*archive[1].values()][:15]


@pytest.mark.parametrize("archive", frozen_answers.names(), indirect=True)
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


def keys(events: Iterable[Event]) -> list[tuple[int, int]]:
    return sorted((event.rank, event.number) for event in events)


def write_again(writer: Writer, event: Event, replied: set[int | None]) -> None:
    """An event and its end as hooks do, so that what repeats one before becomes a short line. A reply ends its run."""
    facts = msgspec.structs.asdict(event)
    end_ns, by, _ = (facts.pop(name) for name in ("end_ns", "ended_by", "rank"))
    result = facts.pop("result", None)
    error = facts.pop("error") if by else ""
    writer.event(type(event), facts)
    if by and event.number not in replied:
        writer.end(event.number, at_ns=event.start_ns if end_ns is None else end_ns, by=by, error=error, result=result)


def test_what_is_written_is_read_again_the_same(traces, tmp_path):
    for at, trace in enumerate(traces):
        (own := tmp_path / str(at)).mkdir()
        for process in trace.processes:
            writer = Writer(own / process.path.name, max_bytes=1 << 30)
            own_header = msgspec.structs.replace(process.header, format=FORMAT)  # The older had no short lines.
            facts = describe(find("tcp_store")), *process.groups.values()
            for line in (own_header, *facts, *filter(None, [process.worker])):
                writer.write(line)
            mine = trace.where(rank=process.rank)
            for event in mine.events:
                write_again(writer, event, {reply.run for reply in mine.of(RpcReply)})
            writer.finish(at_ns=0)
        again = Trace.load(own)
        assert (list(again.events), again.labels) == (list(trace.events), trace.labels)


def test_parts_are_disjoint_and_make_the_whole(traces):
    for trace in traces:
        whole = keys(trace.events)
        begun = sorted({(event.start_ns - trace.first_ns) / 1e6 for event in trace.events} or {0.0})
        cut, later = max(begun[len(begun) // 3], 0), max(begun[-1], 0)  # Where something begins.
        for parts in (
            [trace.where(rank=rank) for rank in trace.ranks],
            [trace.where(phase=phase) for phase in trace.phases],
            [trace.between(0, cut), trace.between(cut, later), trace.between(later)],
        ):
            assert keys(event for part in parts for event in part.events) == whole
        assert sum(len(operations(part)) for part in parts) == len(operations(trace))
        assert sum(analysis.traffic(part).total_bytes for part in parts) == analysis.traffic(trace).total_bytes


def test_within_a_span_is_all_that_it_caused_on_any_rank(traces):
    for trace in traces:
        for name in trace.spans[:3]:
            part = trace.within(name)
            inside = set(keys(part.events))
            assert inside <= set(keys(trace.events))
            below = [event for event in trace.events if (event.rank, event.parent) in inside]
            ends = [end for each in operations(part) for end in each.ends if end.number >= 0]  # RPC's are made.
            assert inside >= {(event.rank, event.number) for event in below}
            assert inside >= {(end.rank, end.number) for end in ends}
            for call, run in ((each.call, each.run) for each in trace.rpc.exchanges if each.call and each.run):
                assert (call.rank, call.number) not in inside or (run.rank, run.number) in inside


def test_a_row_of_a_frame_says_what_its_operation_or_message_says(traces):
    """The frames are made of columns and of what those that are alike share; the values one by one."""
    for trace in traces:
        asked, found = operations(trace), messages(trace)
        calls, sent = asked.to_frame(), found.to_frame()
        for name in ("op", "start_ns", "last_arrival_ns", "given_bytes", "problem", "what"):
            assert calls[name].tolist() == [getattr(each, name) for each in asked], name
        assert calls.last_rank.tolist() == [trace.label(each.last_rank) for each in asked]
        assert calls.site.tolist() == [each.ends[0].site for each in asked]
        for name in ("op", "what", "how", "confirmed", "step"):
            assert sent[name].tolist() == [getattr(each, name) for each in found], name
        assert sent.src.tolist() == [trace.label(each.src) for each in found]
        assert sent.dst.tolist() == [trace.label(each.dst) for each in found]


def test_the_frame_of_an_analysis_adds_up_to_its_value(traces):
    parts = [f"{part}_ns" for part in ("forward", "backward", "transfer", "waiting", "optimizer", "between")]
    for trace in traces:
        shares, steps = analysis.breakdown(trace), analysis.step_times(trace)
        for row in shares.records():
            if row["transfer_ns"] is not None:
                assert sum(row[part] for part in parts) == row["total_ns"]
        assert len(shares.to_frame()) == len(shares.items)
        legs = analysis.overlap(trace)
        assert len(legs.to_frame()) == sum(len(step.shares) for step in legs.steps)
        lengths = [cell.length_ns for step in steps.steps for cell in step.cells.values()]
        assert [row["length_ns"] for row in steps.records()] == lengths
        buckets, gradients = analysis.bucket_times(trace), analysis.gradients(trace)
        assert [row["bytes"] for row in buckets.records()] == [each.bytes for each in buckets.items]
        assert len(buckets.to_frame()) == len(buckets.items)
        assert [row["reduced"] for row in gradients.records()] == [each.reduced for each in gradients.steps]
        whole = analysis.reconcile(trace)
        frame = whole.to_frame()
        assert not len(frame) or frame.predicted_bytes.sum() == whole.whole.predicted_bytes
        compared = analysis.compare(trace, trace.where(rank=trace.ranks[:1]))
        sent = [(row["messages_a"], row["bytes_b"]) for row in compared.records()]
        assert sum(a for a, _ in sent) == compared.total.a.message_count
        assert sum(b for _, b in sent) == compared.total.b.payload_bytes
        held = analysis.rank_memory(trace)
        assert len(held.to_frame()) == sum(map(len, held.held.values()))
        speeds = analysis.bandwidths(trace)
        assert [row["busbw"] for row in speeds.records()] == [each.bus_bandwidth for each in speeds.items]
        for found in (analysis.hangs, analysis.mismatches, analysis.roots, analysis.victims):
            rows = found(trace).to_frame().to_dict("records")
            of = [getattr(each, "operation", None) or each.chain[0].operation for each in found(trace)]
            assert [(row["op"], row["seq"]) for row in rows] == [(each.op, each.seq) for each in of]
        for each in analysis.topologies(trace):
            assert sum(row["channels"] for row in each.records()) == sum(edge.channels for edge in each.edges)
        told = analysis.explain(trace)
        assert sum(row["bytes"] for row in told.records()) == told.traffic.total_bytes
        if analysis.iterations(trace):
            one = analysis.iteration(trace)
            assert len(one.to_frame()) == len(one.messages)
