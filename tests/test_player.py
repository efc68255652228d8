"""The player: what is in the page, and what a reader does with it in a real browser."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
import subprocess
import zlib
from xml.etree import ElementTree

import pytest
from traces import Job, header

from dlearn import messages
from dlearn.analysis.telling.words import message_sentence
from dlearn.errors import DlearnError
from dlearn.play import player

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: nobody can click")


def ring(folder, *, ranks=3, count=4, names=(), size=100):
    """Message i of `count` goes from rank i to its next one and carries (i + 1) x `size` bytes."""
    job = Job(folder, ranks=ranks)
    job.headers = [header(rank, world_size=ranks, name=name) for rank, name in enumerate(names)] or job.headers
    for i in range(count):
        src, dst = i % ranks, (i + 1) % ranks
        job.send(src, dst, size=(i + 1) * size, start_ns=10 * i, end_ns=10 * i + 5)
        job.recv(dst, src, size=(i + 1) * size, start_ns=10 * i, end_ns=10 * i + 5)
    return job


def after(page, folder, script):
    """What `script`, run in a browser at the end of this page, has put together with `say(...)`."""
    helpers = """
        const said = [], say = (...facts) => said.push(facts);
        const all = (selector) => [...document.querySelectorAll(selector)];
        const find = (selector) => document.querySelector(selector);
        const text = (selector) => find(selector).textContent;
        const click = (name) => find(`[data-go=${name}]`).click();
        const press = (key, on = ".picture") => find(on).dispatchEvent(new KeyboardEvent("keydown",
            {key, bubbles: true, cancelable: true}));
        const shown = () => all(".rows .step:not(.later)").length;
    """
    done = "document.body.innerHTML = ''; document.title = JSON.stringify(said);"
    file = folder / "page.html"
    ready = "(each) => each.dlearnPlayer?.go ?? each.dlearnStrip?.look"
    mounted = f"while (!all('.dlearn-player').every({ready})) await new Promise(setTimeout);"
    rows = "all('[data-view=sequence]').forEach((each) => each.click());"  # of the stage, tests/test_browser.py
    asked = f"<script>(async () => {{{helpers}\n{mounted}\n{rows}\n{script}\n{done}}})()</script>"
    whole = page.replace("</body>", f"{asked}</body>")
    file.write_text(whole, encoding="utf-8")
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    ran = subprocess.run(
        [*command, "--virtual-time-budget=2000", "--dump-dom", file.as_uri()], capture_output=True, timeout=60
    )
    title = re.search("<title>(.*?)</title>", ran.stdout.decode(), re.S)
    assert title, ran.stderr.decode()[-2000:]
    return json.loads(html.unescape(title[1]))


def test_a_sentence_for_each_way_of_knowing(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.collective("all_reduce", size=1000, start_ns=0, end_ns=5)
    job.send(0, 1, size=8)
    job.recv(1, 0, size=8)
    job.send(1, 0, size=4)
    trace = job.load()
    told = [message_sentence(message, trace) for message in messages(trace)]
    assert (
        "rank 1 sends rank 0 250 of 1,000 B for all_reduce: uint8[1000] (derived)." in told
    )  # two halves in two parts
    assert told[-2:] == [
        "rank 0 sends rank 1 8 B: uint8[8] (observed).",
        "rank 1 was to send rank 0 4 B: uint8[4]; it never came (missing).",
    ]


def unpacked(page):
    return json.loads(zlib.decompress(base64.b64decode(re.search('dlearn">(.*?)</script>', page, re.S)[1])))


def picture(page):
    return base64.b64decode(re.search('<img class="still"[^>]*base64,([^"]*)">', page)[1]).decode()


def test_a_page_without_scripts_shows_the_first_messages_and_sentences(tmp_path):
    shown = player(ring(tmp_path).load(), title="A ring & more")
    still = re.sub("<script.*?</script>", "", shown.to_html(tmp_path / "ring.html"), flags=re.S)
    assert "<title>A ring &amp; more</title>" in still
    assert len(re.findall("M[0-9]+ [0-9]+l", picture(still))) == 4  # a head for each message
    assert ElementTree.fromstring(picture(still)).tag.endswith("svg")
    assert re.findall("<li>(.*?)</li>", still) == list(shown.sentences)
    assert "<details open>" in still
    assert (tmp_path / "ring.html").read_text(encoding="utf-8") == shown.to_html()
    assert "http" not in still.replace("http://www.w3.org", "")
    assert str(shown).splitlines()[1] == f"   1. {shown.sentences[0]}"


def test_a_page_without_a_place_is_said(tmp_path):
    with pytest.raises(DlearnError, match=r"cannot write .*: No such file or directory. Choose another place"):
        player(ring(tmp_path / "job").load()).to_html(tmp_path / "nowhere" / "page.html")


def test_no_name_breaks_out(tmp_path):
    evil = "</script><b>\u2028&"
    page = player(ring(tmp_path, names=[evil, "<img src=x>", "$x$"]).load(), title=evil).to_html()
    assert page.count("</script>") == 2
    assert "<b>" not in page
    assert page.count("<img") == 1  # the still picture
    assert "\u2028" not in page
    assert "</" not in "".join(ElementTree.fromstring(picture(page)).itertext()).replace("</script><b>", "")
    assert unpacked(page)["pairs"][0].startswith("</script><b>")


def test_a_long_trace_is_cut_and_says_so(tmp_path):
    shown = player(ring(tmp_path, ranks=8, count=320).load())
    assert len(shown.sentences) == 300
    assert "The first 300 of 320 messages; 20 later ones are left out" in shown.notes[1]
    assert len(shown.snippet.encode()) < 60_000


def test_of_three_all_reduces_of_eight_ranks_the_last_is_played_whole_and_stays_small(tmp_path):
    """Derived from gloo's ring, 16 pieces: with what each rank holds after each of 224 messages."""
    job = Job(tmp_path, ranks=8)
    for number in range(3):
        job.collective("all_reduce", size=80_000, start_ns=1000 * number, end_ns=1000 * number + 900)
    shown = player(job.load())
    assert shown.title == "all_reduce #3 (uint8[80000]): 224 of 672 messages, 1.12 MB"
    assert len(shown.sentences) == 224
    assert shown.walk.boards
    assert len(shown.snippet.encode()) < 60_000


