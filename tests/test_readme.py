"""A newcomer walks through README.md and docs/tour.md: every example is run as it stands, and prints what they say.

The Python of both is one notebook, cell after cell; the script that records itself is made of files, and comes first,
since `Travel through a whole run` reads its trace. Compared is what a block shows, up to where lines break, figures of
time, and what `...` leaves out; byte figures are equal.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from traitlets.config import Config
from waiting import free_port


class Block(NamedTuple):
    """`language` is "python", "sh", or "" for what the block before it prints."""

    section: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    found, section = [], ""
    for heading, language, text in re.findall(r"^## ([^\n]+)$|^```(\w*)\n(.*?)^```$", page.read_text(), re.M | re.S):
        section = heading or section
        if not heading:
            found.append(Block(section, language, text))
    return found


ROOT = Path(__file__).parent.parent
BLOCKS = blocks(ROOT / "README.md") + blocks(ROOT / "docs" / "tour.md")
NOT_RUN = ("make demo", "python3 -m venv .venv", "make paper", "make course")
"""They take minutes, or open a browser; `.ci/run` does the first, which does the second."""
ACTIVATE = next(block for block in BLOCKS if block.text.startswith("source"))
ENGINEERS = "For engineers: any script, as it is"
READERS_OWN = {ENGINEERS: [*(Path(__file__).parent / "scripts" / "reader").glob("*.py")]}
"""Scripts that the text says the reader has: train.py, whose rank 1 is killed, and parameter_server.py."""

OWN_SCRIPT = next(at for at, block in enumerate(BLOCKS) if "dlearn.record(" in block.text)
SCRIPT = BLOCKS[OWN_SCRIPT : OWN_SCRIPT + 3]
"""What is written into a script, how it is started, and what reads its trace later."""

FAILED = "the reader sees it fail"

RUN = [block for block in BLOCKS if block.language and not block.text.startswith(NOT_RUN)]


class Walk:
    """The reader's folder, terminal and notebook; `printed[block]` holds all that a block showed, errors too."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        import nbformat  # Here: with the names of the web that it knows, it takes 2.5 s.
        from nbclient import NotebookClient

        self.folder = folder
        self.printed: dict[Block, str] = {}
        self.new_cell = nbformat.v4.new_code_cell
        self.notebook = nbformat.v4.new_notebook()
        ipc = Config({"KernelManager": {"transport": "ipc", "ip": str(sockets / "kernel")}})
        place = {"metadata": {"path": str(folder)}}
        self.client = NotebookClient(self.notebook, timeout=300, allow_errors=True, resources=place, config=ipc)

    def shell(self, block: Block, lines: str) -> str:
        activated = ACTIVATE.text if BLOCKS.index(block) > BLOCKS.index(ACTIVATE) else ""
        return "".join(self.command(activated + line) for line in lines.splitlines())

    def command(self, lines: str) -> str:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(["bash", "-c", lines], cwd=self.folder, timeout=300, **both)
        return done.stdout + (f"{FAILED} with status {done.returncode}\n" if done.returncode else "")

    def cell(self, text: str) -> str:
        cell = self.new_cell(text)
        self.notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        return "\n".join(text_of(output) for output in cell.outputs)


def text_of(output) -> str:
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return f"{FAILED} with {output.ename}: {output.evalue}"
    return output.data.get("text/plain", "")


def walked(folder: Path, sockets: Path) -> Walk:
    walk = Walk(folder, sockets)
    (folder / ".venv").symlink_to(sys.prefix)
    with pytest.MonkeyPatch.context() as patch:
        of_a_reader(folder, patch)
        script, command, later = SCRIPT
        (folder / "train.py").write_text(script.text)
        walk.printed[script] = walk.printed[command] = walk.shell(command, command.text)
        (folder / "later.py").write_text(later.text)
        walk.printed[later] = walk.shell(later, "python later.py")
        with walk.client.setup_kernel():
            for block in RUN:
                for file in READERS_OWN.get(block.section, ()):
                    (folder / file.name).write_text(file.read_text())
                if block not in SCRIPT and block.language == "python":
                    walk.printed[block] = walk.cell(block.text)
                elif block not in SCRIPT:
                    walk.printed[block] = walk.shell(block, block.text)
    return walk


def of_a_reader(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """The environment of a reader who has not activated that in which these tests run."""
    paths = [each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != Path(sys.executable).parent]
    patch.delenv("MPLBACKEND", raising=False)
    patch.setenv("PATH", os.pathsep.join(paths))
    patch.setenv("IPYTHONDIR", str(folder / "ipython"))
    patch.setenv("PET_MASTER_PORT", free_port())  # torchrun's: beside other work its usual port may be taken


def shows(block: Block) -> str:
    """What the page says that this block prints."""
    after = BLOCKS[BLOCKS.index(block) + 1 :][:1]
    return after[0].text if after and not after[0].language else ""


def plain(text: str) -> str:
    """Without what differs from run to run: times and shares of time, dates; and on one line."""
    text = re.sub(r"\d+(\.\d+)?(?= ?(%|s|ms|µs)\b|%)", "#", text)
    return " ".join(re.sub(r"\d{8}-\d{6}", "DATE", text).split())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_block_runs_and_prints_what_the_page_shows_and_nothing_is_left(tmp_path_factory):
    walk = walked(tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("s"))
    different = [block for block in RUN if not is_as_shown(block, walk.printed[block])]
    assert [f"{block.section}: {block.text}\nprinted: {walk.printed[block]}" for block in different] == []
    everybodys = psutil.process_iter(["cwd"])
    of_the_walk = [process for process in everybodys if process.info["cwd"] == str(walk.folder)]
    _, left = psutil.wait_procs(of_the_walk, timeout=60)
    assert [process.cmdline() for process in left] == []


def is_as_shown(block: Block, text: str) -> bool:
    printed = plain(text)
    for part in map(plain, re.split(r"\.\.\.(?:\n|$)", shows(block))):
        if part not in printed:
            return False
        printed = printed[printed.index(part) + len(part) :]
    return shows(block) != "" or FAILED not in printed
