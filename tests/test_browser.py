"""The player as a person meets it: in a page of its own, in a real JupyterLab, in an exported notebook.

Screenshots are left in the folder that DLEARN_ARTIFACTS names, else among pytest's own temporary files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from importlib.util import find_spec
from pathlib import Path

import pytest
from lab import Lab, running_lab
from traces import Job, header

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
WIDTHS = {"light": 1300, "dark": 650}  # CSS pixels: a laptop's window, and half of it
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


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory) -> Path:
    folder = Path(os.environ.get("DLEARN_ARTIFACTS") or tmp_path_factory.mktemp("artifacts"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    """The page. From a file it has no network. An error in its console fails the test."""
    context = browser.new_context(viewport={"width": WIDTHS["light"], "height": 1000})
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
    page.locator(".dlearn-player summary").first.click()
    for scheme in ("light", "dark"):
        light_up(page, scheme)
        for rule in Axe().run(page, context=scope).response["violations"]:
            found += [(rule["id"], f"{scheme} {node['target']}", node["failureSummary"]) for node in rule["nodes"]]
    return found


def light_up(page: Page, scheme: str) -> None:
    """Light or dark, as the reader's system asks for. JupyterLab follows a little later."""
    page.emulate_media(color_scheme=scheme)
    if page.url.startswith("http"):
        expect(page.locator("body")).to_have_attribute("data-jp-theme-light", str(scheme == "light").lower())
        expect(page.locator("#jupyterlab-splash")).to_have_count(0)  # it stands over the page while a theme loads


def photograph(shown: Locator, folder: Path, name: str) -> None:
    """The page where this is: at half width and dark, at full width and light."""
    page = shown.page
    for scheme in ("dark", "light"):
        page.set_viewport_size({"width": WIDTHS[scheme], "height": 1000})
        light_up(page, scheme)
        shown.evaluate("shown => shown.scrollIntoView()")
        page.screenshot(path=folder / f"{name}-{scheme}.png")


def ring(folder: Path, *, names: tuple[str, ...] = (), count: int = 9) -> Job:
    """Message i goes from rank i to the next of three."""
    job = Job(folder, ranks=3)
    job.headers = [header(rank, world_size=3, name=name) for rank, name in enumerate(names)] or job.headers
    for i in range(count):
        job.send(i % 3, (i + 1) % 3, size=100 * (i + 1), start_ns=10 * i, end_ns=10 * i + 5)
        job.recv((i + 1) % 3, i % 3, size=100 * (i + 1), start_ns=10 * i, end_ns=10 * i + 5)
    return job


def test_a_page_of_its_own_plays_without_a_network(browser, tmp_path, artifacts):
    player(ring(tmp_path).load()).to_html(tmp_path / "ring.html")
    with opened(browser, (tmp_path / "ring.html").as_uri()) as page:
        root = page.locator(".dlearn-player")
        walk(root)
        root.locator("[data-go=play]").click()
        stands(root, 3)
        root.locator("[data-go=play]").click()
        assert violations(page) == []
        photograph(root, artifacts, "page")


def test_the_strip_is_travelled_by_mouse_and_keys_and_axe_finds_nothing(browser, tmp_path, artifacts):
    job = Job(tmp_path, ranks=3)
    for turn in range(9):
        times = {"start_ns": 10_000 * turn, "end_ns": 10_000 * turn + 5000}
        job.send(turn % 3, (turn + 1) % 3, size=100 * (turn + 1), **times)
        job.recv((turn + 1) % 3, turn % 3, size=100 * (turn + 1), **times)
    strip(job.load()).to_html(tmp_path / "strip.html")
    with opened(browser, (tmp_path / "strip.html").as_uri()) as page:
        root, lanes = page.locator(".dlearn-strip"), page.locator(".lanes")
        expect(root.locator(".sentence")).to_have_text("9 operations in view: 9 messages, 4.50 kB of payload.")
        lanes.hover(position={"x": 600, "y": 60})
        page.mouse.wheel(0, -200)
        expect(root.locator("code")).to_contain_text("trace.between(")
        lanes.focus()
        for key in ("Home", "n", "n", "ArrowDown"):
            page.keyboard.press(key)
        expect(root.locator("code")).to_contain_text('.where(op="')
        photograph(root, artifacts, "strip")
        for scheme in ("light", "dark"):
            light_up(page, scheme)
            assert [rule["id"] for rule in Axe().run(page).response["violations"]] == []
        page.keyboard.press("Escape")
        page.keyboard.press("Home")
        expect(root.locator("code")).to_have_text("trace")


