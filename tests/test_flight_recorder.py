"""Dumps of torch's Flight Recorder: who is broken is named, who waits is not, and no dump can do any harm."""

import io
import json
import os
import pickle
import re
import tarfile
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import _dump_fr_trace
from waiting import comes_true

from dlearn import Cluster, Trace, analysis, draw, explain, operations
from dlearn.cli import main
from dlearn.errors import TraceError
from dlearn.trace.event import Collective
from dlearn.trace.readers import plain_pickle

SAMPLES = Path(str(files("dlearn.lessons"))) / "data" / "dumps"
GLOO = SAMPLES / "gloo-hang-3ranks.tar.gz"
MEGATRON = [SAMPLES / f"megatron-16ranks-{fault}_1st.tar.gz" for fault in ("gpu_error", "lock_gil")]


def unpacked(archive, folder):
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    (inside,) = folder.iterdir()
    return inside


def told(trace):
    return "\n".join(explain(trace).sentences)


def test_a_gloo_dump_names_the_rank_that_never_called():
    trace = Trace.load(GLOO)
    assert trace.ranks == (0, 1, 2)
    assert "rank 0 and rank 2 wait for rank 1 in all_reduce #7 (train.py:19); rank 1 never called it." in told(trace)
    assert [len(one.ends) for one in operations(trace)].count(3) == 6  # Three all_reduces and three all_gathers.
    pair = [one for one in operations(trace) if one.group.name == "PAIR 1"]
    called = [(one.op, one.group.members, one.ends[0].inputs[0].logical_bytes) for one in pair]
    assert called == [("all_reduce", (0, 2), 40)] * 3
    assert "made from Flight Recorder dumps: times are those of the CPU's calls" in trace.problems[-1]


def test_json_and_pickle_tell_the_same_but_for_the_lines_of_code(tmp_path):
    folder = unpacked(GLOO, tmp_path)
    for path in folder.glob("*.pickle"):
        path.unlink()
    found = Trace.load(folder)
    assert "rank 0 and rank 2 wait for rank 1 in all_reduce #7; rank 1 never called it." in told(found)
    here = [msgspec.structs.replace(event, site="") for event in Trace.load(GLOO).events]
    assert list(found.events) == here


@pytest.mark.parametrize("archive", MEGATRON, ids=["GPU error", "locked GIL"])
def test_exactly_the_ranks_that_were_broken_are_named(archive, tmp_path):
    log = (unpacked(archive, tmp_path) / "fault_injection.log").read_text()
    broken = {int(rank) for rank in re.findall(r"Rank (\d+), fault_type", log)}
    trace = Trace.load(archive)
    assert len(trace.ranks) == 16
    assert {root.rank for root in analysis.roots(trace)} == broken
    for sentence in explain(trace).sentences:
        named = re.match(r"rank (\d+) (never called|is stuck in)", sentence)
        assert named is None or int(named[1]) in broken
    one, other = sorted(broken)
    assert draw.timeline(trace).get_title(loc="left") == f"Rank {one} and rank {other} hold the others up"


def test_a_frozen_rank_whose_dump_is_empty_is_told_by_how_far_it_came():
    trace = Trace.load(MEGATRON[1])
    assert not [event for event in trace.events if event.rank == 9]
    first = next(root for root in analysis.roots(trace) if root.rank == 9)
    assert (first.how, first.operation.op, first.operation.seq) == ("never", "all_to_all", 45265)
    assert first.operation.group.members == tuple(range(8, 16))
    assert all(fact.inferred for fact in trace.processes[9].reached.values())


def test_a_rank_that_came_later_than_others_came_out_is_stuck():
    trace = Trace.load(MEGATRON[0])
    assert (
        "rank 14 is stuck in all_gather_single #42806 of TENSOR_MODEL_PARALLEL_GROUP 42, and in 23 more calls;"
        " rank 15 came out of it." in told(trace)
    )


