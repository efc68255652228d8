"""The trace file: what is written is there, whatever happens next; what is damaged is named, the rest is read."""

import os
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from traces import header, tensor

from dlearn import Event, Trace
from dlearn.errors import TraceError
from dlearn.events.event import FORMAT, AutogradRun, Footer, PointToPoint, Span
from dlearn.events.writer import MAX_LINE_BYTES, Writer

PAGE = (Path(__file__).parents[1] / "docs" / "trace-file.md").read_text()
SEND = {"op": "send", "group": "0", "peer": 1, "tag": 0, "tensors": (tensor(32),), "site": "train.py:14"}


def events(folder: Path) -> list[Event]:
    return sorted(Trace.load(folder).events, key=attrgetter("number"))


def write(folder: Path) -> Path:
    """Header, two sends and their ends, a span without an end, footer; the second send is a short line."""
    writer = Writer(folder / "host-1.jsonl", max_bytes=1 << 20)
    writer.write(header())
    for number in range(2):
        writer.event(PointToPoint, {**SEND, "number": number, "start_ns": 10 * number, "seq": number + 1})
        writer.end(number, at_ns=10 * number + 5, by="wait", error="")
    writer.event(Span, {"number": 2, "start_ns": 20, "name": "step 0"})
    writer.finish(at_ns=10**6)
    return writer.path


def short_lines(path: Path) -> list[bytes]:
    return [line for line in path.read_bytes().splitlines() if line.startswith(b"[")]