def test_names_are_text_and_never_run(browser, tmp_path):
    """Of ranks, of an operation and in the title: whoever wrote the trace."""
    job = ring(tmp_path, names=(EVIL, LONG, "b" * 200), count=3)
    job.collective(EVIL, size=8, start_ns=100, end_ns=200)
    shown = player(job.load(), title=LONG)
    shown.to_html(tmp_path / "evil.html")
    with opened(browser, (tmp_path / "evil.html").as_uri()) as page:
        root = page.locator(".dlearn-player")
        root.locator("[data-go=end]").click()
        stands(root, len(shown.sentences))
        assert root.locator("img[src=x]").count() == 0
        assert page.evaluate("window.ran") is None
        assert page.title() == " ".join(shown.title.split())
        assert root.locator(".title").text_content() == shown.title
        assert root.locator("li").all_text_contents() == list(shown.sentences)
        heard = root.locator(".sentence").text_content()
        assert heard == shown.sentences[-1]
        assert EVIL.strip() in root.text_content()
        assert root.evaluate("root => root.scrollWidth <= root.clientWidth")


# The stage ------------------------------------------------------------------------------------------------------------

CELLS_SHOWN = """root => [...root.querySelectorAll('.machine')].map(
    machine => [...machine.querySelectorAll('.cell title')].map(title => title.textContent))"""
GO = "(root, step) => root.dlearnPlayer.go(step)"


@pytest.fixture
def reduced(tmp_path) -> Player:
    """An all-reduce of four ranks, whose parts travel round the ring."""
    job = Job(tmp_path, ranks=4)
    job.collective("all_reduce", size=4096, start_ns={rank: 10_000 + rank for rank in range(4)}, end_ns=900_000)
    shown = player(job.load())
    shown.to_html(tmp_path / "stage.html")
    return shown


def board_texts(shown: Player, step: int) -> list[list[str]]:
    """What stands on the board of the all-reduce after so many steps, by rank."""
    [board] = shown.walk.boards
    held = shown.walk.held(board, step)
    return [[held[key].text for key in sorted(held) if key[0] == rank] for rank in range(4)]


def test_the_stage_shows_what_the_board_says_at_every_step(browser, reduced, tmp_path):
    with opened(browser, (tmp_path / "stage.html").as_uri()) as page:
        page.emulate_media(reduced_motion="reduce")
        root = page.locator(".dlearn-player")
        assert root.locator(".machine").count() == 4, "the first frame is not empty"
        assert root.locator(".stage .wire").count() == 4, "the ring: from each rank to one other"
        for step in range(len(reduced.sentences) + 1):
            root.evaluate(GO, step)
            assert root.evaluate(CELLS_SHOWN) == [
                [text or "nothing" for text in texts] for texts in board_texts(reduced, step)
            ]


