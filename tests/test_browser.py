"""Player, strip, held jobs and drawings as a person meets them: in pages of their own, and in a real JupyterLab."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab import Lab, running_lab
from matplotlib.image import imread
from pictures import ddp_buckets, ddp_step, drawings, pipeline, ring
from traces import Job

from dlearn import draw, messages, operations
from dlearn.draw.palette import FAINT, INK, MISSING, WHOLE, contrast, look
from dlearn.live.held_stage import snippet, stage_of
from dlearn.play import Player, player, strip

pytest.importorskip("playwright", reason="nobody can click without playwright: `make test-all` installs it")
pytest.importorskip("axe_playwright_python", reason="accessibility needs axe: `make test-all` installs it")
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: nobody can click"),
    pytest.mark.timeout(300),
]

FLAGS = "no-sandbox disable-gpu disable-quic no-first-run disable-background-networking disable-component-update"
WIDTH = 1300  # CSS pixels: a laptop's window
PATIENCE_MS = 60_000  # a machine may be busy
NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
EVIL = """<img src=x onerror="window.ran=1"><script>window.ran=1</script>'"&amp;$x$ 🐍 """
LONG = (EVIL + "x" * 200)[:200]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=[f"--{flag}" for flag in FLAGS.split()])
        yield launched
        launched.close()


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """The page. From a file it has no network. An error in its console fails the test."""
    context = browser.new_context(viewport={"width": WIDTH, "height": 1000})
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(error.stack or str(error)))
    page.on("console", lambda said: errors.append(f"{said.text} {said.location}") if said.type == "error" else None)
    if url.startswith("file:"):
        context.set_offline(True)
        context.route("**", lambda route, ask: route.continue_() if ask.url.startswith("file:") else route.abort())
    page.goto(url)
    yield page
    context.close()
    # An exported notebook asks for require.js and MathJax, and does without.
    assert [error for error in errors if "net::ERR_FAILED https://" not in error and "cdnjs" not in error] == []


@contextmanager
def page_of(browser: Browser, folder: Path, html: str) -> Iterator[Page]:
    """A page, or a part of one, from a file."""
    path = folder / "page.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{html}", encoding="utf-8")
    with opened(browser, path.as_uri()) as page:
        yield page


def after(browser: Browser, page: str, folder: Path, script: str) -> list[Any]:
    """What `script`, run in this page once all of it has come to life, has put together with `say(...)`."""
    helpers = """
        const said = [], say = (...facts) => said.push(facts);
        const all = (selector) => [...document.querySelectorAll(selector)];
        const find = (selector) => document.querySelector(selector);
        const text = (selector) => find(selector).textContent;
        const click = (name) => find(`[data-go=${name}]`).click();
        const press = (key, on) => find(on).dispatchEvent(new KeyboardEvent("keydown",
            {key, bubbles: true, cancelable: true}));
        const isReady = (each) => each.dlearnPlayer?.go ?? each.dlearnStrip?.look;
        while (!all(".dlearn-player").every(isReady)) await new Promise((done) => setTimeout(done));
        const root = find(".dlearn-strip"), travel = root?.dlearnStrip;
        const tell = () => say(root.querySelector("code").textContent, travel.found.length,
            root.querySelector(".sentence").textContent);
    """
    with page_of(browser, folder, page) as shown:
        return shown.evaluate(f"async () => {{ {helpers} {script}; return said; }}")


def stands(root: Locator, step: int) -> None:
    expect(root.locator(".position")).to_have_text(re.compile(rf"\b{step} of \d+$"))


def last(root: Locator) -> int:
    """How many steps the player has."""
    return int(re.search(r"of (\d+)$", root.locator(".position").inner_text())[1])


def walk(root: Locator) -> None:
    """Through the whole player with the mouse, then with the keyboard; it ends at step 2."""
    root.evaluate("root => root.scrollIntoView()")  # JupyterLab shows nothing of what is far away
    page, end = root.page, last(root)
    sentences = root.locator("li").all_text_contents()
    if root.locator("[data-go=start]").is_enabled():
        root.locator("[data-go=start]").click()
    for step in range(1, 4):
        root.locator("[data-go=forward]").click()
        stands(root, step)
        expect(root.locator(".sentence")).to_have_text(sentences[step - 1])
    root.locator("[data-go=end]").click()
    stands(root, end)
    expect(root.locator("[data-go=forward]")).to_be_disabled()
    root.locator(".picture").focus()
    keys = {"ArrowUp": end - 1, "Home": 0, "ArrowRight": 1, "ArrowDown": 2, "ArrowLeft": 1, "End": end}
    for key, step in keys.items():
        page.keyboard.press(key)
        stands(root, step)
    root.locator("input[type=range]").fill("2")
    stands(root, 2)
    expect(root.locator(".sentence")).to_have_text(sentences[1])


def violations(page: Page, scope: str | None = None) -> list[tuple[str, str, str]]:
    """What axe-core finds, light and dark, with all sentences open: rule, where, what it says."""
    found = []
    page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        if page.url.startswith("http"):  # JupyterLab follows, and a splash is over the page till then.
            is_light = str(scheme == "light").lower()
            expect(page.locator("body")).to_have_attribute("data-jp-theme-light", is_light)
            expect(page.locator("#jupyterlab-splash")).to_have_count(0)
        for rule in Axe().run(page, context=scope).response["violations"]:
            found += [(rule["id"], f"{scheme} {node['target']}", node["failureSummary"]) for node in rule["nodes"]]
    return found


