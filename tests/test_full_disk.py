"""A disk that fills up while a job is recorded: the job's results come back, and the trace says what is not in it.
(The kernel's limit on the size of a file refuses what is written in the same way.)"""

import resource
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from traces import header

from dlearn import Cluster, Trace
from dlearn.events.event import Span
from dlearn.events.writer import Writer

ROOM = 20_000
"""Bytes that a file may have."""


@contextmanager
def full_disk(room):
    """No file of this process gets larger than `room`."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def reduce_on_a_full_disk(times: int) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, ROOM))
    for _ in range(times):
        dist.all_reduce(torch.ones(1))
    return "done"


def test_a_full_disk_costs_no_result_and_the_trace_says_how_much_is_not_in_it(own_folder):
    run = Cluster(2).run(reduce_on_a_full_disk, 800, timeout=60)
    assert run.results == {0: "done", 1: "done"}
    for rank, process in enumerate(run.trace.processes):
        # Each call has a line for its begin and one for its end, and there are others.
        assert process.footer.lines + process.footer.not_written > 1600
        assert process.path.stat().st_size <= ROOM
        told = f"{process.footer.not_written:,} lines were not written (the system refused them: EFBIG)"
        assert f"{process.path.name}: {told}" in run.trace.problems
        assert run.output[rank].count("could not be written") == 1


def test_the_footer_takes_the_place_of_the_last_lines_but_not_of_the_header(tmp_path):
    writer = Writer(tmp_path / "host-1.jsonl", max_bytes=1 << 20)
    writer.write(header(world_size=1))
    alone = Writer(tmp_path / "alone" / "host-1.jsonl", max_bytes=1 << 20)
    alone.write(header(world_size=1))
    with full_disk(alone.path.stat().st_size), pytest.raises(OSError, match="File too large"):
        alone.finish(at_ns=1000)
    assert Trace.load(tmp_path / "alone").processes[0].footer is None
    with full_disk(5_000):
        for number in range(100):
            try:
                writer.write(Span(number=number, start_ns=number, name="step"))
            except OSError:
                break
        written = writer.lines
        writer.finish(at_ns=1000)
    trace = Trace.load(tmp_path)
    footer = trace.processes[0].footer
    # The header is a line, too; what was given up for the footer counts as not written, as the one that was refused.
    assert len(trace.events) == footer.lines - 1 < written - 1
    assert footer.lines + footer.not_written == written + 1
    told = f"host-1.jsonl: {footer.not_written} lines were not written (the system refused them: EFBIG)"
    assert trace.problems == (told,)
