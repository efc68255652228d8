"""dlearn scrub: a trace without hosts, paths and names says the same of who sent what to whom."""

from importlib.resources import files
from pathlib import Path

import pytest
from traces import Job

from dlearn import Trace, analysis, explain, messages
from dlearn.cli import main

SAMPLES = Path(str(files("dlearn.lessons"))) / "data" / "dumps"


def written(folder):
    return b"".join(path.read_bytes() for path in folder.iterdir())


def test_no_name_of_the_user_is_left_and_the_messages_are_the_same(tmp_path, capsys):
    job = Job(tmp_path / "trace", ranks=2)
    job.group("secret-pair", range(2))
    job.connect()
    for rank in range(2):
        job.span(rank, "step 3")
        job.span(rank, "secret project")
        job.bucket(rank, 0, {"secret.weight": 40})
    job.collective("all_reduce", size=400, group="secret-pair", site="secret/train.py:14")
    trace = job.load()
    assert main(["scrub", str(trace.path), "-o", str(tmp_path / "out")]) == 0
    assert "1 host" in capsys.readouterr().out
    left = written(tmp_path / "out")
    assert b"secret" not in left
    assert b"127.0.0.1" not in left
    again = Trace.load(tmp_path / "out")
    assert analysis.traffic(again).payload_bytes == analysis.traffic(trace).payload_bytes
    assert [(each.src, each.dst, each.how) for each in messages(again)] == [
        (each.src, each.dst, each.how) for each in messages(trace)
    ]
    assert again.spans == ("step 3", "name-1")
    assert [event.site for event in again.of(*{type(each) for each in again.events}) if event.site] == ["file-1:14"] * 2


@pytest.mark.parametrize("name", ["megatron-16ranks-gpu_error_1st.tar.gz", "gloo-hang-3ranks.tar.gz"])
def test_dumps_name_the_same_ranks_without_their_names(name, tmp_path):
    assert main(["scrub", str(SAMPLES / name), "-o", str(tmp_path / "out")]) == 0
    again, before = Trace.load(tmp_path / "out"), Trace.load(SAMPLES / name)
    assert [(root.rank, root.how) for root in analysis.roots(again)] == [
        (root.rank, root.how) for root in analysis.roots(before)
    ]
    assert not any(word in written(tmp_path / "out") for word in (b"TENSOR_MODEL", b"train.py"))


def test_the_log_of_nccl_keeps_its_rings_and_loses_its_hosts(tmp_path):
    log = SAMPLES / "nccl-2.9.9-16gpus.log.gz"
    assert main(["scrub", str(log), "-o", str(tmp_path / "out")]) == 0
    found = analysis.topology(Trace.load(tmp_path / "out"))
    assert list(found.hosts) == ["host-1", "host-2"]
    assert found.rings == analysis.topology(Trace.load(log)).rings
    assert b"worker" not in written(tmp_path / "out")
    assert explain(Trace.load(tmp_path / "out")).sentences


def test_a_damaged_line_is_not_passed_on(tmp_path, capsys):
    trace = Job(tmp_path / "trace", ranks=1).load()
    with next(trace.path.glob("*.jsonl")).open("ab") as stream:
        stream.write(b'{"name": "secret\n')
    assert main(["scrub", str(trace.path), "-o", str(tmp_path / "out")]) == 1
    assert "a damaged line, of which nobody knows what is in it" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())
