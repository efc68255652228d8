"""OTF2 archives: other people's MPI jobs in every view."""

import shutil
import sys
import tarfile
from pathlib import Path

import pytest

from dlearn import Trace, messages, operations
from dlearn.errors import SetupError, TraceError

pytest.importorskip("otf2", reason="the package otf2 is not installed")
PING_PONG = Path(__file__).parent / "samples" / "otf2-ping-pong"
COLLECTIVES = Path(__file__).parent / "samples" / "otf2-collectives-10ranks.tar.gz"


def test_sixteen_messages_go_to_and_fro():
    trace = Trace.load(PING_PONG)
    sent = list(messages(trace))
    assert [(each.src, each.dst, each.how) for each in sent] == [(0, 1, "observed"), (1, 0, "observed")] * 8
    assert [each.payload_bytes for each in sent] == [16 * 1024 << at // 2 for at in range(16)]
    assert {each.operation.tag for each in sent} == {10, 20}
    assert all(each.sent_ns < each.received_ns for each in sent)
    assert any("made from an OTF2 archive" in problem for problem in trace.problems)


def test_all_sends_meet_their_receives_and_all_collectives_their_members(tmp_path):
    with tarfile.open(COLLECTIVES) as packed:
        packed.extractall(tmp_path, filter="data")
    ten = Trace.load(tmp_path)
    sends = [one for one in operations(ten) if one.is_message]
    assert len(sends) == len(messages(ten)) == 1440
    assert all(len(one.ends) == 2 for one in sends)
    others = [one for one in operations(ten) if not one.is_message]
    assert all(one.missing == () and one.mismatch is None for one in others)
    pairs = {one.group.members for one in others if len(one.group.members) == 2}
    assert pairs == {(0, 6), (1, 7), (2, 8), (3, 9)}
    wide = [one for one in others if len(one.group.members) == 10]
    # An int each, 4 B, on ten ranks; rank 0 is the root.
    assert {one.op: [(bytes_of(end.inputs), bytes_of(end.outputs)) for end in one.ends] for one in wide[::-1]} == {
        "broadcast": [(4, 0)] + [(0, 4)] * 9,
        "gather": [(4, 40)] + [(4, 0)] * 9,
        "scatter": [(40, 4)] + [(0, 4)] * 9,
        "reduce": [(4, 0)] * 10,
        "all_reduce": [(4, 0)] * 10,
        "all_gather": [(4, 40)] * 10,
        "all_to_all_single": [(40, 40)] * 10,
    }


def bytes_of(tensors):
    return sum(each.payload_bytes for each in tensors)


def test_what_is_no_single_archive_in_a_folder_is_refused(tmp_path, monkeypatch):
    with pytest.raises(TraceError, match="an OTF2 archive is read from a folder: unpack it first"):
        Trace.load(COLLECTIVES)
    shutil.copytree(PING_PONG, tmp_path / "two")
    shutil.copy(PING_PONG / "traces.otf2", tmp_path / "two" / "more.otf2")
    with pytest.raises(TraceError, match="are two OTF2 archives: give one job"):
        Trace.load(tmp_path / "two")
    monkeypatch.setitem(sys.modules, "otf2", None)
    with pytest.raises(SetupError, match="an OTF2 archive needs otf2, which is not installed: pip install otf2"):
        Trace.load(PING_PONG)
