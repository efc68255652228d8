"""Clusters in a real Jupyter kernel: cells, live output, interrupts, and the kernel's death."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from installed_torch import own_words
from jupyter_client.manager import KernelManager
from waiting import comes_true

CELL_SECONDS = 60
TESTS = Path(__file__).parent
HERE = f"{TESTS}{os.pathsep}{TESTS.parent}"
"""Where a kernel finds what these tests import, and the dlearn that is tested."""


class Kernel:
    """A running kernel; `run` executes a cell and returns what it showed. `cell` is the number of the last one."""

    def __init__(self, folder: Path) -> None:
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(folder), env={**os.environ, "PYTHONPATH": HERE})
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

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

    def wait_for_text(self, text: str) -> None:
        """Until the running cell has printed this."""
        while text not in self.wait_for("stream")["text"]:
            pass

    def wait_for(self, kind: str) -> dict:
        """The next output of this kind."""
        while True:
            message = self.client.get_iopub_msg(timeout=CELL_SECONDS)
            if message["msg_type"] == kind:
                return message["content"]

    @property
    def pid(self) -> int:
        return self.manager.provisioner.process.pid

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture(scope="module")
def open_kernel(tmp_path_factory):
    """One for all tests, as a person works on in one: to load torch twice, in it and in its fork server, takes 5 s."""
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    try:
        yield kernel
    finally:
        kernel.close()


@pytest.fixture
def kernel(open_kernel, tmp_path):
    """In a folder of this test's own, without ranks of the test before."""
    assert open_kernel.manager.is_alive(), "the test that ends it is the last one"
    failed = error_of(
        open_kernel.run(
            "import os, torch, torch.distributed as dist\n"
            "from dlearn import Cluster, span\n"
            "from dlearn.cluster import spares\n"
            "spares.close()\n"
            f"os.chdir({str(tmp_path)!r})"
        )
    )
    assert failed is None, failed["traceback"]
    return open_kernel


def text_of(outputs: list[dict]) -> str:
    return own_words("".join(output["text"] for output in outputs if output["kind"] == "stream"))


def error_of(outputs: list[dict]) -> dict | None:
    return next((output for output in outputs if output["kind"] == "error"), None)


def ranks_of(kernel: Kernel) -> list[int]:
    """The rank processes that descend from this kernel, by their process group: each rank leads its own."""
    below = psutil.Process(kernel.pid).children(recursive=True)
    return [child.pid for child in below if _is_rank(child)]


def _is_rank(process: psutil.Process) -> bool:
    try:
        return os.getpgid(process.pid) == process.pid and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def all_end(pids: list[int]) -> bool:
    return comes_true(lambda: not any(psutil.pid_exists(pid) and _is_rank(psutil.Process(pid)) for pid in pids))


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
    assert error_of(shown) is None, error_of(shown)
    assert text_of(shown) == "True 1\n"
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
    assert "raise KeyError('lost')" in shown_error
    assert "site-packages" not in shown_error
    assert len(shown_error.splitlines()) < 10
    assert text_of(kernel.run("print(Cluster(2).run(use).results[0][1])")) == "0\n"


@pytest.mark.slow
def test_output_is_live(kernel, tmp_path):
    """The rank goes on when the line is there."""
    kernel.run(
        "import programs\n"
        "def speak():\n"
        "    for i in range(3):\n"
        "        print('line', i)\n"
        "        programs.wait_for(f'seen {i}')"
    )
    request = kernel.client.execute("Cluster(1).run(speak)")
    for i in range(3):
        kernel.wait_for_text(f"[rank 0] line {i}")
        (tmp_path / f"seen {i}").touch()
    assert error_of(kernel.outputs(request)) is None


@pytest.mark.slow
@pytest.mark.parametrize("before", ["run = ", ""])
def test_rows_stand_in_one_output_of_which_a_sentence_is_left(kernel, tmp_path, before):
    kernel.run("import programs")
    request = kernel.client.execute(f"{before}Cluster(2).run(programs.wait_for, 'seen')")
    first = kernel.wait_for("display_data")
    (tmp_path / "seen").touch()
    shown = kernel.outputs(request)
    last = [output["data"] for output in shown if output["kind"] == "update_display_data"][-1]
    assert first["data"]["text/plain"].startswith("dlearn: 2 of 2 ranks at work, ")
    assert first["metadata"] == {"dlearn": "live"}
    assert "<td" in first["data"]["text/html"]
    assert last == {"text/plain": "2 ranks returned", "text/html": "<p>2 ranks returned</p>"}
    cards = [output for output in shown if output["kind"] == "execute_result"]
    assert len(cards) == (0 if before else 1)


@pytest.mark.parametrize("body", ["while True: pass", "dist.recv(torch.ones(1), 1 - dist.get_rank())"])
def test_an_interrupt_ends_the_ranks_and_the_next_cell_works(kernel, body):
    kernel.run(f"def stuck():\n    print('stuck')\n    {body}")
    request = kernel.client.execute("Cluster(2).run(stuck)")
    kernel.wait_for_text("stuck")
    ranks = ranks_of(kernel)
    assert len(ranks) == 2
    kernel.manager.interrupt_kernel()
    error = error_of(kernel.outputs(request))
    assert error["ename"] == "Interrupted"
    (line,) = error["traceback"]
    assert line.startswith("KeyboardInterrupt: the ranks were ended; what they had recorded is in ")
    assert all_end(ranks)
    shown = kernel.run("print(Cluster(2).run(dist.get_rank).results)")
    assert text_of(shown) == "{0: 0, 1: 1}\n"


def test_a_hang_is_told_and_the_next_cell_works(kernel):
    kernel.run("def skip():\n    if dist.get_rank() == 0:\n        dist.all_reduce(torch.ones(4))")
    skipping = f"In[{kernel.cell}]:3"
    kernel.run("from hanging import end_when, in_calls")
    error = error_of(kernel.run("raise end_when(in_calls(1), Cluster(2), skip).error"))
    told = f"rank 0 waits for rank 1 in all_reduce #1 ({skipping}); rank 1 never called it"
    assert told in "\n".join(error["traceback"])
    assert text_of(kernel.run("print(Cluster(2).run(dist.get_rank).results)")) == "{0: 0, 1: 1}\n"


def test_the_kernels_death_ends_its_ranks(kernel, tmp_path):
    """Ranks whose other threads never get to run, each with a child in a session of its own.

    The last test: the kernel is gone then.
    """
    kernel.run(
        "import programs, re\n"
        "def stuck():\n"
        f"    programs.with_helper({str(tmp_path / 'pids')!r})\n"
        "    re.match('(a+)+b', 'a' * 50)  # One call of C, which lasts for hours and does not let go of the GIL."
    )
    kernel.client.execute("Cluster(3).run(stuck)")
    files = [tmp_path / f"pids{rank}" for rank in range(3)]
    assert comes_true(lambda: all(file.exists() and len(file.read_text().split()) == 2 for file in files))
    pids = [int(pid) for file in files for pid in file.read_text().split()]
    assert set(ranks_of(kernel)) <= set(pids)
    assert [pid for pid in pids if not _is_rank(psutil.Process(pid))] == []
    os.kill(kernel.pid, signal.SIGKILL)
    assert all_end(pids)
