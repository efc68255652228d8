"""Predicted against measured bytes, on traces by hand: what agrees is confirmed, what does not is said."""

import msgspec
import pytest
from traces import Job, tensor

from dlearn import messages
from dlearn.analysis import explain, reconcile
from dlearn.trace.event import NotMeasured


def ring_of_two(folder, *, measured=(392, 392), **facts) -> Job:
    """One all_reduce of 200 B on 2 ranks: a ring of 4 segments, each rank sends 2 x 2 of them: 200 B in 4 messages.

    On the wire 200 + 4 x 96 = 584 B, and 4 x 48 = 192 B in answer to the other's: 776 B each way.
    """
    job = Job(folder, ranks=2)
    job.connect()
    count(job, 8)
    job.collective("all_reduce", size=200, **facts)
    for rank, sent in enumerate(measured):
        job.counters(rank, None if sent is None else 8 + sent)
    return job


def count(job, *sent, **facts):
    """A sample of each of two ranks, which have written the same."""
    for rank in (0, 1):
        job.counters(rank, *sent, **facts)


EXACT = (776, 776)


def test_what_the_counters_confirm(tmp_path):
    trace = ring_of_two(tmp_path, measured=EXACT).load()
    found = reconcile(trace)
    assert [(p.src, p.dst, p.payload_bytes, p.predicted_bytes, p.measured_bytes) for p in found.whole.pairs] == [
        (0, 1, 200, 776, 776),
        (1, 0, 200, 776, 776),
    ]
    assert found.exact
    assert found.whole.residue_bytes == 0
    assert all(message.confirmed for message in messages(trace))
    assert found.sentence == (
        "The whole recording: payload 400 B, predicted on the wire 1,552 B,"
        " measured by the kernel 1,552 B, residue 0 B."
    )
    assert str(found).splitlines()[1:5] == [
        "from    to      payload  predicted  measured  residue",
        "rank 0  rank 1      200        776       776        0",
        "rank 1  rank 0      200        776       776        0",
        "in all              400      1,552     1,552        0",
    ]


def test_bytes_that_no_recorded_call_accounts_for_are_said(tmp_path):
    """Calls on the backend object itself do not pass the recorder; their bytes pass the group's connections."""
    job = Job(tmp_path, ranks=2)
    job.connect()
    count(job, 8)
    count(job, 8 + 776)
    found = reconcile(job.load())
    assert [(pair.residue_bytes, pair.why) for pair in found.whole.pairs] == [(776, "not seen")] * 2
    assert found.whole.not_seen_bytes == 1552
    assert not found.exact
    assert found.sentence.endswith(
        "residue 1,552 B (not seen: 1,552 B were written on the connections of group world that no recorded call"
        " accounts for)."
    )


def test_connections_beside_the_known_groups_count_from_their_beginning(tmp_path):
    """A process group made by hand: seen at the end only. What the known group sent is confirmed all the same."""
    job = ring_of_two(tmp_path, measured=())
    job.connect(known=False)
    job.counters(0, 8 + 776, 500)
    job.counters(1, 8 + 776, 20)
    trace = job.load()
    found = reconcile(trace)
    assert [(pair.whose, pair.src, pair.dst, pair.residue_bytes, pair.why) for pair in found.whole.pairs] == [
        ("world", 0, 1, 0, ""),
        ("world", 1, 0, 0, ""),
        ("none known", 0, 1, 500, "not seen"),
        ("none known", 1, 0, 20, "not seen"),
    ]
    assert found.whole.note == (
        "not seen: 520 B were written on connections of no known group that no recorded call accounts for"
    )
    assert all(message.confirmed for message in messages(trace))
    assert reconcile(trace.where(op="all_reduce")).whole.not_seen_bytes == 0, "not counted for a part of the trace"


