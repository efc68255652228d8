"""The deck: what stands on its slides, and what a person does with it in a real browser."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import matplotlib.pyplot as plt
import pytest
from test_export import HOSTILE, hostile
from test_player import after, in_browser
from traces import Job

from dlearn import draw, export
from dlearn.draw.embed import inline_svg
from dlearn.export.steps import one_step


def training(folder, *, steps=3, broken=False):
    """Two ranks; in step i each sends the other (i + 1) x 100 B. A `broken` job has one more step, without an end."""
    job = Job(folder, ranks=2)
    for step in range(steps + broken):
        unfinished = step == steps
        for rank in (0, 1):
            at = 1000 * step
            span = job.span(rank, f"step {step}", start_ns=at, end_ns=None if unfinished else at + 900)
            own = {"size": 100 * (step + 1), "parent": span, "tag": 2 * step}
            job.send(rank, 1 - rank, start_ns=at + 10, end_ns=at + 100, **own)
            job.recv(1 - rank, rank, start_ns=at + 10, end_ns=at + 200, **own)
    return job


@pytest.fixture(scope="module")
def deck(tmp_path_factory):
    return export.slides(training(tmp_path_factory.mktemp("deck")).load())


def titles(deck):
    return re.findall(r"<h1>(.*?)</h1>", deck)


def test_seven_slides_tell_the_story(deck):
    assert titles(deck) == [
        "Each rank sends 600 B to the other",
        "The cast: 2 ranks",
        "In words",
        "Message by message",
        "Who sends how much to whom",
        "When",
        "What to trust",
    ]
    assert deck.count("Shown: &#x27;step 2&#x27;, the last complete one of 3 steps.") == 3
    assert deck.count("Shown: the whole trace.") == 1, "the traffic is that of all steps"
    assert "rank 0 sends rank 1 300 B (uint8[300], tag 4)." in deck
    assert '<td>host, process 1000</td><td>world (gloo, 2 ranks)</td><td class="figure">600</td>' in deck
    assert '<tr><th scope="row" class="figure">6</th><td>observed</td>' in deck
    assert plt.get_fignums() == []


def test_of_a_step_without_an_end_the_one_before_is_told(tmp_path):
    assert one_step(training(tmp_path, broken=True).load()).which == "'step 2', the last complete one of 4 steps"


def test_a_part_that_was_chosen_is_what_is_shown(tmp_path):
    part = one_step(training(tmp_path).load().within("step 1"))
    assert part.which == "the part that was chosen"
    assert {event.start_ns for event in part.trace.events} == {1010}


def test_without_steps_a_training_step_is_told(tmp_path):
    job = Job(tmp_path, ranks=2)
    for step in range(2):
        for rank in (0, 1):
            job.stretch(rank, "forward", 100 * step, 100 * step + 10)
            job.stretch(rank, "optimizer", 100 * step + 50, 100 * step + 60)
        job.collective("all_reduce", size=8, start_ns=100 * step + 20, end_ns=100 * step + 30)
    part = one_step(job.load())
    assert part.which == "training step 1, the last complete one, counted from 0"
    assert [match.ends[0].start_ns for match in part.trace.matches] == [120]


def test_it_needs_nothing_else_and_no_two_ids_are_the_same(deck):
    assert re.findall(r'(?:src|href)="(?!#)[^"]*"|@import|url\((?!#)', deck) == []
    ids = re.findall(r'\sid="([^"]*)"', deck)
    assert len(ids) == len(set(ids)) > 20
    assert set(re.findall(r'(?:href="#|url\(#)([^")]*)', deck)) <= set(ids)


def test_every_picture_has_a_name_and_words_instead(deck):
    assert re.findall('role="img" aria-label="(.*?)"', deck) == [
        "Each rank sends 300 B to the other, in 2 messages",
        "Each rank sends 600 B to the other",
        "Each rank sends 300 B to the other",
    ]
    assert deck.count("<summary>The same in words</summary>") == 3
    assert "rank 0 sends rank 1 300 B: uint8[300], tag 4 (observed)." in deck


def test_no_name_breaks_out(tmp_path):
    deck = export.slides(hostile(tmp_path))
    assert deck.count("<script>") == deck.count("</script>") == 1
    assert re.findall(r"<b>|<br/?>|<img", deck) == []
    assert "\u2028" not in deck
    assert f"<h1>{'z' * 50}" not in deck
    assert "&lt;/script&gt;&lt;b&gt;" in deck
    assert HOSTILE[3] in deck  # in the cast, whole


def test_a_job_that_died_and_an_empty_one_have_a_deck_too(tmp_path):
    job = Job(tmp_path / "died", ranks=2)
    job.collective("all_reduce", ranks=[0], size=8, end_ns=None)
    deck = export.slides(job.load(without=[1]))
    assert "Problem: 1 of 2 processes left a file in" in deck
    assert len(titles(export.slides(Job(tmp_path / "empty", ranks=1).load()))) == 7


def test_a_picture_in_a_page_keeps_its_references_and_loses_what_would_leak(tmp_path):
    svg = inline_svg(draw.timeline(training(tmp_path).load()), prefix="mine-")
    root = ET.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "<style" not in svg
    assert all(each.startswith("mine-") for each in re.findall(r'\sid="([^"]*)"', svg))
    assert "url(#mine-" in svg


@in_browser
def test_keys_buttons_and_swipes_turn_the_pages(deck, tmp_path):
    script = """
        const now = () => all(".slide").findIndex((slide) => getComputedStyle(slide).display !== "none") + 1;
        const key = (key, more = {}) => document.body.dispatchEvent(new KeyboardEvent("keydown",
            {key, bubbles: true, cancelable: true, ...more}));
        const turned = [now()];
        for (const each of ["ArrowRight", "PageDown", " ", "ArrowLeft", "End", "ArrowRight", "Home", "PageUp"]) {
            key(each);
            turned.push(now());
        }
        key("End"); key(" ", {shiftKey: true}); turned.push(now());
        find("[data-go='-1']").click(); turned.push(now());
        const touch = (type, clientX) =>
            document.dispatchEvent(Object.assign(new Event(type), {changedTouches: [{clientX, clientY: 0}]}));
        touch("touchstart", 300); touch("touchend", 100); turned.push(now());
        say(turned, text("nav .number"), text(".said"), document.activeElement.id, find("progress").value);
    """
    assert after(deck, tmp_path, script) == [
        [[1, 2, 3, 4, 3, 7, 7, 1, 1, 6, 5, 6], "6 of 7", "Slide 6 of 7: When", "slide-6", 6]
    ]


def test_without_scripts_every_slide_is_there(deck):
    still = re.sub("<script.*?</script>", "", deck, flags=re.S)
    assert still.count('<section class="slide"') == 7
    assert 'class="deck"' not in still


def test_it_can_be_printed_and_be_dark(deck):
    assert "break-after: page" in deck
    assert "prefers-color-scheme: dark" in deck
