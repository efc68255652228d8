"""dlearn scrub: a trace without hosts, paths and names says the same of who sent what to whom."""

import frozen_answers
import pytest
from traces import Job

from dlearn import Trace, messages
from dlearn.cli import main
from dlearn.events.event import Collective


def scrubbed(path, folder):
    """The trace without names, and the bytes of its files."""
    assert main(["scrub", str(path), "-o", str(folder)]) == 0
    return Trace.load(folder), b"".join(each.read_bytes() for each in folder.iterdir())


def test_no_name_of_the_user_is_left(tmp_path):
    job = Job(tmp_path / "trace", ranks=2)
    job.group("secret-pair", range(2))
    job.connect()
    job.span((0, 1), "step 3")
    for number, name in enumerate(("secret project", "secret", "step_secret", "secret.weight")):
        job.span((0, 1), name)
        job.bucket((0, 1), number, {name: 40})
    job.collective("all_reduce", size=400, group="secret-pair", site="secret/train.py:14")
    again, left = scrubbed(job.load().path, tmp_path / "out")
    assert b"secret" not in left
    assert b"127.0.0.1" not in left
    assert again.spans == ("step 3", "name-1", "name-2", "name-3", "name-4")
    assert [event.site for event in again.of(Collective)] == ["file-1:14"] * 2


def test_a_damaged_line_is_not_passed_on(tmp_path, capsys):
    trace = Job(tmp_path / "trace", ranks=1).load()
    with next(trace.path.glob("*.jsonl")).open("ab") as stream:
        stream.write(b'{"name": "secret\n')
    assert main(["scrub", str(trace.path), "-o", str(tmp_path / "out")]) == 1
    assert "a damaged line: what is in it is not known" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.parametrize("name", ["workloads", "mpi", "lesson-send_and_receive"])
def test_without_its_names_a_trace_has_the_same_messages(name, tmp_path):
    for path, trace in [*frozen_answers.traces(name, tmp_path).items()][3:9]:
        again, left = scrubbed(trace.path, tmp_path / f"out {path}")
        said = [[(each.src, each.dst, each.payload_bytes, each.how) for each in messages(of)] for of in (again, trace)]
        assert said[0] == said[1]
        assert trace.processes[0].header.host.encode() not in left