def test_connections_beside_the_known_groups_are_seen_without_any_other_sample(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.connect(known=False)
    job.counters(0, 500)
    job.counters(1, 0)
    found = reconcile(job.load())
    assert (found.whole.measured_bytes, found.whole.not_seen_bytes) == (500, 500)


def test_connections_that_come_late_are_those_that_were_sought(tmp_path):
    """Gloo may connect only when two ranks first talk: the group's own connections are not known, and so not seen."""
    job = Job(tmp_path, ranks=2)
    job.counters(0)
    job.counters(1)
    job.collective("all_reduce", size=200)
    job.connect(known=False)
    job.counters(0, 784)
    job.counters(1, 784)
    found = reconcile(job.load())
    assert found.whole.not_seen_bytes == 0
    assert found.whole.measured_bytes is None


def test_a_trace_in_which_nothing_was_seen_has_no_residue_of_0(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.connect()
    for _ in range(2):
        job.counters(0, 8)
        job.counters(1, 8)
    found = reconcile(job.load())
    assert not found.exact
    assert str(found) == (
        "The whole recording: no call was recorded whose bytes could be compared, and nothing was counted."
    )


def test_what_was_predicted_and_not_yet_written(tmp_path):
    found = reconcile(ring_of_two(tmp_path, measured=(776, 700)).load())
    assert [pair.why for pair in found.whole.pairs] == ["", "not written yet"]
    assert found.whole.note == (
        "predicted, and not written on the connections of group world when the counters were read: 76 B"
    )


def test_a_wrong_model_is_caught_and_said(tmp_path):
    """Rank 1 sends twice what the algorithm says: nothing of it is confirmed, rank 0's messages are."""
    trace = ring_of_two(tmp_path, measured=(776, 976)).load()
    found = reconcile(trace)
    assert not found.exact
    assert [pair.residue_bytes for pair in found.whole.pairs] == [0, 200]
    assert {(m.src, m.confirmed) for m in messages(trace)} == {(0, True), (1, False)}
    assert "residue 200 B" in found.sentence
    assert "residue 200 B" in str(explain(trace))
    assert "4 confirmed by the kernel's counters" in str(explain(trace))


def test_a_send_and_its_answer(tmp_path):
    """4 B from rank 1 to rank 0: 100 B there, 48 B back (measured on torch 2.13)."""
    job = Job(tmp_path, ranks=2)
    job.connect()
    count(job, 0)
    job.send(1, 0, size=4)
    job.recv(0, 1, size=4)
    for rank, sent in ((0, 48), (1, 100)):
        job.counters(rank, sent)
    trace = job.load()
    assert reconcile(trace).exact
    assert [message.confirmed for message in messages(trace)] == [True]


def test_each_span_for_itself(tmp_path):
    """Two steps, the second with 10 B too many; the whole is then off by 10 B, the first step is not."""
    job = Job(tmp_path, ranks=2)
    job.connect()
    sent = [8, 8]
    for step, extra in enumerate((0, 10)):
        inside = [job.span(rank, f"step {step}") for rank in (0, 1)]
        for rank in (0, 1):
            job.counters(rank, sent[rank], parent=inside[rank])
        job.collective("all_reduce", size=200, parent=inside[0])
        sent = [776 + extra + each for each in sent]
        for rank in (0, 1):
            job.counters(rank, sent[rank], parent=inside[rank])
    trace = job.load()
    found = reconcile(trace)
    assert [(part.what, part.residue_bytes) for part in found.parts] == [("step 0", 0), ("step 1", 20)]
    not_seen = "not seen: 20 B were written on the connections of group world that no recorded call accounts for"
    assert found.sentences() == [
        f"The whole recording: {not_seen}.",
        "1 of 2 parts with residue 0.",
        f"step 1: predicted 1,552 B, measured 1,572 B, residue 20 B ({not_seen}).",
    ]
    assert reconcile(trace.within("step 0")).exact
    assert not reconcile(trace.within("step 1")).exact
    assert {(m.operation.seq, m.confirmed) for m in messages(trace)} == {(1, True), (2, False)}


def test_each_operation_for_itself(tmp_path):
    """With samples for which the recorder waited, between any two stands one operation."""
    job = Job(tmp_path, ranks=2)
    job.connect()
    for sent in (8, 784, 1560):
        count(job, sent, still=True)
        if sent < 1560:
            job.collective("all_reduce", size=200, site="train.py:7")
    found = reconcile(job.load())
    assert [(part.what, part.residue_bytes) for part in found.parts] == [
        ("all_reduce #1 (train.py:7)", 0),
        ("all_reduce #2 (train.py:7)", 0),
    ]
    assert found.intrusive
    assert 'measure="phase"' in str(found)


def test_groups_have_connections_of_their_own(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.group("pair", [0, 2])
    job.connect()
    job.connect("pair")
    start = {0: (8, 8, 8), 1: (8, 8), 2: (8, 8, 8)}
    for rank, sent in start.items():
        job.counters(rank, *sent)
    job.collective("all_reduce", size=200, group="pair")
    for rank, sent in start.items():
        job.counters(rank, *sent[:2], *(each + 776 for each in sent[2:]))
    found = reconcile(job.load())
    assert [(pair.group, pair.src, pair.dst, pair.residue_bytes) for pair in found.whole.pairs] == [
        ("pair", 0, 2, 0),
        ("pair", 2, 0, 0),
    ]


def test_bytes_on_the_wrong_group_are_a_residue(tmp_path):
    """The sum over groups would be right; the connection is not."""
    job = Job(tmp_path, ranks=2)
    job.group("other", [0, 1])
    job.connect()
    job.connect("other")
    count(job, 8, 8)
    job.collective("all_reduce", size=200)
    count(job, 8, 784)
    found = reconcile(job.load())
    assert [(pair.group, pair.residue_bytes) for pair in found.whole.pairs] == [
        ("other", 776),
        ("other", 776),
        ("world", -776),
        ("world", -776),
    ]


def test_a_steps_bytes_are_those_of_the_outer_groups_connections(tmp_path):
    """A glass-box all_reduce: its sends belong to an inner group, its connections were made for the outer one."""
    job = Job(tmp_path, ranks=2, backend="dlearn_ring")
    job.group("steps", [0, 1], within="world")
    job.connect()
    count(job, 8)
    outer = job.collective("all_reduce", size=100)
    job.send(1, 0, size=100, group="steps", parent=outer[1], step=0)
    job.recv(0, 1, size=100, group="steps", parent=outer[0], step=0)
    job.send(0, 1, size=100, group="steps", parent=outer[0], step=1)
    job.recv(1, 0, size=100, group="steps", parent=outer[1], step=1)
    count(job, 8 + 196 + 48)
    trace = job.load()
    assert reconcile(trace).exact
    assert [(m.op, m.src, m.dst, m.step, m.how, m.confirmed) for m in messages(trace)] == [
        ("all_reduce", 1, 0, 0, "observed", True),
        ("all_reduce", 0, 1, 1, "observed", True),
    ]


def test_no_counters(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=200)
    trace = job.load()
    found = reconcile(trace)
    assert not found.exact
    assert [pair.measured_bytes for pair in found.whole.pairs] == [None, None]
    assert found.sentence.endswith("predicted on the wire 1,552 B, not measured (the trace holds no socket counters).")
    assert "not measured" in str(found)
    assert not any(message.confirmed for message in messages(trace))


def test_why_not_is_told_as_the_process_said_it(tmp_path):
    job = Job(tmp_path, ranks=2)
    for lines in job.files:
        lines.append(NotMeasured(reason="darwin tells no process about the bytes in its sockets"))
    job.collective("all_reduce", size=200)
    assert "not measured (darwin tells" in reconcile(job.load()).sentence


@pytest.mark.parametrize("backend", ["nccl", "nccl2"])
def test_nccl_passes_the_sockets_by(tmp_path, backend):
    job = Job(tmp_path, ranks=2, backend=backend)
    job.collective("all_reduce", size=200)
    assert "nccl moves its bytes between GPUs" in reconcile(job.load()).sentence


def test_one_rank_without_samples(tmp_path):
    """Rank 1's process could not count: what it sent is "not measured", and so is the sum."""
    job = ring_of_two(tmp_path, measured=EXACT)
    job.files[1] = [line for line in job.files[1] if type(line).__name__ != "Counters"]
    found = reconcile(job.load())
    assert [(pair.src, pair.residue_bytes) for pair in found.whole.pairs] == [(0, 0), (1, None)]
    assert found.whole.measured_bytes is None
    assert not found.exact
    assert "not measured (no samples of rank 1)" in found.sentence


def test_one_connection_that_was_not_seen(tmp_path):
    """Of three ranks, rank 0's connection to rank 1 is not in its file: that pair is not measured, the others are."""
    job = Job(tmp_path, ranks=3)
    job.connect()
    job.files[0] = [line for line in job.files[0] if getattr(line, "id", None) != 0]
    for rank in range(3):
        job.counters(rank, 0, 0)
    job.collective("broadcast", size=10, root=0)
    for rank, sent in enumerate(((106, 106), (48, 0), (48, 0))):
        job.counters(rank, *sent)
    found = reconcile(job.load())
    assert [(pair.src, pair.dst, pair.residue_bytes) for pair in found.whole.pairs] == [
        (0, 1, None),
        (0, 2, 0),
        (1, 0, None),
        (2, 0, 0),
    ]
    assert found.whole.note == (
        "2 connections were not seen when their group was made, or closed before the last sample"
    )


def test_a_call_after_the_last_sample_is_counted(tmp_path):
    job = ring_of_two(tmp_path, measured=EXACT)
    job.collective("all_reduce", size=200)
    found = reconcile(job.load())
    assert found.whole.residue_bytes == 0
    assert found.whole.note == "2 calls, with 400 B of payload, lie outside of the samples"


def test_an_operation_that_nobody_can_predict_is_said_and_confirms_nothing(tmp_path):
    job = ring_of_two(tmp_path, measured=(5000, 5000), inputs=(tensor(200, payload=80),))
    found = reconcile(job.load())
    assert not found.exact
    assert found.whole.note.startswith("2 calls not predicted: gloo ")


def test_a_closed_connection_keeps_its_last_count(tmp_path):
    job = ring_of_two(tmp_path, measured=EXACT)
    count(job, None)
    assert reconcile(job.load()).exact


def test_what_was_sent_before_a_connection_closed_unseen_is_not_measured(tmp_path):
    """A second all_reduce, and then the connection of rank 0 is gone: what it wrote meanwhile nobody knows."""
    job = ring_of_two(tmp_path, measured=EXACT)
    job.collective("all_reduce", size=200)
    job.counters(0, None)
    job.counters(1, 8 + 2 * 776)
    found = reconcile(job.load())
    assert [(pair.src, pair.residue_bytes) for pair in found.whole.pairs] == [(0, None), (1, 0)]
    assert "closed before the last sample" in found.whole.note


def test_a_peer_whose_file_is_missing(tmp_path):
    """Nobody knows whom rank 0's connection led to: its bytes are of no pair, and what it sent is not confirmed."""
    job = ring_of_two(tmp_path, measured=EXACT)
    trace = job.load(without=[1])
    assert not reconcile(trace).exact
    assert not any(message.confirmed for message in messages(trace))


def test_loopback_of_another_host_is_another_connection(tmp_path):
    job = ring_of_two(tmp_path, measured=EXACT)
    job.headers[1] = msgspec.structs.replace(job.headers[1], host="other")
    assert not reconcile(job.load()).exact


@pytest.mark.parametrize("sent", [[], [1, 2, 3], [None]])
def test_a_sample_that_fits_no_socket_is_no_reason_to_stop(tmp_path, sent):
    job = ring_of_two(tmp_path, measured=EXACT)
    job.counters(0, *sent)
    assert reconcile(job.load()).whole.pairs


def test_a_part_is_not_given_what_was_counted_for_others(tmp_path):
    """The counters were read before and after both collectives; for one of them alone nothing was measured."""
    job = Job(tmp_path, ranks=2)
    job.connect()
    count(job, 8, phase="backward")
    job.collective("all_reduce", size=200, phase="backward")
    job.collective("broadcast", size=100, root=0)
    job.counters(0, 8 + 776 + 100 + 48, phase="backward")
    job.counters(1, 8 + 776 + 48, phase="backward")
    trace = job.load()
    part = reconcile(trace.where(phase="backward"))
    assert reconcile(trace).whole.measured_bytes is not None
    assert part.whole.measured_bytes is None
    assert not part.exact
    assert part.finding == (
        "1,552 B predicted on the wire, not measured: what rank 0 sent for other operations was counted with it"
    )
