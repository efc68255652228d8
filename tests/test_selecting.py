"""Parts of a trace: what a selection holds, that operations stay whole in it, and that windows lose nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Job

from dlearn import operations
from dlearn.analysis import messages, traffic
from dlearn.errors import TraceError
from dlearn.hooks.c10d import c10d_ops
from dlearn.trace.event import RpcCall, RpcReply, RpcRun, Worker
from dlearn.trace.selecting import kind_of
from dlearn.trace.trace import Trace

MS = 1_000_000


def one_step(folder) -> Trace:
    """0 ms forward, a broadcast; 10 ms backward, an all_reduce that rank 1 calls at 14 ms; 20 ms a send, phase none."""
    job = Job(folder, ranks=3)
    job.collective("broadcast", size=8, root=0, start_ns=0, end_ns=1 * MS, phase="forward")
    job.collective(
        "all_reduce", size=12, start_ns={0: 10 * MS, 1: 14 * MS, 2: 11 * MS}, end_ns=15 * MS, phase="backward"
    )
    job.send(0, 2, size=5, start_ns=20 * MS, end_ns=21 * MS)
    job.recv(2, 0, size=5, start_ns=9 * MS, end_ns=22 * MS)
    return job.load()


def ops(trace: Trace) -> list[str]:
    return [operation.op for operation in operations(trace)]


# Where ----------------------------------------------------------------------------------------------------------------


def test_where_selects_a_phase(tmp_path):
    trace = one_step(tmp_path)
    assert trace.phases == ("forward", "backward", "none")
    assert ops(trace.where(phase="backward")) == ["all_reduce"]
    assert ops(trace.where(phase="none", rank=2)) == ["send"]
    assert trace.where(phase="optimizer").events == ()
    with pytest.raises(TraceError, match="no phase 'backwards'; the phases are: setup, forward, backward"):
        trace.where(phase="backwards")


def test_where_names_the_ops_if_there_is_no_such_one(tmp_path):
    trace = one_step(tmp_path)
    with pytest.raises(TraceError, match=r"no op 'allreduce'; this trace has: all_reduce, broadcast, recv, send$"):
        trace.where(op="allreduce")
    # What torch could do and this job did not is an answer, too.
    names = [op.name for op in (*c10d_ops.COLLECTIVES, *c10d_ops.POINT_TO_POINT)]
    assert [name for name in names if trace.where(op=name).events] == [
        "all_reduce",
        "broadcast",
        "send",
        "recv",
        "recv",
    ]


def test_where_selects_several_ranks_by_number_or_name(tmp_path):
    trace = one_step(tmp_path)
    assert {event.rank for event in trace.where(rank=[0, "rank 2"]).events} == {0, 2}
    assert trace.where(rank=[]).events == ()
    with pytest.raises(TraceError, match="no rank 7 in this trace; its ranks are: rank 0, rank 1, rank 2"):
        trace.where(rank=[0, 7])


def test_where_keeps_an_operation_whole(tmp_path):
    """Rank 1 takes part in both collectives: they keep the ends and messages of the ranks that were not asked for."""
    trace = one_step(tmp_path)
    mine = trace.where(rank=1)
    assert ops(mine) == ["broadcast", "all_reduce"]
    assert [operation.ranks for operation in operations(mine)] == [(0, 1, 2)] * 2
    assert len(messages(mine)) == len(messages(trace)) - 1


def test_rpc_is_one_kind_of_four(tmp_path):
    job = Job(tmp_path, ranks=2)
    for rank in (0, 1):
        job.files[rank].append(Worker(name=f"worker{rank}", id=rank, wall_ns=0))
    call = {"caller": 0, "call": 1}
    job.event(
        RpcCall, 0, op="rpc_sync", function="f", flavour="python", to=1, call=1, handed_ns=5, start_ns=4, end_ns=90
    )
    run = job.event(RpcRun, 1, function="f", arrived_ns=20, start_ns=30, end_ns=40, **call)
    job.event(RpcReply, 1, start_ns=41, run=run, pickled_bytes=3, **call)
    job.send(0, 1)
    trace = job.load()
    assert len(trace.where(kind="rpc").events) == 3
    assert len(trace.where(kind="rpc run").events) == 1
    # The run and the reply belong to the call, however late the callee is.
    assert len(trace.between(0, 6 / MS).events) == 3
    assert [kind_of(event) for event in trace.between(6 / MS).events] == ["p2p"]


def test_a_glass_box_collective_keeps_the_steps_of_the_other_ranks(tmp_path):
    """A star: ranks 1 and 2 send to rank 0. The selection of rank 1 has rank 2's step, too."""
    trace = star(tmp_path)
    for part in (trace, trace.where(rank=1), trace.where(op="all_reduce"), trace.between(0, 5)):
        assert ops(part) == ["all_reduce"]
        assert traffic(part).payload_bytes == {(1, 0): 8, (2, 0): 8}
    assert ops(trace.where(kind="p2p")) == ["send", "send"]
    # The steps began after 5 ms, but what they are part of did not.
    assert ops(trace.between(5)) == []