def test_a_packet_moves_from_sender_to_receiver_and_only_then_is_its_part_there(browser, reduced, tmp_path):
    with opened(browser, (tmp_path / "stage.html").as_uri()) as page:
        root = page.locator(".dlearn-player")
        root.evaluate(GO, 4)
        root.locator("[data-go=forward]").click()
        packet = root.locator(".packet")
        assert root.evaluate(CELLS_SHOWN) == [[text or "nothing" for text in each] for each in board_texts(reduced, 4)]
        seen = root.evaluate(
            """async root => {
                const places = [];
                const packet = root.querySelector('.packet');
                for (let frame = 0; frame < 600 && root.querySelector('.packet') === packet; frame += 1) {
                    places.push(packet.getAttribute('transform'));
                    if (places.length > 3 && places.at(-1) === places.at(-2)) break;
                    await new Promise(requestAnimationFrame);
                }
                return [...new Set(places)];
            }"""
        )
        assert len(seen) > 2, "it moves, and does not jump"
        expect(packet).to_have_count(1)
        assert root.evaluate(CELLS_SHOWN) == board_texts(reduced, 5)


def test_playing_moves_together_what_travels_at_the_same_time(browser, reduced, tmp_path):
    """In each round of the ring all four ranks send."""
    with opened(browser, (tmp_path / "stage.html").as_uri()) as page:
        root = page.locator(".dlearn-player")
        root.evaluate(GO, 4)
        root.locator("[data-go=play]").click()
        expect(root.locator(".packet")).to_have_count(4)
        root.locator("[data-go=play]").click()
        assert root.locator(".position").text_content() == f"step 8 of {len(reduced.sentences)}"
        assert root.locator(".sentence").text_content().startswith("4 messages at the same time. One of them: ")
        assert root.locator(".wire.used").count() == 4
        expect(root.locator(".packet").first).to_be_visible()
        page.wait_for_function(
            "([root, wanted]) => JSON.stringify((CELLS)(root)) === wanted".replace("CELLS", CELLS_SHOWN),
            arg=[root.element_handle(), json.dumps(board_texts(reduced, 8), separators=(",", ":"))],
        )
        root.locator("[data-go=forward]").click()
        expect(root.locator(".packet")).to_have_count(1)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 12, 16, 64])
def test_the_stage_fits_its_page_with_any_number_of_ranks(browser, tmp_path, ranks):
    job = Job(tmp_path, ranks=ranks)
    job.collective("all_reduce", size=ranks * 64, end_ns=900_000)
    player(job.load()).to_html(tmp_path / "many.html")
    with opened(browser, (tmp_path / "many.html").as_uri()) as page:
        root = page.locator(".dlearn-player")
        for wide in (350, 500, 800, 1280):
            page.set_viewport_size({"width": wide, "height": 900})
            root.evaluate(GO, 3)
            boxes = [box.bounding_box() for box in root.locator(".machine .box").all()]
            assert len(boxes) == ranks
            assert root.evaluate("root => root.scrollWidth <= root.clientWidth")
            apart = [(one, other) for i, one in enumerate(boxes) for other in boxes[i + 1 :]]
            assert not [pair for pair in apart if overlap(*pair)], wide


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    across = one["x"] < other["x"] + other["width"] and other["x"] < one["x"] + one["width"]
    return across and one["y"] < other["y"] + other["height"] and other["y"] < one["y"] + one["height"]


def test_a_player_that_was_hidden_is_as_large_as_before(browser, reduced, tmp_path):
    """A tab that is left and found again, and one that was hidden when the page came."""
    scaled = "root => root.querySelector('.stage').viewBox.baseVal.width - root.querySelector('.picture').clientWidth"
    with opened(browser, (tmp_path / "stage.html").as_uri()) as page:
        root = page.locator(".dlearn-player")
        for change in ("display = 'none'", "display = ''"):
            root.evaluate(f"root => {{ root.style.{change}; }}")
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        assert root.evaluate(scaled) == 0
        root.evaluate("root => { root.style.display = 'none'; }")
        root.evaluate(GO, 2)
        root.evaluate("root => { root.style.display = ''; }")
        page.wait_for_function(f"({scaled})(document.querySelector('.dlearn-player')) === 0")


GRID = """root => {
    const rows = new Map();
    for (const rect of root.querySelectorAll('.heat')) {
        const [x, y, width, opacity] = ['x', 'y', 'width', 'opacity'].map((name) => Number(rect.getAttribute(name)));
        rows.set(y, [...(rows.get(y) ?? []), [x, width, (opacity - 0.08) / 0.92]]);
    }
    const inOrder = (found) => found.sort(([one], [other]) => one - other);
    return inOrder([...rows]).map(([, runs]) => inOrder(runs));
}"""