def test_its_examples_are_a_trace_and_its_program_reads_them(own_folder, capsys):
    (head, foot), event, short = (block.splitlines() for block in re.findall(r"```json\n(.*?)```", PAGE, re.S))
    path = Path("traces/ddp/node1-4711.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text("\n".join([head, *event, *short, foot.replace("1200", "5")]) + "\n")
    trace = Trace.load(path.parent)
    assert (trace.processes[0].complete, trace.processes[0].header.format) == (True, FORMAT)
    one, other = events(path.parent)
    assert (one.number, one.ended_by, other.ended_by) == (41, "callback", "callback")
    assert (other.number, other.parent, other.seq, other.backward, other.end_ns) == (97, 96, 8, 2, 93482935107315)
    assert other.inputs == one.inputs
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {}
    exec(program, names)  # The page's own program.
    assert capsys.readouterr().out == "2 events\n"
    mine = [(each.number, each.start_ns, each.parent, each.seq) for each in (one, other)]
    assert [(each["number"], each["start_ns"], each["parent"], each["seq"]) for each in names["found"]] == mine


def test_each_line_is_in_the_file_as_soon_as_it_is_written_and_none_after_closing(tmp_path):
    writer = Writer(tmp_path / "host-1.jsonl", max_bytes=1 << 20)
    writer.write(header())
    for number in range(100):
        writer.write(Span(number=number, start_ns=number, name="step"))
    trace = Trace.load(tmp_path)  # As of a process that was killed now.
    assert [event.pending for event in trace.events] == [True] * 100
    assert (trace.problems, trace.processes[0].closed) == ((), False)
    writer.close()
    writer.close()
    writer.write(Footer(at_ns=1, lines=101))
    assert not Trace.load(tmp_path).processes[0].closed


@pytest.mark.parametrize("max_bytes", [0, 500])
def test_what_the_size_limit_keeps_out_is_counted_and_said(tmp_path, max_bytes):
    writer = Writer(tmp_path / "host-1.jsonl", max_bytes=max_bytes)
    writer.write(header())
    for number in range(20):
        writer.write(Span(number=number, start_ns=number, name="x" * 60))
    writer.end(0, at_ns=50, by="return", error="")  # Shorter than what is left, but its event may be out already.
    for number in (20, 21):
        writer.event(PointToPoint, {**SEND, "number": number, "start_ns": number, "seq": number})
    writer.finish(at_ns=99)
    trace = Trace.load(tmp_path)
    kept = len(trace.events)
    assert 0 < kept < 20 if max_bytes else kept == 0
    assert trace.problems == (f"host-1.jsonl: {23 - kept} lines were not written (size limit)",)
    assert short_lines(writer.path) == []
    assert not any(event.pending for event in trace.events), "an end may be among the lines that were kept out"


def test_a_program_that_says_the_same_again_writes_numbers_only(tmp_path):
    path = write(tmp_path)
    assert short_lines(path) == [b"[0,5,1]", b"[0,1,10,-1,2]", b"[1,15,1]"]
    found = [(each.number, each.start_ns, each.end_ns, each.ended_by) for each in events(tmp_path)]
    assert found == [(0, 0, 5, "wait"), (1, 10, 15, "wait"), (2, 20, None, "")]


def test_contexts_of_workers_with_large_ids_are_read(tmp_path):
    writer = Writer(tmp_path / "host-1.jsonl", max_bytes=1 << 20, header=header())
    contexts = [(worker << 48) + 1 for worker in (32, 33, 2**15 - 1)]  # torch's ids have 16 bits.
    for number, context in enumerate(contexts):
        writer.event(AutogradRun, {"number": number, "start_ns": 0, "context": context, "node": 1})
    assert len(short_lines(writer.path)) == 1
    assert [each.context for each in events(tmp_path)] == contexts


SPAN = b'{"kind":"span","number":7,"start_ns":9,"name":"x"'
ODD_GROUP = b'{"kind":"group","name":"odd","backend":"gloo",'


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"{not json}", "JSON is malformed"),
        (b'{"kind":"rumour"}', "Invalid value 'rumour'"),
        (SPAN.replace(b"7", b"-1") + b"}", "Expected `int` >= 0"),
        (SPAN.replace(b"7", b"9" * 5000) + b"}", ""),
        (SPAN + b',"end_ns":3}', "event 7 ends before it starts"),
        (b"[" * 100_000, "a line of numbers"),
        (b"x" * (10 << 20), "is longer than 1,048,576 bytes"),
        (b'{"kind":"end","event":99,"by":"wait"}', "the end of event 99, which is not in the file"),
        (b'{"kind":"end","event":2,"by":"wait","at_ns":-5}', "event 2 ends before it starts"),
        (msgspec.json.encode(header()), "a second header"),
        (ODD_GROUP + b'"rank":0,"size":2,"ranks":[0,1,2]}', "group 'odd'"),
        (ODD_GROUP + b'"rank":0,"size":1048576}', "group 'odd' has 1,048,576 members and does not say which"),
        (b"[1,5,10,-1,2]", "like event 1, which is not in the file"),  # It is there, but as a short line itself.
        (b"[0,1,10,-1,2]", "event 1 a second time"),
        (b"[0,-5,10,-1,2]", "a number below 0"),
        (b"[7,15,1]", "the end of event 7, which is not in the file"),
        (b"[2,9,1]", "event 2 ends before it starts"),
        (b"[0,5,10,-1,2,7]", "not the numbers of an event like event 0"),
        *[(line, "a line of numbers") for line in (b"[2,35,8]", b"[2,1x,1]", b"[2,15]", b"[]", b"[2,25,1")],
    ],
    ids=range(23),
)
def test_a_damaged_line_is_named_and_costs_no_other(tmp_path, line, told):
    path = write(tmp_path)
    *lines, footer = path.read_bytes().splitlines(keepends=True)
    footer = footer.replace(b'"lines":%d' % len(lines), b'"lines":%d' % (len(lines) + 1))
    path.write_bytes(b"".join([*lines, line + b"\n", footer]))
    trace = Trace.load(tmp_path)
    (problem,) = trace.problems
    assert "one damaged line was left out (line " in problem
    assert told in problem
    assert problem.isprintable()
    assert [(each.number, each.end_ns) for each in events(tmp_path)] == [(0, 5), (1, 15), (2, None)]
    assert not any(each.pending for each in trace.events), "the line may have been an end"
    assert (trace.processes[0].complete, trace.processes[0].closed) == (False, True)


