"""What other tools are given: each format is read back by its own rules; and `dlearn export`, as it is typed."""

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import RECORDED, recorded_job, ring
from traces import Job

from dlearn import Trace, export, messages, operations
from dlearn.cli import FORMATS, main
from dlearn.events.event import NOT_OBSERVED

HOSTILE = ["</script><b>\u2028&amp; %%{init: {}}%%", "end", '😀 "é"; #35; -x\n->> y', "z" * 200]
HOSTILE += ["a b", "a b", "wrap:<br/>`|"]


def two_ranks(folder: Path) -> Trace:
    """A send seen at both ends, one that never came, and an all-reduce of 8 B, whose messages are derived."""
    job = Job(folder, ranks=2)
    step = job.span(0, "step 0", start_ns=1000, end_ns=90_000)
    job.send(0, 1, size=1000, start_ns=2000, end_ns=3000, parent=step, site="a.py:1")
    job.recv(1, 0, size=1000, start_ns=1000, end_ns=4000)
    job.collective("all_reduce", size=8, start_ns={0: 5000, 1: 6000}, end_ns={0: 8000, 1: 9000})
    job.send(1, 0, size=4, start_ns=10_000, end_ns=None)
    return job.load()


def hostile(folder: Path) -> Trace:
    """Each rank sends to the next; every name and text is as bad as it can be."""
    count = len(HOSTILE)
    job = Job(folder, ranks=count, names=HOSTILE)
    for rank in range(count):
        job.span(rank, HOSTILE[rank])
        job.message(rank, (rank + 1) % count, size=10, site=HOSTILE[0])
    job.collective(HOSTILE[2], size=8, start_ns=60, end_ns=70, role="</script>;#end\n<img src=x>")
    return job.load()


KINDS = st.sampled_from(["pair", "send", "recv", "all_reduce", "late", "span"])
CALLS = st.lists(
    st.tuples(KINDS, st.integers(0, 2), st.integers(1, 2), st.integers(0, 40), st.integers(0, 30)), max_size=12
)


def random_job(folder: Path, made: list[tuple[str, int, int, int, int]]) -> Trace:
    """A send or recv alone never meets another: each call has a tag and a size of its own."""
    job = Job(folder, ranks=3)
    for number, (kind, rank, away, start, length) in enumerate(made):
        other, own = (rank + away) % 3, {"tag": number, "size": 100 + number}
        if kind in ("pair", "send"):
            end = {"end_ns": start + length} if length % 3 else {"by": NOT_OBSERVED, "end_ns": None}
            job.send(rank, other, start_ns=start, **own, **end)
        if kind in ("pair", "recv"):
            job.recv(other, rank, start_ns=max(0, start - length), end_ns=start + length if length % 4 else None, **own)
        if kind == "all_reduce":
            ends = {each: start + length + (each + rank) % 3 for each in range(3)}
            job.collective("all_reduce", size=64, start_ns={0: start, 1: max(0, start - 3), 2: start}, end_ns=ends)
        if kind == "late":
            job.collective("all_reduce", ranks=[rank], size=4, start_ns=start, end_ns=None)
        if kind == "span":
            job.span(rank, f"part {number}", start_ns=start, end_ns=start + length)
    return job.load()


def read_as_perfetto_does(text: str) -> list[dict[str, object]]:
    """By time, what stands first in the file first. An arrow holds on to the slice that covers it on its track."""
    events = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["traceEvents"]
    named = {(event["name"], event["pid"], event.get("tid")) for event in events if event["ph"] == "M"}
    tracks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    arrows: dict[int, list[str]] = defaultdict(list)
    timed = sorted((event for event in events if event["ph"] != "M"), key=lambda event: event["ts"])
    for event in timed:
        if event["ph"] == "C":
            assert ("process_name", event["pid"], None) in named
            assert event["args"]["bytes"] >= 0
            continue
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        assert ("process_name", event["pid"], None) in named
        assert ("thread_name", event["pid"], event["tid"]) in named
        open_slices = tracks[event["tid"]]
        while open_slices and open_slices[-1][1] <= ns(event["ts"]):
            open_slices.pop()
        if event["ph"] == "X":
            begin, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
            assert begin < end
            assert not open_slices or end <= open_slices[-1][1], "a slice sticks out of the one around it"
            open_slices.append((begin, end))
        elif event["ph"] in "sf":
            assert open_slices, "an arrow from or to nowhere"
            arrows[event["id"]].append(event["ph"])
    assert all(ends == ["s", "f"] for ends in arrows.values())
    return events


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def read_as_mermaid_does(diagrams: list[str]) -> int:
    """How many messages the diagrams draw, each as often as the loops around it say; each `end` has its begin."""
    found = 0
    for diagram in diagrams:
        assert len(re.findall(r"r\d+-", diagram)) <= 500
        assert len(diagram) <= 50_000
        times = [1]
        for line in diagram.splitlines()[1:]:
            word = line.strip()
            if word == "end":
                times.pop()
            assert len(line) - len(word) == 4 * len(times)
            if word.startswith(("loop ", "rect ")):
                times.append(times[-1] * int(word.split()[1] if word.startswith("loop") else 1))
            found += times[-1] * bool(re.match(r"r\d+-", word))
        assert times == [1]
    return found


