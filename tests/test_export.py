"""What other tools are given: each format is read back by its own rules, for traces by hand and for random ones."""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import Job, header

from dlearn import Trace, export, messages
from dlearn.trace.event import NOT_OBSERVED

HOSTILE = [
    "</script><b>\u2028&amp; %%{init: {}}%%",
    "end",
    '😀 "é"; #35; -x\n->> y',
    "z" * 200,
    "a b",
    "a b",
    "wrap:<br/>`|",
]


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
    job = Job(folder, ranks=len(HOSTILE))
    job.headers = [header(rank, world_size=len(HOSTILE), name=name) for rank, name in enumerate(HOSTILE)]
    for rank in range(len(HOSTILE)):
        other = (rank + 1) % len(HOSTILE)
        job.span(rank, HOSTILE[rank])
        job.send(rank, other, size=10, site=HOSTILE[0])
        job.recv(other, rank, size=10)
    job.collective("all_reduce", size=1000, start_ns=30, end_ns=50, role="</script>;#end\n<img src=x>")
    job.collective(HOSTILE[2], size=8, start_ns=60, end_ns=70)
    return job.load()


Call = tuple[str, int, int, int, int]
calls = st.lists(
    st.tuples(
        st.sampled_from(["pair", "send", "recv", "all_reduce", "late", "span"]),
        st.integers(0, 2),
        st.integers(1, 2),
        st.integers(0, 40),
        st.integers(0, 30),
    ),
    max_size=12,
)


def random_job(folder: Path, made: list[Call]) -> Trace:
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


# Perfetto -------------------------------------------------------------------------------------------------------------


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


def test_perfetto_what_never_came_has_no_arrow_and_says_so(tmp_path):
    events = read_as_perfetto_does("".join(export.perfetto(two_ranks(tmp_path))))
    lost = [event for event in events if event["ph"] == "X" and "what" in event["args"]][-1]
    assert lost["name"] == "send · 4 B"
    assert lost["args"]["missing"] == "1 expected and never came, so there is no arrow: rank 0 never received it"
    assert lost["args"]["end"] == "nobody came out of it"
    assert events[4]["ph"] == "M"
    sent = next(event for event in events if event.get("args", {}).get("site") == "a.py:1")
    assert sent["args"] == {
        "what": "uint8[1000]",
        "payload_bytes": 1000,
        "phase": "none",
        "site": "a.py:1",
        "op": "send",
        "group": "world",
        "number": 1,
        "messages": "1 observed: hooks saw it at both ends",
    }


def test_perfetto_calls_at_the_same_time_have_tracks_of_their_own(tmp_path):
    job = Job(tmp_path, ranks=2)
    for tag in range(3):
        job.send(0, 1, tag=tag, start_ns=10 + tag, end_ns=20 + tag)
        job.recv(1, 0, tag=tag, start_ns=10 + tag, end_ns=30 + tag)
    events = read_as_perfetto_does("".join(export.perfetto(job.load())))
    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 6
    assert [event["args"]["name"] for event in events if event["name"] == "thread_name"][1:4] == [
        "calls",
        "calls, 2",
        "calls, 3",
    ]


def test_perfetto_counts_what_is_in_flight(tmp_path):
    """1,000 B for 2 us, from the send to the end of its recv; then 8 B all-reduced, 2 B at a time."""
    events = read_as_perfetto_does("".join(export.perfetto(two_ranks(tmp_path))))
    counted = [(event["ts"], event["args"]["bytes"]) for event in events if event["ph"] == "C" and event["pid"] == 1]
    assert counted[:2] == [(1, 1000), (2.999, 0)]  # the last moment of the slice that the arrow ends in
    assert max(size for at, size in counted[2:]) == 2
    assert counted[-1][1] == 0


def test_perfetto_a_bucket_s_name_and_every_arrow_s_length(tmp_path):
    """Rank 0 is done at 30 us and rank 1 at 50: no arrow stands still at the end of rank 0."""
    job = Job(tmp_path, ranks=3)
    for rank in range(3):
        job.bucket(rank, 0, {"w": 3000})
        job.gradient(rank, "w", size=3000, at_ns=5000)
    launched = {"launcher": "reducer", "backward": 0, "phase": "backward"}
    ends = {0: 30_000, 1: 50_000, 2: 40_000}
    job.collective("all_reduce", size=3000, start_ns=10_000, end_ns=ends, **launched)
    events = read_as_perfetto_does("".join(export.perfetto(job.load())))
    assert {event["name"] for event in events if event["ph"] == "X"} == {"bucket 0 · 3.00 kB"}
    begins = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    assert len(begins) == 24
    assert all(event["ts"] > begins[event["id"]] for event in events if event["ph"] == "f")


