"""What answers and sentences look like in a terminal and in a notebook."""

from collections.abc import Sequence

import pytest
from traces import Job, tensor

from dlearn import explain, messages, operations
from dlearn.events.event import REFUSED


def many(folder, count=12):
    job = Job(folder, ranks=2)
    for number in range(count):
        job.collective("all_reduce", size=1000, start_ns={0: number * 100_000, 1: number * 100_000 + 30}, end_ns=50_000)
    return job.load()


def test_operations_are_a_table_of_the_first_ten_and_a_sequence_of_all(tmp_path):
    asked = operations(many(tmp_path))
    assert len(asked) == 12
    assert isinstance(asked, Sequence)
    assert [each.seq for each in asked] == [each.seq for each in asked[:]] == list(range(1, 13))
    assert asked[-1] is asked[11]
    with pytest.raises(IndexError):
        asked[12]
    first, head, *rows, rest = str(asked).splitlines()
    assert first == "12 operations: 12 all_reduce"
    assert head.split() == ["operation", "ranks", "at,", "ms", "took,", "ms", "gives,", "B", "what"]
    assert [row.split()[:5] for row in rows] == [["all_reduce", "rank", "0,", "rank", "1"]] * 10
    assert {row.split()[-2] for row in rows} == {"1,000"}
    assert rest == "and 2 more"
    card = asked._repr_html_()
    assert card.startswith("<p><strong>12 operations: 12 all_reduce</strong></p><table>")
    assert (card.count("<tr>"), card.count('scope="col"')) == (11, 6)
    sent = messages(many(tmp_path / "again"))
    lines = str(sent).splitlines()
    assert lines[0] == f"{len(sent)} messages of 12 operations; 0 operations not explained"
    assert lines[1].split()[:4] == ["from", "to", "payload", "bytes"]
    assert (lines[-1], len(lines)) == (f"and {len(sent) - 10} more", 13)


def test_refused_and_failed_calls_stand_beside_those_that_went_through(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=4, by=REFUSED, error="RuntimeError")
    job.collective("all_reduce", size=4)
    job.collective("all_reduce", size=4, by="wait", error="RuntimeError")
    job.collective("all_reduce", size=4)
    job.send(0, 1, size=8, by=REFUSED, error="ValueError", start_ns=15)
    job.message(0, 1, size=8, start_ns=15)
    told = [*explain(job.load()).sentences]
    assert told[:7] == [
        "2 ranks (gloo): 5 of 6 operations explained by 17 messages"
        " (16 derived from the backend's algorithm, 1 observed).",
        "In all: all_reduce of 4 B (uint8[4]); refused at once on every rank (RuntimeError): nothing was sent.",
        "In all: all_reduce of 4 B (uint8[4]), 2 times; 0→1, 1→0: 4 B each (derived).",
        "In all: all_reduce of 4 B (uint8[4]); it failed on every rank (RuntimeError):"
        " which of its messages have travelled is not known.",
        "In all: rank 0 was to send rank 1 8 B (uint8[8]); refused at once on rank 0 (ValueError): nothing was sent.",
        "In all: rank 0 sends rank 1 8 B (uint8[8]).",
        "In the whole trace rank 0 sends 16 B and rank 1 sends 8 B of payload, 24 B in all; 1 operation not counted.",
    ]


def test_names_of_strangers_stay_on_one_line_and_are_no_markup(tmp_path):
    job = Job(tmp_path, ranks=2, names=("<b>\nbold", ""))
    span = "step <script>\n</script>"
    parent, evil = job.span((0, 1), span), tensor(4, dtype="<i>\x1b[31m\u202e")
    job.collective("all_reduce", inputs=(evil,), parent=parent, phase="<u>\r", site="<a>\n:1")
    (tmp_path / "a\nb<i>.jsonl").touch()
    trace = job.load()
    assert "\n" not in trace.label(0)
    assert str(trace).count("\n") == len(trace.problems)
    explanation = explain(trace)
    assert all(sentence.isprintable() for sentence in explanation.sentences)
    shown = explanation._repr_html_() + trace._repr_html_()
    assert not any(tag in shown for tag in ("<script>", "<b>", "<i>", "<u>", "<a>"))
    assert "step &lt;script&gt;\\n" in shown
