"""Traces of torch's profiler: what kernels did is told on GPU time, and what does not say so is counted."""

import json
import random
from pathlib import Path

from test_flight_recorder import SAMPLES as DUMPS

from dlearn import Trace, draw, explain, operations
from dlearn.analysis import traffic

SAMPLES = Path(__file__).with_name("samples")
DLRM = DUMPS / "dlrm-8ranks.tar.gz"
BASE_NS = 1_700_000_000_000_000_000


def kernel(ts, dur, **said):
    """Of 1 MB of float32."""
    args = {"stream": 20, "grid": [8, 1, 1], "Collective name": "allreduce", "dtype": "Float"}
    args |= {"In msg nelems": 250_000, "Out msg nelems": 250_000, "Process Group Name": "0"}
    args |= {"Process Group Description": "default_pg", "In split size": "[]", "Process Group Ranks": "[0, 1, 2]"}
    args |= {key.replace("_", " "): value for key, value in said.items()}
    return {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_X", "ts": ts, "dur": dur, "args": args}


def write(folder, rank, kernels, *, world=3, host="one"):
    """A file as torch's profiler writes it; made by hand."""
    config = [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": world, "ranks": list(range(world))}]
    info = {"backend": "nccl", "rank": rank, "world_size": world, "pg_config": config}
    file = {"distributedInfo": info, "baseTimeNanoseconds": BASE_NS, "host_name": host, "traceEvents": kernels}
    (folder / f"worker{rank}.pt.trace.json").write_text(json.dumps(file | {"traceName": host}))


def test_a_real_trace_of_one_rank_of_two():
    trace = Trace.load(SAMPLES / "resnet-ddp-rank0of2.json.gz")
    # From its own numbers: 3 steps of 5 buckets, and 2 broadcasts of the buffers before each.
    reduced = [call for call in trace.events if call.op == "all_reduce"]
    assert (len(trace.events), len(reduced)) == (21, 15)
    assert sum(call.inputs[0].logical_bytes for call in reduced) == 3 * 102_228_128
    assert 2_636_669 in [call.end_ns - call.start_ns for call in trace.events]  # "dur": 2636.669
    assert not any(one.missing for one in operations(trace))  # Rank 1 left no file: it is unseen.


def test_execution_traces_tell_what_old_kernels_do_not():
    trace = Trace.load(DLRM)
    found = list(operations(trace))
    assert [(len(one.ends), one.mismatch) for one in found] == [(8, None)] * 8
    sent = traffic(trace)
    # What each rank gives, by its own splits, less what it keeps; and what each gets is as large as its room.
    for rank in range(8):
        calls = [event for event in trace.events if event.rank == rank and event.op == "all_to_all_single"]
        given = [call.splits or (call.inputs[0].logical_bytes // 8,) * 8 for call in calls]
        kept = sum(row[rank] for row in given)
        assert sent.bytes_from(rank=rank) == sum(map(sum, given)) - kept
        got = sum(size for (_, dst), size in sent.payload_bytes.items() if dst == rank)
        assert got == sum(call.outputs[0].logical_bytes for call in calls) - kept
    assert "derived from nccl's algorithm" in draw.traffic(trace).get_label()


def test_who_comes_last_is_on_the_time_of_the_gpu_and_calls_meet_by_their_number(tmp_path):
    # Rank 1 begins 700 us after the others; all end together, 100 us later. Rank 2 alone tells of a call before.
    for rank, late in enumerate((0, 700, 20)):
        write(tmp_path, rank, [kernel(500, 5, Seq=7)] * (rank == 2) + [kernel(1000 + late, 800 - late, Seq=8)])
    trace = Trace.load(tmp_path)
    before, one = operations(trace)
    assert (before.seq, before.ranks, one.seq, one.ranks) == (7, (2,), 8, (0, 1, 2))
    assert {end.rank: end.end_ns for end in one.ends} == dict.fromkeys(range(3), BASE_NS + 1_800_000)
    assert (one.last_rank, one.start_ns, one.last_arrival_ns) == (1, BASE_NS + 1_000_000, BASE_NS + 1_700_000)


def test_hosts_clocks_are_compared_by_the_ends_of_collectives_one_by_another(tmp_path):
    """Four steps of two ranks on each host; a rank calls up to 900 us after the others, and all end within 5 us."""
    groups = [[0, 1, 2, 3], [2, 3, 4, 5]]
    ahead_us = {"one": 0, "two": 3500, "three": -1200}
    made = random.Random(1)
    for rank in range(6):
        host = list(ahead_us)[rank // 2]
        kernels = []
        for step in range(4):
            for number, members in enumerate(groups):
                end = 10_000 * (step + 1) + 1000 * number + ahead_us[host] + made.uniform(0, 5)
                start = end - 100 - made.uniform(0, 900)
                named = {"Process Group Name": str(number), "Process Group Ranks": str(members)}
                kernels += [kernel(start, end - start, **named)] * (rank in members)
        write(tmp_path, rank, kernels, world=6, host=host)
    trace = Trace.load(tmp_path)
    for process in trace.processes:
        off_ns = process.clock.offset_ns + 1000 * ahead_us[process.header.host]
        assert abs(off_ns) <= 5_000 * len(groups)
    assert "3 clocks: two's is moved by -0.003" in "".join(explain(trace).sentences)