def test_any_single_line_that_is_lost_is_noticed_and_nothing_hangs(tmp_path):
    path = write(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert [each.pending for each in events(tmp_path)] == [False, False, True]
    for lost in range(1, len(lines) - 1):
        path.write_bytes(b"".join([*lines[:lost], *lines[lost + 1 :]]))
        trace = Trace.load(tmp_path)
        assert f"1 of {len(lines)} lines are lost" in trace.problems[-1]
        assert not trace.processes[0].complete
        assert not any(each.pending for each in trace.events)


def test_a_last_line_that_is_cut_off_and_a_second_footer(tmp_path):
    path = write(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    (problem,) = Trace.load(tmp_path).problems
    assert problem == "host-1.jsonl: one damaged line was left out (line 7, the last, is cut off)"
    assert (len(events(tmp_path)), Trace.load(tmp_path).processes[0].closed) == (3, False)
    path.write_bytes(whole + whole.splitlines(keepends=True)[-1])
    assert "line 8: a second footer" in Trace.load(tmp_path).problems[0]


def test_a_header_is_needed(tmp_path):
    for content, told in (
        (b"x" * (10 << 20), "no trace"),
        (b'{"kind":"header","format":4}\n', "no trace header"),
        (b"[" * 100_000, "no trace header"),
        (b'{"kind":"header","format":1,"dlearn":"0.0","old":1}\n', "format 1; this dlearn reads formats 4 and 6."),
        (b'{"kind":"header","format":7,"dlearn":"9.9","news":1}\n', "written by dlearn 9.9: use that version."),
    ):
        (tmp_path / "x.jsonl").write_bytes(content)
        with pytest.raises(TraceError, match=r"x\.jsonl, line 1: ") as error:
            Trace.load(tmp_path)
        assert told in str(error.value)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_folder_and_a_pipe_are_no_files(tmp_path, make):
    write(tmp_path)
    make(tmp_path / "odd.jsonl")  # A pipe would be waited for if it were opened.
    with pytest.raises(TraceError, match=r"odd\.jsonl is no file"):
        Trace.load(tmp_path)


def test_every_string_fits_on_one_line_and_moves_no_cursor(tmp_path):
    name = "\x1b[2J \u202egnikcirt \ud7a3 <b> étape, two\nlines\r\b\t"
    told = "\\x1b[2J \\u202egnikcirt \ud7a3 <b> étape, two\\nlines\\r\\x08\\t"
    writer = Writer(tmp_path / "host-1.jsonl", max_bytes=1 << 30)
    writer.write(header(name=name))
    writer.write(Span(number=0, start_ns=0, name=name, thread=name))
    trace = Trace.load(tmp_path)
    (span,) = trace.events
    assert (trace.processes[0].header.name, span.name, span.thread) == (told, told, told)


def test_a_line_among_thousands_is_named_by_its_number(tmp_path):
    """Lines are read in blocks: damage, odd names and contradictions are found in any of them, wherever it is cut."""
    start = len(b'{"kind":"span","number":0,"start_ns":0,"name":""}\n')
    longest = "x" * (MAX_LINE_BYTES - start)
    names = [longest, *("étape" if number == 6000 else "x" * (number % 97) for number in range(1, 8000))]
    writer = Writer(tmp_path / "host-1.jsonl", max_bytes=1 << 30)
    writer.write(header())
    for number, name in enumerate(names):
        writer.write(Span(number=number, start_ns=min(number, 9), name=name))
    path = writer.path
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3999] = b'{"kind":"end","event":1,"by":"return"}{"kind":"end","event":2,"by":"return"}\n'
    lines[4999] = b'{"kind":"span",\n"number":9999,"start_ns":0,"name":"x"}\n'
    lines[7002] = lines[1].replace(b'"number":0', b'"number":9001').replace(b"xx", b"xxx", 1)  # One byte too long.
    lines[7500] = b'{"kind":"span","number":9000,"start_ns":0,"name":"\\u001b"}\n'
    path.write_bytes(b"".join([*lines, b'{"kind":"span","number":1,"start_ns":0,"name":"x"}\n']))
    (told,) = Trace.load(tmp_path).problems
    assert all(text in told for text in ("5 damaged lines", "line 4000:", "line 5000:", "line 5001:"))
    found = {event.number: event.name for event in events(tmp_path)}
    assert [found[number] for number in (0, 96, 6000, 9000)] == [longest, "x" * 96, "étape", "\\x1b"]
    assert 9001 not in found
