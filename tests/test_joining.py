"""From exchanges to operations, from operations to messages."""

from collections import Counter

import pytest
from traces import Job, tensor

from dlearn.analysis import messages, operations
from dlearn.join import confirming
from dlearn.trace.event import NOT_OBSERVED, Collective, TensorInfo
from dlearn.trace.message import payload_bytes


def one_operation(job, **load):
    (operation,) = operations(job.load(**load))
    return operation


def test_an_operation_waits_for_its_last_rank(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=300, start_ns={0: 10, 1: 70, 2: 30}, end_ns={0: 90, 1: 95, 2: 91})
    operation = one_operation(job)
    assert (operation.start_ns, operation.transfer_ns, operation.end_ns, operation.last_rank) == (10, 70, 95, 1)
    assert (operation.pending, operation.failed, operation.missing, operation.unseen) == (False, False, (), ())
    assert operation.what == "uint8[300]"


def test_a_step_of_the_schedule_takes_its_share_of_the_transfer(tmp_path):
    """2 ranks, 4 B: 2 halves of 2 steps, each step 1/4 of the 80 ns from the last call to the last end."""
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=4, start_ns={0: 0, 1: 20}, end_ns=100)
    found = messages(job.load())
    times = [(each.sent_ns, each.received_ns) for each in found if each.src == 0]
    assert times == [(20, 40), (40, 60), (60, 80), (80, 100)]
    said = {(each.payload_bytes, each.whole_bytes, each.how, each.op) for each in found}
    assert said == {(1, 4, "derived", "all_reduce")}


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize("size", [1, 7, 4096, 100_001])
def test_sums_over_all_ranks(tmp_path, ranks, size):
    """An all-reduce moves 2 (n-1) B in all, a broadcast (n-1) B, an all-gather n (n-1) B."""
    job = Job(tmp_path, ranks=ranks)
    job.collective("all_reduce", size=size, start_ns=10, end_ns=20)
    job.collective("broadcast", size=size, root=ranks - 1, start_ns=30, end_ns=40)
    outputs = tuple(tensor(size) for _ in range(ranks))
    job.collective("all_gather", size=size, outputs=outputs, start_ns=50, end_ns=60)
    found = messages(job.load())
    assert found.unexplained == ()
    moved = Counter[str]()
    for each in found:
        moved[each.op] += each.payload_bytes
    shares = {"all_reduce": 2, "broadcast": 1, "all_gather": ranks}
    assert moved == Counter({op: share * (ranks - 1) * size for op, share in shares.items()})


def test_messages_of_a_subgroup_go_between_its_members(tmp_path):
    """Group ranks 0, 1, 2 are ranks 5, 3, 1; the root is group rank 1."""
    job = Job(tmp_path, ranks=6)
    job.group("odd", [5, 3, 1])
    job.collective("broadcast", size=10, root=1, group="odd")
    assert [(each.src, each.dst) for each in messages(job.load())] == [(3, 1), (3, 5)]


def test_coalesced_tensors_travel_as_one(tmp_path):
    """10 + 20 B on 2 ranks: 2 x 1/2 x 30 B from each."""
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce_coalesced", inputs=(tensor(10), tensor(20)))
    found = messages(job.load())
    assert sum(each.payload_bytes for each in found if each.src == 0) == 30
    assert found[0].what == "uint8[10], uint8[20]"
    assert found[0].describe(most=1) == found[0].what, "its commas separate no parameters"


def test_segments_hold_whole_items(tmp_path):
    """3 float64 on 4 ranks: 3 segments of 8 B each, never a part of a number."""
    job = Job(tmp_path, ranks=4)
    job.collective("all_reduce", inputs=(tensor(24, dtype="float64"),))
    assert {each.payload_bytes for each in messages(job.load())} == {8}


def test_payload_is_what_a_rank_gives_else_what_it_gets():
    facts = {"number": 0, "start_ns": 0, "op": "broadcast", "group": "world", "seq": 1}
    gives = Collective(inputs=(tensor(5), tensor(6)), outputs=(tensor(50),), **facts)
    gets = Collective(outputs=(tensor(50),), **facts)
    assert (payload_bytes(gives), payload_bytes(gets)) == (11, 50)


def test_a_send_and_its_recv_are_one_observed_message(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, size=8, start_ns=10, end_ns=35)
    job.recv(1, 0, size=8, start_ns=5, end_ns=30)
    (message,) = messages(job.load())
    assert (message.src, message.dst, message.payload_bytes, message.how) == (0, 1, 8, "observed")
    assert (message.sent_ns, message.received_ns) == (10, 30)


def test_a_send_that_nobody_received(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, end_ns=None)
    (message,) = messages(job.load())
    assert (message.how, message.operation.missing, message.received_ns) == ("missing", (1,), None)