def test_of_many_ranks_one_grid_holds_what_the_board_says_and_forward_goes_round_by_round(browser, tmp_path):
    job = Job(tmp_path, ranks=24)
    job.collective("all_reduce", size=24 * 64, end_ns=900_000)
    shown = player(job.load())
    shown.to_html(tmp_path / "grid.html")
    [board] = shown.walk.boards
    with opened(browser, (tmp_path / "grid.html").as_uri()) as page:
        page.emulate_media(reduced_motion="reduce")
        root = page.locator(".dlearn-player")
        for rounds in (0, 1, 2, 3):
            held = shown.walk.held(board, 24 * rounds)
            columns = 1 + max(place for _, place in held)
            for rank, runs in enumerate(root.evaluate(GRID)):
                cell = sum(width for _, width, _ in runs) / columns
                shares = [share for _, width, share in runs for _ in range(round(width / cell))]
                assert shares == pytest.approx([held[rank, place].share for place in range(columns)])
            root.locator("[data-go=forward]").click()
            assert root.locator(".position").text_content() == f"step {24 * (rounds + 1)} of {len(shown.sentences)}"
            assert root.locator(".packet").count() == 24
        root.locator("[data-go=back]").click()
        assert root.locator(".position").text_content() == f"step 72 of {len(shown.sentences)}"


def test_who_never_came_is_an_empty_place_with_red_wires_and_what_is_derived_moves_along_dashes(browser, tmp_path):
    job = Job(tmp_path, ranks=3)
    job.collective("all_reduce", size=300, start_ns=0, end_ns=1_000_000)
    for rank in range(3):
        job.stretch(rank, "forward", 1_100_000, 1_200_000)
    job.collective("all_reduce", size=300, ranks=[0, 2], start_ns=2_000_000, end_ns=None)
    trace = job.load()
    for part in (trace, trace.between(1.5, 3)):
        player(part).to_html(tmp_path / "hung.html")
        with opened(browser, (tmp_path / "hung.html").as_uri()) as page:
            root = page.locator(".dlearn-player")
            assert root.evaluate(CELLS_SHOWN) == [["its own part"], [], ["its own part"]]
            assert root.locator(".wire.missing").count() == 3, "the ring that never ran"
            assert "0.00 ms" not in root.inner_text()
    player(trace).to_html(tmp_path / "hung.html")
    with opened(browser, (tmp_path / "hung.html").as_uri()) as page:
        root = page.locator(".dlearn-player")
        root.evaluate(GO, 1)
        dashes = "wire => getComputedStyle(wire).strokeDasharray"
        assert root.locator(".wire.used").evaluate(dashes) != "none"
        assert root.locator(".wire:not(.used)").first.evaluate(dashes) == "none"


# In JupyterLab --------------------------------------------------------------------------------------------------------

CELLS = [
    f"""
import torch
import torch.distributed as dist
from dlearn import Cluster, play


def ring():
    mine, other = torch.ones(6), torch.zeros(6)
    for _ in range(3):
        sending = dist.isend(mine, (dist.get_rank() + 1) % 3)
        dist.recv(other, (dist.get_rank() - 1) % 3)
        sending.wait()


run = Cluster(3).run(ring)
player = play.player(run.trace, title={LONG!r})
heard = []
player.on_step(heard.append)
player.step = 4
player""",
    "display(player, 'and once more')",
    "print(player.step, heard[-1])",
    "player.step = 5",
]


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    if find_spec("jupyterlab") is None:
        pytest.skip("this needs JupyterLab: `make test-all` installs it")
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


def ready(page: Page) -> None:
    expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible()


def run_all(page: Page) -> None:
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name="Run All Cells", exact=True).click()


