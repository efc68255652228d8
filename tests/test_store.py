"""The trace file: what is written is there, whatever happens next; what is damaged is named, the rest is read."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from traces import Job, header

from dlearn.errors import TraceError
from dlearn.trace.event import NOT_OBSERVED, Collective, End, Footer, GroupFact, Header, PointToPoint, Span
from dlearn.trace.printable import printable
from dlearn.trace.store import ProcessFile, read
from dlearn.trace.writer import MAX_LINE_BYTES, Writer


def good_file(folder: Path) -> Path:
    """Seven lines: header, group, two events with their ends, footer."""
    job = Job(folder, ranks=1)
    job.collective("all_reduce", size=8, ranks=[0])
    job.span(0, "step 0")
    return job.write()[0]


def written(path: Path, *lines: object) -> ProcessFile:
    """A file of these lines, read; without a footer if none is among them."""
    writer = Writer(path, max_bytes=1 << 30)
    for line in lines:
        writer.write(line)
    writer.close()
    return read(path)


def change(path: Path, line: int, to: bytes | None) -> Path:
    """Replace line number `line` (from 1); None deletes it."""
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line - 1 : line] = [] if to is None else [to]
    path.write_bytes(b"".join(lines))
    return path


def test_what_is_written_is_read_back(tmp_path):
    file = read(good_file(tmp_path))
    assert (file.header.job, file.header.rank, file.problems, file.complete) == ("job", 0, [], True)
    call, span = file.events.values()
    assert isinstance(call, Collective)
    assert (call.op, call.start_ns, call.end_ns, call.ended_by, call.inputs[0].payload_bytes) == (
        "all_reduce", 10, 20, "return", 8,
    )  # fmt: skip
    assert isinstance(span, Span)
    assert file.footer == Footer(at_ns=1000, lines=6)


def in_a_process(program: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_a_killed_process_leaves_every_line_that_it_wrote(tmp_path):
    path = tmp_path / "host-1.jsonl"
    program = f"""
