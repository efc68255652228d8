"""Make docs/pictures/held.png: the stage of a ring of three ranks in mid-hold, as Chromium shows it.

python tools/held_picture.py
"""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from playwright.sync_api import sync_playwright

from dlearn import Cluster
from dlearn.play.page import page

OUT = Path(__file__).parent.parent / "docs" / "pictures" / "held.png"


def ring() -> None:
    mine, other = torch.ones(1000), torch.empty(1000)
    sending = dist.isend(mine, (dist.get_rank() + 1) % 3)
    dist.recv(other, (dist.get_rank() - 1) % 3)
    sending.wait()


def main() -> None:
    run = Cluster(3, hold=True).run(ring)
    run.release(0)
    while len(run.waiting) < 3:
        pass
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        file = Path(folder, "held.html")
        page("A held job", run._repr_mimebundle_()["text/html"], file)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": 900, "height": 520})
        shown.goto(file.as_uri())
        shown.locator(".dlearn-paused").screenshot(path=OUT)
        browser.close()
    run.end()


if __name__ == "__main__":
    main()
