"""Which calls of different processes are one operation, and which messages follow from it: what real jobs rarely do."""

from traces import Job, tensor

from dlearn import Trace, messages, operations
from dlearn.events.event import NOT_OBSERVED, Collective
from dlearn.join.wait_times import waiting


def ends(operation):
    return [(end.rank, end.number) for end in operation.ends]


def test_a_rank_whose_file_is_not_whole_may_have_called(tmp_path):
    """Only a whole file proves that a rank never came."""
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", ranks=[0])
    path = job.write()[2]
    path.write_bytes(path.read_bytes() + b"{damage}\n")
    (found,) = operations(Trace.load(tmp_path))
    assert found.missing == (1,)


def test_a_group_has_members_of_its_own_numbering(tmp_path):
    """Group ranks 0, 1, 2 of "odd" are ranks 5, 3, 1; of two groups "half" one has ranks 0, 1, the other 2, 4."""
    job = Job(tmp_path, ranks=6)
    job.group("odd", [5, 3, 1])
    job.collective("broadcast", size=10, root=1, group="odd")
    job.message(3, 1, group="odd", start_ns=30)
    for members in ([0, 1], [2, 4]):
        job.group("half", members)
        job.collective("barrier", group="half", start_ns=50)
    trace = job.load()
    collective, p2p, *halves = operations(trace)
    assert (collective.group.members, ends(collective)) == ((5, 3, 1), [(1, 0), (3, 0), (5, 0)])
    assert (p2p.sender, p2p.receiver, ends(p2p)) == (3, 1, [(3, 1), (1, 1)])
    assert [each.group.members for each in halves] == [(0, 1), (2, 4)]
    assert [(each.src, each.dst) for each in messages(trace) if each.op == "broadcast"] == [(3, 1), (3, 5)]


def test_each_direction_tag_and_group_is_a_channel_first_in_first_out(job):
    job.group("other", [1, 0])
    for group, tag in (("world", 7), ("world", 8), ("other", 7)):  # Numbers 0 to 2
        job.send(0, 1, group=group, tag=tag)
    for group, tag in (("other", 7), ("world", 8), ("world", 7)):
        job.recv(1, 0, group=group, tag=tag)
    job.message(1, 0, tag=7)
    for _ in range(3):
        job.send(0, 1, tag=9)  # Numbers 4 to 6
    for _ in range(2):
        job.recv(1, 0, tag=9)  # Numbers 4 and 5
    found = operations(job.load())
    pairs = {((0, 0), (1, 2)), ((0, 1), (1, 1)), ((0, 2), (1, 0)), ((1, 3), (0, 3)), ((0, 4), (1, 4)), ((0, 5), (1, 5))}
    assert {tuple(ends(each)) for each in found} == {*pairs, ((0, 6),)}
    assert [each.missing for each in found if len(each.ends) == 1] == [(1,)]


def test_who_receives_late_what_was_sent_into_a_buffer_keeps_no_rank_waiting(job):
    job.message(0, 1, start_ns={0: 10, 1: 100}, end_ns={0: 20, 1: 110})
    job.collective("all_reduce", size=4, start_ns={0: 200, 1: 230}, end_ns=240)
    assert waiting(job.load()) == {1: 30}


def test_a_send_larger_than_its_buffer_is_a_problem_and_an_end_that_nobody_saw_gives_no_times(job):
    job.message(0, 1, size={0: 8, 1: 4})
    another_type = {0: (tensor(8),), 1: (tensor(8, dtype="int8"),)}
    job.message(0, 1, tensors=another_type, start_ns=15)  # Of as many bytes, it fits.
    job.collective("all_reduce", size=8, by=NOT_OBSERVED, start_ns=20)
    trace = job.load()
    assert [each.problem for each in operations(trace)] == ["sends 8 B into a buffer of 4 B", "", ""]
    derived = {(each.how, each.sent_ns, each.received_ns) for each in messages(trace) if each.op == "all_reduce"}
    assert derived == {("derived", None, None)}


def test_what_gives_no_messages_is_listed_with_the_reason(job):
    job.event(Collective, 0, op="all_reduce", group="?", seq=1, end_ns=20)
    found, why = messages(trace := job.load()), "the line that describes its process group is lost"
    assert list(found.unexplained) == [(one, why) for one in operations(trace)]
    assert f"not explained: all_reduce: {why}" in str(found)
