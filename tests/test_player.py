"""Player and strip without a browser: what their pages hold, of recorded jobs and of hard ones; where Python stands.

What a reader does with them is clicked in test_browser.py.
"""

import base64
import json
import re
import zlib
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
from pictures import HOSTILE, RECORDED, recorded_job, ring
from traces import Job, tensor

from dlearn import DlearnError, Trace, export, messages, operations
from dlearn.events.event import NOT_OBSERVED, Collective
from dlearn.play import player, strip


@pytest.fixture(scope="module", params=RECORDED)
def trace(request, tmp_path_factory):
    return recorded_job(request.param, tmp_path_factory.mktemp("job"))


def unpacked(page):
    block = zlib.decompress(base64.b64decode(re.search('dlearn">(.*?)</script>', page, re.S)[1]))
    length = 4 + int.from_bytes(block[:4], "little")
    facts = json.loads(block[4:length])
    ends = np.cumsum([*facts["columns"].values()])[:-1]
    return facts, np.split(np.frombuffer(block[length:], "<i4"), ends)


def picture(page):
    """The SVG that a page shows which runs no scripts."""
    return base64.b64decode(re.search('<img class="still"[^>]*base64,([^"]*)">', page)[1]).decode()


def in_the_strip(trace):
    """The facts of its page; its columns: start, took, waited and operation of calls, kind and step of operations."""
    return unpacked(strip(trace).to_html())


def test_a_page_plays_all_messages_and_tells_the_same_sentences(trace):
    shown, page = player(trace), player(trace).to_html()
    data = unpacked(page)[0]
    assert data["sentences"] == list(shown.sentences)
    played = sum(step["dst"] >= 0 for step in data["steps"])
    came = [message for message in messages(trace) if message.how != "missing"]
    assert len(came) <= played <= len(messages(trace))
    assert page.count("</script>") == page.count("<script")
    assert ElementTree.fromstring(picture(shown._repr_html_())).tag.endswith("svg")
    listed = re.findall("<li>(.*?)</li>", page)
    assert len(listed) == min(25, len(shown.sentences))


def test_the_strip_holds_all_calls_messages_and_bytes(trace):
    shown = operations(trace)
    data, [start, took, waited, operation, kind, within, *_] = in_the_strip(trace)
    assert len(start) == sum(len(each.ends) for each in shown)
    assert (waited <= np.where(took < 0, waited, took)).all()
    assert sorted({*operation.tolist()}) == list(range(len(shown)))
    assert len(kind) == len(shown)
    pairs = [pair for each in kind.tolist() for pair in data["kinds"][each]["pairs"]]
    came = [message for message in messages(trace) if message.how != "missing"]
    assert sum(count for *_, count, _ in pairs) == len(came)
    assert sum(size for _, _, size, *_ in pairs) == sum(message.payload_bytes or 0 for message in came)
    for place, span in enumerate(data["spans"]):
        assert (within == place).sum() == len(operations(trace.within(span)))


def test_without_scripts_a_page_has_its_sentences_and_a_notebook_a_picture_too(tmp_path):
    shown = player(ring(tmp_path, count=4).load(), title="A ring & more")
    still = re.sub("<script.*?</script>", "", shown.to_html(tmp_path / "ring.html"), flags=re.S)
    assert "<title>A ring &amp; more</title>" in still
    assert 'id="message 0 to 1"' in picture(shown._repr_html_())
    assert re.findall("<li>(.*?)</li>", still) == list(shown.sentences)
    assert "http" not in still.replace("http://www.w3.org", ""), "it needs no network"
    assert (tmp_path / "ring.html").read_text(encoding="utf-8") == shown.to_html()
    with pytest.raises(DlearnError, match=r"cannot write .*: No such file or directory. Choose another place"):
        shown.to_html(tmp_path / "nowhere" / "page.html")


def test_no_name_breaks_out_of_any_page(tmp_path):
    job = ring(tmp_path, count=4, names=[HOSTILE, "<img src=x>", "$x$\u2028"])
    job.span(0, HOSTILE, start_ns=0, end_ns=90_000)
    trace = job.load()
    pages = (player(trace, title=HOSTILE).to_html(), strip(trace).to_html(), export.html(trace))
    for page, scripts in zip(pages, (2, 2, 4), strict=True):  # A player and a strip stand in the last one.
        assert page.count("</script>") == page.count("<script") == scripts
        assert page.count("</title>") == 1
        assert "<img src" not in page
        assert "\u2028" not in page
    assert unpacked(player(trace).to_html())[0]["pairs"][0].startswith(HOSTILE[:30])
    assert HOSTILE[:10] in "".join(ElementTree.fromstring(picture(player(trace)._repr_html_())).itertext())
    shown = strip(trace)._repr_html_()
    assert shown.count("<img") == 1, "a notebook that nobody trusts shows a picture"


def test_a_rank_that_all_others_talk_to_stands_in_the_middle_under_its_own_number(tmp_path):
    job = Job(tmp_path, ranks=4)
    for rank in (0, 2, 3):
        job.message(rank, 1)
    spots = unpacked(player(job.load()).to_html())[0]["stage"]["spots"]
    (x, y), others = spots[1], [spots[rank] for rank in (0, 2, 3)]
    assert min(left for left, _ in others) < x < max(left for left, _ in others)
    assert min(top for _, top in others) < y < max(top for _, top in others)


