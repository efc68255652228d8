"""How smooth are the strip and the stage? Frames in Chromium, of up to 10^6 calls, and of a packet that moves.

    python benchmarks/travel.py [--largest 1000000] [--ranks 4 64]

A frame is what one step of a zoom costs the page, from the call until everything is drawn (canvas, words, matrix);
shown are the median and the worst of 60, which zoom in on the middle. A screen shows 60 frames a second: 16.7 ms each.
"stage" counts the animation frames of one packet's way, 650 ms, on 8 ranks. Needs playwright and chromium.
"""

import shutil
import statistics
import tempfile
import time
from pathlib import Path

from measuring import options
from playwright.sync_api import Page, sync_playwright
from scale import write

from dlearn import Trace, play

ZOOM = """() => {
    const strip = document.querySelector(".dlearn-strip").dlearnStrip;
    const half = strip.data.length / 2;
    return Array.from({ length: 60 }, (_, turn) => {
        const wide = half * 0.9 ** turn, begin = performance.now();
        strip.look(half - wide, half + wide);
        return performance.now() - begin;
    });
}"""
FRAMES = """async () => {
    const begin = performance.now();
    let frames = 0;
    document.querySelector("[data-go=forward]").click();
    while (performance.now() - begin < 650) { await new Promise(requestAnimationFrame); frames += 1; }
    return frames;
}"""


def strip_row(page: Page, ranks: int, calls: int, folder: Path) -> str:
    write("send", ranks, calls // 2, folder)
    trace = Trace.load(folder / "trace")
    begin = time.process_time()
    play.strip(trace).to_html(folder / "strip.html")
    made = time.process_time() - begin
    page.goto((folder / "strip.html").as_uri())
    page.wait_for_function("!!document.querySelector('.dlearn-strip').dlearnStrip.look")
    frames = page.evaluate(ZOOM)
    size = (folder / "strip.html").stat().st_size
    return (
        f"{ranks:>5} {calls:>9,} {statistics.median(frames):>10.1f} {max(frames):>9.1f} {made:>9.2f} {size / 1e6:>8.2f}"
    )


def stage_frames(page: Page, folder: Path) -> int:
    write("send", 8, 64, folder)
    play.player(Trace.load(folder / "trace")).to_html(folder / "stage.html")
    page.goto((folder / "stage.html").as_uri())
    page.wait_for_function("!!document.querySelector('.dlearn-player').dlearnPlayer.go")
    return int(page.evaluate(FRAMES))


def main() -> None:
    asked = options(__doc__, largest=1_000_000, ranks=[4, 64])
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        print("ranks     calls  median, ms worst, ms  made in s  page, MB")
        for ranks in asked.ranks:
            for calls in (10**4, 10**5, 10**6):
                if calls <= asked.largest:
                    with tempfile.TemporaryDirectory() as folder:
                        print(strip_row(page, ranks, calls, Path(folder)), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            print(f"stage, 8 ranks: {stage_frames(page, Path(folder))} frames in 650 ms; 39 is every frame of a screen")
        browser.close()


if __name__ == "__main__":
    main()
