"""Dumps of torch's Flight Recorder: who is broken is named, and who waits is not."""

import json
import os
import pickle
import re
import tarfile
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace
from waiting import comes_true

from dlearn import Cluster, Trace, analysis, draw, explain, operations
from dlearn.events.event import Collective

SAMPLES = Path(str(files("dlearn.lessons"))) / "data" / "dumps"
GLOO = SAMPLES / "gloo-hang-3ranks.tar.gz"
MEGATRON = [SAMPLES / f"megatron-16ranks-{fault}_1st.tar.gz" for fault in ("gpu_error", "lock_gil")]


def in_archive(archive: Path, inside: str) -> bytes:
    with tarfile.open(archive) as packed:
        (found,) = [each for each in packed if each.name.endswith(inside)]
        return packed.extractfile(found).read()


def test_a_gloo_dump_names_the_rank_that_never_called():
    trace = Trace.load(GLOO)
    assert trace.ranks == (0, 1, 2)
    told = str(explain(trace))
    assert "rank 0 and rank 2 wait for rank 1 in all_reduce #7 (train.py:19); rank 1 never called it." in told
    assert [len(one.ends) for one in operations(trace)].count(3) == 6  # Three all_reduces and three all_gathers.
    pair = [one for one in operations(trace) if one.group.name == "PAIR 1"]
    called = [(one.op, one.group.members, one.ends[0].inputs[0].logical_bytes) for one in pair]
    assert called == [("all_reduce", (0, 2), 40)] * 3
    assert "made from Flight Recorder dumps: times are those of the CPU's calls" in trace.problems[-1]


@pytest.mark.parametrize("archive", MEGATRON, ids=["GPU error", "locked GIL"])
def test_exactly_the_broken_ranks_are_named_and_every_other_is_a_victim_of_one(archive):
    log = in_archive(archive, "fault_injection.log").decode()
    broken = {int(rank) for rank in re.findall(r"Rank (\d+), fault_type", log)}
    trace = Trace.load(archive)
    assert {root.rank for root in analysis.roots(trace)} == broken
    for sentence in explain(trace).sentences:
        named = re.match(r"rank (\d+) (never called|is stuck in)", sentence)
        assert named is None or int(named[1]) in broken
    one, other = sorted(broken)
    assert draw.timeline(trace).get_title(loc="left") == f"Rank {one} and rank {other} hold the others up"
    victims = analysis.victims(trace)
    assert {victim.rank for victim in victims} == set(range(16)) - broken
    for victim in victims:
        passed = [victim.rank, *(wait.other for wait in victim.chain)]
        assert [wait.rank for wait in victim.chain] == passed[:-1]
        assert [rank for rank in passed if rank in broken] == [passed[-1]]
        assert len(set(passed)) == len(passed)
    assert "no rank is seen to hold those up" not in str(explain(trace))


def test_how_ranks_are_known_to_be_stuck():
    late, frozen = map(Trace.load, MEGATRON)
    assert (
        "rank 14 is stuck in all_gather_single #42806 of TENSOR_MODEL_PARALLEL_GROUP 42, and in 23 more calls;"
        " rank 15 came out of it." in str(explain(late))
    )
    assert (
        "rank 5 waits for rank 9 in send #13696 of PIPELINE_MODEL_PARALLEL_GROUP 46, which waits for rank 13 in"
        " send #11982 of PIPELINE_MODEL_PARALLEL_GROUP 46, which waits for rank 12 in all_to_all #20537 of"
        " EXPERT_MODEL_PARALLEL_GROUP 74; rank 7 waits in the same way (inferred from the order of calls)."
    ) in str(explain(late))
    # The dump of a frozen rank is empty but for how far it came.
    assert not [event for event in frozen.events if event.rank == 9]
    first = next(root for root in analysis.roots(frozen) if root.rank == 9)
    assert (first.how, first.operation.op, first.operation.seq) == ("never", "all_to_all", 45265)
    assert first.operation.group.members == tuple(range(8, 16))
    assert all(fact.inferred for fact in frozen.processes[9].reached.values())


def dumped(folder):
    """Three calls on each rank, but for rank 1, which does not come to the last; then everybody's dump."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # Read with the first call of a process.
    dist.init_process_group("gloo")
    me = dist.get_rank()
    dist.all_reduce(torch.ones(1000))
    dist.all_gather([torch.empty(5) for _ in range(3)], torch.ones(5))
    pending = dist.all_reduce(torch.ones(4, dtype=torch.int32), async_op=True) if me != 1 else None
    # That a call of gloo's has ended is noted by a thread of its own.
    assert comes_true(lambda: all(entry["retired"] for entry in pickle.loads(_dump_fr_trace())["entries"][:2]))
    Path(folder, f"rank_{me}").write_bytes(_dump_fr_trace())
    assert comes_true(lambda: len(list(Path(folder).iterdir())) == dist.get_world_size())
    if me == 1:  # Its leaving ends the call of the others.
        dist.destroy_process_group()
    else:
        with pytest.raises(RuntimeError):
            pending.wait()


def test_a_dump_has_what_our_own_record_of_the_same_run_has(tmp_path):
    run = Cluster(3, init=False).run(dumped, str(tmp_path), timeout=60)
    found = {}
    for name, trace in (("dump", Trace.load(tmp_path)), ("record", run.trace)):
        found[name] = sorted(
            (call.rank, call.seq, call.op, call.group, call.inputs, sum(each.logical_bytes for each in call.outputs))
            for call in trace.of(Collective)
        )
        assert [one.missing for one in operations(trace)] == [(), (), (1,)]
        assert "rank 1 never called it" in str(explain(trace))
        assert "test_flight_recorder.py:" in str(explain(trace))
    assert found["dump"] == found["record"]
    assert analysis.traffic(Trace.load(tmp_path)).payload_bytes == analysis.traffic(run.trace).payload_bytes


def dump_of(**fields):
    entry = {"record_id": 0, "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce"}
    entry |= {"time_created_ns": 10**18, "input_sizes": [[4]], "input_dtypes": ["Float"], "state": "scheduled"}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "entries": [entry | fields], "pg_config": config, "pg_status": {}}


@pytest.mark.parametrize(("ids", "guilty"), [(("6", "7"), {1}), (("5", "5"), set())])
def test_where_a_number_may_mean_two_groups_nobody_is_accused_by_it(tmp_path, ids, guilty):
    """Rank 0 waits in A, rank 2 in B; rank 1 has made no call, and its status says so by the numbers of the groups."""
    config = {"6": {"name": "6", "desc": "A", "ranks": "[0, 1]"}, "7": {"name": "7", "desc": "B", "ranks": "[1, 2]"}}
    for rank, names in enumerate((["6"], ["6", "7"], ["7"])):
        number = ids[rank > 0]
        call = {"record_id": 7, "pg_id": int(number), "process_group": [names[0], "AB"[rank > 0]]}
        dump = dump_of(**call, collective_seq_id=5)
        dump["entries"] = dump["entries"] if rank != 1 else []
        dump["pg_config"] = {name: config[name] for name in names}
        made = {"last_enqueued_collective": 4 + (rank != 1), "last_completed_collective": 4}
        dump["pg_status"] = dict.fromkeys(ids if rank == 1 else [number], made)
        (tmp_path / f"dump_{rank}").write_text(json.dumps(dump))
    assert {root.rank for root in analysis.roots(Trace.load(tmp_path))} == guilty
