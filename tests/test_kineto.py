"""Traces of torch's profiler: what kernels did is told on GPU time, and what does not say so is counted."""

import gzip
import json
import random
import tarfile
import time
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlearn import Trace, draw, explain, operations
from dlearn.analysis import traffic
from dlearn.errors import TraceError
from dlearn.join.waiting import waited_until_ns, waiting

SAMPLES = Path(__file__).with_name("samples")
REAL = SAMPLES / "resnet-ddp-rank0of2.json.gz"
BASE_NS = 1_700_000_000_000_000_000
MEGABYTE = 250_000  # elements of float32


def kernel(ts, dur, **said):
    args = {"stream": 20, "grid": [8, 1, 1], "Collective name": "allreduce", "dtype": "Float"}
    args |= {"In msg nelems": MEGABYTE, "Out msg nelems": MEGABYTE, "Process Group Name": "0"}
    args |= {"Process Group Description": "default_pg", "In split size": "[]", "Process Group Ranks": "[0, 1, 2]"}
    args |= {key.replace("_", " "): value for key, value in said.items()}
    return {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_X", "ts": ts, "dur": dur, "args": args}


def write(folder, rank, kernels, *, world=3, host="one", config=None, **more):
    """A file as torch's profiler writes it; made by hand."""
    if config is None:
        config = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world, "ranks": list(range(world))}]
    info = {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": config}
    file = {"distributedInfo": info, "baseTimeNanoseconds": BASE_NS, "host_name": host, "traceEvents": kernels}
    (folder / f"worker{rank}.pt.trace.json").write_text(json.dumps(file | more))


def test_a_real_trace_of_one_rank_of_two():
    trace = Trace.load(REAL)
    calls = list(trace.events)
    assert len(calls) == 21
    assert {call.op for call in calls} == {"broadcast", "all_reduce"}
    # From its own numbers: 3 steps of 5 buckets, and 2 broadcasts of the buffers before each.
    assert [call.op for call in calls].count("all_reduce") == 15
    assert sum(call.inputs[0].logical_bytes for call in calls if call.op == "all_reduce") == 3 * 102_228_128
    assert 2_636_669 in [call.end_ns - call.start_ns for call in calls]  # "dur": 2636.669
    assert trace.processes[0].header.world_size == 2
    assert not any(one.missing for one in operations(trace))  # Rank 1 left no file: it is unseen.
    assert any("calls of a group are matched by their order" in problem for problem in trace.problems)


def test_calls_of_gloo_are_counted_and_nothing_is_claimed_of_them():
    trace = Trace.load(SAMPLES / "kineto-gloo-3ranks")
    assert trace.ranks == (0, 1, 2)
    assert not trace.events
    # What its script called: rank 0 and rank 2 three all_reduces more, in a pair; rank 0 sends three times to rank 1.
    assert [process.imported.unexplained for process in trace.processes] == [3 + 6 + 3, 3 + 3 + 3, 3 + 6]
    told = "\n".join(explain(trace).sentences)
    assert "3 ranks (no process group told of): 0 of 0 operations explained by 0 messages (none)." in told
    assert "calls that do not say who sent what to whom: 30, which took 10.8 ms" in told
    assert traffic(trace).total_bytes == 0


def test_a_real_file_without_communication_says_of_which_job_it_is():
    trace = Trace.load(SAMPLES / "gloo-rank34of300-truncated.json.gz")
    assert trace.ranks == (34,)
    assert trace.processes[0].header.world_size == 300
    assert not trace.events
    assert not operations(trace)
    assert any("1 of 300 processes left a file" in problem for problem in trace.problems)


DLRM = Path(str(files("dlearn.lessons"))) / "data" / "dumps" / "dlrm-8ranks.tar.gz"


def test_execution_traces_tell_what_old_kernels_do_not(tmp_path):
    trace = Trace.load(DLRM)
    found = list(operations(trace))
    assert [len(one.ends) for one in found] == [8] * 8
    assert [one.misfit for one in found] == [None] * 8
    assert [one.op for one in found].count("all_to_all_single") == 5
    sent = traffic(trace)
    # What each rank gives, by its own splits, less what it keeps.
    for rank in range(8):
        calls = [event for event in trace.events if event.rank == rank and event.op == "all_to_all_single"]
        given = [call.splits or (call.inputs[0].logical_bytes // 8,) * 8 for call in calls]
        to_others = sum(size for row in given for place, size in enumerate(row) if place != rank)
        assert sum(size for (src, _), size in sent.payload_bytes.items() if src == rank) == to_others
        # And what each gets is as large as what it has room for.
        got = sum(size for (_, dst), size in sent.payload_bytes.items() if dst == rank)
        assert got == sum(call.outputs[0].logical_bytes for call in calls) - sum(row[rank] for row in given)
    assert sent.total_bytes == 451_136
    drawn = draw.traffic(trace)
    assert drawn.get_title(loc="left").startswith("Rank 3 receives the most: 91.1")
    assert "derived from nccl's algorithm" in drawn.get_label()
    # The ends of each kernel agree on all ranks far better than the starts, as they should on one host.
    for one in found:
        ends, starts = ([getattr(end, name) for end in one.ends] for name in ("end_ns", "start_ns"))
        assert max(ends) - min(ends) <= 10_000
        assert max(starts) - min(starts) > 10_000
    assert any("execution traces, joined by order" in problem for problem in trace.problems)


def test_execution_traces_of_other_calls_tell_nothing(tmp_path):
    with tarfile.open(DLRM) as packed:
        packed.extractall(tmp_path, filter="data")
    path = tmp_path / "dlrm_eg_3.json"
    told = json.loads(path.read_text())
    told["nodes"].pop()
    path.write_text(json.dumps(told))
    trace = Trace.load(tmp_path)
    assert 3 not in {event.rank for event in trace.events}
    assert any("calls that do not say who sent what to whom: 8, which took" in problem for problem in trace.problems)
    one = {"name": "record_param_comms", "input_types": ["Tensor(float)"]}
    for inputs in ([1, 2, 3, "x"], [{"a": 1}, 2, 3, "x", []]):
        path.write_text(json.dumps({"schema": "1.0.1", "nodes": [one | {"inputs": inputs}]}))
        with pytest.raises(TraceError, match=r"dlrm_eg_3\.json: no execution trace that can be read"):
            Trace.load(tmp_path)


def test_who_comes_last_and_who_waits_is_on_the_time_of_the_gpu(tmp_path):
    # Rank 1 begins 700 us after the others; all end together, 100 us later.
    for rank, late in enumerate((0, 700, 20)):
        write(tmp_path, rank, [kernel(1000 + late, 800 - late)])
    trace = Trace.load(tmp_path)
    (one,) = operations(trace)
    assert one.group.members == (0, 1, 2)
    assert {end.rank: end.end_ns for end in one.ends} == dict.fromkeys(range(3), BASE_NS + 1_800_000)
    assert [waited_until_ns(one, end) for end in one.ends] == [BASE_NS + 1_700_000] * 3
    assert waiting(trace) == {1: 700_000}  # For whom, and how long at most.


def test_calls_meet_by_their_number_where_they_have_one(tmp_path):
    write(tmp_path, 0, [kernel(1000, 5, Seq=7), kernel(2000, 5, Seq=8)], world=2)
    write(tmp_path, 1, [kernel(2001, 5, Seq=8)], world=2)
    assert [(one.seq, len(one.ends)) for one in operations(Trace.load(tmp_path))] == [(7, 1), (8, 2)]
    assert not any("by their order" in problem for problem in Trace.load(tmp_path).problems)


def test_what_cannot_be_the_same_call_is_said_to_be_none(tmp_path):
    write(tmp_path, 0, [kernel(1000, 5)], world=2)
    write(tmp_path, 1, [kernel(1000, 5, **{"Collective name": "broadcast"})], world=2)
    (one,) = operations(Trace.load(tmp_path))
    assert one.misfit is not None


def test_sends_meet_receives_and_an_all_to_all_says_how_much_to_whom(tmp_path):
    write(tmp_path, 0, [kernel(1000, 9, **{"Collective name": "send", "Rank": 1})], world=2)
    to_all = kernel(2000, 9, **{"Collective name": "all_to_allv", "In split size": "[1, 3]"})
    write(tmp_path, 1, [kernel(1001, 9, **{"Collective name": "recv", "Rank": 0}), to_all], world=2)
    sent, exchanged = operations(Trace.load(tmp_path))
    assert (sent.sender, sent.receiver, sent.payload_bytes) == (0, 1, 4 * MEGABYTE)
    assert (exchanged.op, exchanged.ends[0].splits) == ("all_to_all_single", (MEGABYTE, 3 * MEGABYTE))


def test_members_that_are_cut_out_are_taken_from_the_list_of_groups(tmp_path):
    cut = "[" + ", ".join(map(str, range(29))) + ", ..., 63]"
    write(tmp_path, 0, [kernel(1000, 5, **{"Process Group Ranks": cut})], world=64)
    assert operations(Trace.load(tmp_path))[0].group.members == tuple(range(64))
    write(tmp_path, 0, [kernel(1000, 5, **{"Process Group Ranks": cut, "Process Group Name": "7"})], world=64)
    assert "calls that do not say who sent what to whom: 1, which took 0.005 ms" in Trace.load(tmp_path).problems


def test_kernels_that_say_nothing_are_counted_with_their_time(tmp_path):
    silent = {"ph": "X", "cat": "kernel", "name": "ncclKernel_SendRecv", "ts": 1, "dur": 500, "args": {"stream": 7}}
    write(tmp_path, 0, [kernel(1000, 5), silent, silent | {"name": "gemm"}], world=1)
    assert "calls that do not say who sent what to whom: 1, which took 0.5 ms" in Trace.load(tmp_path).problems


OFFSETS_US = {"one": 0, "two": 3500, "three": -1200}
"""By how much a host's clock is ahead."""


def write_hosts(folder, groups):
    """Four steps of two ranks on each host; a rank calls up to 900 us after the others, and all end within 5 us."""
    made = random.Random(1)
    hosts = list(OFFSETS_US)
    for rank in range(6):
        host = hosts[rank // 2]
        mine = [members for members in groups if rank in members]
        kernels = []
        for step in range(4):
            for members in mine:
                end = 10_000 * (step + 1) + 1000 * groups.index(members) + OFFSETS_US[host] + made.uniform(0, 5)
                start = end - 100 - made.uniform(0, 900)
                named = {"Process Group Name": str(groups.index(members)), "Process Group Ranks": str(members)}
                kernels.append(kernel(start, end - start, **named))
        write(folder, rank, kernels, world=6, host=host, config=[], traceName=host)


@pytest.mark.parametrize(
    "groups", [[[0, 1, 2, 3, 4, 5]], [[0, 1, 2, 3], [2, 3, 4, 5]]], ids=["all together", "the last by the second"]
)
def test_hosts_clocks_are_compared_by_the_ends_of_collectives(tmp_path, groups):
    write_hosts(tmp_path, groups)
    trace = Trace.load(tmp_path)
    for process in trace.processes:
        off_ns = process.clock.offset_ns + 1000 * OFFSETS_US[process.header.host]
        assert abs(off_ns) <= 5_000 * len(groups)
    told = "".join(explain(trace).sentences)
    assert "3 clocks: two's is moved by -0.003" in told
    assert "give or take" in told
    for one in operations(trace):
        begins = {end.rank: end.start_ns for end in one.ends}
        assert max(end.end_ns for end in one.ends) - max(begins.values()) < 1_100_000


def test_hosts_without_an_operation_in_common_are_said(tmp_path):
    write_hosts(tmp_path, [[0, 1], [2, 3], [4, 5]])
    problems = Trace.load(tmp_path).problems
    assert any("the clock of host three, two was never compared" in problem for problem in problems)


@pytest.mark.slow
def test_a_large_file_is_read_in_less_time_than_python_writes_it(tmp_path):
    """As many events as a real file of one rank of 64 has, 54 MB."""
    with gzip.open(REAL) as stream:
        file = json.load(stream)
    kernels, more = file["traceEvents"], {"External id": 1, "Input Dims": [[64, 3, 7, 7], [64]], "Ev Idx": 5776}
    other = {"ph": "X", "cat": "cpu_op", "name": "aten::convolution", "pid": 1, "tid": 1, "ts": 1.5, "dur": 2.5}
    file["traceEvents"] = kernels + [other | {"args": more | {"Sequence number": at}} for at in range(216_092)]
    began = time.process_time()
    (tmp_path / "rank0.json").write_text(json.dumps(file))
    written = time.process_time()
    trace = Trace.load(tmp_path)
    assert time.process_time() - written < written - began
    assert trace.events


def test_two_steps_in_one_folder_are_refused(tmp_path):
    write(tmp_path, 0, [kernel(1000, 5)])
    (tmp_path / "again.json").write_bytes((tmp_path / "worker0.pt.trace.json").read_bytes())
    with pytest.raises(TraceError, match="are both of rank 0: give one step of one job"):
        Trace.load(tmp_path)


@pytest.mark.parametrize("name", ["ts", "dur"])
def test_a_time_that_no_clock_has_is_refused(tmp_path, name):
    write(tmp_path, 0, [kernel(1000, 5) | {name: 1.7e305}])
    with pytest.raises(TraceError, match=r"worker0\.pt\.trace\.json: a call lies at a time that no clock has"):
        Trace.load(tmp_path)


def answer(path):
    try:
        return "".join(explain(Trace.load(path)).sentences)
    except TraceError as error:
        return str(error)


values = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.just("[0, 9]")
)
NAMES = ("Collective name", "dtype", "In msg nelems", "Process Group Name", "Process Group Ranks", "Seq", "Rank")


@given(name=st.sampled_from((*NAMES, "In split size", "ts", "dur", "name", "cat", "args")), value=values)
@example(name="In split size", value=f"[{'1' * 5000}]")
@settings(max_examples=200, deadline=None)
def test_any_value_in_any_field_is_told_or_refused_in_a_sentence(tmp_path_factory, name, value):
    folder = tmp_path_factory.mktemp("profiles")
    one = kernel(1000, 5)
    (one["args"] if name in one["args"] or name in NAMES else one)[name] = value
    write(folder, 0, [one])
    assert answer(folder).isprintable()


@given(cut=st.integers(0, 60_000), place=st.integers(0, 60_000), value=st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(tmp_path_factory, cut, place, value):
    whole = bytearray(gzip.decompress(REAL.read_bytes()))
    whole[place % len(whole)] = value
    path = tmp_path_factory.mktemp("profiles") / "rank0.json"
    path.write_bytes(bytes(whole[: cut or None]))
    assert answer(path).isprintable()