def test_a_page_of_its_own_plays_without_a_network(browser, tmp_path):
    with page_of(browser, tmp_path, player(ring(tmp_path).load()).to_html()) as page:
        root = page.locator(".dlearn-player")
        walk(root)
        root.locator("[data-go=play]").click()
        stands(root, 3)
        root.locator("[data-go=play]").click()
        assert violations(page) == []


def test_names_are_text_and_never_run(browser, tmp_path):
    """Of ranks, of an operation and in the title: whoever wrote the trace."""
    job = ring(tmp_path, names=(EVIL, LONG, "b" * 200), count=3)
    job.collective(EVIL, size=8, start_ns=100, end_ns=200)
    shown = player(job.load(), title=LONG)
    with page_of(browser, tmp_path, shown.to_html()) as page:
        root = page.locator(".dlearn-player")
        root.locator("[data-go=end]").click()
        stands(root, len(shown.sentences))
        assert root.locator("img[src=x]").count() == 0
        assert page.evaluate("window.ran") is None
        assert page.title() == " ".join(shown.title.split())
        assert root.locator(".title").text_content() == shown.title
        assert root.locator("li").all_text_contents() == list(shown.sentences)
        assert root.locator(".sentence").text_content() == shown.sentences[-1]
        assert EVIL.strip() in root.text_content()
        assert root.evaluate("root => root.scrollWidth <= root.clientWidth")


def test_control_messages_can_be_hidden(browser, tmp_path):
    """A barrier of two ranks is two messages without data (0 to 1, 1 to 0), before four with data."""
    job = Job(tmp_path, ranks=2)
    job.collective("barrier", start_ns=0, end_ns=1)
    for i in range(4):
        job.message(0, 1, size=8, start_ns=10 + i, end_ns=20)
    script = """
        for (let i = 0; i < 4; i++) click("forward");
        say(text(".position"), text(".sentence"));
        find("[type=checkbox]").click();
        say(text(".position"), text(".sentence"), text("tfoot"), text("label"));
    """
    second = "rank 0 sends rank 1 8 B: uint8[8] (observed)."
    assert after(browser, player(job.load()).to_html(), tmp_path, script) == [
        ["message 4 of 6", second],
        ["message 2 of 4", second, "in all216 B", " Hide control messages: 4 of 6 carry data"],
    ]


CELLS_SHOWN = """root => [...root.querySelectorAll('.machine')].map(
    machine => [...machine.querySelectorAll('.cell title')].map(title => title.textContent).map(
        text => text === "nothing" ? "" : text))"""
PARTS, FILLS = ".cell rect:not(.slot)", "each => each.map(rect => rect.getAttribute('fill'))"
GO = "(root, step) => root.dlearnPlayer.go(step)"


@pytest.fixture
def reduced(tmp_path) -> Player:
    """An all-reduce of four ranks, whose parts travel round the ring."""
    job = Job(tmp_path, ranks=4)
    facts = {"start_ns": {rank: 10_000 + rank for rank in range(4)}, "site": "train.py:12"}
    job.collective("all_reduce", size=4096, end_ns=900_000, **facts)
    return player(job.load())


def board_texts(shown: Player, step: int) -> list[list[str]]:
    """What stands on the board of the all-reduce after so many steps, by rank."""
    [panel] = shown.walk.panels
    held = shown.walk.held(panel, step)
    return [[held[key].text for key in sorted(held) if key[0] == rank] for rank in range(4)]


def test_the_stage_shows_what_the_board_says_at_every_step(browser, reduced, tmp_path):
    with page_of(browser, tmp_path, reduced.to_html()) as page:
        page.emulate_media(reduced_motion="reduce")
        root = page.locator(".dlearn-player")
        assert root.locator(".machine").count() == 4, "the first frame is not empty"
        assert root.locator(".stage .wire").count() == 4, "the ring: from each rank to one other"
        root.evaluate(GO, 0)
        assert {*root.locator(PARTS).evaluate_all(FILLS)} == {look("all_reduce").color}
        for step in range(len(reduced.sentences) + 1):
            root.evaluate(GO, step)
            assert root.evaluate(CELLS_SHOWN) == board_texts(reduced, step)
        assert {*root.locator(PARTS).evaluate_all(FILLS)} == {WHOLE}
        expect(root.locator(".lit")).to_have_text("train.py:12")
        root.locator("[data-view=film]").click()
        expect(root.locator(".still")).to_be_visible()


