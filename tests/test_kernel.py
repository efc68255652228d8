"""Clusters in a real Jupyter kernel: cells, live output, interrupts, and the kernel's death."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed_torch import own_words
from jupyter_client.manager import KernelManager
from waiting import all_end, comes_true

CELL_SECONDS = 60
HERE = os.pathsep.join(map(str, Path(__file__).parents[:2]))  # What these tests import, and the dlearn that is tested.


class Kernel:
    """A running kernel; `run` executes a cell and returns what it showed. `cell` is the number of the last one."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, "PYTHONPATH": HERE})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.folder = folder

    def run(self, code: str) -> list[dict]:
        """The output messages of the cell, in order; errors among them."""
        return self.outputs(self.client.execute(code))

    def outputs(self, request: str) -> list[dict]:
        found = []
        while True:
            message = self.client.get_iopub_msg(timeout=CELL_SECONDS)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "execute_input":
                self.cell = content["execution_count"]
            if kind == "status" and content["execution_state"] == "idle":
                return found
            if kind not in ("status", "execute_input"):
                found.append({"kind": kind, **content})

    def wait_for(self, kind: str, text: str = "") -> dict:
        """The next output of this kind, with this text in it."""
        while True:
            message = self.client.get_iopub_msg(timeout=CELL_SECONDS)
            if message["msg_type"] == kind and text in str(message["content"]):
                return message["content"]

    def ranks(self) -> list[int]:
        """The processes of the last run, by the names of their files."""
        last = max((self.folder / ".dlearn" / "runs").iterdir(), key=lambda run: run.stat().st_mtime_ns)
        return [int(path.stem.rsplit("-", 1)[1]) for path in last.glob("trace/*.jsonl")]

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory) -> Iterator[Kernel]:
    """One for all tests, as a person works on in one: to load torch twice, in it and in its fork server, takes 5 s."""
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    try:
        start = "import programs, re, torch, torch.distributed as dist\nfrom dlearn import Cluster"
        assert error_of(kernel.run(start)) is None
        yield kernel
    finally:
        kernel.close()


def text_of(outputs: list[dict]) -> str:
    return own_words("".join(output["text"] for output in outputs if output["kind"] == "stream"))


def error_of(outputs: list[dict]) -> dict | None:
    return next((output for output in outputs if output["kind"] == "error"), None)


def test_cells_classes_and_errors(kernel):
    kernel.run(
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(3, 1)\n"
        "    def forward(self, x):\n"
        "        return self.layer(x)\n"
        "data = torch.ones(2, 3)\n"
        "def use():\n"
        "    from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "    net = DDP(Net())\n"
        "    net(data).sum().backward()\n"
        "    return net.module, dist.get_rank()"
    )
    training = kernel.cell
    shown = kernel.run("run = Cluster(2).run(use)\nprint(type(run.results[1][0]) is Net, run.results[1][1])")
    assert text_of(shown) == "True 1\n", error_of(shown)
    # The call site of what DDP sends is the cell and its line.
    shown = kernel.run("print({event.site for event in run.trace.where(op='all_reduce').events})")
    assert text_of(shown) == f"{{'In[{training}]:11'}}\n"
    kernel.run("def fail():\n    if dist.get_rank() == 1:\n        raise KeyError('lost')\n    dist.barrier()")
    failing = kernel.cell
    error = error_of(kernel.run("Cluster(2).run(fail)"))
    assert error["ename"] == "RankError"
    shown_error = "\n".join(error["traceback"])
    assert "rank 1 failed first: KeyError: 'lost'" in shown_error
    assert f"Cell In[{failing}], line 3, in fail" in shown_error
    assert "site-packages" not in shown_error
    assert len(shown_error.splitlines()) < 10


def test_output_is_live_and_rows_stand_in_one_output_of_which_a_sentence_is_left(kernel):
    """The rank goes on when the line, and then the rows, are there."""
    kernel.run("def speak():\n    print('a line')\n    programs.wait_for('seen')")
    request = kernel.client.execute("run = Cluster(1).run(speak)")
    kernel.wait_for("stream", "[rank 0] a line")
    first = kernel.wait_for("display_data")
    (kernel.folder / "seen").touch()
    shown = kernel.outputs(request)
    last = [output["data"] for output in shown if output["kind"] == "update_display_data"][-1]
    assert first["data"]["text/plain"].startswith("dlearn: 1 of 1 ranks at work, ")
    assert 'role="cell"' in first["data"]["text/html"]
    assert last == {"text/plain": "1 rank returned", "text/html": "<p>1 rank returned</p>"}
    assert [output for output in shown if output["kind"] == "execute_result"] == []
    assert [output["kind"] for output in kernel.run("run")] == ["execute_result"]


@pytest.mark.parametrize("body", ["while True: pass", "dist.recv(torch.ones(1), 1 - dist.get_rank())"])
def test_an_interrupt_ends_the_ranks_and_the_next_cell_works(kernel, body):
    kernel.run(f"def stuck():\n    print('stuck')\n    {body}")
    request = kernel.client.execute("Cluster(2).run(stuck)")
    kernel.wait_for("stream", "stuck")
    assert comes_true(lambda: len(kernel.ranks()) == 2)
    ranks = kernel.ranks()
    kernel.manager.interrupt_kernel()
    error = error_of(kernel.outputs(request))
    assert error["ename"] == "Interrupted"
    (line,) = error["traceback"]
    assert line.startswith("KeyboardInterrupt: the ranks were ended; what they had recorded is in ")
    assert all_end(ranks)
    assert text_of(kernel.run("print(Cluster(2).run(dist.get_rank).results)")) == "{0: 0, 1: 1}\n"


def test_the_kernels_death_ends_its_ranks(kernel, tmp_path):
    """Ranks whose other threads never get to run, each with a child in a session of its own.

    The last test: the kernel is gone then.
    """
    kernel.run(
        "def stuck():\n"
        f"    programs.with_helper({str(tmp_path / 'pids')!r})\n"
        "    re.match('(a+)+b', 'a' * 50)  # One call of C, which lasts for hours and does not let go of the GIL."
    )
    kernel.client.execute("Cluster(3).run(stuck)")
    files = [tmp_path / f"pids{rank}" for rank in range(3)]
    assert comes_true(lambda: all(file.exists() and len(file.read_text().split()) == 2 for file in files))
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    os.kill(kernel.manager.provisioner.process.pid, signal.SIGKILL)
    assert all_end(pids)
