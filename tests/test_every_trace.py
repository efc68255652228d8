"""What holds of every trace: the archives of recorded jobs, and jobs that real ranks ran just now."""

from collections.abc import Iterable

import frozen_answers
import msgspec
import pytest
import rpc_jobs
import workloads

from dlearn import Event, Trace, analysis, messages, operations
from dlearn.events.event import FORMAT, RpcReply
from dlearn.events.source import describe, find
from dlearn.events.writer import Writer


@pytest.fixture(scope="module", params=[*frozen_answers.names(), "just now"])
def traces(request, tmp_path_factory) -> list[Trace]:
    if request.param == "just now":
        recorded, workers = request.getfixturevalue("recorded"), ["ps", "trainer1", "trainer2"]
        by_rpc = recorded(rpc_jobs.serve_and_train, workers, rpc=True, measure="phase")
        return [recorded(workloads.point_to_point), by_rpc]
    every = frozen_answers.traces(request.param, tmp_path_factory.mktemp(request.param))
    return [*every.values()][:15]


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
