"""What answers look like in a terminal and in a notebook."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from traces import Job

from dlearn import messages, operations
from dlearn.cluster.run import Run
from dlearn.shown import Answer, Table


class Two(Answer, frozen=True):
    """An answer with everything that one may have."""

    def paragraphs(self):
        yield "2 <found>"
        yield Table([["who", "bytes", "why"], ["rank 0", "1,000", "asked"], ["rank 10", "5", ""]], names=1, numbers=1)
        yield ""
        yield "a note"


def test_text_is_the_finding_the_table_with_numbers_at_the_right_and_the_notes():
    assert str(Two()).splitlines() == [
        "2 <found>",
        "who      bytes  why",
        "rank 0   1,000  asked",
        "rank 10      5",
        "",
        "a note",
    ]
    assert repr(Two()) == str(Two())


def test_a_card_has_the_finding_first_and_a_table_with_heads_for_screen_readers():
    card = Two()._repr_html_()
    assert card.startswith("<p><strong>2 &lt;found&gt;</strong></p><table>")
    assert card.count('scope="col"') == 3
    assert card.count('scope="row"') == 2
    assert '<td style="text-align:right">1,000</td><td style="text-align:left">asked</td>' in card
    assert card.endswith("</table><ul><li>a note</li></ul>")


def many(tmp_path, count=12):
    job = Job(tmp_path, ranks=2)
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
    assert list(asked[5:5]) == list(many(tmp_path / "none", count=0).events[:3]) == []
    first, head, *rows, rest = str(asked).splitlines()
    assert first == "12 operations: 12 all_reduce"
    assert head.split() == ["operation", "ranks", "at,", "ms", "took,", "ms", "gives,", "B", "what"]
    assert [row.split()[:5] for row in rows] == [["all_reduce", "rank", "0,", "rank", "1"]] * 10
    assert {row.split()[-2] for row in rows} == {"1,000"}
    assert rest == "and 2 more"
    assert asked._repr_html_().count("<tr>") == 11


def test_messages_are_a_table_of_the_first_ten_and_their_reasons(tmp_path):
    sent = messages(many(tmp_path))
    lines = str(sent).splitlines()
    assert lines[0] == f"{len(sent)} messages of 12 operations; 0 operations not explained"
    assert lines[1].split()[:4] == ["from", "to", "payload", "bytes"]
    assert lines[-1] == f"and {len(sent) - 10} more"
    assert len(lines) == 13


def test_nothing_is_shown_as_nothing(tmp_path):
    trace = many(tmp_path, count=0)
    assert str(operations(trace)) == "0 operations"
    assert str(messages(trace)) == "0 messages of 0 operations; 0 operations not explained"


def test_a_run_says_what_it_sent_and_how_to_look_at_it(tmp_path):
    many(tmp_path / "trace")
    run = Run(tmp_path, recorded=True, results={0: None, 1: None})
    lines = str(run).splitlines()
    assert lines[0] == "2 ranks returned"
    assert lines[1].startswith("2 ranks (gloo): 12 of 12 operations explained by")
    assert "play.player(run.trace)" in lines[2]
    assert lines[3] == f"kept in {tmp_path}"
    assert run._repr_html_().startswith("<p><strong>2 ranks returned</strong></p><ul><li>2 ranks (gloo)")


def test_a_run_whose_trace_cannot_be_read_is_shown_all_the_same(tmp_path):
    (tmp_path / "trace").mkdir()
    assert "holds no trace" in str(Run(tmp_path, recorded=True))
    assert str(Run(tmp_path, recorded=False)).splitlines() == ["0 ranks returned", f"kept in {tmp_path}"]