def test_perfetto_by_clocks_that_are_wrong_nothing_flows_back_in_time(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.send(0, 1, start_ns=500, end_ns=600)
    job.recv(1, 0, start_ns=10, end_ns=20)
    events = read_as_perfetto_does("".join(export.perfetto(job.load())))
    assert [event["args"]["no arrow"] for event in events if event["ph"] == "X"] == [
        "1: an end is not in the trace, or by the clocks it came before it was sent"
    ] * 2


def test_perfetto_gradients_and_buckets_are_moments(tmp_path):
    job = Job(tmp_path, ranks=1)
    job.bucket(0, 0, {"w": 4, "b": 2})
    job.gradient(0, "w", at_ns=2000)
    events = read_as_perfetto_does("".join(export.perfetto(job.load())))
    moments = [(event["name"], event["ts"]) for event in events if event["ph"] == "i"]
    assert moments == [("bucket 0 of 1", 0), ("gradient of w", 2)]


@given(calls)
@settings(max_examples=40, deadline=None)
def test_perfetto_of_any_job_slices_nest_and_arrows_hold(made):
    with tempfile.TemporaryDirectory() as folder:
        trace = random_job(Path(folder), made)
        events = read_as_perfetto_does("".join(export.perfetto(trace)))
    known = [message for message in messages(trace) if message.how != "missing"]
    assert sum(event["ph"] == "s" for event in events) <= len(known)


# Mermaid --------------------------------------------------------------------------------------------------------------


def test_mermaid_solid_dashed_and_crossed(tmp_path):
    [diagram] = export.mermaid(two_ranks(tmp_path))
    assert diagram == (
        "sequenceDiagram\n"
        "    participant r0 as rank 0\n"
        "    participant r1 as rank 1\n"
        "    Note over r0,r1: Rank 1 waits for rank 0 in send #35;2#59; rank 0 never received it\n"
        "    r0->>r1: 1,000 B, uint8[1000]\n"
        "    Note over r0,r1: all_reduce 8 B: uint8[8] (derived)\n"
        "    loop 4 times\n"
        "        r0-->>r1: 2 B\n"
        "        r1-->>r0: 2 B\n"
        "    end\n"
        "    r1-xr0: 4 B, uint8[4] (never came)\n"
    )


def test_mermaid_the_same_again_is_a_loop(tmp_path):
    job = Job(tmp_path, ranks=2)
    for i in range(10):
        for src, dst in ((0, 1), (1, 0)):
            job.send(src, dst, start_ns=100 * i + 10 * src, end_ns=100 * i + 10 * src + 5)
            job.recv(dst, src, start_ns=100 * i + 10 * src, end_ns=100 * i + 10 * src + 5)
    [diagram] = export.mermaid(job.load())
    assert diagram.splitlines()[4:] == [
        "    loop 10 times",
        "        r0->>r1: 4 B, uint8[4]",
        "        r1->>r0: 4 B, uint8[4]",
        "    end",
    ]


def test_mermaid_a_phase_is_a_band_and_phases_that_repeat_are_a_loop(tmp_path):
    job = Job(tmp_path, ranks=2)
    for step in range(3):
        for at, phase in enumerate(("forward", "backward")):
            job.collective("all_reduce", size=8, phase=phase, start_ns=100 * step + 10 * at, end_ns=100 * step + 20)
    [diagram] = export.mermaid(job.load())
    band = "rect rgba(128, 128, 128, 0.12)"
    assert [line.strip() for line in diagram.splitlines()[4:]] == [
        "loop 3 times",
        *(line for phase in ("forward", "backward") for line in [
            band,
            f"Note over r0,r1: {phase}",
            "Note over r0,r1: all_reduce 8 B: uint8[8] (derived)",
            "loop 4 times", "r0-->>r1: 2 B", "r1-->>r0: 2 B", "end",
            "end",
        ]),
        "end",
    ]  # fmt: skip


def test_mermaid_a_loop_that_no_diagram_can_hold_is_written_out(tmp_path):
    """Twelve sizes, 64 arrows each: the step that is repeated has more arrows than Mermaid draws."""
    job = Job(tmp_path, ranks=64)
    for step in range(2):
        for size in range(12):
            start_ns = 1000 * (12 * step + size)
            job.collective("all_gather", size=100 + size, start_ns=start_ns, end_ns=start_ns + 500)
    parts = export.mermaid(job.load())
    assert len(parts) > 1
    assert all(len(re.findall("r\\d+-", part)) <= 500 and len(part) <= 50_000 for part in parts)


def nested(diagram):
    """How deep the lines stand; each end has its begin."""
    depth = 1
    for line in diagram.splitlines()[1:]:
        depth -= line.strip() == "end"
        assert len(line) - len(line.lstrip()) == 4 * depth
        depth += line.strip().startswith(("loop ", "rect "))
    return depth


@given(calls)
@settings(max_examples=40, deadline=None)
def test_mermaid_of_any_job_bands_and_loops_are_closed_and_each_message_is_there(made):
    with tempfile.TemporaryDirectory() as folder:
        trace = random_job(Path(folder), made)
        diagrams = export.mermaid(trace)
    found = 0
    for diagram in diagrams:
        assert nested(diagram) == 1
        times = [1]
        for line in map(str.strip, diagram.splitlines()):
            if line.startswith(("loop ", "rect ")):
                times.append(times[-1] * int(line.split()[1] if line.startswith("loop") else 1))
            elif line == "end":
                times.pop()
            else:
                found += times[-1] * bool(re.match(r"r\d+-", line))
    assert found == len(messages(trace))


def test_mermaid_each_part_is_within_the_limits_and_nothing_is_lost(tmp_path):
    job = Job(tmp_path, ranks=2)
    for i in range(1200):
        job.send(0, 1, size=i + 1, start_ns=10 * i, end_ns=10 * i + 5)
        job.recv(1, 0, size=i + 1, start_ns=10 * i, end_ns=10 * i + 5)
    parts = export.mermaid(job.load())
    assert len(parts) == 3
    assert all(part.count("->>") <= 500 and len(part) <= 50_000 for part in parts)
    assert all(
        f"(part {number} of 3)" in part and part.count("participant") == 2 for number, part in enumerate(parts, 1)
    )
    sizes = [int(size.replace(",", "")) for part in parts for size in re.findall(r"->>r1: ([\d,]+) B", part)]
    assert sizes == list(range(1, 1201))


def test_mermaid_names_are_text(tmp_path):
    [diagram] = export.mermaid(hostile(tmp_path))
    cast = [line for line in diagram.splitlines() if "participant" in line]
    assert len(cast) == len(HOSTILE)
    assert cast[2] == "    participant r2 as #128512; #34;é#34;#59; #35;35#59; -x#92;n-#62;#62; y"
    assert cast[6] == "    participant r6 as wrap#58;#60;br/#62;#96;#124;"
    text = re.sub(r"#\d+;|->>|-->>|-x", "", diagram)
    assert re.findall(r"[;#<>{}%&\"`|]", text) == []
    assert "Note over r0,r6: #128512;" in diagram  # the call whose messages nobody knows


# What is empty, and the page ------------------------------------------------------------------------------------------


def test_a_trace_without_calls_is_well_formed_in_every_format(tmp_path):
    trace = Job(tmp_path, ranks=2).load()
    assert all(event["ph"] == "M" for event in read_as_perfetto_does("".join(export.perfetto(trace))))
    assert export.mermaid(trace)[0].endswith("Note over r0: no message\n")


def test_the_page_is_the_player(tmp_path):
    page = export.html(hostile(tmp_path))
    assert "dlearn-player" in page
    assert page.count("<img") == 1  # the still picture


def test_perfetto_names_are_text(tmp_path):
    events = read_as_perfetto_does("".join(export.perfetto(hostile(tmp_path))))
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names[3] == "z" * 200
    assert names[2] == '😀 "é"; #35; -x\\n->> y'


def test_pieces_are_pieces(tmp_path):
    job = Job(tmp_path, ranks=2)
    for i in range(1000):
        job.send(0, 1, start_ns=10 * i, end_ns=10 * i + 5)
        job.recv(1, 0, start_ns=10 * i, end_ns=10 * i + 5)
    sizes = [len(piece) for piece in export.perfetto(job.load())]
    # 4 records a message, 512 in a piece of less than 300 B each.
    assert len(sizes) >= 7
    assert max(sizes) < 512 * 400
    assert all(earlier for earlier, _ in pairwise(sizes))
