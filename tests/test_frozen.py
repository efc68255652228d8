"""Today's answers about recorded traces are those that were frozen: of torch's workloads, RPC, MPI, and the lessons."""

from __future__ import annotations

import json
import zipfile

import frozen_answers
import pytest


@pytest.mark.parametrize("name", frozen_answers.names())
def test_answers_are_those_that_were_frozen(name):
    """A difference is a defect, or `python tests/frozen_answers.py write NAME` and the reason in the commit."""
    assert list(frozen_answers.differences(name)) == []


def test_all_kinds_of_traces_are_frozen():
    assert {"mpi", "rpc", "workloads"} < set(frozen_answers.names())


def test_a_changed_byte_and_a_lost_message_are_found(tmp_path, monkeypatch):
    name = "workloads"
    with zipfile.ZipFile(frozen_answers.HERE / f"{name}.zip") as archive:
        files = {each: archive.read(each) for each in archive.namelist()}
    answers = json.loads(files[frozen_answers.ANSWERS])
    folder = next(iter(answers))
    sent = answers[folder]["messages"]
    sent["payload_bytes"][0] += 1
    sent["how"].pop()
    frozen_answers._save(tmp_path / f"{name}.zip", {**files, frozen_answers.ANSWERS: json.dumps(answers).encode()})
    monkeypatch.setattr(frozen_answers, "HERE", tmp_path)
    count = len(sent["how"])
    before = sent["payload_bytes"][0]
    assert list(frozen_answers.differences(name)) == [
        f"{name}/{folder}.messages.how: was {count} items, is {count + 1} items",
        f"{name}/{folder}.messages.payload_bytes[0]: was {before}, is {before - 1}",
    ]