import os, signal
from pathlib import Path
from traces import header
from dlearn.trace.event import Span
from dlearn.trace.writer import Writer
writer = Writer(Path({str(path)!r}), max_bytes=1 << 20)
writer.write(header())
for number in range(100):
    writer.write(Span(number=number, start_ns=number, name="step"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert in_a_process(program).returncode == -signal.SIGKILL
    file = read(path)
    assert (len(file.events), file.problems, file.footer) == (100, [], None)
    assert all(event.pending for event in file.events.values())


@pytest.mark.parametrize("max_bytes", [0, 500])
def test_what_the_size_limit_keeps_out_is_counted_and_said(tmp_path, max_bytes):
    path = tmp_path / "host-1.jsonl"
    writer = Writer(path, max_bytes=max_bytes)
    writer.write(header())
    for number in range(20):
        writer.write(Span(number=number, start_ns=number, name="x" * 60))
    writer.write(End(event=0, at_ns=50, by="return"))  # shorter than what is left, but its event may be out already
    writer.write(Footer(at_ns=99, lines=writer.lines, not_written=writer.not_written))
    writer.close()
    file = read(path)
    written = len(file.events)
    assert (written > 0) == (max_bytes > 0)
    assert written < 20
    assert file.problems == [f"host-1.jsonl: {21 - written} lines were not written (size limit)"]
    # The end may be among the lines that were kept out: nothing hangs.
    assert not any(event.pending for event in file.events.values())


def test_a_full_disk_costs_one_line_and_not_the_next(tmp_path):
    """The kernel takes a part of the line, as on a full disk; later there is room again."""
    path = tmp_path / "host-1.jsonl"
    program = f"""
import resource, signal
from pathlib import Path
from traces import header
from dlearn.trace.event import Footer, Span
from dlearn.trace.writer import Writer
path = Path({str(path)!r})
writer = Writer(path, max_bytes=1 << 20)
writer.write(header())
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, most))
try:
    writer.write(Span(number=0, start_ns=0, name="half of it"))
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
writer.write(Span(number=1, start_ns=1, name="whole"))
writer.write(Footer(at_ns=2, lines=writer.lines, not_written=writer.not_written))
"""
    assert in_a_process(program).stdout == "No space left on device\n"
    file = read(path)
    assert [event.name for event in file.events.values()] == ["whole"]
    assert file.footer is not None
    assert file.footer.not_written == 1


def test_a_closed_writer_writes_nothing(tmp_path):
    writer = Writer(tmp_path / "host-1.jsonl", max_bytes=1000)
    writer.close()
    writer.close()
    writer.write(header())
    assert (tmp_path / "host-1.jsonl").read_bytes() == b""


@pytest.mark.parametrize(
    ("line", "to", "told"),
    [
        (3, b"{not json}\n", "2 damaged lines were left out (line 3: JSON is malformed"),
        (3, b"\x00\xff\xfe\n", "line 3"),
        (3, b'{"kind":"rumour"}\n', "line 3: Invalid value 'rumour'"),
        (3, b'{"kind":"span","number":-1,"start_ns":0,"name":"x"}\n', "line 3: Expected `int` >= 0"),
        (3, b'{"kind":"span","number":' + b"9" * 5000 + b',"start_ns":0,"name":"x"}\n', "line 3"),
        (3, b'{"kind":"span","number":7,"start_ns":9,"end_ns":3,"name":"x"}\n', "event 7 ends before it starts"),
        (3, b"[" * 100_000 + b"\n", "line 3"),
        (3, b'{"kind":"span","number":7,"start_ns":0,"name":"x","y":' + b"[" * 100_000 + b"}\n", "line 3"),
        (3, b"x" * (10 << 20) + b"\n", "line 3 is longer than 1,048,576 bytes"),
        (4, b'{"kind":"end","event":99,"by":"wait"}\n', "the end of event 99, which is not in the file"),
        (4, b'{"kind":"end","event":0,"by":"wait","at_ns":-5}\n', "event 0 ends before it starts"),
        (5, b'{"kind":"end","event":0,"by":"wait","at_ns":50}\n', "the end of event 0 a second time"),
        (5, b'{"kind":"span","number":0,"start_ns":0,"name":"x"}\n', "event 0 a second time"),
        (5, b'{"kind":"footer","at_ns":0,"lines":6}\n', "a second footer"),
        (5, None, "1 of 7 lines are lost"),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named_and_the_rest_is_read(tmp_path, line, to, told):
    file = read(change(good_file(tmp_path), line, to))
    assert told in "; ".join(file.problems)
    assert not file.complete
    assert file.footer is not None or line == 7
    assert file.events


def test_a_last_line_that_is_cut_off(tmp_path):
    path = good_file(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    file = read(path)
    assert file.problems == ["host-1000.jsonl: one damaged line was left out (line 7, the last, is cut off)"]
    assert (len(file.events), file.footer) == (2, None)


@pytest.mark.parametrize(
    "group",
    [
        {"rank": 2, "size": 2},
        {"rank": 0, "size": 2, "ranks": (0, 1, 2)},
        {"rank": 0, "size": 2, "ranks": (1, 1)},
        {"rank": 0, "size": 1 << 20},
    ],
)
def test_a_group_that_contradicts_itself_is_left_out(tmp_path, group):
    odd = GroupFact(name="odd", backend="gloo", **group)
    file = written(tmp_path / "host-1.jsonl", header(), odd)
    assert "group 'odd'" in file.problems[0]


def test_a_header_is_needed(tmp_path):
    path = tmp_path / "x.jsonl"
    for content, told in [
        (b"", "the file is empty"),
        (b"\x7fELF\x00\x01", "no trace header"),
        (b"x" * (10 << 20), "no trace"),
        (b'{"kind":"span"}\n', "no trace header"),
        (b'{"kind":"header","format":4}\n', "no trace header"),
        (b"[" * 100_000, "no trace header"),
        (b'{"kind":"header","format":' + b"9" * 5000 + b"}\n", "no trace header"),
        (
            b'{"kind":"header","format":1,"dlearn":"0.0","old":1}\n',
            "trace format 1; this dlearn reads formats 4 and 5.",
        ),
        (
            b'{"kind":"header","format":6,"dlearn":"9.9","news":1}\n',
            "trace format 6; this dlearn reads formats 4 and 5.",
        ),
    ]:
        path.write_bytes(content)
        with pytest.raises(TraceError, match=r"x\.jsonl, line 1: ") as error:
            read(path)
        assert told in str(error.value)


def test_a_folder_and_a_pipe_are_no_files(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")  # would be waited for if it were opened
    for name in ("folder.jsonl", "pipe.jsonl"):
        with pytest.raises(TraceError, match=f"{name} is no file"):
            read(tmp_path / name)


def test_an_end_that_nobody_saw_has_no_time(tmp_path):
    """The recorder writes when it gave up; that is not when the message arrived."""
    job = Job(tmp_path, ranks=1)
    job.send(0, 0, by=NOT_OBSERVED, end_ns=500)
    (event,) = read(job.write()[0]).events.values()
    assert (event.end_ns, event.pending) == (None, False)


def test_who_sent_is_known_at_the_end_of_a_recv_from_any_source(tmp_path):
    job = Job(tmp_path, ranks=2)
    number = job.recv(0, None, end_ns=None)
    job.files[0].append(End(event=number, at_ns=30, by="wait", peer=1))
    other = job.recv(0, 0, end_ns=None)  # its source was known from the start: an end does not change it
    job.files[0].append(End(event=other, at_ns=30, by="wait", peer=1))
    first, second = read(job.write()[0]).events.values()
    assert isinstance(first, PointToPoint)
    assert isinstance(second, PointToPoint)
    assert (first.peer, second.peer) == (1, 0)


def test_lost_ends_of_dropped_works_are_said_and_nothing_else_is_doubted(tmp_path):
    file = written(tmp_path / "host-1.jsonl", header(), Footer(at_ns=1, lines=1, works_dropped=3))
    assert file.problems == ["host-1.jsonl: sends and receives whose end was not observed: 3"]
    assert file.complete


def test_every_string_fits_on_one_line_and_moves_no_cursor(tmp_path):
    name = "\x1b[2J two\nlines \u202egnikcirt \ud7a3 <b>"
    odd = Span(number=0, start_ns=0, name=name, thread="\x07")
    file = written(tmp_path / "host-1.jsonl", header(name=name), odd)
    (span,) = file.events.values()
    told = "\\x1b[2J two\\nlines \\u202egnikcirt \ud7a3 <b>"
    assert (file.header.name, span.name, span.thread) == (told, told, "\\x07")
    assert printable("étape 3") == "étape 3"


def test_a_line_is_at_most_as_long_as_it_may_be(tmp_path):
    """A name just below the limit is read, one just above is damage."""
    start = len(b'{"kind":"span","number":0,"start_ns":0,"name":""}\n')
    for length, problems in [(MAX_LINE_BYTES - start, 0), (MAX_LINE_BYTES - start + 1, 1)]:
        span = Span(number=0, start_ns=0, name="x" * length)
        file = written(tmp_path / f"host-{length}.jsonl", header(), span)
        assert len(file.problems) == problems


def test_a_line_among_thousands_is_named_by_its_number(tmp_path):
    """Lines are read in blocks: damage, odd names and contradictions are found in any of them, wherever it is cut."""
    path = tmp_path / "host-1.jsonl"
    names = ["étape" if number == 6000 else "x" * (number % 97) for number in range(8000)]
    spans = [Span(number=number, start_ns=number, name=name) for number, name in enumerate(names)]
    written(path, header(), *spans)
    two_in_one = b'{"kind":"end","event":1,"by":"return"}{"kind":"end","event":2,"by":"return"}\n'
    change(path, 4000, two_in_one)
    change(path, 5000, b'{"kind":"span",\n"number":9999,"start_ns":0,"name":"x"}\n')
    change(path, 7003, b'{"kind":"span","number":9000,"start_ns":0,"name":"\\u001b"}\n')
    change(path, 8002, b'{"kind":"span","number":1,"start_ns":0,"name":"x"}\n')
    file = read(path)
    (told,) = file.problems
    assert all(text in told for text in ("4 damaged lines", "line 4000:", "line 5000:", "line 5001:"))
    assert [file.events[number].name for number in (96, 6000, 9000, 7998)] == ["x" * 96, "étape", "\\x1b", "x" * 44]


def test_headers_of_this_format_keep_their_fields():
    """Renaming one makes every existing trace unreadable: then FORMAT must change, too."""
    fields = "format job host pid torch dlearn start_ns restart rank name world_size clock"
    assert Header.__struct_fields__ == tuple(fields.split())