def test_the_matrix_of_an_all_to_all_has_the_ranks_at_its_edges_and_a_frame_on_what_is_sent(browser, tmp_path):
    made = Job(tmp_path, ranks=12)
    made.collective("all_to_all_single", size=1200, end_ns=1000)
    with page_of(browser, tmp_path, player(made.load()).to_html()) as page:
        page.emulate_media(reduced_motion="reduce")
        for width in (1280, 350):
            page.set_viewport_size({"width": width, "height": 900})
            page.locator(".dlearn-player").evaluate(GO, 5)
            texts = page.locator(".stage text").all_text_contents()
            assert texts == [*(str(rank) for rank in range(12) for _ in "xy"), "to rank", "from rank"]
            src, dst = re.match(r"rank (\d+) sends rank (\d+)", page.locator(".sentence").inner_text()).groups()
            middles = """() => [...document.querySelectorAll(".stage text, .frame")].map((each) => {
                const { left, right, top, bottom } = each.getBoundingClientRect();
                return [(left + right) / 2, (top + bottom) / 2]; })"""
            *numbers, _, _, (x, y) = page.evaluate(middles)
            assert abs(numbers[2 * int(src)][1] - y) < 3, "the row of the sender"
            assert abs(numbers[2 * int(dst) + 1][0] - x) < 3, "the column of the receiver"


def test_a_stage_keeps_micro_batches_by_number_in_boxes_up_to_both_edges(browser, tmp_path):
    shown = player(pipeline(tmp_path / "made", stages=4, micro_batches=6))
    full = next(at for at, each in enumerate(shown.sentences, 1) if "to come: 6" in each)
    with page_of(browser, tmp_path, shown.to_html()) as page:
        for width in (1280, 350):
            page.set_viewport_size({"width": width, "height": 900})
            page.locator(".dlearn-player").evaluate(GO, full)
            box = page.locator(".machine").first
            assert box.locator("li").all_text_contents() == [*"012345"]
            titles = box.locator("li").evaluate_all("all => all.map((each) => each.title)")
            assert titles == [f"micro-batch {number}" for number in range(6)]
            cut = "all => all.filter((each) => each.scrollHeight > each.clientHeight).length"
            assert page.locator("foreignObject, foreignObject li").evaluate_all(cut) == 0


def test_a_packet_moves_from_sender_to_receiver_and_only_then_is_its_part_there(browser, reduced, tmp_path):
    with page_of(browser, tmp_path, reduced.to_html()) as page:
        root = page.locator(".dlearn-player")
        root.evaluate(GO, 4)
        root.locator("[data-go=forward]").click()
        assert root.evaluate(CELLS_SHOWN) == board_texts(reduced, 4)
        places = """() => new Promise((done) => { const seen = new Set(), packet = document.querySelector(".packet");
            const look = () => { seen.add(packet.getAttribute("transform"));
                seen.size > 2 ? done(seen.size) : requestAnimationFrame(look); }; look(); })"""
        assert page.evaluate(places) > 2, "it moves, and does not jump"
        arrived = f"wanted => JSON.stringify(({CELLS_SHOWN})(document)) === wanted"
        page.wait_for_function(arrived, arg=json.dumps(board_texts(reduced, 5), separators=(",", ":")))
        expect(root.locator(".packet")).to_have_count(1)


def test_a_player_that_was_hidden_is_as_large_as_before(browser, reduced, tmp_path):
    """A tab that is left and found again, and one that was hidden when the page came."""
    scaled = "root => root.querySelector('.stage').clientWidth - root.querySelector('.picture').clientWidth"
    with page_of(browser, tmp_path, reduced.to_html()) as page:
        root = page.locator(".dlearn-player")
        for change in ("display = 'none'", "display = ''"):
            root.evaluate(f"root => {{ root.style.{change}; }}")
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert root.evaluate(scaled) == 0
        root.evaluate("root => { root.style.display = 'none'; }")
        root.evaluate(GO, 2)
        root.evaluate("root => { root.style.display = ''; }")
        page.wait_for_function(f"({scaled})(document.querySelector('.dlearn-player')) === 0")


GAPS = """root => {
    const rects = (selector) => [...root.querySelectorAll(selector)].map(each => each.getBoundingClientRect());
    const met = rects(".box").filter((one, i, all) => all.some((other, k) => k < i && one.left < other.right
        && other.left < one.right && one.top < other.bottom && other.top < one.bottom));
    const wires = rects(".stage .wire").map(({width, height}) => Math.hypot(width, height));
    return [met.length, root.scrollWidth - root.clientWidth, Math.min(...wires) > 12];
}"""


@pytest.mark.parametrize("width", [350, 500])
def test_on_a_narrow_page_no_rank_stands_on_another_and_each_wire_is_seen(browser, tmp_path, width):
    for ranks in (3, 4, 8):
        job = Job(tmp_path / str(ranks), ranks=ranks)
        job.collective("all_reduce", size=8192, start_ns=0, end_ns=900_000)
        with page_of(browser, tmp_path, player(job.load()).to_html()) as page:
            page.set_viewport_size({"width": width, "height": 900})
            page.wait_for_function("() => document.querySelector('.stage')?.viewBox.baseVal.width < 500")
            assert page.locator(".dlearn-player").evaluate(GAPS) == [0, 0, True]


def test_the_first_collective_plays_once_seen_until_a_click_or_python_ends_it(browser, reduced, tmp_path):
    with page_of(browser, tmp_path, reduced.to_html()) as page:
        root, play = page.locator(".dlearn-player"), page.locator("[data-go=play]")
        for end in (lambda: root.locator(".picture").click(), lambda: root.evaluate(GO, 7)):
            expect(root.locator(".position")).to_have_text("all_reduce #1: round 1 of 12")
            expect(play).to_have_text("Pause")
            end()
            expect(play).to_have_text("Play")
            page.reload()
        page.emulate_media(reduced_motion="reduce")
        page.reload()
        expect(root.locator(".position")).to_have_text("message 0 of 48")
        page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert (play.inner_text(), root.locator(".machine.at").count()) == ("Play", 0)