def check(trace: Trace) -> None:
    events = read_as_perfetto_does("".join(export.perfetto(trace)))
    slices = [event for event in events if event["ph"] == "X"]
    assert sum("op" in event["args"] for event in slices) >= sum(len(each.ends) for each in operations(trace))
    known = [message for message in messages(trace) if message.how != "missing"]
    assert sum(event["ph"] == "s" for event in events) <= len(known)
    left = {event["pid"]: event["args"]["bytes"] for event in events if event["ph"] == "C"}
    assert {*left.values()} <= {0}, "in the end nothing is in flight"
    assert read_as_mermaid_does(export.mermaid(trace)) == len(messages(trace))


@pytest.mark.parametrize("name", RECORDED)
def test_of_a_recorded_job_every_message_is_there(name, tmp_path):
    check(recorded_job(name, tmp_path))


@given(CALLS)
@settings(max_examples=30, deadline=None)
def test_of_any_job_slices_nest_arrows_hold_and_loops_are_closed(tmp_path_factory, made):
    check(random_job(tmp_path_factory.mktemp("job"), made))


def test_perfetto_a_process_per_rank_a_slice_per_call_an_arrow_per_message(tmp_path):
    events = read_as_perfetto_does("".join(export.perfetto(two_ranks(tmp_path))))
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "rank 0", 2: "rank 1"}
    slices = [(event["name"], event["pid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert slices == [
        ("step 0", 1, 0, 89),
        ("send · 1.00 kB", 1, 1, 1),  # 2000 ns is 1 us after the first event
        ("recv · 1.00 kB", 2, 0, 3),
        ("waiting", 2, 0, 1),
        ("transfer", 2, 1, 2),
        ("all_reduce · 8 B", 1, 4, 3),
        ("waiting", 1, 4, 1),
        ("transfer", 1, 5, 2),
        ("all_reduce · 8 B", 2, 5, 3),
        ("send · 4 B", 2, 9, 80),  # nobody received it: until the end of the trace
        ("waiting", 2, 9, 80),
    ]
    first, *others = [event for event in events if event["ph"] == "s"]
    assert (first["cat"], first["ts"], first["args"]["payload_bytes"]) == ("observed", 1, 1000)
    assert {each["cat"] for each in others} == {"derived"}
    assert all("no measurement" in each["args"]["known"] for each in others)
    assert len(others) == sum(message.how == "derived" for message in messages(two_ranks(tmp_path / "again")))
    lost = [event for event in events if event["ph"] == "X" and "what" in event["args"]][-1]["args"]
    assert lost["missing"] == "1 expected and never came, so there is no arrow: rank 0 never received it"
    counted = [(event["ts"], event["args"]["bytes"]) for event in events if event["ph"] == "C" and event["pid"] == 1]
    assert counted[:2] == [(1, 1000), (2.999, 0)]  # the last moment of the slice that the arrow ends in
    assert max(size for at, size in counted[2:]) == 2  # of 8 B all-reduced, 2 B at a time


def test_mermaid_solid_dashed_and_crossed(tmp_path):
    [diagram] = export.mermaid(two_ranks(tmp_path))
    assert diagram == (
        "sequenceDiagram\n"
        "    participant r0 as rank 0\n"
        "    participant r1 as rank 1\n"
        "    Note over r0,r1: Rank 1 waits for rank 0 in send #35;2\n"
        "    r0->>r1: 1,000 B, uint8[1000]\n"
        "    Note over r0,r1: all_reduce 8 B: uint8[8] (derived)\n"
        "    loop 4 times\n"
        "        r0-->>r1: 2 B\n"
        "        r1-->>r0: 2 B\n"
        "    end\n"
        "    r1-xr0: 4 B, uint8[4] (never came)\n"
    )


def test_mermaid_names_are_text(tmp_path):
    [diagram] = export.mermaid(hostile(tmp_path))
    cast = [line for line in diagram.splitlines() if "participant" in line]
    assert len(cast) == len(HOSTILE)
    assert cast[2] == "    participant r2 as #128512; #34;é#34;#59; #35;35#59; -x#92;n-#62;#62; y"
    assert cast[6] == "    participant r6 as wrap#58;#60;br/#62;#96;#124;"
    text = re.sub(r"#\d+;|->>|-->>|-x", "", diagram)
    assert re.findall(r"[;#<>{}%&\"`|]", text) == []
    assert "Note over r0,r6: #128512;" in diagram  # the call whose messages nobody knows


def test_perfetto_names_are_text_and_what_is_empty_is_well_formed(tmp_path):
    events = read_as_perfetto_does("".join(export.perfetto(hostile(tmp_path / "hostile"))))
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names[2:4] == ['😀 "é"; #35; -x\\n->> y', "z" * 200]
    trace = Job(tmp_path / "empty", ranks=2).load()
    assert all(event["ph"] == "M" for event in read_as_perfetto_does("".join(export.perfetto(trace))))
    assert export.mermaid(trace)[0].endswith("Note over r0: no message\n")


@pytest.fixture
def traced(tmp_path):
    """One send: an animation of it has few frames."""
    job = Job(tmp_path / "trace", ranks=2)
    job.message(0, 1, size=1000, end_ns={0: 3000, 1: 4000})
    job.write()
    return str(tmp_path / "trace")


@pytest.mark.parametrize("form", export.__all__)
def test_every_format_has_its_word_and_makes_a_file(form, traced, tmp_path, capsys):
    assert form in FORMATS
    out = tmp_path / "made.out"
    out.write_text("goes")
    assert main(["export", form, traced, "-o", str(out)]) == 0
    assert capsys.readouterr().out.startswith(f"{out}: ")
    assert len(out.read_bytes()) > 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.out", "trace"]


def test_several_diagrams_are_several_files_or_one_page(tmp_path, capsys):
    """700 messages, no two the same: two diagrams."""
    ring(tmp_path / "trace", ranks=2, count=700).write()
    assert main(["export", "mermaid", str(tmp_path / "trace"), "-o", str(tmp_path / "ring.mmd")]) == 0
    assert capsys.readouterr().out == f"2 diagrams: {tmp_path}/ring-1.mmd to {tmp_path}/ring-2.mmd\n"
    diagrams = [(tmp_path / f"ring-{number}.mmd").read_text() for number in (1, 2)]
    assert main(["export", "mermaid", str(tmp_path / "trace"), "-o", str(tmp_path / "ring.md")]) == 0
    page = (tmp_path / "ring.md").read_text()
    assert page == "".join(f"```mermaid\n{diagram}```\n\n" for diagram in diagrams)


@pytest.mark.parametrize(
    ("words", "status", "sentence"),
    [
        ("html trace -o {0}/no/page.html", 2, "{0}/no/page.html: there is no folder {0}/no. Make"),
        ("html trace -o {0}", 2, "{0} is no file that could be replaced. Give another -o."),
        ("html trace -o " + "n" * 300, 2, "n" * 60 + "...: File name too long. Give another -o."),
        ("html nothing -o {0}/x.md", 1, ""),
        ("mermaid empty -o {0}/x.md", 1, "nothing was recorded in {0}/empty: there is nothing to export."),
    ],
)
def test_what_cannot_be_done_is_one_sentence(words, status, sentence, traced, tmp_path, capsys):
    Job(tmp_path / "empty", ranks=2).write()
    form, trace, *rest = words.format(tmp_path).split()
    assert main(["export", form, f"{tmp_path}/{trace}", *rest]) == status
    out, error = capsys.readouterr()
    assert out == ""
    assert error.count("\n") == 1
    assert error.startswith(f"dlearn: {sentence.format(tmp_path)}")
    assert not (tmp_path / "x.md").exists()


def test_of_a_file_that_cannot_be_finished_nothing_is_left(traced, tmp_path, capsys, monkeypatch):
    def breaks_off(made):
        yield "half"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(export.perfetto(Trace.load(traced))), "__iter__", breaks_off)
    out = tmp_path / "x.json"
    out.write_text("stays")
    assert main(["export", "perfetto", traced, "-o", str(out)]) == 1
    full = "No space left on device. Choose another place for it."
    assert capsys.readouterr().err == f"dlearn: cannot write {out}: {full}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace", "x.json"]
    assert out.read_text() == "stays"