@pytest.mark.parametrize("lost", [12, 13, 0])
def test_a_rank_without_a_dump_is_unseen_and_not_guilty(lost, tmp_path):
    folder = unpacked(MEGATRON[0], tmp_path)
    (folder / f"_dump_{lost}").unlink()
    trace = Trace.load(folder)
    named = {root.rank for root in analysis.roots(trace)}
    assert lost not in named
    assert named <= {12, 14}
    assert any("of 16 processes left a file" in problem for problem in trace.problems)


def test_import_writes_a_trace_of_ours(tmp_path, capsys):
    assert main(["import", str(MEGATRON[1]), "-o", str(tmp_path / "trace")]) == 0
    assert "118 collective, 24 p2p" in capsys.readouterr().out
    again, here = Trace.load(tmp_path / "trace"), Trace.load(MEGATRON[1])
    assert list(again.events) == list(here.events)
    assert [root.rank for root in analysis.roots(again)] == [9, 14]
    assert again.problems[-1] == here.problems[-1]
    assert main(["import", str(MEGATRON[1]), "-o", str(tmp_path / "trace")]) == 2
    assert "is not empty. Give a new folder as -o." in capsys.readouterr().err


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
        calls = [event for event in trace.events if isinstance(event, Collective)]
        found[name] = sorted(
            (call.rank, call.seq, call.op, call.group, call.inputs, sum(each.logical_bytes for each in call.outputs))
            for call in calls
        )
        assert [one.missing for one in operations(trace)] == [(), (), (1,)]
        assert "rank 1 never called it" in told(trace)
        assert "test_flight_recorder.py:" in told(trace)
    assert found["dump"] == found["record"]
    assert analysis.traffic(Trace.load(tmp_path)).payload_bytes == analysis.traffic(run.trace).payload_bytes


@pytest.mark.parametrize("archive", MEGATRON, ids=["GPU error", "locked GIL"])
def test_every_other_rank_of_a_real_job_is_a_victim_by_a_chain_that_ends_at_a_root(archive):
    trace = Trace.load(archive)
    named = {root.rank for root in analysis.roots(trace)}
    victims = analysis.victims(trace)
    assert {victim.rank for victim in victims} == set(range(16)) - named
    for victim in victims:
        passed = [victim.rank, *(wait.other for wait in victim.chain)]
        assert [wait.rank for wait in victim.chain] == passed[:-1]
        assert [rank for rank in passed if rank in named] == [passed[-1]]
        assert len(set(passed)) == len(passed)
    assert "nobody is seen to hold those up" not in told(trace)


def test_the_chain_of_victims_is_told_through_the_stages_of_a_pipeline():
    assert (
        "rank 5 waits for rank 9 in send #13696 of PIPELINE_MODEL_PARALLEL_GROUP 46, which waits for rank 13 in"
        " send #11982 of PIPELINE_MODEL_PARALLEL_GROUP 46, which waits for rank 12 in all_to_all #20537 of"
        " EXPERT_MODEL_PARALLEL_GROUP 74; rank 7 waits in the same way (inferred from the order of calls)."
    ) in told(Trace.load(MEGATRON[0]))


def write_calls(folder, groups, calls):
    """`groups`: name -> description and members; `calls`: rank -> in whose call #5 it is."""
    for rank, mine in calls.items():
        dump = dump_of()
        (entry,) = dump["entries"]
        dump["entries"] = [
            entry | {
                "record_id": 7 + at, "pg_id": int(name), "process_group": [name, groups[name][0]],
                "collective_seq_id": 5, "time_created_ns": 10**9 * (1 + at),
            }
            for at, name in enumerate(mine)
        ]  # fmt: skip
        dump["pg_config"] = {
            name: {"name": name, "desc": desc, "ranks": str(ranks)}
            for name, (desc, ranks) in groups.items()
            if rank in ranks
        }
        dump["pg_status"] = {
            name: {"last_enqueued_collective": 4 + (name in mine), "last_completed_collective": 4}
            for name in dump["pg_config"]
        }
        (folder / f"dump_{rank}").write_text(json.dumps(dump))


