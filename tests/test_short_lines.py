"""Events that are like one before: short lines in the file, the same events when it is read."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import all_events, header

from dlearn.trace.event import (
    NOT_OBSERVED,
    REFUSED,
    Collective,
    End,
    Gradient,
    PointToPoint,
    Span,
    Stretch,
    TensorInfo,
)
from dlearn.trace.store import read
from dlearn.trace.writer import Writer

TENSORS = (TensorInfo((2, 4), "float32", "cpu", 32, 32),)
SEND = {"op": "send", "group": "0", "peer": 1, "tag": 0, "tensors": TENSORS, "site": "train.py:14"}
REDUCE = {"op": "all_reduce", "group": "0", "inputs": TENSORS, "phase": "backward", "launcher": "reducer"}


def write(folder: Path, steps: list[tuple[Any, ...]], *, at_length: bool = False) -> Path:
    """A file with these events, (kind, facts), and ends, (number, at_ns, by); `at_length`: each with all its fields."""
    path = folder / f"host-{at_length:d}.jsonl"
    writer = Writer(path, max_bytes=1 << 20)
    writer.write(header())
    for step in steps:
        if len(step) == 2:
            kind, facts = step
            writer.write(kind(**facts)) if at_length else writer.event(kind, dict(facts))
        else:
            number, at_ns, by, *rest = step
            facts = {"error": "", **(rest[0] if rest else {})}
            if at_length:
                writer.write(End(event=number, at_ns=at_ns, by=by, **facts))
            else:
                writer.end(number, at_ns=at_ns, by=by, **facts)
    writer.finish(at_ns=10**6)
    return path


def short_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines() if line.startswith(b"[")]


def test_a_program_that_says_the_same_again_writes_numbers_only(tmp_path):
    steps: list[tuple[Any, ...]] = []
    for number in range(3):
        steps.append((PointToPoint, {**SEND, "number": number, "start_ns": 10 * number, "seq": number + 1}))
        steps.append((number, 10 * number + 5, "wait"))
    path = write(tmp_path, steps)
    assert short_lines(path) == [b"[0,5,1]", b"[0,1,10,-1,2,-1]", b"[1,15,1]", b"[0,2,20,-1,3,-1]", b"[2,25,1]"]
    events = all_events(read(path))
    assert events == all_events(read(write(tmp_path, steps, at_length=True)))
    assert [(each.number, each.start_ns, each.end_ns, each.ended_by, each.tensors) for each in events] == [
        (0, 0, 5, "wait", TENSORS),
        (1, 10, 15, "wait", TENSORS),
        (2, 20, 25, "wait", TENSORS),
    ]


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    steps: list[tuple[Any, ...]] = []
    running: list[tuple[int, int]] = []
    time = draw(st.integers(-(10**17), 10**17))
    numbers = draw(st.lists(st.integers(0, 2**53), unique=True, max_size=30))
    for seq, number in enumerate(numbers):
        time += draw(st.integers(0, 10**6))
        common: dict[str, Any] = {"number": number, "start_ns": time}
        if draw(st.booleans()):
            common["parent"] = draw(st.sampled_from([None, 0, 7, number]))
        backward = draw(st.sampled_from([None, 0, 3]))
        kind, facts = draw(
            st.sampled_from(
                [
                    (PointToPoint, {**SEND, "seq": seq}),
                    (PointToPoint, {**SEND, "seq": seq, "op": "recv", "peer": None, "tag": -1}),
                    (PointToPoint, {**SEND, "seq": seq, "checksum": seq}),
                    (Collective, {**REDUCE, "seq": seq, "backward": backward}),
                    (Collective, {**REDUCE, "seq": seq, "thread": "one of gloo's"}),
                    (Gradient, {"model": 0, "parameter": "fc.weight", "bytes": 8, "backward": backward}),
                    (Stretch, {"phase": "forward"}),
                    (Span, {"name": "step 3"}),
                ]
            )
        )
        steps.append((kind, common | facts))
        if kind.ends:
            running.append((number, time))
        while running and draw(st.booleans()):
            over, begun = running.pop(draw(st.integers(0, len(running) - 1)))
            by = draw(st.sampled_from(["callback", "wait", "return", NOT_OBSERVED, REFUSED, "by hand"]))
            more = draw(st.sampled_from([{}, {}, {"error": "RuntimeError"}, {"peer": 2, "tag": 5}, {"peer": None}]))
            steps.append((over, begun + draw(st.integers(0, 10**6)), by, more))
    return steps


@settings(max_examples=200, deadline=None)
@given(programs())
def test_short_or_at_length_the_events_are_the_same(tmp_path_factory, steps):
    folder = tmp_path_factory.mktemp("trace")
    short, long = read(write(folder, steps)), read(write(folder, steps, at_length=True))
    assert short.problems == long.problems == []
    assert all_events(short) == all_events(long)
    assert short.event_count == len(all_events(long))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"[9,5,10,-1,2,-1]", "like event 9, which is not in the file"),
        (b"[1,5,10,-1,2,-1]", "like event 1, which is not in the file"),  # It is there, but as a short line itself.
        (b"[0,1,10,-1,2,-1]", "event 1 a second time"),
        (b"[0,0,10,-1,2,-1]", "event 0 a second time"),
        (b"[0,-5,10,-1,2,-1]", "a number below 0"),
        (b"[0,5,10,-2,2,-1]", "a number below 0"),
        (b"[7,15,1]", "the end of event 7, which is not in the file"),
        (b"[0,15,1]", "the end of event 0 a second time"),
        (b"[1,15,1]", "the end of event 1 a second time"),
        (b"[1,9,1]", "event 1 ends before it starts"),
        (b"[1,15,5]", "a line of numbers"),
        (b"[1,15,-1]", "a line of numbers"),
        (b"[1,1x,1]", "a line of numbers"),
        (b"[1,,1]", "a line of numbers"),
        (b"[1,1234567890123456789,1]", "a line of numbers"),
        (b"[1,15]", "a line of numbers"),
        (b"[]", "a line of numbers"),
        (b"[1,15,1", "a line of numbers"),
        (b"[", "a line of numbers"),
    ],
)
def test_a_damaged_short_line_is_named_and_costs_no_other(tmp_path, line, told):
    ends_again = told.startswith("event 1 ends")
    path = write(
        tmp_path,
        [
            (PointToPoint, {**SEND, "number": 0, "start_ns": 0, "seq": 1}),
            (0, 5, "wait"),
            (PointToPoint, {**SEND, "number": 1, "start_ns": 10, "seq": 2}),
            *([] if ends_again else [(1, 15, "wait")]),
        ],
    )
    *lines, footer = path.read_bytes().splitlines(keepends=True)
    footer = footer.replace(b'"lines":%d' % len(lines), b'"lines":%d' % (len(lines) + 1))
    path.write_bytes(b"".join([*lines, line + b"\n", footer]))
    file = read(path)
    assert len(file.problems) == 1
    assert f"one damaged line was left out (line {len(lines) + 1}" in file.problems[0]
    assert told in file.problems[0]
    assert [each.number for each in all_events(file)] == [0, 1]
    assert not any(each.pending for each in all_events(file))


def test_what_is_told_at_an_end_only_changes_no_event_that_is_like_it(tmp_path):
    receive = {**SEND, "op": "recv", "peer": None, "tag": -1}
    path = write(
        tmp_path,
        [
            (PointToPoint, {**receive, "number": 0, "start_ns": 0, "seq": 1}),
            (0, 5, "wait", {"peer": 2, "tag": 9}),
            (PointToPoint, {**receive, "number": 1, "start_ns": 10, "seq": 2}),
            (1, 15, "wait", {"peer": 0, "tag": 4}),
            (PointToPoint, {**receive, "number": 2, "start_ns": 20, "seq": 3}),
        ],
    )
    assert len(short_lines(path)) == 2
    assert [(each.peer, each.tag, each.end_ns) for each in all_events(read(path))] == [
        (2, 9, 5),
        (0, 4, 15),
        (None, -1, None),
    ]


def test_an_event_that_found_no_room_is_none_that_others_are_like(tmp_path):
    writer = Writer(tmp_path / "host-1.jsonl", max_bytes=0)
    writer.write(header())
    for number in range(2):
        writer.event(PointToPoint, {**SEND, "number": number, "start_ns": number, "seq": number})
    writer.finish(at_ns=9)
    assert short_lines(writer.path) == []
    assert read(writer.path).problems == ["host-1.jsonl: 2 lines were not written (size limit)"]


def test_events_of_a_file_without_its_end_do_not_hang_where_lines_are_lost(tmp_path):
    steps: list[tuple[Any, ...]] = [
        (PointToPoint, {**SEND, "number": number, "start_ns": number, "seq": number}) for number in range(3)
    ]
    path = write(tmp_path, steps)
    assert all(each.pending for each in all_events(read(path)))
    path.write_bytes(path.read_bytes().replace(b"[0,1,1,-1,1,-1]\n", b""))
    lost = all_events(read(path))
    assert [(each.number, each.ended_by) for each in lost] == [(0, NOT_OBSERVED), (2, NOT_OBSERVED)]
