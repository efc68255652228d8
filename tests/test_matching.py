"""Which events of different processes are the ends of one exchange."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Job

from dlearn.trace.event import NOT_OBSERVED, Collective, End, GroupFact, PointToPoint, Socket
from dlearn.trace.trace import Trace


def ends(match):
    return [(end.rank, end.number) for end in match.ends]


def test_collectives_meet_by_their_number_in_the_group(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("barrier")
    job.collective("all_reduce", size=8, start_ns={0: 50, 1: 40, 2: 60}, end_ns=70)
    first, second = job.load().matches
    assert (first.seq, ends(first), first.missing) == (1, [(0, 0), (1, 0), (2, 0)], ())
    assert (second.seq, ends(second)) == (2, [(0, 1), (1, 1), (2, 1)])


def test_a_rank_whose_file_is_not_whole_may_have_called(tmp_path):
    """Only a whole file proves that a rank never came."""
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", ranks=[0])
    path = job.write()[2]
    path.write_bytes(path.read_bytes() + b"{damage}\n")
    (found,) = Trace.load(tmp_path).matches
    assert found.missing == (1,)


def test_a_group_has_members_of_its_own_numbering(tmp_path):
    """Group rank 0 of "odd" is rank 3, group rank 1 is rank 1."""
    job = Job(tmp_path, ranks=4)
    job.group("odd", [3, 1])
    job.collective("all_reduce", group="odd")
    job.send(3, 1, group="odd", start_ns=30)
    job.recv(1, 3, group="odd", start_ns=30)
    collective, p2p = job.load().matches
    assert (collective.group.members, ends(collective)) == ((3, 1), [(1, 0), (3, 0)])
    assert (p2p.sender, p2p.receiver, ends(p2p)) == (3, 1, [(3, 1), (1, 1)])


def test_a_group_has_one_name_however_often_each_member_has_seen_that_name(tmp_path):
    """ "half" was made of ranks 0 and 1, then of 0 and 2, and all have counted for themselves."""
    job = Job(tmp_path, ranks=3)
    described = {"name": "half", "backend": "gloo", "size": 2}
    for rank, index, name, ranks, made in [
        (0, 0, "half", (0, 1), "first"),
        (1, 1, "half", (0, 1), "first"),
        (0, 0, "half~2", (0, 2), "second"),
        (2, 1, "half", (0, 2), "second"),
    ]:
        job.files[rank].append(GroupFact(**{**described, "name": name}, rank=index, ranks=ranks, made=made))
        job.files[rank].append(Socket(id=len(job.files[rank]), group=name, local="a 1", remote="b 2"))
    calls = [(0, 0, "half"), (1, 0, "half"), (0, 1, "half~2"), (2, 0, "half")]
    for rank, number, group in calls:
        own = {"number": number, "start_ns": 10 * number, "end_ns": 10 * number + 5, "ended_by": "return"}
        job.files[rank].append(Collective(op="barrier", group=group, seq=1, **own))
    trace = job.load()
    assert [(each.group.name, ends(each), each.missing) for each in trace.matches] == [
        ("half", [(0, 0), (1, 0)], ()),
        ("half~2", [(0, 1), (2, 0)], ()),
    ]
    assert [[each.group for each in process.sockets.values()] for process in trace.processes] == [
        ["half", "half~2"],
        ["half"],
        ["half~2"],
    ]


def test_groups_of_one_name_with_other_members_are_two_groups(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.group("half", [0, 1])
    job.collective("barrier", group="half")
    job.group("half", [2, 3])
    job.collective("barrier", group="half")
    assert [match.group.members for match in job.load().matches] == [(0, 1), (2, 3)]


def test_sends_meet_recvs_first_in_first_out(tmp_path):
    job = Job(tmp_path, ranks=2)
    for start in (10, 20, 30):
        job.send(0, 1, start_ns=start)
    for start in (11, 12):
        job.recv(1, 0, start_ns=start)
    matches = job.load().matches
    assert [ends(match) for match in matches] == [[(0, 0), (1, 0)], [(0, 1), (1, 1)], [(0, 2)]]
    assert [match.missing for match in matches] == [(), (), (1,)]


def test_each_direction_tag_and_group_is_a_channel_of_its_own(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.group("other", [1, 0])
    job.send(0, 1, tag=7)  # number 0
    job.send(0, 1, tag=8)  # number 1
    job.send(0, 1, group="other", tag=7)  # number 2
    job.recv(1, 0, group="other", tag=7)  # number 0
    job.recv(1, 0, tag=8)  # number 1
    job.recv(1, 0, tag=7)  # number 2
    job.send(1, 0, tag=7)  # number 3
    job.recv(0, 1, tag=7)  # number 3
    pairs = {tuple(ends(match)) for match in job.load().matches}
    assert pairs == {((0, 0), (1, 2)), ((0, 1), (1, 1)), ((0, 2), (1, 0)), ((1, 3), (0, 3))}


def test_a_recv_from_any_source_meets_its_sender_once_it_has_ended(tmp_path):
    job = Job(tmp_path, ranks=3)
    number = job.recv(0, None, end_ns=None)
    job.files[0].append(End(event=number, at_ns=30, by="wait", peer=2))
    job.recv(0, None, end_ns=None, start_ns=50)
    job.send(2, 0)
    ended, pending = job.load().matches
    assert (ended.sender, ended.receiver, len(ended.ends)) == (2, 0, 2)
    assert (pending.sender, pending.receiver, pending.missing) == (None, 0, ())


def test_a_group_that_nobody_described_leaves_its_events_alone(tmp_path):
    job = Job(tmp_path, ranks=2)
    for rank in (0, 1):
        job.event(Collective, rank, op="barrier", group="?", seq=1, end_ns=20)
        job.event(PointToPoint, rank, op="send", group="?", peer=0, tag=0, seq=1, end_ns=20)
    matches = job.load().matches
    assert [len(match.ends) for match in matches] == [1, 1, 1, 1]
    assert {match.group.backend for match in matches} == {"unknown"}


def test_a_member_without_a_file_goes_by_its_global_rank(tmp_path):
    job = Job(tmp_path, ranks=4)
    job.group("pair", [1, 3])
    job.send(1, 3, group="pair")
    (match,) = job.load(without=[3]).matches
    assert (match.sender, match.receiver, match.missing) == (1, 3, ())


def test_global_ranks_are_resolved_to_processes(tmp_path):
    """The cluster's rank 0 is rank 1 of the default group, and the other way round; only 0 wrote about "pair"."""
    job = Job(tmp_path, ranks=2)
    for rank in (0, 1):
        job.files[rank] = [GroupFact(name="world", backend="gloo", rank=1 - rank, size=2, ranks=(0, 1), default=True)]
    job.files[0].append(GroupFact(name="pair", backend="gloo", rank=1, size=2, ranks=(0, 1)))
    job.event(PointToPoint, 0, op="send", group="pair", peer=0, tag=0, seq=1, end_ns=20)
    (match,) = job.load().matches
    assert (match.group.members, match.sender, match.receiver) == ((1, 0), 0, 1)