def test_only_the_messages_that_were_asked_for(tmp_path):
    trace = ring(tmp_path).load()
    shown = player(trace, messages=[messages(trace)[2]])
    assert shown.title == "1 message with 300 B"
    assert shown.sentences == ("rank 2 sends rank 0 300 B: uint8[300] (observed).",)


def test_what_is_no_message_is_refused_in_one_sentence(tmp_path):
    trace = Job(tmp_path, ranks=1).load()
    for wrong in (300, [1, 2], "all"):
        with pytest.raises(DlearnError, match=r"messages= takes the messages to play, and not .*: such as dlearn"):
            player(trace, messages=wrong)


def test_what_has_no_messages_is_told(tmp_path):
    job = Job(tmp_path, ranks=2, backend="unheard_of")
    job.collective("all_reduce", size=8)
    shown = player(job.load())
    assert shown.sentences == ()
    assert shown.notes[0] == "0 messages of 0 operations; 1 operations not explained"


@in_browser
def test_clicks_step_through_the_messages(tmp_path):
    shown = player(ring(tmp_path).load())
    script = """
        say(text(".position"), shown(), find("details").open);
        for (let i = 0; i < 3; i++) click("forward");
        say(text(".position"), shown(), text(".sentence"));
        say(text("tfoot"), text("tbody tr"));
        click("end"); say(text(".position"), text("tfoot"), find("[data-go=forward]").disabled);
        say(text("tbody tr"), document.activeElement.className);
        click("back"); click("back"); say(text(".position"), text("tfoot"));
        click("start"); say(text(".position"), shown());
        const slider = find("[type=range]"); slider.value = 2; slider.dispatchEvent(new Event("input"));
        say(text(".position"), slider.getAttribute("aria-valuetext"));
    """
    assert after(shown.to_html(), tmp_path, script) == [
        ["step 0 of 4", 0, False],
        ["step 3 of 4", 3, shown.sentences[2]],
        ["in all3600 B", "rank 0 → rank 11100 B"],  # 100 + 200 + 300
        ["step 4 of 4", "in all41,000 B", True],
        ["rank 0 → rank 12500 B", "picture"],  # 100 + 400
        ["step 2 of 4", "in all2300 B"],
        ["step 0 of 4", 0],
        ["step 2 of 4", "step 2 of 4"],
    ]