def test_who_never_came_is_an_empty_place_with_red_wires_and_what_is_derived_moves_along_dashes(browser, tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=300, start_ns=0, end_ns=1_000_000)
    job.stretch(range(3), "forward", 1_100_000, 1_200_000)
    job.collective("all_reduce", size=300, ranks=[0, 2], start_ns=2_000_000, end_ns=None)
    trace = job.load()
    for part, step in ((trace.between(1.5, 3), 0), (trace, 1)):
        with page_of(browser, tmp_path, player(part).to_html()) as page:
            root = page.locator(".dlearn-player")
            assert root.evaluate(CELLS_SHOWN) == [["its own part"], [], ["its own part"]]
            assert root.locator(".wire.missing").count() == 3, "the ring that never ran"
            if step:
                root.evaluate(GO, step)
                dashes = "wire => getComputedStyle(wire).strokeDasharray"
                assert root.locator(".wire.used").evaluate(dashes) != "none"
                assert root.locator(".wire:not(.used)").first.evaluate(dashes) == "none"


def in_steps(folder: Path) -> Job:
    """Steps of 1 ms: in each an all-reduce, to which rank 1 comes late, and a send from rank 0 to rank 1."""
    made = Job(folder, ranks=3)
    for step in range(6):
        begin = step * 1_000_000
        # A parent has the same number on all ranks: each makes three events in a step.
        parent = made.span(range(3), f"step {step}", start_ns=begin, end_ns=begin + 900_000)
        starts = {rank: begin + 1000 + 50_000 * (rank == 1) for rank in range(3)}
        made.collective("all_reduce", size=300, start_ns=starts, end_ns=begin + 200_000, parent=parent)
        times = {"start_ns": begin + 300_000, "end_ns": begin + 310_000, "parent": parent}
        made.message(0, 1, size=8, **times)
        made.span(2, "idle", **times)
    return made


def test_the_copied_python_selects_what_the_page_shows(browser, tmp_path):
    trace = in_steps(tmp_path).load()
    script = """
        tell();
        find("select").value = 2; find("select").dispatchEvent(new Event("change")); tell();
        travel.look(10000, 33000); tell();
        for (const key of ["n", "n", "ArrowDown"]) { press(key, ".lanes"); tell(); }
        press("Escape", ".lanes"); press("Home", ".lanes"); tell();
        press("+", ".lanes"); tell(); press("ArrowRight", ".lanes"); tell();
    """
    told = after(browser, strip(trace).to_html(), tmp_path, script)
    for python, count, sentence in told:
        assert len(operations(eval(python, {"trace": trace}))) == count, (python, sentence)
    pythons = [python for python, _, _ in told]
    assert pythons[:3] == ["trace", 'trace.within("step 2")', "trace.between(1, 3.3)"]
    assert pythons[6] == "trace"
    assert told[0][2] == "12 operations in view: 150 messages, 7.25 kB of payload."
    assert len(messages(trace)) == 150
    assert len({python for python in pythons if ".where(" in python}) == 2


def test_a_call_is_told_with_its_line_its_wait_and_how_it_is_known(browser, tmp_path):
    made = Job(tmp_path, ranks=3)
    made.collective("all_reduce", size=300, start_ns={0: 0, 1: 400_000, 2: 0}, end_ns=1_000_000, site="train.py:31")
    made.collective("all_reduce", size=300, ranks=[0, 2], start_ns=2_000_000, end_ns=None)
    script = """
        for (const call of [0, 1]) { travel.choose(call); tell(); }
    """
    (_, _, first), (python, count, second) = after(browser, strip(made.load()).to_html(), tmp_path, script)
    assert first == (
        "all_reduce of uint8[300] (train.py:31): rank 0 was in it for 1.00 ms, 400 µs of it waiting for rank 1."
        " Messages: derived. 24 messages, 1.20 kB of payload."
    )
    assert second == (
        "all_reduce of uint8[300], which rank 1 never called: rank 0 never came out of it."
        " Messages: missing. 0 messages, 0 B of payload."
    )
    assert (python, count) == ('trace.between(2, 2.0001).where(op="all_reduce")', 1)


def test_the_strip_is_travelled_by_mouse_and_keys_and_axe_finds_nothing(browser, tmp_path):
    with page_of(browser, tmp_path, strip(ring(tmp_path).load()).to_html()) as page:
        root, lanes = page.locator(".dlearn-strip"), page.locator(".lanes")
        expect(root.locator(".sentence")).to_have_text("9 operations in view: 9 messages, 4.50 kB of payload.")
        lanes.hover(position={"x": 600, "y": 60})
        page.mouse.wheel(0, -200)
        expect(root.locator("code")).to_contain_text("trace.between(")
        lanes.focus()
        for key in ("Home", "n", "n", "ArrowDown"):
            page.keyboard.press(key)
        expect(root.locator("code")).to_contain_text('.where(op="')
        assert violations(page) == []
        page.keyboard.press("Escape")
        page.keyboard.press("Home")
        expect(root.locator("code")).to_have_text("trace")


