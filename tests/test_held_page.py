"""The stage of a held job: what it is told, what is drawn of it, and what a click asks. Without ranks or a kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from dlearn.live.held_page import HeldPage, State
from dlearn.live.schedule import HeldCall
from dlearn.play.page import page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EVIL = "<script>window.ran=1</script>"


class Job:
    """Three ranks of which two wait; it notes what it is asked."""

    def __init__(self) -> None:
        calls = [
            HeldCall(0, 1, "send", 1, 4000, "train.py:5", "none"),
            HeldCall(1, 1, "recv", 0, 4000, "train.py:6", "none"),
            HeldCall(2, 1, "all_reduce", None, 16, "train.py:7", "none"),
        ]
        self.keeper = SimpleNamespace(names=(0, 1, 2), calls=calls, passed=[], is_open=False)
        self.ranks = {0: "waits at the gate: send to 1", 1: "waits at the gate: recv from 0", 2: EVIL}
        self.hang = "rank 0 waits"
        self.under_way = True
        self.asked: list[object] = []

    def let_through_now(self, rank: object = None) -> None:
        self.asked.append(rank)

    def free(self) -> None:
        self.asked.append("free")


def test_the_state_says_who_waits_on_which_wire():
    job = Job()
    state = HeldPage(job, "x").state()
    assert state["stage"]["pairs"] == [[0, 1]]  # That of the receive is the same.
    assert [(call["rank"], call["to"], call["receives"]) for call in state["waiting"]] == [
        (0, 1, False),
        (1, 0, True),
        (2, None, False),
    ]
    assert (state["now"][0], state["hang"], state["state"]) == ("waits at the gate", "rank 0 waits", "held")
    job.ranks[0] = "in send #1 (train.py:5)"
    assert HeldPage(job, "x").state()["now"][0] == "in send #1"


def test_a_click_acts_on_the_run_and_only_on_one_that_is_under_way():
    job = Job()
    shown = HeldPage(job, "x")
    shown._widget = SimpleNamespace(state=None)
    for asked in ({"act": "step"}, {"act": "release", "rank": 2}, {"act": "release", "rank": 9}, {"act": "?"}):
        shown._obey(asked)
    shown._obey({"act": "free"})
    assert job.asked == [None, 2, "free"]
    assert shown._widget.state["last"] == "the gate is open"
    job.under_way = False
    shown._obey({"act": "step"})
    assert job.asked == [None, 2, "free"]


def test_a_page_does_not_keep_its_job_alive():
    job = Job()
    shown = HeldPage(job, "x")
    del job
    assert shown.state()["state"] == "over"


@contextmanager
def chromium() -> Iterator[Browser]:
    pytest.importorskip("playwright", reason="nobody can click without playwright: `make test-all` installs it")
    import test_browser
    from playwright.sync_api import sync_playwright

    if test_browser.CHROMIUM is None:
        pytest.skip("no chromium on this machine: nobody can click")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=test_browser.CHROMIUM, args=[f"--{flag}" for flag in test_browser.FLAGS.split()]
        )
        yield browser
        browser.close()


@contextmanager
def opened(browser: Browser, job: Job, folder: Path) -> Iterator[Page]:
    """A page with the stage of this job, which no kernel has joined. An error in its scripts fails the test."""
    page("held", HeldPage(job, "x").html(), folder / "held.html")
    shown = browser.new_page(viewport={"width": 900, "height": 600})
    errors: list[str] = []
    shown.on("pageerror", lambda error: errors.append(str(error)))
    shown.goto((folder / "held.html").as_uri())
    yield shown
    assert errors == []


def joined(shown: Page, state: State) -> None:
    """Join the page with a model as a kernel's: `model.put` tells it a state, `asked` is what was clicked."""
    bridge = (files("dlearn.play") / "held_bridge.js").read_text().replace("export default", "window.bridge =")
    shown.evaluate(bridge)
    shown.evaluate(
        """state => {
        const data = { run: "x", state: JSON.parse(state) }, heard = {};
        window.asked = [];
        window.model = { get: (name) => data[name], on: (event, act) => (heard[event] = act), off() {},
            send: (what) => asked.push([what.act, what.rank]),
            put: (state) => { data.state = { ...data.state, ...state }; heard["change:state"](); } };
        bridge.initialize({ model });
    }""",
        json.dumps(state),
    )


@pytest.mark.slow
def test_each_state_is_drawn_and_what_is_clicked_is_asked(tmp_path: Path):
    job = Job()
    with chromium() as browser, opened(browser, job, tmp_path) as shown:
        assert shown.locator(".packet").count() == 3
        assert shown.locator("button").count() == 0  # No kernel answers.
        joined(shown, HeldPage(job, "x").state())
        for button in ("[data-act=step]", "[data-rank='1']", "[data-act=free]"):
            shown.locator(button).click()
        assert shown.evaluate("asked") == [["step", None], ["release", 1], ["free", None]]
        shown.evaluate("model.put({ waiting: [], passed: 3, state: 'over', hang: '' })")
        assert shown.locator(".position").inner_text() == "0 wait at the gate, 3 let through (it has ended)"
        assert shown.locator(".packet, button").count() == 0
        assert shown.evaluate("window.ran") is None


@pytest.mark.slow
def test_two_pages_on_one_kernel_show_the_same_and_a_click_in_either_acts_once(tmp_path: Path):
    job = Job()
    kernel = HeldPage(job, "x")
    with chromium() as browser, opened(browser, job, tmp_path) as left, opened(browser, job, tmp_path) as right:
        pages = [left, right]

        def told(state):  # As a kernel tells every page that is open.
            for each in pages:
                each.evaluate("state => model.put(JSON.parse(state))", json.dumps(state))

        kernel._widget = SimpleNamespace(state=kernel.state())
        for each in pages:
            joined(each, kernel.state())
        for number, (clicked, button, asked) in enumerate(
            [(left, "[data-act=step]", None), (right, "[data-rank='1']", 1)], start=1
        ):
            clicked.locator(button).click()
            heard = [what for each in pages for what in each.evaluate("asked.splice(0)")]
            assert len(heard) == 1
            kernel._obey({"act": heard[0][0], "rank": heard[0][1]})
            assert len(job.asked) == number
            assert job.asked[-1] == asked
            job.keeper.calls.pop(0)
            job.keeper.passed.append("call")
            told(kernel.state())
            positions = [each.locator(".position").inner_text() for each in pages]
            assert positions == [f"{3 - number} wait at the gate, {number} let through"] * 2
            assert [each.locator(".packet").count() for each in pages] == [3 - number] * 2