@in_browser
def test_play_does_not_stay_where_nothing_moves(tmp_path):
    """Rank 0 works eight times, then two ranks send each other a message."""
    job = Job(tmp_path, ranks=2)
    for at in range(8):
        job.span(0, f"F{at}", start_ns=10 * at, end_ns=10 * at + 5)
    for src, dst in ((0, 1), (1, 0)):
        job.send(src, dst, size=8, start_ns=100 + src, end_ns=120)
        job.recv(dst, src, size=8, start_ns=100 + src, end_ns=120)
    script = """
        const [waits, real] = [[], setTimeout];
        globalThis.setTimeout = (act, ms) => { waits.push(ms); return real(act, 0); };
        click("play");
        while (text(".position") !== "step 10 of 10") await new Promise((done) => real(done, 0));
        say(...waits);
    """
    [waits] = after(player(job.load()).to_html(), tmp_path, script)
    assert waits[8:] == [1200, 1200]
    assert all(wait <= 200 for wait in waits[:8])


@in_browser
def test_control_messages_can_be_hidden(tmp_path):
    """A barrier of two ranks is two messages without data (0 to 1, 1 to 0), before four with data."""
    job = Job(tmp_path, ranks=2)
    job.collective("barrier", start_ns=0, end_ns=1)
    for i in range(4):
        job.send(0, 1, size=8, start_ns=10 + i, end_ns=20)
        job.recv(1, 0, size=8, start_ns=10 + i, end_ns=20)
    script = """
        for (let i = 0; i < 4; i++) click("forward");
        say(text(".position"), text(".sentence"));
        find("[type=checkbox]").click();
        say(text(".position"), text(".sentence"), shown(), text("label"));
    """
    second = "rank 0 sends rank 1 8 B: uint8[8] (observed)."
    assert after(player(job.load()).to_html(), tmp_path, script) == [
        ["step 4 of 6", second],
        ["step 2 of 4", second, 2, " Hide control messages: 4 of 6 carry data"],
    ]


@in_browser
def test_players_on_one_page_do_not_meet_and_fit_a_narrow_one(tmp_path):
    """What never came is in the picture, and in no total. 480 px is half a laptop's width."""
    job = ring(tmp_path, ranks=8, count=30)
    job.send(0, 1, size=8, start_ns=1000)
    trace = job.load()
    page = player(trace, title="second").to_html().replace("<body>", f"<body>{player(trace)._repr_html_()}")
    script = """
        const [first, second] = all(".dlearn-player");
        second.querySelector("[data-go=end]").click();
        say(all(".position").map((each) => each.textContent), shown(), all(".buttons").length);
        say(all("tfoot").map((each) => each.textContent));
        document.body.style.width = "464px";
        say(first.scrollWidth <= first.clientWidth, second.scrollWidth <= second.clientWidth);
    """
    assert after(page, tmp_path, script) == [
        [["step 0 of 31", "step 31 of 31"], 20, 2],
        [["in all00 B", "in all3046,500 B"]],  # 100 * (1 + 2 + ... + 30)
        [True, True],
    ]


@in_browser
def test_a_hang_is_what_the_page_shows_first(tmp_path):
    """Who waits has a dot, who never came an X; a future step is faint. Red is nothing else."""
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=300, start_ns=0, end_ns=50)
    job.collective("all_reduce", ranks=[0, 2], size=300, start_ns=100, end_ns=None)
    script = """
        const red = () => all(".rows .step").filter((each) => each.classList.contains("missing"));
        say(text(".position"), text(".sentence"), all(".missing circle").length, text(".missing .absent"));
        click("start");
        say(shown(), all(".rows .later").length, red().length);
    """
    told = "Rank 0 and rank 2 wait for rank 1 in all_reduce #2; rank 1 never called it (missing)."
    shown = player(job.load())
    assert shown.step == 25
    assert after(shown.to_html(), tmp_path, script) == [
        ["step 25 of 25", told, 2, "✖ never came"],
        [0, 20, 0],
    ]