def test_every_arrow_of_the_strip_begins_and_ends_on_a_bar_of_its_operation(browser, tmp_path):
    """Three operations at once: each rank has three bars below each other."""
    made = Job(tmp_path, ranks=3)
    for place, op in enumerate(["all_reduce", "all_gather", "reduce_scatter"]):
        starts = {rank: 10_000 * place + 20_000 * rank for rank in range(3)}
        made.collective(op, size=300, start_ns=starts, end_ns=200_000 + 50_000 * place)
    script = """
        const bars = [], points = [], { fillRect, moveTo } = CanvasRenderingContext2D.prototype;
        const draws = (ink) => ink.canvas.className == "lanes";
        CanvasRenderingContext2D.prototype.fillRect = function (...box) {
            if (draws(this)) bars.push([this.fillStyle, ...box]);
            fillRect.apply(this, box);
        };
        CanvasRenderingContext2D.prototype.moveTo = function (...at) {
            if (draws(this)) points.push(at);
            moveTo.apply(this, at);
        };
        for (const call of [0, 1, 2]) {
            bars.length = points.length = 0;
            travel.choose(call);
            const { colors, kinds, kind, operation } = travel.data;
            const color = colors[kinds[kind[operation[call]]].look][0][0].toLowerCase();
            say(bars.filter(([fill]) => fill === color).map(([, ...box]) => box), [...points]);
        }
    """
    for bars, points in after(browser, strip(made.load()).to_html(), tmp_path, script):
        assert (len(bars), len(points) >= 6) == (3, True)
        for x, y in points:
            assert any(left - 1 <= x <= left + w + 1 and top < y < top + h for left, top, w, h in bars), (x, y, bars)


DRAWS = """
    const written = [], painted = [], { fillText, fillRect } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...at) {
        written.push([this.canvas.className, text, this.fillStyle, this.font, ...at]);
        fillText.call(this, text, ...at);
    };
    CanvasRenderingContext2D.prototype.fillRect = function (...box) {
        painted.push([this.canvas.className, this.fillStyle, this.globalAlpha, ...box]);
        fillRect.apply(this, box);
    };
    travel.choose(-1);
    say(written, painted);
"""


def test_the_rows_of_who_is_waited_for_have_names_and_the_rank_that_never_came_is_red_in_them(browser, tmp_path):
    """Rank 1 comes late to step 1, and not at all to the last all-reduce."""
    made = Job(tmp_path, ranks=2)
    ddp_buckets(made)
    for step in range(3):
        ddp_step(made, 1000 * step, late=500 * (step == 1), backward=step)
    made.collective("all_reduce", ranks=[0], size=40, start_ns=4_000_000, end_ns=None)
    ((written, painted),) = after(browser, strip(made.load()).to_html(), tmp_path, DRAWS)
    names = [(text, fill, "bold" in font) for _, text, fill, font, x, *_ in written if x == 0]
    assert names[:2] == [("rank 1", MISSING, True), ("rank 0", INK, False)], "beside the lanes"
    assert names[2] == ("waited for", FAINT, False)
    assert names[3:] == names[:2], "beside the rows below"
    below = 160
    red = [y for canvas, fill, alpha, _, y, *_ in painted if (canvas, fill, alpha) == ("lanes", MISSING, 1)]
    rows = sorted({y for canvas, fill, _, _, y, *_ in painted if (canvas, fill) == ("lanes", INK) and y > below})
    assert (len(rows), red) == (2, rows[1:]), "in ink, as no bucket is; solid red in the last row only"


def test_a_single_long_step_keeps_its_mark_where_many_share_a_column(browser, tmp_path):
    """800 steps on some 400 columns; step 300 takes ten times as long."""
    made, at = Job(tmp_path, ranks=1), 0
    for step in range(800):
        took = 10_000 * (1 + 9 * (step == 300))
        made.span(0, f"step {step}", start_ns=at, end_ns=at + took)
        at += took
    made.collective("barrier", start_ns=0, end_ns=at)
    ((_, painted),) = after(browser, strip(made.load()).to_html(), tmp_path, DRAWS)
    caps = [(fill, *box) for canvas, fill, _, *box in painted if canvas == "overview" and box[3] == 2]
    assert len(caps) < 500, "a column has several steps"
    high = [(fill, y) for fill, _, y, *_ in caps if y < 10]
    assert high == [(INK, 3)], "it is named, and its mark is at the top"