def test_half_of_a_pair_is_observed_where_the_other_file_is_missing(tmp_path):
    """Rank 1 may well have sent it: only its file is not here."""
    job = Job(tmp_path, ranks=2)
    job.recv(0, 1)
    (message,) = messages(job.load(without=[1]))
    assert (message.how, message.src, message.sent_ns, message.received_ns) == ("observed", 1, None, 20)
    assert (message.operation.missing, message.operation.unseen) == ((), (1,))


def test_a_send_larger_than_its_buffer_is_a_problem(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, size=8)
    job.recv(1, 0, size=4)
    assert one_operation(job).problem == "sends 8 B into a buffer of 4 B"


def different(job):
    job.collective("all_reduce", size=4, ranks=[0])
    job.collective("broadcast", size=4, ranks=[1], root=0)


def sizes(job):
    job.collective("all_reduce", size=4, ranks=[0])
    job.collective("all_reduce", size=8, ranks=[1])


def roots(job):
    job.collective("broadcast", size=4, ranks=[0], root=0)
    job.collective("broadcast", size=4, ranks=[1], root=1)


def twice(job):
    job.collective("barrier", ranks=[0], seq=7)
    job.collective("barrier", ranks=[0], seq=7)


def unknown_backend(job):
    job.group("fast", [0, 1], backend="nccl")
    job.collective("all_reduce", size=4, group="fast")


NOT_SEEN = "a recv whose peer is known at its end only, and nobody saw that end"


@pytest.mark.parametrize(
    ("story", "why"),
    [
        (different, "the ranks called different operations: all_reduce, broadcast"),
        (sizes, "the ranks called it with different sizes: 4, 8 B"),
        (roots, "the ranks called it with different roots"),
        (twice, "a rank appears twice: two groups of the same name, or a damaged trace"),
        (
            lambda job: job.collective("all_reduce", inputs=(tensor(400, payload=24),)),
            "gloo first adds up what a sparse tensor has twice; how much is left is not recorded",
        ),
        (
            lambda job: job.collective("all_reduce", inputs=(tensor(2**40),) * 100),
            "its schedule has more than 20,000 messages",
        ),
        (
            lambda job: job.collective("all_to_none", size=4),
            "no schedule of gloo's all_to_none is known here yet",
        ),
        (unknown_backend, "no schedule of nccl's all_reduce is known here yet"),
        (lambda job: job.collective("broadcast", size=4, root=2), "its root is no member of the process group"),
        (
            lambda job: job.event(Collective, 0, op="all_reduce", group="?", seq=1, end_ns=20),
            "the line that describes its process group is lost",
        ),
        (
            lambda job: job.recv(0, None, end_ns=None),
            NOT_SEEN,
        ),
        (
            lambda job: job.recv(0, None, by=NOT_OBSERVED, end_ns=None),
            NOT_SEEN,
        ),
    ],
)
def test_what_gives_no_messages_is_listed_with_the_reason(tmp_path, story, why):
    job = Job(tmp_path, ranks=2)
    story(job)
    trace = job.load()
    found = messages(trace)
    assert [reason for _, reason in found.unexplained] == [why]
    assert [operation for operation, _ in found.unexplained] == list(operations(trace))
    assert f"not explained: {operations(trace)[0].op}: {why}" in str(found)


def test_a_collective_that_a_rank_never_called_has_missing_messages(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("broadcast", size=5, root=0, ranks=[0, 1], end_ns=None)
    found = messages(job.load())
    assert [(each.src, each.dst, each.how, each.sent_ns) for each in found] == [
        (0, 1, "missing", None),
        (0, 2, "missing", None),
    ]


def test_an_end_that_nobody_saw_leaves_its_messages_without_times(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=8, by=NOT_OBSERVED)
    found = messages(job.load())
    assert {(each.how, each.sent_ns, each.received_ns) for each in found} == {("derived", None, None)}


def test_messages_come_in_the_order_of_sending(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=8, start_ns=100, end_ns=200)
    job.send(0, 1, start_ns=120)
    job.send(1, 0, start_ns=50)
    assert [each.sent_ns for each in messages(job.load())] == [50, 100, 100, 120, 125, 125, 150, 150, 175, 175]


def test_more_messages_than_fit_are_counted_out(tmp_path, monkeypatch):
    """Each all_reduce of 2 ranks has 8 messages: two fit into 20."""
    monkeypatch.setattr(confirming, "MOST_MESSAGES", 20)
    job = Job(tmp_path, ranks=2)
    for start in (10, 30, 50):
        job.collective("all_reduce", size=8, start_ns=start, end_ns=start + 5)
    found = messages(job.load())
    assert len(found) == 16
    assert [reason for _, reason in found.unexplained] == ["the trace has more than 20 messages; ask for a part of it"]


def test_a_tensor_of_many_dimensions_and_many_tensors_are_told_in_short(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.collective("all_reduce", inputs=tuple(TensorInfo((2, 3), "float32", "cpu", 24, 24) for _ in range(20_000 // 8)))
    assert one_operation(job).what == "float32[2, 3], float32[2, 3], float32[2, 3] and 2,497 more"
