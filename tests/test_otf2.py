"""OTF2 archives: other people's MPI jobs in every view."""

import shutil
import sys
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dlearn import Trace, analysis, draw, explain, messages, operations
from dlearn.cli import main
from dlearn.errors import SetupError, TraceError
from dlearn.trace.readers import otf2_archive

pytest.importorskip("otf2", reason="the package otf2 is not installed")
PING_PONG = Path(__file__).parent / "samples" / "otf2-ping-pong"
COLLECTIVES = Path(__file__).parent / "samples" / "otf2-collectives-10ranks.tar.gz"
KIB = 1024


@pytest.fixture(scope="module")
def ten(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    with tarfile.open(COLLECTIVES) as packed:
        packed.extractall(folder, filter="data")
    return Trace.load(folder)


def test_sixteen_messages_go_to_and_fro():
    trace = Trace.load(PING_PONG)
    sent = list(messages(trace))
    assert [(each.src, each.dst) for each in sent] == [(0, 1), (1, 0)] * 8
    assert [each.payload_bytes for each in sent] == [16 * KIB << at // 2 for at in range(16)]
    assert {each.how for each in sent} == {"observed"}
    assert {each.operation.tag for each in sent} == {10, 20}
    assert all(each.sent_ns < each.received_ns for each in sent)
    for one in operations(trace):
        assert [end.ended_by for end in one.ends] == ["leave", "leave"]
    assert any("made from an OTF2 archive" in problem for problem in trace.problems)
    assert draw.timeline(trace).get_title(loc="left")


def test_all_sends_meet_their_receives_and_all_collectives_their_members(ten):
    sends = [one for one in operations(ten) if one.is_message]
    assert len(sends) == len(messages(ten)) == 1440
    assert all(len(one.ends) == 2 for one in sends)
    others = [one for one in operations(ten) if not one.is_message]
    assert sum(len(one.ends) for one in others) == 1200
    assert all(one.missing == () and one.misfit is None for one in others)
    kinds = Counter(one.op for one in others if len(one.group.members) == 10)
    rooted = dict.fromkeys(("broadcast", "gather", "reduce", "scatter"), 1)
    assert kinds == {**rooted, "all_gather": 12, "all_reduce": 12, "all_to_all_single": 12}
    pairs = {one.group.members for one in others if len(one.group.members) == 2}
    assert pairs == {(0, 6), (1, 7), (2, 8), (3, 9)}
    assert any("calls that do not say who sent what to whom: 1,080" in problem for problem in ten.problems)


def test_sizes_are_what_a_rank_gives_and_gets(ten):
    first = {}
    for one in operations(ten):
        if len(one.group.members) == 10 and not one.is_message:
            first.setdefault(one.op, one)
    sizes = {
        op: [tuple(sum(each.payload_bytes for each in side) for side in (end.inputs, end.outputs)) for end in one.ends]
        for op, one in first.items()
    }  # An int each, 4 B, on ten ranks; rank 0 is the root.
    assert sizes["broadcast"] == [(4, 0)] + [(0, 4)] * 9
    assert sizes["gather"] == [(4, 40)] + [(4, 0)] * 9
    assert sizes["scatter"] == [(40, 4)] + [(0, 4)] * 9
    assert sizes["reduce"] == [(4, 0)] * 10
    assert sizes["all_reduce"] == [(4, 0)] * 10
    assert sizes["all_gather"] == [(4, 40)] * 10
    assert sizes["all_to_all_single"] == [(40, 40)] * 10


def test_words_traffic_and_import_work_on_it(ten, tmp_path, capsys):
    told = " ".join(explain(ten).sentences)
    assert "10 ranks (MPI): 1,440 of 2,120 operations explained by 1,440 messages (1,440 observed)" in told
    assert len({analysis.traffic(ten).bytes_from(rank=rank) for rank in range(10)}) == 1
    assert main(["import", str(PING_PONG), "-o", str(tmp_path / "trace")]) == 0
    capsys.readouterr()
    here, again = Trace.load(PING_PONG), Trace.load(tmp_path / "trace")
    assert list(again.events) == list(here.events)


def test_a_packed_archive_and_two_archives_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(TraceError, match="an OTF2 archive is read from a folder: unpack it first"):
        Trace.load(COLLECTIVES)
    shutil.copytree(PING_PONG, tmp_path / "two")
    shutil.copy(PING_PONG / "traces.otf2", tmp_path / "two" / "more.otf2")
    with pytest.raises(TraceError, match="are two OTF2 archives: give one job"):
        Trace.load(tmp_path / "two")


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "otf2", None)
    with pytest.raises(SetupError, match="an OTF2 archive needs otf2, which is not installed: pip install otf2"):
        Trace.load(PING_PONG)


FILES = sorted(path.relative_to(PING_PONG) for path in PING_PONG.rglob("*") if path.is_file())


@given(
    name=st.sampled_from(FILES),
    cut=st.none() | st.integers(0, 3000),
    changed=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8),
)
@example(name=Path("traces", "0.evt"), cut=None, changed=[(426, 135)])  # A time that no event can have.
@settings(max_examples=12, deadline=None)
def test_a_damaged_archive_is_read_or_refused_in_a_sentence(tmp_path_factory, name, cut, changed):
    folder = tmp_path_factory.mktemp("archive") / "copy"
    shutil.copytree(PING_PONG, folder)
    data = bytearray((PING_PONG / name).read_bytes())
    for place, value in changed:
        data[place % len(data)] = value
    (folder / name).write_bytes(bytes(data[:cut]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(otf2_archive, "MOST_SECONDS", 10)
        try:
            answer = "\n".join(explain(Trace.load(folder)).sentences)
        except TraceError as error:
            answer = str(error)
    assert answer.replace("\n", "").isprintable()


def test_an_archive_that_keeps_its_library_busy_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(otf2_archive, "MOST_SECONDS", 0.01)
    with pytest.raises(TraceError, match=r"its library read for 0\.01 s and came to no end"):
        Trace.load(PING_PONG)