def test_a_run_of_many_steps_is_shown_in_shares_and_leads_to_its_longest_step(browser, tmp_path):
    """A step is 330 µs of 400; rank 0 computes 270 of them and waits 40 for a transfer (see `ddp_step`)."""
    made = Job(tmp_path, ranks=2)
    ddp_buckets(made)
    for step in range(80):
        ddp_step(made, 400 * step + 2000 * (step > 40), late=2000 * (step == 40), backward=step)
    with page_of(browser, tmp_path, strip(made.load()).to_html()) as page:
        root, lanes, code = page.locator(".dlearn-strip"), page.locator(".lanes"), page.locator("code")
        expect(root).to_have_class(re.compile("shares"))
        lanes.hover(position={"x": 90, "y": 40})
        shares = "training step 0: rank 0 computes 68%, sends unhidden 10%, waits for the last rank 0%."
        expect(root.locator(".sentence")).to_have_text(shares)
        assert violations(page) == []
        picture = "[...document.querySelectorAll('canvas')].map((each) => each.toDataURL())"
        page.mouse.move(0, 0)
        before = page.evaluate(picture)
        for display in ("none", ""):
            root.evaluate("(root, display) => { root.parentElement.style.display = display; }", display)
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert page.evaluate(picture) == before
        for link in (page.get_by_text("Training step 40 took"), root.locator(".longest button").filter(has_text="40")):
            lanes.press("Home")
            expect(root).to_have_class(re.compile("shares"))
            link.click()
            expect(root).not_to_have_class(re.compile("shares"))
            expect(code).to_have_text(re.compile(r"trace.between\(16, "))
        lanes.press("Home")
        lanes.click(position={"x": 90, "y": 40})
        expect(code).to_have_text("trace.between(0, 0.4)")
        page.set_viewport_size({"width": 350, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= 350


SEEN = """() => [...document.querySelectorAll("text")].map(text => {
    const box = text.getBoundingClientRect();
    const at = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    const under = document.elementsFromPoint(...at).filter(each => each.tagName == "path");
    const paint = under.map(each => getComputedStyle(each)).find(each => /^rgb/.test(each.fill));
    return [text.textContent, getComputedStyle(text).fill, paint ? paint.fill : ""];
})"""


def rgb(css):
    return tuple(int(part) / 255 for part in re.findall(r"\d+", css)[:3])


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_in_the_page_of_its_reader(browser, tmp_path, scheme):
    for name, ax in drawings(tmp_path).items():
        draw.save(ax, tmp_path / f"{name}.svg")
        with opened(browser, (tmp_path / f"{name}.svg").as_uri()) as page:
            page.set_viewport_size({"width": 1300, "height": 2000})
            page.emulate_media(color_scheme=scheme)
            seen = [each for each in page.evaluate(SEEN) if each[2]]
        assert len(seen) > 3, name
        faint = [each for each in seen if contrast(rgb(each[1]), rgb(each[2])) < 4.5]
        assert faint == [], name


@pytest.mark.parametrize("light", [True, False])
def test_a_drawing_takes_theme_and_width_of_its_cell_and_shares_no_id(browser, tmp_path, light):
    """The theme is JupyterLab's, also where the reader's system asks for the other one."""
    shown = draw.timeline(ring(tmp_path).load()).figure._repr_html_()
    theme = f'data-jp-theme-light="{str(light).lower()}"'
    with page_of(browser, tmp_path, f"<body {theme}>{shown}</body>") as page:
        page.emulate_media(color_scheme="dark" if light else "light")
        page.set_viewport_size({"width": 800, "height": 900})
        image, narrow = page.locator(".dlearn-wide"), page.locator(".dlearn-narrow")
        assert page.locator("[id]").count() == 0
        assert 770 <= image.bounding_box()["width"] <= 800
        assert not narrow.is_visible()
        image.screenshot(path=tmp_path / "seen.png")
        corner = imread(tmp_path / "seen.png")[2, 2, :3]
        assert tuple(corner) == pytest.approx((1, 1, 1) if light else (17 / 255,) * 3, abs=0.01)
        page.set_viewport_size({"width": 420, "height": 900})
        expect(image).to_be_hidden()
        assert narrow.is_visible(), "laid out for the cell, and not scaled"


SCRIPT = "</script><script>window.ran=1</script>"


def held_state(told: list[tuple[int, str, int | None, int]], ranks: int, hang: str = "") -> dict[str, Any]:
    """What a page shows while these calls wait, or the first two ranks wait for each other."""
    names = ("rank", "op", "to", "bytes")
    calls = [SimpleNamespace(**dict(zip(names, facts, strict=True)), site="train.py:5") for facts in told]
    gate = SimpleNamespace(names=tuple(range(ranks)), calls=calls, passed=[], wires={})
    send = SimpleNamespace(exchange=None, is_message=True, ends=[SimpleNamespace(op="send")])
    hung = []
    for waiting, missing in ((0, 1), (1, 0)) if hang else ():
        operation = SimpleNamespace(**vars(send), missing=(missing,))
        hung.append(SimpleNamespace(waiting=(waiting,), operation=operation))
    doing = dict.fromkeys(range(ranks), "computes") | {2: SCRIPT}
    return stage_of(gate, doing, hung) | {"hang": hang, "last": "", "state": "paused"}


def joined(page: Page, run: str, state: dict[str, Any]) -> None:
    """Join the page with a model as a kernel's: `models[run].put` tells it a state, `asked` is what was clicked."""
    page.evaluate((files("dlearn.play") / "bridge.js").read_text().replace("export default", "window.bridge ="))
    page.evaluate(
        """([run, state]) => {
        const data = { name: run, state: JSON.parse(state) }, heard = {};
        window.asked ??= [];
        window.models ??= {};
        models[run] = { get: (name) => data[name], on: (event, act) => (heard[event] = act), off() {},
            send: (what) => asked.push([run, what.act, what.rank]),
            put: (state) => { data.state = { ...data.state, ...state }; heard["change:state"](); } };
        bridge.initialize({ model: models[run] });
    }""",
        [run, json.dumps(state)],
    )


CALLS = [(0, "send", 1, 4000), (1, "recv", 0, 4000), (2, "all_reduce", None, 16)]


def test_each_state_of_held_jobs_is_drawn_and_a_click_reaches_its_own_run_only(browser, tmp_path):
    states = {run: held_state(CALLS, 3) for run in ("one", "two")}  # On one page.
    wires = [(wire["src"], wire["dst"]) for wire in states["one"]["stage"]["wires"]]
    assert wires == [(0, 1), (2, -1)]  # The receive's is the send's.
    stages = "".join(snippet(run, "A held job", state) for run, state in states.items())
    with page_of(browser, tmp_path, f"<body>{stages}</body>") as page:
        one, two = page.locator(".dlearn-paused").all()
        expect(one.locator(".packet").or_(two.locator(".packet"))).to_have_count(6)
        assert page.locator("[data-act]").count() == 0, "no kernel answers"
        for run, state in states.items():
            joined(page, run, state)
        two.get_by_role("button", name="step").click()
        two.get_by_role("button", name="Release rank 1's recv #1, 4.00 kB").click()
        two.get_by_role("button", name="Release rank 0's send #1, 4.00 kB").focus()
        page.keyboard.press("Enter")
        page.keyboard.press(" ")
        one.get_by_role("combobox").select_option("send")
        one.get_by_role("button", name="until").click()
        assert page.evaluate("asked") == [
            ["two", "step", None], ["two", "release", 1], ["two", "release", 0], ["two", "release", 0],
            ["one", "until", None],
        ]  # fmt: skip
        page.evaluate("models.two.put({ waiting: [], position: 'no call waits', state: 'over' })")
        assert violations(page, ".dlearn-paused") == []
        assert two.locator(".position").inner_text() == "no call waits"
        assert two.locator(".packet, [data-act]").count() == 0
        assert one.locator(".packet").count() == 3
        assert page.evaluate("window.ran") is None


CROWDED = """(kind) => {
    const boxes = [...document.querySelectorAll(".dlearn-paused " + kind)].map((box) => box.getBoundingClientRect());
    const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
    return boxes.filter((one, i) => boxes.slice(0, i).some((other) => meet(one, other))).length;
}"""


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16, 64])
def test_a_held_stage_has_room_in_a_narrow_cell_and_what_hangs_is_red(browser, tmp_path, ranks):
    sends = [(rank, "all_reduce", None, 4_000_000) for rank in range(ranks)]
    for number, state in enumerate((held_state(sends, ranks), held_state([], ranks, "one waits"))):
        with page_of(browser, tmp_path, f"<body>{snippet('', 'A held job', state)}</body>") as page:
            page.set_viewport_size({"width": 350, "height": 900})
            expect(page.locator(".packet")).to_have_count(0 if number else ranks)
            for kind in ("svg text", "svg li", "rect.box"):
                assert page.evaluate(CROWDED, kind) == 0, kind
            assert page.evaluate("document.documentElement.scrollWidth") <= 350
            assert page.locator(".wire.missing, .machine.absent").count() == 4 * number
            assert violations(page, ".dlearn-paused") == []


