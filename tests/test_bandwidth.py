"""Algorithm and bus bandwidth, as nccl-tests define them."""

import pytest
from traces import Job, tensor

from dlearn import draw
from dlearn.analysis import operations
from dlearn.analysis.costs.bandwidth import bandwidth, bandwidths
from dlearn.draw.palette import look
from dlearn.errors import DlearnError
from dlearn.trace.event import NOT_OBSERVED

MS = 1_000_000


def only(job):
    (operation,) = operations(job.load())
    return bandwidth(operation)


# (op, what each rank hands over, the size of nccl-tests, busbw / algbw), on 4 ranks. Of data in parts, the size is the
# whole: 4 blocks of 1 MB are gathered; the 4 MB that are scattered stand as a whole at the root or at every rank.
CASES = [
    ("all_reduce", 4_000_000, 4_000_000, 1.5),  # 2 * 3/4
    ("all_reduce_coalesced", 4_000_000, 4_000_000, 1.5),
    ("all_gather", 1_000_000, 4_000_000, 0.75),  # 3/4
    ("all_gather_single_coalesced", 1_000_000, 4_000_000, 0.75),
    ("reduce_scatter", 4_000_000, 4_000_000, 0.75),
    ("reduce_scatter_single", 4_000_000, 4_000_000, 0.75),
    ("all_to_all_single", 4_000_000, 4_000_000, 0.75),
    ("gather", 1_000_000, 4_000_000, 0.75),
    ("broadcast", 4_000_000, 4_000_000, 1.0),
    ("reduce", 4_000_000, 4_000_000, 1.0),
]


@pytest.mark.parametrize(("op", "given", "size", "factor"), CASES, ids=[case[0] for case in CASES])
def test_size_and_factor_of_each_op(tmp_path, op, given, size, factor):
    job = Job(tmp_path, ranks=4)
    job.collective(op, size=given, root=0, start_ns=0, end_ns=2 * MS)
    found = only(job)
    assert found.size_bytes == size
    assert found.algorithm_bandwidth == pytest.approx(2e9)  # 4 MB in 2 ms
    assert found.bus_bandwidth == pytest.approx(2e9 * factor)


def test_of_a_scatter_only_the_root_hands_over_the_whole(tmp_path):
    job = Job(tmp_path, ranks=4)
    whole, part = (tensor(1_000_000),) * 4, (tensor(1_000_000),)
    job.collective("scatter", ranks=[0], root=0, inputs=whole, outputs=part, start_ns=0, end_ns=2 * MS)
    job.collective("scatter", ranks=[1, 2, 3], root=0, inputs=(), outputs=part, start_ns=0, end_ns=2 * MS)
    assert only(job).bus_bandwidth == pytest.approx(1.5e9)  # 3/4 * 4 MB in 2 ms


def test_the_time_begins_with_the_last_call_and_ends_with_the_last_rank(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=1000, start_ns={0: 0, 1: 5 * MS}, end_ns={0: 6 * MS, 1: 9 * MS})
    assert only(job).duration_ns == 4 * MS


