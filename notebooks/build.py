"""Make the notebooks: NAME.py (py:percent, the source) -> NAME.ipynb, executed.

    python notebooks/build.py [NAME ...]        all of them, or only those named

Each runs in an empty folder, so that it cannot lean on the files beside it. What differs from run to run without
meaning anything (ids, times, version of the kernel) is taken out: the difference in git is what a reader would see.
"""

import argparse
import base64
import io
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import jupytext
import nbformat
import psutil
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode
from PIL import Image

HERE = Path(__file__).parent
CELL_SECONDS = 600
MOST_BYTES = 500_000
COLORS = 64
_PICTURE = re.compile(r'<picture><source [^>]*?srcset=(\\"[^"]*")>(<img [^>]*?)src=(\\"[^"]*")></picture>')
"""What `one_picture` makes, as JSON writes it."""
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def main() -> int:
    known = {path.stem: path for path in sources()}
    parser = argparse.ArgumentParser(description="Execute the notebooks and save them with their outputs.")
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"one of: {', '.join(known)} (default: all)")
    names = parser.parse_args().names or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"no notebooks: {', '.join(unknown)}; there are: {', '.join(known)}")
    for name in names:
        if not build(known[name]):
            return 1
    return 0


def sources() -> list[Path]:
    """The notebooks' sources: every .py here but this one."""
    return sorted(path for path in HERE.glob("*.py") if path.name != Path(__file__).name)


def build(source: Path) -> bool:
    """Execute one notebook and save it; False, and nothing saved, if a cell fails."""
    start = time.monotonic()
    notebook = read(source)
    print(f"{source.stem}: running ...", file=sys.stderr, flush=True)
    try:
        with tempfile.TemporaryDirectory() as folder, peak_memory() as peak, kernel(folder) as manager:
            run_in(manager, notebook)
    except CellExecutionError as error:
        print(f"{source.stem}: a cell failed, nothing saved\n{error}", file=sys.stderr)
        return False
    scrub(notebook)
    text = nbformat.writes(notebook) + "\n"
    if len(text.encode()) > MOST_BYTES:
        text = smaller_only(text)
    size = len(text.encode())
    if size > MOST_BYTES:
        print(f"{source.stem}: {size:,} bytes, more than {MOST_BYTES:,}: nothing saved. Smaller figures?")
        return False
    source.with_suffix(".ipynb").write_text(text, encoding="utf-8")
    seconds = time.monotonic() - start
    print(f"{source.stem}: {seconds:.0f} s, peak {max(peak) / 1e6:.0f} MB, {size / 1e3:.0f} kB", flush=True)
    return True


def smaller_only(text: str) -> str:
    """Of each drawing's SVG and PNG the smaller one: an <img> stays in a notebook that is not trusted, too."""
    return _PICTURE.sub(lambda found: f"{found[2]}src={min(found[1], found[3], key=len)}>", text)


def read(source: Path) -> NotebookNode:
    """The notebook of a source, not executed, with the same cell ids each time."""
    notebook = jupytext.read(source, fmt="py:percent")
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = NotebookNode(dlearn=notebook.metadata["dlearn"], kernelspec=KERNEL)
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number}"
    return notebook


@contextmanager
def kernel(folder: str | Path) -> Iterator[AsyncKernelManager]:
    os.environ.pop("MPLBACKEND", None)  # a backend chosen out here would keep the figures out of the cells
    with tempfile.TemporaryDirectory() as sockets:
        # Over sockets in a folder: no port of this machine listens, and the kernel has nothing to warn of.
        manager = AsyncKernelManager(kernel_name=KERNEL["name"], transport="ipc", ip=f"{sockets}/kernel")
        run_sync(manager.start_kernel)(cwd=folder, extra_arguments=["--HistoryManager.hist_file=:memory:"])
        try:
            yield manager
        finally:
            run_sync(manager.shutdown_kernel)()


def run_in(manager: AsyncKernelManager, notebook: NotebookNode) -> None:
    """Run all cells of a notebook in this kernel. Of a cell that fails, the error names the tags, too."""
    client = NotebookClient(notebook, km=manager, timeout=CELL_SECONDS, record_timing=False)
    try:
        client.execute()
    except CellExecutionError as error:
        ran = [cell for cell in notebook.cells if cell.get("execution_count")]
        error.add_note(f"{error.ename} in a cell with the tags {ran[-1].metadata.get('tags', [])}")
        raise
    finally:
        client.kc.stop_channels()


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """While it lasts, sample the memory of our child processes in bytes; what ranks share counts once (PSS)."""
    samples = [0]
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.1):
            total = 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    total += process.memory_full_info().pss
            samples[0] = max(samples[0], total)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def scrub(notebook: NotebookNode) -> None:
    """Leave only what a reader sees."""
    notebook.metadata.language_info = NotebookNode(name="python")
    notebook.metadata.pop("widgets", None)
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = fewer_colors(output.data["image/png"])
                    one_picture(output.data)
                # Without a kernel there are no sliders: the picture beside them stays.
                output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            cell.outputs = [output for output in cell.outputs if not is_empty(output)]


def fewer_colors(picture: str) -> str:
    """The same PNG (base64) with a palette, as a rule less than half as large; a transparent one stays as it is."""
    image = Image.open(io.BytesIO(base64.b64decode(picture)))
    if image.convert("RGBA").getextrema()[3][0] < 255:
        return picture
    smaller = io.BytesIO()
    flat = image.convert("RGB").quantize(COLORS, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE)
    flat.save(smaller, "PNG", optimize=True)
    return min(picture, base64.b64encode(smaller.getvalue()).decode(), key=len)


def one_picture(data: NotebookNode) -> None:
    """A drawing as SVG, and as PNG where SVG is taken out of HTML: as in a notebook that is not trusted."""
    before, drawing, svg = data.get("text/html", "").partition('src="data:image/svg+xml;')
    if drawing and '<img class="dlearn-drawing' in before:
        style, image = before.removesuffix('<div class="dlearn-cell">').split("<img ", 1)
        svg = svg.split(">")[0] + ">"  # Without the one for narrow cells: a notebook is to stay small.
        source = f'<source type="image/svg+xml" srcset="data:image/svg+xml;{svg}'
        png = data.pop("image/png").replace("\n", "")
        data["text/html"] = f'{style}<picture>{source}<img {image}src="data:image/png;base64,{png}"></picture>'


def is_empty(output: NotebookNode) -> bool:
    """Whether it shows nothing, or what stands there only because a run took a moment."""
    live = output.get("metadata", {}).get("dlearn") == "live"
    return output.output_type == "display_data" and (live or not any(output.data.values()))


if __name__ == "__main__":
    sys.exit(main())