def star(folder) -> Trace:
    job = Job(folder, ranks=3, backend="dlearn_ring")
    outer = job.collective("all_reduce", size=8, start_ns=0, end_ns=90 * MS)
    for src in (1, 2):
        job.send(src, 0, size=8, parent=outer[src], start_ns=src * 10 * MS, end_ns=80 * MS)
        job.recv(0, src, size=8, parent=outer[0], start_ns=src * 10 * MS, end_ns=80 * MS)
    return job.load()


# Windows --------------------------------------------------------------------------------------------------------------


def test_an_operation_is_in_the_window_in_which_its_first_rank_calls_it(tmp_path):
    trace = one_step(tmp_path)
    assert ops(trace.between(0, 5)) == ["broadcast"]
    # The recv was posted at 9 ms, the all_reduce first called at 10 ms: rank 1's late end comes along.
    assert ops(trace.between(5, 12)) == ["send", "all_reduce"]
    assert [event.rank for event in trace.between(10, 12).events] == [0, 2, 1]
    assert trace.between(12, 100).events == ()
    assert ops(trace.between(10)) == ["all_reduce"]
    assert ops(trace.between(0, 10.5).where(rank=0)) == ["broadcast", "send", "all_reduce"]


def test_a_window_that_ends_before_it_begins_is_refused(tmp_path):
    trace = one_step(tmp_path)
    assert trace.between(3, 3).events == ()
    for end in (2.0, float("nan")):
        with pytest.raises(TraceError, match="ends before it begins: swap the two"):
            trace.between(5, end)


def test_time_begins_with_the_first_event_that_is_no_sample(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.counters(0, 8)
    job.span(0, "a", start_ns=10 + 2 * MS, end_ns=30 * MS)
    trace = job.load()
    assert trace.first_ns == 10 + 2 * MS
    assert [kind_of(event) for event in trace.between(0, 1).events] == ["counters", "span"]


def test_an_empty_trace_has_empty_windows(tmp_path):
    trace = Job(tmp_path, ranks=1).load()
    assert trace.between(0, 5).between(1).where(phase="forward").events == ()


times = st.integers(0, 40 * MS)


@st.composite
def jobs(draw):
    """Collectives that begin at other times on each rank, sends and their receives, a send to nobody."""
    starts = draw(st.lists(st.tuples(times, times, times), min_size=1, max_size=5))
    sends = draw(st.lists(st.tuples(times, times | st.none()), max_size=4))
    cuts = sorted(draw(st.lists(st.floats(0, 45), max_size=4)))
    return starts, sends, cuts


@settings(max_examples=60, deadline=None)
@given(jobs())
def test_windows_side_by_side_hold_everything_once(tmp_path_factory, made):
    starts, sends, cuts = made
    job = Job(tmp_path_factory.mktemp("job"), ranks=3)
    for each in starts:
        job.collective("all_reduce", size=12, start_ns=dict(enumerate(each)), end_ns=50 * MS)
    for sent, received in sends:
        job.send(0, 1, start_ns=sent, end_ns=50 * MS)
        if received is not None:
            job.recv(1, 0, start_ns=received, end_ns=50 * MS)
    trace = job.load()
    windows = [trace.between(a, b) for a, b in zip([0.0, *cuts], [*cuts, None], strict=True)]
    assert sorted([event for window in windows for event in window.events], key=_key) == sorted(trace.events, key=_key)
    assert sum(len(operations(window)) for window in windows) == len(operations(trace))
    assert sum(traffic(window).total_bytes for window in windows) == traffic(trace).total_bytes
    assert all(not operation.unseen for window in windows for operation in operations(window))


def _key(event):
    return event.rank, event.number


def test_what_is_in_a_window_by_itself_is_there_by_its_start(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.span(0, "a", start_ns=0, end_ns=30 * MS)
    job.gradient(0, "w", at_ns=10 * MS)
    trace = job.load()
    assert [kind_of(event) for event in trace.between(5).events] == ["gradient"]