def test_ranks_that_wait_for_each_other_in_two_groups_are_named_as_a_deadlock(tmp_path):
    """Each has made the call in one group that the other has still to make there."""
    write_calls(tmp_path, {"5": ("A", [0, 1]), "6": ("B", [0, 1])}, {0: ["5"], 1: ["6"]})
    assert (
        "a deadlock: rank 0 waits in all_reduce #5 of A 5 for rank 1, which waits in all_reduce #5 of B 6 for rank 0"
        in told(Trace.load(tmp_path))
    )


CHAIN = {"5": ("A", [2, 3]), "6": ("B", [1, 2])}
"""Rank 1 never called #5 of B; rank 2 waits there, and in A with rank 3."""


def test_a_rank_waits_through_another_for_the_root(tmp_path):
    write_calls(tmp_path, CHAIN, {1: [], 2: ["6", "5"], 3: ["5"]})
    trace = Trace.load(tmp_path)
    assert [(root.rank, root.how) for root in analysis.roots(trace)] == [(1, "never")]
    chains = [(victim.rank, [wait.other for wait in victim.chain]) for victim in analysis.victims(trace)]
    assert chains == [(2, [1]), (3, [2, 1])]
    assert (
        "rank 3 waits for rank 2 in all_reduce #5 of A 5, which waits for rank 1 in all_reduce #5 of B 6"
        " (inferred from the order of calls)." in told(trace)
    )
    assert "rank 2 waits for rank 1 in all_reduce #5 of B 6." in told(trace)


def test_a_call_that_was_made_before_is_not_held_up_by_a_later_one(tmp_path):
    write_calls(tmp_path, CHAIN, {1: [], 2: ["5", "6"], 3: ["5"]})
    trace = Trace.load(tmp_path)
    assert [victim.rank for victim in analysis.victims(trace)] == [2]
    assert "1 more call of 1 more rank did not end; nobody is seen to hold those up." in told(trace)


# Bad input ------------------------------------------------------------------------------------------------------------


class Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


class Elsewhere(pickle.Pickler):
    def persistent_id(self, obj):
        return "there" if obj == "entries" else None


def elsewhere():
    data = io.BytesIO()
    Elsewhere(data).dump({"version": "2.9", "entries": []})
    return data.getvalue()


def many_times():
    """A small file that stands for 10 ** 12 values."""
    value = ["x"]
    for _ in range(12):
        value = [value] * 10
    return pickle.dumps({"version": "2.9", "entries": [], "pg_config": value})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (pickle.dumps({"version": "2.9", "entries": [Runs()]}), "names posix.system, and data need no code"),
        (elsewhere(), "refers to something outside of it"),
        (many_times(), "refers to the same lists again and again, and stands for too much"),
        (pickle.dumps({"version": "2.9", "entries": [1]}), "Expected `object`, got `int`"),
        (pickle.dumps({"version": "2.9", "entries": []})[:-5], "cannot|cut|truncated|exhausted|ran out"),
        (b"\x80\x05\x8e" + (10**10).to_bytes(8, "little"), "truncated|cut|exceeds|too large|ran out"),
        (b"[" * 100_000, "neither a trace"),
        (b'{"version": "2.9", "entries": ' + b"[" * 100_000, "no dump that can be read"),
        (b"", "neither a trace"),
    ],
)
def test_no_dump_runs_code_or_ends_in_more_than_a_sentence(own_folder, data, why):
    Path("dump_0").write_bytes(data)
    with pytest.raises(TraceError, match=why) as error:
        Trace.load("dump_0")
    assert "\n" not in str(error.value)
    assert not Path("ran").exists()


def test_what_cannot_be_read_ends_in_a_sentence(tmp_path, capsys):
    assert main(["import", "x" * 5000, "-o", str(tmp_path / "one")]) == 1
    assert "cannot be read: File name too long" in capsys.readouterr().err
    assert main(["import", str(tmp_path / "nothing"), "-o", str(tmp_path / "two")]) == 1
    assert "neither a trace (a folder with one .jsonl file per process) nor a dump" in capsys.readouterr().err
    (tmp_path / "cut_0.gz").write_bytes(GLOO.read_bytes()[:2000])
    assert main(["explain", str(tmp_path / "cut_0.gz")]) == 1
    assert "cut_0.gz: cannot be read" in capsys.readouterr().err


