"""Algorithm and bus bandwidth, as nccl-tests define them."""

import pytest
from traces import Job, tensor

from dlearn import operations
from dlearn.analysis import bandwidth, bandwidths
from dlearn.events.event import NOT_OBSERVED

MS = 1_000_000

# op -> what each of 4 ranks hands over, and busbw / algbw. The size is that of the whole: of 4 blocks of 1 MB that are
# gathered 4 MB, as of the 4 MB that are scattered.
CASES = {
    "all_reduce": (4_000_000, 1.5),  # 2 * 3/4
    "all_reduce_coalesced": (4_000_000, 1.5),
    "all_gather": (1_000_000, 0.75),  # 3/4
    "all_gather_single_coalesced": (1_000_000, 0.75),
    "reduce_scatter": (4_000_000, 0.75),
    "reduce_scatter_single": (4_000_000, 0.75),
    "all_to_all_single": (4_000_000, 0.75),
    "gather": (1_000_000, 0.75),
    "broadcast": (4_000_000, 1.0),
    "reduce": (4_000_000, 1.0),
}


def test_size_and_factor_of_each_op(tmp_path):
    job = Job(tmp_path, ranks=4)
    for number, (op, (given, _)) in enumerate(CASES.items()):
        at = 10 * number * MS
        job.collective(op, size=given, root=0, start_ns=at, end_ns=at + 2 * MS)
    whole, part = (tensor(1_000_000),) * 4, (tensor(1_000_000),)
    times = {"start_ns": 900 * MS, "end_ns": 902 * MS, "root": 0, "outputs": part}
    job.collective("scatter", ranks=[0], inputs=whole, **times)
    job.collective("scatter", ranks=[1, 2, 3], inputs=(), **times)
    found = {each.op: bandwidth(each) for each in operations(job.load())}
    for op, (_, factor) in {**CASES, "scatter": (0, 0.75)}.items():
        assert found[op].size_bytes == 4_000_000
        assert found[op].algorithm_bandwidth == pytest.approx(2e9)  # 4 MB in 2 ms
        assert found[op].bus_bandwidth == pytest.approx(2e9 * factor), op


def test_the_time_begins_with_the_last_call_and_ends_with_the_last_rank_or_the_recv(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=1000, start_ns={0: 0, 1: 5 * MS}, end_ns={0: 6 * MS, 1: 9 * MS})
    job.recv(1, 0, size=3000, start_ns=10 * MS, end_ns=14 * MS)
    job.send(0, 1, size=3000, start_ns=11 * MS, end_ns=None, by=NOT_OBSERVED)
    reduced, sent = map(bandwidth, operations(job.load()))
    assert (reduced.duration_ns, sent.duration_ns) == (4 * MS, 3 * MS)
    assert sent.bus_bandwidth == sent.algorithm_bandwidth == pytest.approx(1e6)


def test_equal_operations_share_a_row_and_what_has_none_says_why(tmp_path):
    """4 MB on 4 ranks in 2, 4 and 8 ms: busbw is 3, 1.5 and 0.75 GB/s; of 4 kB in 2 ms 3 MB/s."""
    job = Job(tmp_path, ranks=4)
    for i, (size, duration) in enumerate([(4_000_000, 2), (4_000_000, 4), (4_000_000, 8), (4_000, 2), (0, 2)]):
        job.collective("all_reduce", size=size, start_ns=i * 100 * MS, end_ns=(i * 100 + duration) * MS)
    job.collective("barrier", start_ns=900 * MS, end_ns=901 * MS)
    trace = job.load()
    table = str(bandwidths(trace)).splitlines()
    assert "all_reduce      4  4,000,000 B      3      4.00 ms  1.00 GB/s  1.50 GB/s" in table
    assert "not here: 1 × barrier: nccl-tests define no bandwidth for it" in table