def run_cell(page: Page, number: int) -> Locator:
    """Run it once more; its output."""
    cell = page.locator(".jp-CodeCell").nth(number)
    cell.locator(".cm-content").click()
    before = cell.locator(".jp-InputPrompt").inner_text()
    page.keyboard.press("Shift+Enter")
    expect(cell.locator(".jp-InputPrompt")).not_to_have_text(before)
    expect(cell.locator(".jp-InputPrompt")).to_have_text(re.compile(r"\[\d+\]"))
    return cell.locator(".jp-OutputArea-output")


def shown_html(notebook: Path) -> list[str]:
    """All HTML among its saved outputs."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    data = [output.get("data", {}) for cell in cells for output in cell.get("outputs", [])]
    return ["".join(shown["text/html"]) for shown in data if "text/html" in shown]


def save(page: Page) -> None:
    with page.expect_response(lambda response: response.request.method == "PUT"):
        page.keyboard.press("Control+s")


@pytest.fixture(scope="module")
def lesson(browser, lab) -> Iterator[Page]:
    """A notebook with a real run, executed and saved."""
    empty = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    cells = [{**empty, "id": f"cell-{number}", "source": cell.strip()} for number, cell in enumerate(CELLS)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}, "cells": cells}
    (lab.folder / "lesson.ipynb").write_text(json.dumps(notebook))
    with opened(browser, lab.url("lesson.ipynb")) as page:
        ready(page)
        run_all(page)
        expect(page.locator(".dlearn-player .position")).to_have_count(2)
        stands(page.locator(".dlearn-player").last, 5)
        save(page)
        yield page


def test_in_jupyterlab_mouse_and_keys_step_through_a_real_run(lesson, artifacts):
    root = lesson.locator(".dlearn-player").first
    cell = lesson.locator(".jp-Cell.jp-mod-active")
    root.locator(".title").click()
    active = cell.get_attribute("data-windowed-list-index")
    walk(root)
    assert cell.get_attribute("data-windowed-list-index") == active, "JupyterLab took an arrow key"
    assert lesson.evaluate("window.ran") is None
    assert root.locator(".title").text_content().startswith("<img src=x")
    assert violations(lesson, ".dlearn-player") == []
    photograph(root, artifacts, "jupyterlab")


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
def test_an_exported_notebook_plays_without_network_and_kernel(browser, lab, artifacts):
    lab.run("nbconvert", "--to", "html", "lesson.ipynb")
    with opened(browser, (lab.folder / "lesson.html").as_uri()) as page:
        first, second = page.locator(".dlearn-player").all()
        walk(first)
        stands(second, 0)
        assert violations(page, ".dlearn-player") == []
        photograph(first, artifacts, "exported")


def test_a_committed_lesson_tells_before_it_is_trusted_and_plays_after(browser, lab, artifacts):
    committed = Path(shutil.copy(NOTEBOOKS / "parameter_server.ipynb", lab.folder))
    snippet = next(html for html in shown_html(committed) if "dlearn-player" in html)
    sentence = unescape(re.search("<li>(.*?)</li>", snippet)[1])
    with opened(browser, lab.url("parameter_server.ipynb")) as page:
        told = page.locator("li").get_by_text(sentence, exact=True)
        expect(told).to_be_attached()
        photograph(told, artifacts, "untrusted")
        assert page.locator("[data-go]").count() == 0, "a button that does nothing"
        page.keyboard.press("Control+Shift+C")
        page.keyboard.type("Trust Notebook")
        page.keyboard.press("Enter")
        page.locator(".jp-Dialog").get_by_role("button", name="Trust").click()
        ready(page)
        walk(page.locator(".dlearn-player").first)
        run_all(page)
        expect(page.locator(".dlearn-player")).to_have_count(0)
        expect(page.locator(".dlearn-player .position")).to_have_count(1)
        walk(page.locator(".dlearn-player"))
        assert page.locator(".jp-RenderedText[data-mime-type$=error]").count() == 0
