"""Files of other tools that are damaged, hostile or not read yet: a trace, or a sentence, and nothing else."""

import gzip
import json
import os
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_flight_recorder import GLOO, dump_of, in_archive
from test_kineto import DLRM, SAMPLES, kernel, write
from test_nccl_log import made_log

from dlearn import Trace, explain
from dlearn.cli import main
from dlearn.errors import TraceError

NOT_READ = {
    "all_reduce.0.et": "a Chakra execution trace (.et)",
    "ncv4-topo.xml": "NCCL's topology (XML)",
    "ncv4-graph.xml": "NCCL's graphs (XML)",
    "gloo-et-1.1.1.json.gz": "a PyTorch execution trace of schema 1.1.1-chakra.0.0.4",
}


class Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


def many_times():
    """A small file that stands for 10 ** 12 values."""
    value = ["x"]
    for _ in range(12):
        value = [value] * 10
    return pickle.dumps({"version": "2.9", "entries": [], "pg_config": value})


HUGE = "h:1:1 [0] NCCL INFO comm 0x{0} rank {0} nranks 99999 cudaDev {0} busId 1 - Init COMPLETE\n"
EMPTY_DUMP = pickle.dumps({"version": "2.9", "entries": []})


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("dump_0", pickle.dumps({"version": "2.9", "entries": [Runs()]}), "names posix.system, and data need no code"),
        ("dump_0", many_times(), "refers to the same lists again and again, and stands for too much"),
        ("dump_0", pickle.dumps({"version": "2.9", "entries": [1]}), "Expected `object`, got `int`"),
        ("dump_0", EMPTY_DUMP[:-5], "cannot|cut|truncated|exhausted|ran out"),
        ("dump_0", b"\x80\x05\x8e" + (10**10).to_bytes(8, "little"), "truncated|cut|exceeds|too large|ran out"),
        ("dump_0", b"[" * 100_000, "neither a trace"),
        ("dump_0", b'{"version": "2.9", "entries": ' + b"[" * 100_000, "no dump that can be read"),
        ("dump_0", b"", "neither a trace"),
        ("dump", EMPTY_DUMP, "its name does not end in a rank"),
        ("cut_0.gz", GLOO.read_bytes()[:2000], "cannot be read"),
        ("nccl.log", "".join(map(HUGE.format, range(500))).encode(), "a communicator of 99,999 ranks is more than can"),
        ("nccl.log", b"x" * 5_000_000 + b" NCCL INFO " + b"0[0] -> " * 100_000, "NCCL's log"),
        ("nccl.log.gz", (SAMPLES / "nccl-2.30-lines-by-subsystem.log.gz").read_bytes(), "tells of which communicator"),
        *[(name, (SAMPLES / "not-read" / name).read_bytes(), re.escape(what)) for name, what in NOT_READ.items()],
    ],
    ids=range(17),
)
def test_what_cannot_be_read_is_refused_in_one_sentence(own_folder, capsys, name, data, why):
    Path(name).write_bytes(data)
    with pytest.raises(TraceError, match=why) as error:
        Trace.load(name)
    assert str(error.value).isprintable()
    assert main(["import", name, "-o", "out"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    assert not Path("ran").exists()


def answer(folder: Path, name: str, data: bytes) -> str:
    """What the file tells, or the sentence that refuses it; nothing else may come."""
    (folder / name).write_bytes(data)
    try:
        return "".join(explain(Trace.load(folder)).sentences)
    except TraceError as error:
        return str(error)


LOG = "\n".join(made_log([[0, 1, 2, 3], [0, 2, 3, 1]], calls=[("AllReduce", 1000, "RING"), ("Send", 5, "")]))
WHOLE = {
    "dump_1": in_archive(GLOO, "1.pickle"),
    "dump_1.json": in_archive(GLOO, "1.json"),
    "rank0.json": gzip.decompress((SAMPLES / "resnet-ddp-rank0of2.json.gz").read_bytes()),
    "dlrm_eg_3.json": in_archive(DLRM, "eg_3.json"),
    "nccl.log": LOG.encode(),
    "x.et": b"\x0a\x05",
}


@pytest.mark.parametrize("name", WHOLE)
@given(
    cut=st.none() | st.integers(0, 60_000),
    changed=st.lists(st.tuples(st.integers(0, 60_000), st.binary(min_size=1, max_size=3)), max_size=6),
    behind=st.just(b"") | st.binary(max_size=100),
)
@settings(max_examples=25, deadline=None)
def test_a_damaged_file_is_read_or_refused_in_a_sentence(tmp_path_factory, name, cut, changed, behind):
    data = WHOLE[name]
    for place, value in changed:
        at = place % len(data)
        data = data[:at] + value + data[at + len(value) :]
    assert answer(tmp_path_factory.mktemp("files"), name, data[:cut] + behind).isprintable()


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats() | st.text(max_size=5) | st.just("[0, 9]"),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=5,
)
IN_DUMP = ("record_id", "process_group", "profiling_name", "time_created_ns", "input_sizes", "input_dtypes", "state")
IN_DUMP += ("collective_seq_id", "p2p_seq_id", "retired", "is_p2p", "frames", "pg_id", "time_discovered_completed_ns")
IN_KERNEL = ("Collective name", "dtype", "In msg nelems", "Process Group Name", "Process Group Ranks", "Seq", "Rank")
IN_KERNEL += ("In split size", "ts", "dur", "name", "cat", "args")


@given(field=st.sampled_from(IN_DUMP), value=anything, packed=st.booleans())
@example(field="profiling_name", value="gloo:\x1b[2Jall_reduce", packed=False)
@example(field="profiling_name", value="nccl:send 0->" + "9" * 5000, packed=False)
@example(field="process_group", value=["0", "\u202edefault_pg"], packed=False)
@settings(max_examples=50, deadline=None)
def test_any_value_in_any_field_of_a_dump(tmp_path_factory, field, value, packed):
    dump = dump_of(**{field: value}, is_p2p=True) if field == "profiling_name" else dump_of(**{field: value})
    data = pickle.dumps(dump) if packed else json.dumps(dump).encode()
    assert answer(tmp_path_factory.mktemp("dumps"), "dump_0", data).isprintable()


@given(field=st.sampled_from(IN_KERNEL), value=anything)
@example(field="In split size", value=f"[{'1' * 5000}]")
@settings(max_examples=50, deadline=None)
def test_any_value_in_any_field_of_a_profile(tmp_path_factory, field, value):
    folder = tmp_path_factory.mktemp("profiles")
    one = kernel(1000, 5)
    (one if field in one else one["args"])[field] = value
    write(folder, 0, [one])
    data = (folder / "worker0.pt.trace.json").read_bytes()
    assert answer(folder, "worker0.pt.trace.json", data).isprintable()