def test_a_message_is_there_when_its_recv_ends(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.recv(1, 0, size=3000, start_ns=0, end_ns=4 * MS)
    job.send(0, 1, size=3000, start_ns=1 * MS, end_ns=None, by=NOT_OBSERVED)
    found = only(job)
    assert (found.ranks, found.duration_ns) == (2, 3 * MS)
    assert found.bus_bandwidth == found.algorithm_bandwidth == pytest.approx(1e6)


def test_what_has_none_says_why(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.group("alone", [1])
    job.collective("barrier")
    job.collective("all_reduce", size=8, group="alone")
    job.collective("all_to_all_single", size=9, splits=(2, 3, 4))
    job.collective("all_reduce", size=8, start_ns=30, end_ns=20)
    job.collective("all_reduce", size=8, ranks=[0, 1], end_ns=None)
    assert set(bandwidths(job.load()).left_out) == {
        "barrier: nccl-tests define no bandwidth for it",
        "all_reduce: on one rank nothing travels",
        "all_to_all_single: nccl-tests define it for parts of equal size only",
        "all_reduce: its end was not observed, or lies before its start",
        "all_reduce: it failed, or not every rank's call is here",
    }


def test_a_rank_whose_file_is_lost_may_have_been_the_last(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=8)
    (operation,) = operations(job.load(without=[2]))
    with pytest.raises(DlearnError, match="not every rank's call is here"):
        bandwidth(operation)


def test_the_table_counts_equal_operations_and_shows_the_median(tmp_path):
    job = Job(tmp_path, ranks=4)
    for i, duration in enumerate((2, 4, 90)):
        job.collective("all_reduce", size=4_000_000, start_ns=i * 100 * MS, end_ns=(i * 100 + duration) * MS)
    job.collective("barrier", start_ns=400 * MS, end_ns=401 * MS)
    table = bandwidths(job.load())
    assert str(table).splitlines() == [
        "op          ranks         size  times  median time      algbw      busbw",
        "all_reduce      4  4,000,000 B      3      4.00 ms  1.00 GB/s  1.50 GB/s",
        "not here: 1 × barrier: nccl-tests define no bandwidth for it",
    ]
    assert "1.50 GB/s" in table._repr_html_()


def test_one_shows_itself(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=4_000_000, start_ns=0, end_ns=2 * MS)
    assert str(only(job)) == "all_reduce of 4.00 MB on 2 ranks: 2.00 ms, algbw 2.00 GB/s, busbw 2.00 GB/s"


def test_a_dot_is_the_median_and_its_bar_the_spread(tmp_path):
    """4 MB on 4 ranks in 2, 4 and 8 ms: busbw is 3, 1.5 and 0.75 GB/s; of 4 kB in 2 ms 3 MB/s."""
    job = Job(tmp_path, ranks=4)
    for i, (size, duration) in enumerate([(4_000_000, 2), (4_000_000, 4), (4_000_000, 8), (4_000, 2)]):
        job.collective("all_reduce", size=size, start_ns=i * 100 * MS, end_ns=(i * 100 + duration) * MS)
    job.collective("barrier", start_ns=900 * MS, end_ns=901 * MS)
    ax = draw.bandwidth(job.load())
    (line,) = ax.lines
    assert [*line.get_xdata()] == [4_000, 4_000_000]
    assert [*line.get_ydata()] == pytest.approx([3e6, 1.5e9])
    (bars,) = ax.collections
    ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
    assert ends == [pytest.approx([3e6, 3e6]), pytest.approx([0.75e9, 3e9])]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    title = " ".join(ax.get_title(loc="left").split())
    assert title == "all_reduce on 4 ranks reaches 1.50 GB/s at 4.00 MB, 3.00 MB/s at 4.00 kB"
    assert "Not here: 1 × barrier: nccl-tests define no bandwidth for it." in ax.get_label()


def test_an_op_has_the_colour_that_it_has_in_all_pictures(tmp_path):
    job = Job(tmp_path, ranks=2)
    for at, op in enumerate(("broadcast", "all_reduce", "all_gather")):
        job.collective(op, size=4000, root=0 if op == "broadcast" else None, start_ns=at * MS, end_ns=(at + 1) * MS)
    lines = {line.get_gid().split()[0]: line for line in draw.bandwidth(job.load()).lines}
    assert {op: line.get_color() for op, line in lines.items()} == {op: look(op).line for op in lines}
    # The two blues: one is hatched in bars, and open here.
    assert lines["all_gather"].get_markerfacecolor() == "white" != lines["all_reduce"].get_markerfacecolor()


def test_a_trace_without_bandwidths_says_so(tmp_path):
    trace = Job(tmp_path, ranks=2).load()
    assert str(bandwidths(trace)).splitlines()[1:] == []
    ax = draw.bandwidth(trace)
    assert ax.texts[0].get_text() == "Nothing in this trace has a bandwidth."


def test_an_operation_of_no_bytes_has_no_place_on_logarithmic_axes(tmp_path):
    job = Job(tmp_path, ranks=2)
    for at, size in enumerate((0, 4000)):
        job.collective("all_reduce", size=size, start_ns=10_000 * at, end_ns=10_000 * at + 2000)
    ax = draw.bandwidth(job.load())
    (line,) = ax.lines
    assert list(line.get_xdata()) == [4000]
    told = [text.get_text() for text in ax.texts]
    assert "Not here: 1 kind of operations in which nothing travels." in told
