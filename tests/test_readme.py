"""A newcomer walks through README.md and docs/tour.md: every example is run as it stands, and prints what they say.

The Python of both is one notebook, cell after cell; `In your own script` is made of files, and comes first, since
`Travel through a whole run` reads its trace. Compared is what a block shows, up to where lines break, figures of
time, and what `...` leaves out; byte figures are equal.
"""

from __future__ import annotations

import ast
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from readme import README, TOUR, Block, blocks
from traitlets.config import Config

if TYPE_CHECKING:
    import nbformat  # Where it is used: with the names of the web that it knows, it takes 2.5 s.

BLOCKS = blocks(README) + blocks(TOUR)
NOT_RUN = {  # the first line of a block: who runs it instead, or why nobody can
    "make demo": "opens a browser; .ci/run does `make demo`, and tests/test_browser.py works in JupyterLab",
    "python3 -m venv .venv": "takes minutes; it is what `make demo` runs",
    "make paper": "takes minutes; tests/test_ddp_paper.py runs the claims",
}
ACTIVATE = next(block for block in BLOCKS if block.text.startswith("source"))
BEFORE = {"make", "python3"}
"""The commands that a reader has who has not activated the environment yet."""
SCRIPT = "In your own script"
READERS_OWN = {"Any script, as it is": [*(Path(__file__).parent / "scripts" / "reader").glob("*.py")]}
"""Scripts that the text says the reader has: train.py, whose rank 1 is killed, and parameter_server.py."""

FAILED = "the reader sees it fail"

RUN = [block for block in BLOCKS if block.language and not block.text.startswith(tuple(NOT_RUN))]


class Walk:
    """The reader's folder, terminal and notebook; `printed[block]` holds all that a block showed, errors too."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        import nbformat
        from nbclient import NotebookClient

        self.folder = folder
        self.printed: dict[Block, str] = {}
        self.notebook = nbformat.v4.new_notebook()
        self.client = NotebookClient(
            self.notebook,
            timeout=300,
            kernel_name="python3",
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
            config=Config({"KernelManager": {"transport": "ipc", "ip": str(sockets / "kernel")}}),
        )

    def shell(self, block: Block, lines: str) -> str:
        activated = ACTIVATE.text if BLOCKS.index(block) > BLOCKS.index(ACTIVATE) else ""
        return "".join(self.command(activated + line) for line in lines.splitlines())

    def command(self, lines: str) -> str:
        both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        done = subprocess.run(["bash", "-c", lines], cwd=self.folder, timeout=300, **both)
        return done.stdout + (f"{FAILED} with status {done.returncode}\n" if done.returncode else "")

    def cell(self, text: str) -> str:
        from nbformat.v4 import new_code_cell

        cell = new_code_cell(text)
        self.notebook.cells.append(cell)
        self.client.execute_cell(cell, len(self.notebook.cells) - 1)
        return "\n".join(text_of(output) for output in cell.outputs)


def text_of(output: nbformat.NotebookNode) -> str:
    if output.output_type == "stream":
        return output.text
    if output.output_type == "error":
        return f"{FAILED} with {output.ename}: {output.evalue}"
    return output.data.get("text/plain", "")


def walked(folder: Path, sockets: Path) -> Walk:
    walk = Walk(folder, sockets)
    (folder / ".venv").symlink_to(sys.prefix)
    with environment(
        PATH=path_without_ours(),
        IPYTHONDIR=str(folder / "ipython"),
        PET_MASTER_PORT=str(free_port()),  # torchrun's: beside other work its usual port may be taken
    ):
        script, command, later = [block for block in BLOCKS if block.section == SCRIPT]
        (folder / "train.py").write_text(script.text)
        walk.printed[script] = walk.printed[command] = walk.shell(command, command.text)
        (folder / "later.py").write_text(later.text)
        walk.printed[later] = walk.shell(later, "python later.py")
        with walk.client.setup_kernel():
            for block in RUN:
                for file in READERS_OWN.get(block.section, ()):
                    (folder / file.name).write_text(file.read_text())
                if block.section != SCRIPT and block.language == "python":
                    walk.printed[block] = walk.cell(block.text)
                elif block.section != SCRIPT:
                    walk.printed[block] = walk.shell(block, block.text)
    return walk


def path_without_ours() -> str:
    """Of a reader who has not activated the environment in which these tests run."""
    ours = Path(sys.executable).parent
    return os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if Path(each) != ours)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("MPLBACKEND", raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


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
    of_the_walk = [process for process in psutil.process_iter() if folder_of(process) == walk.folder]
    _, left = psutil.wait_procs(of_the_walk, timeout=60)
    assert [process.cmdline() for process in left] == []


def is_as_shown(block: Block, text: str) -> bool:
    printed = plain(text)
    for part in map(plain, re.split(r"\.\.\.(?:\n|$)", shows(block))):
        if part not in printed:
            return False
        printed = printed[printed.index(part) + len(part) :]
    if shows(block):
        return True
    return FAILED not in printed and (printed != "" or not ends_in_a_value(block))


def ends_in_a_value(block: Block) -> bool:
    """Whether the cell shows its last line: an expression, and no call that returns None."""
    last = ast.parse(block.text).body[-1] if block.language == "python" and block.section != SCRIPT else None
    return isinstance(last, ast.Expr) and not re.search(r"\.(assert_\w+|release|shutdown)\(", ast.unparse(last))


def test_what_a_cell_is_said_to_show_is_its_last_expression():
    said = [block for block in BLOCKS if "last expression" in block.text]
    assert said != []
    for block in said:
        (line,) = [line for line in block.text.splitlines() if "last expression" in line]
        assert block.text.endswith(f"{line}\n")
        assert ends_in_a_value(block), line


def test_every_command_is_found_where_the_page_has_come_to():
    """Before the environment is activated it is named by its path; afterwards its folder is on PATH."""
    for block in BLOCKS:
        if block.language == "sh" and block != ACTIVATE:
            activated = BLOCKS.index(block) > BLOCKS.index(ACTIVATE)
            for line in block.text.splitlines():
                command = line.split()[0].removeprefix(".venv/bin/")
                ours = (Path(sys.executable).parent / command).exists()
                usable = ours and (activated or line.startswith(".venv/"))
                assert usable or command in BEFORE, line


def folder_of(process: psutil.Process) -> Path | None:
    try:
        return Path(process.cwd())
    except psutil.Error:  # It has ended, or is another user's.
        return None


@pytest.mark.parametrize("start", NOT_RUN)
def test_what_is_not_run_stands_there(start):
    assert sum(block.text.startswith(start) for block in BLOCKS) == 1