RING = """
import torch
import torch.distributed as dist
from dlearn import Cluster, play


def ring():
    mine, other = torch.full((4,), float(dist.get_rank())), torch.zeros(4)
    for _ in range(3):
        sending = dist.isend(mine, (dist.get_rank() + 1) % 3)
        dist.recv(other, (dist.get_rank() - 1) % 3)
        sending.wait()
        mine = other.clone()
    return other[0].item()


run = Cluster(3).run(ring)
"""
SHOWN = f"""
player = play.player(run.trace, title={LONG!r})
heard = []
player.on_step(heard.append)
player.step = 4
player"""
CELLS = [RING + SHOWN, "display(player, 'and once more')", "print(player.step, heard[-1])", "player.step = 5"]


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    if find_spec("jupyterlab") is None:
        pytest.skip("this needs JupyterLab: `make test-all` installs it")
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


def ready(page: Page) -> None:
    expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible()


def run_cell(page: Page, number: int) -> Locator:
    """Run it once more; its output."""
    cell = page.locator(".jp-CodeCell").nth(number)
    cell.evaluate("cell => cell.scrollIntoView()")  # What is out of sight has no content that could be clicked.
    cell.locator(".cm-content").click()
    before = cell.locator(".jp-InputPrompt").inner_text()
    page.keyboard.press("Shift+Enter")
    expect(cell.locator(".jp-InputPrompt")).not_to_have_text(before)
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]"))
    return cell.locator(".jp-OutputArea-output")


def save(page: Page) -> None:
    with page.expect_response(lambda each: each.request.method == "PUT" and "/api/contents/" in each.url):
        page.keyboard.press("Control+s")


