"""Live and held jobs as a person meets them: clicked in a real JupyterLab.

Screenshots are left in the folder that DLEARN_ARTIFACTS names, else among pytest's own temporary files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("playwright", reason="nobody can click without playwright: `make test-all` installs it")
import test_browser
from lab import Lab
from playwright.sync_api import Browser, Locator, Page, expect
from test_browser import opened, ready, run_cell, save

browser, lab, artifacts = test_browser.browser, test_browser.lab, test_browser.artifacts
pytestmark = test_browser.pytestmark

IMPORTS = """
import time
from pathlib import Path
import torch, torch.distributed as dist, torch.distributed.rpc as rpc
from torch.nn.parallel import DistributedDataParallel
import dlearn
from dlearn import Cluster
"""
SLOW = """
def train():
    model = DistributedDataParallel(torch.nn.Linear(512, 512))
    for step in range(6):
        with dlearn.span(f"step {step}"):
            model(torch.ones(8, 512)).sum().backward()

run = Cluster(3, network="5 Mbit/s, 2 ms").run(train)
"""
HANGS = """
def late():
    end = time.monotonic() + 60
    while dist.get_rank() == 1 and not Path("seen").exists() and time.monotonic() < end:
        time.sleep(0.05)
    dist.all_reduce(torch.ones(4))

run = Cluster(2).run(late)
"""
RING = """
def ring():
    mine, other = torch.full((4,), float(dist.get_rank())), torch.zeros(4)
    for _ in range(2):
        sending = dist.isend(mine, (dist.get_rank() + 1) % 3)
        dist.recv(other, (dist.get_rank() - 1) % 3)
        sending.wait()
        mine = other.clone()
    return other[0].item()

run = Cluster(3, hold=True).run(ring)
run
"""
RACE = """
WEIGHT = [10]

def read():
    return WEIGHT[0]

def write(value):
    WEIGHT[0] = value

def add_one():
    if rpc.get_worker_info().name != "server":
        rpc.rpc_sync("server", write, (rpc.rpc_sync("server", read) + 1,))
    dist.barrier()
    return WEIGHT[0]

def race(hold):
    return Cluster(["server", "a", "b"], rpc=True, hold=hold).run(add_one)

run = race(True)
run
"""


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


def start(page: Page, number: int) -> Locator:
    """Begin to run a cell; its output."""
    cell = page.locator(".jp-CodeCell").nth(number)
    cell.locator(".cm-content").click()
    page.keyboard.press("Shift+Enter")
    return cell.locator(".jp-OutputArea-output")


def passed(root: Locator, count: int) -> None:
    expect(root.locator(".position")).to_have_text(re.compile(rf", {count} let through"))


def test_rows_of_ddp_over_a_slow_link_end_as_a_sentence(browser, lab, artifacts):
    with notebook(browser, lab, "slow", IMPORTS + SLOW) as page:
        output = start(page, 0)
        row = output.locator("tbody tr").first
        expect(row).to_contain_text(
            re.compile(r"rank 0.*B/s.*step \d: (waits [\d.]+ s for rank \d )?in all_reduce #\d+, bucket 0")
        )
        page.screenshot(path=artifacts / "live-ddp.png")
        expect(output).to_contain_text("3 ranks returned")
        expect(output.locator("tbody tr")).to_have_count(0)


def test_a_hang_appears_in_place_while_the_cell_runs(browser, lab, artifacts):
    with notebook(browser, lab, "hangs", IMPORTS + HANGS) as page:
        output = start(page, 0)
        told = output.locator("[role=status]")
        expect(told).to_have_text(
            re.compile(
                r"^rank 0 waits for rank 1 in all_reduce #1 \(In\[1\]:\d+\); rank 1 never called it, it computes"
            )
        )
        page.screenshot(path=artifacts / "live-hang.png")
        (lab.folder / "seen").touch()
        expect(output).to_contain_text("2 ranks returned")
        expect(told).to_have_count(0)


def test_a_held_ring_is_stepped_to_its_end_and_comes_back_after_a_reload(browser, lab, artifacts):
    with notebook(browser, lab, "ring", IMPORTS + RING, "print(run.join(60).results)") as page:
        run_cell(page, 0)
        root = page.locator(".dlearn-held")
        expect(root.locator(".packet")).to_have_count(3)
        passed(root, 0)
        root.locator("[data-act=step]").click()
        passed(root, 1)
        expect(root.locator(".sentence")).to_have_text(re.compile(r"^let through: rank \d's send to \d \("))
        root.locator("[data-act=release]").first.click()
        passed(root, 2)
        page.screenshot(path=artifacts / "held-ring.png")
        save(page)
        page.reload()
        passed(root, 2)
        expect(root.locator("[data-act=step]")).to_be_visible()
        for count in range(2, 12):
            expect(root.locator(".position")).not_to_have_text(re.compile("^0 wait"))
            root.locator("[data-act=step]").click()
            passed(root, count + 1)
        expect(root.locator(".position")).to_have_text("0 wait at the gate, 12 let through (it has ended)")
        expect(root.locator("button")).to_have_count(0)
        expect(run_cell(page, 1)).to_have_text("{0: 1.0, 1: 2.0, 2: 0.0}\n")


def test_a_race_that_was_clicked_is_replayed(browser, lab, artifacts):
    again = "print(run.results['server'], race(schedule).join(60).results['server'])"
    with notebook(browser, lab, "race", IMPORTS + RACE, "schedule = run.schedule\nrun.free().join(60);", again) as page:
        run_cell(page, 0)
        root = page.locator(".dlearn-held")
        for count, name in enumerate("abab", 1):
            root.locator("[data-act=release]").get_by_text(f"Release {name}", exact=True).click()
            passed(root, count)
        page.screenshot(path=artifacts / "held-race.png")
        run_cell(page, 1)
        expect(root.locator(".position")).to_have_text(re.compile("it has ended"))
        expect(run_cell(page, 2)).to_have_text("11 11\n")


def test_what_is_held_is_seen_on_a_page_without_a_kernel(browser, lab):
    with notebook(browser, lab, "alone", IMPORTS + RING, "run.end()") as page:
        run_cell(page, 0)
        expect(page.locator(".dlearn-held .packet")).to_have_count(3)
        save(page)
        lab.run("nbconvert", "--to", "html", "alone.ipynb")
    with opened(browser, (lab.folder / "alone.html").as_uri()) as page:
        root = page.locator(".dlearn-held")
        expect(root.locator(".packet")).to_have_count(3)
        expect(root.locator(".position")).to_contain_text("as it was: no kernel answers")
        assert root.locator("button").count() == 0