def test_a_tree_has_a_row_for_each_round(tmp_path):
    """Of 8 ranks 1, then 2 and 3, then 4 to 7 get what rank 0 has."""
    job = Job(tmp_path, ranks=8)
    job.collective("broadcast", size=800, root=0)
    heights = [y for _, y in unpacked(player(job.load()).to_html())[0]["stage"]["spots"]]
    assert [sorted({*heights}).index(y) for y in heights] == [0, 1, 2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize("ranks", [2, 3, 5, 12, 64])
def test_no_rank_stands_on_another_on_the_stage(tmp_path, ranks):
    job = Job(tmp_path, ranks=ranks)
    for rank in range(ranks):
        job.message(rank, (rank + 1) % ranks)
    stage = unpacked(player(job.load()).to_html())[0]["stage"]
    assert len(stage["spots"]) == ranks
    for (x, y), (other, below) in combinations(stage["spots"], 2):
        assert abs(x - other) >= stage["wide"] or abs(y - below) >= stage["high"]


def test_a_long_trace_is_cut_and_says_so_and_a_collective_is_played_whole(tmp_path):
    shown = player(ring(tmp_path / "long", ranks=8, count=320).load())
    assert len(shown.sentences) == 300
    assert "The first 300 of 320 messages; 20 later ones are left out" in shown.notes[1]
    job = Job(tmp_path / "whole", ranks=8)
    for number in range(3):
        job.collective("all_reduce", size=80_000, start_ns=1000 * number, end_ns=1000 * number + 900)
    shown = player(job.load())
    assert shown.title == "all_reduce #3 (uint8[80000]): 224 of 672 messages, 1.12 MB"
    assert len(shown.snippet.encode()) < 60_000


def test_only_the_messages_that_were_asked_for(tmp_path):
    trace = ring(tmp_path, count=4).load()
    shown = player(trace, messages=[messages(trace)[2]])
    assert shown.sentences == ("rank 2 sends rank 0 300 B: uint8[300] (observed).",)
    for wrong in (300, [1, 2], "all"):
        with pytest.raises(DlearnError, match=r"messages= takes the messages to play, and not .*: such as dlearn"):
            player(trace, messages=wrong)


def test_python_stands_where_it_was_sent_and_tells_who_asked(tmp_path):
    """Without a kernel. With one the page follows: test_browser.py."""
    shown, heard = player(ring(tmp_path, count=4).load()), []
    shown.on_step(heard.append)
    for step in (3, 3, 4, 0):
        shown.step = step
    assert (shown.step, heard) == (0, [3, 4, 0])
    assert shown._repr_mimebundle_() == {"text/html": shown._repr_html_(), "text/plain": repr(shown)}
    for step in (-1, 5, 1.5, "two", None):
        with pytest.raises(
            DlearnError, match=rf"no step {step!r}: choose one from 0 \(before the first message\) to 4"
        ):
            shown.step = step


def test_what_never_ended_what_nobody_saw_end_and_who_never_came_are_told_apart(tmp_path):
    job = Job(tmp_path, ranks=3)
    for step in range(2):
        job.span(0, f"step {step}", start_ns=step * 1_500_000, end_ns=None if step else 1_400_000)
    job.collective("all_reduce", size=8, start_ns=0, end_ns=1_000_000)
    unseen = {"op": "all_reduce", "group": "world", "seq": 2, "inputs": (tensor(8),), "by": NOT_OBSERVED}
    job.event(Collective, 0, start_ns=2_000_000, **unseen)
    job.collective("barrier", ranks=[1], start_ns=2_000_000, end_ns=None)
    data, [_, took, *_] = in_the_strip(job.load())
    assert took.tolist() == [10_000, -2, 10_000, -1, 10_000]
    assert [2] in [kind["absent"] for kind in data["kinds"]]
    assert [length for *_, length in data["cells"]] == [14_000, -1], "a step that was never finished"


def test_a_strip_of_one_operation_is_titled_by_its_longest_wait_which_is_of_no_rank_that_left_before(tmp_path):
    """Rank 1 of a broadcast leaves at 8 ms, before rank 2 comes at 9: it did not wait for it."""
    job = Job(tmp_path, ranks=3)
    facts = {0: (4, 12), 1: (0, 8), 2: (9, 13)}
    for rank, (start_ms, end_ms) in facts.items():
        times = {"start_ns": start_ms * 1_000_000, "end_ns": end_ms * 1_000_000}
        job.collective("broadcast", ranks=[rank], size=8, root=0, **times)
    trace = job.load()
    data, [_, _, waited, *_] = in_the_strip(trace)
    assert waited.tolist() == [50_000, 0, 0]
    assert strip(trace).title == "Longest wait: rank 0 for rank 2, 5.00 ms in broadcast #1"
    assert data["marked"] == [0, 2]


def test_a_trace_without_calls_is_refused_in_one_sentence(tmp_path):
    with pytest.raises(DlearnError, match="nothing to travel through"):
        strip(Trace(tmp_path, (), ()))