@contextmanager
def notebook(browser: Browser, lab: Lab, name: str, *cells: str) -> Iterator[Page]:
    """A notebook with these cells, of which none has run."""
    empty = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    made = [{**empty, "id": f"cell-{number}", "source": cell.strip()} for number, cell in enumerate(cells)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    told = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": made}
    (lab.folder / f"{name}.ipynb").write_text(json.dumps(told))
    with opened(browser, lab.url(f"{name}.ipynb")) as page:
        ready(page)
        yield page


@pytest.fixture(scope="module")
def lesson(browser, lab) -> Iterator[Page]:
    """A notebook with a real run, executed and saved."""
    with notebook(browser, lab, "lesson", *CELLS) as page:
        for name in ("Run", "Run All Cells"):
            page.get_by_role("menuitem", name=name, exact=True).click()
        expect(page.locator(".dlearn-player .position")).to_have_count(2)
        stands(page.locator(".dlearn-player").last, 5)
        save(page)
        yield page


def test_in_jupyterlab_mouse_and_keys_step_through_a_real_run(lesson):
    root = lesson.locator(".dlearn-player").first
    cell = lesson.locator(".jp-Cell.jp-mod-active")
    root.locator(".title").click()
    active = cell.get_attribute("data-windowed-list-index")
    walk(root)
    assert cell.get_attribute("data-windowed-list-index") == active, "JupyterLab took an arrow key"
    assert lesson.evaluate("window.ran") is None
    assert violations(lesson, ".dlearn-player") == []


def test_in_jupyterlab_page_and_python_follow_each_other(lesson):
    first, second = lesson.locator(".dlearn-player").all()
    run_cell(lesson, 3)
    for root in (first, second):
        stands(root, 5)
    second.locator("[data-go=back]").click()
    stands(first, 4)
    first.locator("[data-go=end]").click()
    stands(second, 9)
    expect(run_cell(lesson, 2)).to_have_text("9 9\n")
    lesson.reload()
    for root in (first, second):
        stands(root, 9)
    first.locator("[data-go=start]").click()
    stands(second, 0)
    expect(run_cell(lesson, 2)).to_have_text("0 0\n")


@pytest.mark.usefixtures("lesson")
def test_an_exported_notebook_plays_without_network_and_kernel(browser, lab):
    with opened(browser, lab.exported("lesson.ipynb").as_uri()) as page:
        first, second = page.locator(".dlearn-player").all()
        walk(first)
        stands(second, 0)
        assert violations(page, ".dlearn-player") == []


def test_a_committed_lesson_tells_before_it_is_trusted_and_plays_after(browser, lab):
    committed = Path(shutil.copy(NOTEBOOKS / "parameter_server.ipynb", lab.folder))
    outputs = [cell.get("outputs", []) for cell in json.loads(committed.read_text(encoding="utf-8"))["cells"]]
    shown = "".join("".join(each.get("data", {}).get("text/html", "")) for cell in outputs for each in cell)
    sentence = unescape(re.search("<li>(.*?)</li>", shown[shown.index("dlearn-player") :])[1])
    with opened(browser, lab.url("parameter_server.ipynb")) as page:
        told = page.locator("li").get_by_text(sentence, exact=True)
        expect(told).to_be_attached()
        assert page.locator("[data-go]").count() == 0, "a button that does nothing"
        # What the palette's "Trust Notebook" does. The palette itself closes when the page takes the focus.
        page.wait_for_function("window.jupyterapp?.commands.isEnabled('notebook:trust')")
        page.evaluate("() => { window.jupyterapp.commands.execute('notebook:trust'); }")
        page.locator(".jp-Dialog").get_by_role("button", name="Trust").click()
        ready(page)
        walk(page.locator(".dlearn-player").first)


# `waiting` returns when all three ranks have come to the gate: the saved page has the state of when it was shown.
HELD = RING.replace("Cluster(3)", "Cluster(3, hold=True)").replace("range(3)", "range(1)") + "run.waiting\nrun"


def passed(root: Locator, count: int) -> None:
    expect(root.locator(".position")).to_have_text(re.compile(rf"^{count} let through"))


def test_a_held_ring_is_stepped_to_its_end_and_comes_back_after_a_reload(browser, lab):
    with notebook(browser, lab, "ring", HELD, "print(run.join(60).results)") as page:
        run_cell(page, 0)
        root = page.locator(".dlearn-paused")
        expect(root.locator(".packet")).to_have_count(3)
        passed(root, 0)
        root.locator("[data-act=step]").click()
        passed(root, 1)
        expect(root.locator(".sentence")).to_have_text(re.compile(r"^let through: rank \d's send to \d \("))
        root.locator("[data-act=release]").first.click()
        passed(root, 2)
        page.evaluate("document.activeElement.blur()")  # A stage keeps all keys.
        save(page)
        with opened(browser, lab.exported("ring.ipynb").as_uri()) as alone:
            shown = alone.locator(".dlearn-paused")
            expect(shown.locator(".packet")).to_have_count(3)
            expect(shown.locator(".position")).to_contain_text("as it was: no kernel answers")
            assert shown.locator("button").count() == 0
        page.reload()
        passed(root, 2)
        expect(root.locator("[data-act=step]")).to_be_visible()
        for count in range(2, 6):
            expect(root.locator(".position")).not_to_contain_text("no call waits")
            root.locator("[data-act=step]").click()
            passed(root, count + 1)
        expect(root.locator(".position")).to_have_text("6 let through, no call waits; 3 ranks: has ended")
        expect(root.locator("button")).to_have_count(0)
        expect(run_cell(page, 1)).to_have_text("{0: 2.0, 1: 0.0, 2: 1.0}\n")
