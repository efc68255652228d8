"""Make docs/pictures/held.png: the stage of two pairs of ranks that send first, in Chromium."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import torch
import torch.distributed as dist
from playwright.sync_api import sync_playwright

from dlearn import Cluster
from dlearn.live.held_stage import snippet
from dlearn.play.page import page

OUT = Path(__file__).parent.parent / "docs" / "pictures" / "held.png"


def both_send_first() -> None:
    tensor, partner = torch.ones(1000), dist.get_rank() ^ 1
    dist.send(tensor, partner)
    dist.recv(tensor, partner)


JOIN = """state => bridge.initialize({
    model: { get: (name) => ({ name: "held", state: JSON.parse(state) })[name], on() {}, off() {}, send() {} },
})"""


def main() -> None:
    run = Cluster(4, hold=True).run(both_send_first)
    run.release(0)
    run.release(1)
    stage = run.hang.stage | {"hang": str(run.hang), "last": "", "state": "paused"}
    run.end()
    bridge = (files("dlearn.play") / "bridge.js").read_text().replace("export default", "window.bridge =")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 860, "height": 520})
        shown.set_content(page("A held job", snippet("held", "A held job", stage)))
        shown.evaluate(bridge)
        shown.evaluate(JOIN, json.dumps(stage))
        shown.get_by_role("button", name="Release rank 2").hover()
        shown.locator(".dlearn-paused").screenshot(path=OUT)
        browser.close()


if __name__ == "__main__":
    main()