def test_a_group_with_many_members_elsewhere_costs_little(tmp_path):
    """One file of a job with 100,000 ranks, and 3,000 calls: no list of absent ranks for each call."""
    job = Job(tmp_path, ranks=1)
    job.files[0] = [GroupFact(name="world", backend="gloo", rank=0, size=100_000, ranks=tuple(range(100_000)))]
    for _ in range(3000):
        job.collective("barrier", ranks=[0])
    trace = job.load()
    assert len(trace.matches) == 3000
    assert trace.matches[0].missing == ()


CALLS = st.lists(
    st.tuples(
        st.sampled_from(["collective", "send", "recv", "recv any"]),
        st.integers(0, 2),
        st.integers(0, 2),
        st.sampled_from(["world", "pair", "?"]),
        st.integers(0, 1),
        st.sampled_from(["return", NOT_OBSERVED]),
    ),
    max_size=30,
)


@given(CALLS)
@settings(max_examples=60, deadline=None)
def test_every_event_is_in_exactly_one_match(tmp_path_factory, calls):
    job = Job(tmp_path_factory.mktemp("job"), ranks=3)
    job.group("pair", [2, 0])
    called = []
    for at_ns, (kind, rank, other, group, tag, by) in enumerate(calls):
        own = {"group": group, "seq": other, "start_ns": at_ns, "end_ns": at_ns, "by": by}
        if kind == "collective":
            called.append((rank, job.event(Collective, rank, op="all_reduce", **own)))
        else:
            peer = None if kind == "recv any" else other
            number = job.event(PointToPoint, rank, op=kind[:4], peer=peer, tag=tag, **own)
            called.append((rank, number))
    matches = job.load().matches
    assert sorted((end.rank, end.number) for each in matches for end in each.ends) == sorted(called)
    for each in matches:
        assert set(each.missing).isdisjoint(end.rank for end in each.ends) or each.sender == each.receiver


@pytest.mark.parametrize("ranks", [1, 5])
def test_matches_come_in_the_order_of_first_call(tmp_path, ranks):
    job = Job(tmp_path, ranks=ranks)
    for start in (300, 100, 200):
        job.collective("barrier", start_ns=start, end_ns=400)
    assert [match.seq for match in job.load().matches] == [2, 3, 1]


def test_of_some_steps_a_receive_from_anyone_stays_alone_and_is_not_lost(tmp_path):
    """It has no place among the receives from one rank, of which some are in steps that were not recorded."""
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, place=3)
    job.send(0, 1, place=4)
    job.recv(1, 0)  # From anyone, and it was rank 0.
    job.recv(1, 0)
    job.recv(1, 0, place=3)
    found = [ends(match) for match in job.load().matches]
    assert sorted(found) == [[(0, 0), (1, 2)], [(0, 1)], [(1, 0)], [(1, 1)]]