def test_two_jobs_in_one_folder_are_refused(tmp_path):
    folder = unpacked(MEGATRON[0], tmp_path)
    (folder / "other_0").write_bytes((folder / "_dump_1").read_bytes())
    with pytest.raises(TraceError, match="are both of rank 0, and differ: give one job"):
        Trace.load(folder)


def test_a_dump_without_a_rank_in_its_name_is_refused(tmp_path):
    (tmp_path / "dump").write_bytes(pickle.dumps({"version": "2.9", "entries": []}))
    with pytest.raises(TraceError, match="its name does not end in a rank"):
        Trace.load(tmp_path)


def test_ranks_that_can_be_none_are_not_known(tmp_path):
    dump = dump_of(profiling_name="nccl:send 0->" + "9" * 5000, is_p2p=True)
    dump["pg_config"]["0"]["ranks"] = "[{[]}]"
    (tmp_path / "dump_0").write_text(json.dumps(dump))
    assert "1 rank" in answer(tmp_path)


def dump_of(**fields):
    entry = {"record_id": 0, "process_group": ["0", "default_pg"], "profiling_name": "nccl:all_reduce"}
    entry |= {"time_created_ns": 10**18, "input_sizes": [[4]], "input_dtypes": ["Float"], "state": "scheduled"}
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    return {"version": "2.10", "entries": [entry | fields], "pg_config": config, "pg_status": {}}


def answer(folder):
    """What the dumps there tell, or the sentence that refuses them; nothing else may come."""
    try:
        return told(Trace.load(folder))
    except TraceError as error:
        return str(error)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=5,
)
FIELDS = ("record_id", "process_group", "profiling_name", "time_created_ns", "input_sizes", "input_dtypes", "state")
FIELDS += ("collective_seq_id", "p2p_seq_id", "retired", "is_p2p", "frames", "pg_id", "time_discovered_completed_ns")


@given(field=st.sampled_from(FIELDS), value=anything, packed=st.booleans())
@example(field="profiling_name", value="gloo:\x1b[2Jall_reduce", packed=False)
@example(field="process_group", value=["0", "\u202edefault_pg"], packed=False)
@settings(max_examples=150, deadline=None)
def test_any_value_in_any_field_is_told_or_refused_in_a_sentence(tmp_path_factory, field, value, packed):
    folder = tmp_path_factory.mktemp("dumps")
    dump = dump_of(**{field: value})
    (folder / "dump_0").write_bytes(pickle.dumps(dump) if packed else json.dumps(dump).encode())
    assert answer(folder).replace("\n", "").isprintable()


@given(cut=st.integers(0, 12_000), changed=st.lists(st.tuples(st.integers(0, 12_000), st.integers(0, 255)), max_size=4))
@settings(max_examples=150, deadline=None)
def test_a_damaged_dump_is_read_or_refused_in_a_sentence(tmp_path_factory, cut, changed):
    whole = bytearray(WHOLE[cut % len(WHOLE)])
    for place, value in changed:
        whole[place % len(whole)] = value
    folder = tmp_path_factory.mktemp("dumps")
    (folder / "dump_1").write_bytes(bytes(whole[: cut or None]))
    assert answer(folder).replace("\n", "").isprintable()


def dumps_of_gloo():
    with tarfile.open(GLOO) as packed:
        return [packed.extractfile(member).read() for member in packed if member.isfile()]


WHOLE = dumps_of_gloo()


@given(st.binary(max_size=200))
def test_any_bytes_are_plain_data_or_refused(data):
    try:
        value = plain_pickle.loads(b"\x80\x04" + data)
    except ValueError as error:
        value = str(error)
    assert type(value).__module__ == "builtins"
