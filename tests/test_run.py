"""`dlearn run`: scripts that know nothing of dlearn, started by torchrun or alone, and how they end."""

from __future__ import annotations

import os
import pty
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from installed_torch import own_words
from traces import Job
from waiting import comes_true

from dlearn import explain
from dlearn.analysis import reconcile
from dlearn.cli import main
from dlearn.scripts import command
from dlearn.scripts.summary import summary
from dlearn.trace.trace import Trace

slow = pytest.mark.slow

DDP = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, what = dist.get_rank(), sys.argv[1]
tensor = torch.ones(100)
for step in range(6):
    if step == 4 and rank == 1:
        if what == "kill": os.kill(os.getpid(), 9)
        if what == "abort": os.abort()
        if what == "exit": os._exit(7)  # sys.exit: gloo may abort when its threads still run
        while what == "hang" and not os.path.exists("go on"): time.sleep(0.05)
    dist.all_reduce(tensor)
sys.stdout.write(f"rank {rank} is done: {sys.argv[1:]}" + chr(10))
dist.destroy_process_group()
"""


def dlearn_run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dlearn.cli", "run", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, **environment},
    )


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return name


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_torchrun_records_every_rank_and_changes_no_output(tmp_path):
    done = dlearn_run(tmp_path, "--nproc-per-node=2", "--trace", "t", script(tmp_path, DDP), "well", "--trace", "mine")
    assert done.returncode == 0, done.stderr
    said = [f"rank {rank} is done: ['well', '--trace', 'mine']" for rank in (0, 1)]
    assert sorted(own_words(done.stdout).splitlines()) == said
    trace = Trace.load(tmp_path / "t")
    assert (trace.ranks, trace.problems) == ((0, 1), ())
    assert [len(match.ends) for match in trace.matches] == [2] * 6
    assert "dlearn: the trace is in t\n" in done.stderr
    assert "6 of 6 operations explained by" in done.stderr


def test_bytes_that_were_not_seen_are_said_at_the_end(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.connect()
    for sent in (8, 784):
        job.counters(0, sent)
        job.counters(1, sent)
    job.write()
    assert "\ndlearn: not seen: 1,552 B were written that no recorded call accounts for\n" in summary(tmp_path)


@pytest.mark.parametrize(
    ("what", "status", "told"),
    [
        ("kill", -signal.SIGKILL, "was killed by SIGKILL"),
        pytest.param("abort", -signal.SIGABRT, "was killed by SIGABRT", marks=slow),
        pytest.param("exit", 7, "ended with status 7", marks=slow),
    ],
)
def test_the_trace_of_a_dead_job_tells_its_story(tmp_path, what, status, told):
    done = dlearn_run(tmp_path, "--nproc-per-node=2", "--trace", "t", script(tmp_path, DDP), what)
    assert done.returncode == status, done.stderr
    story = f"rank 0 waits for rank 1 in all_reduce #5 (train.py:12); rank 1 never called it, it {told}."
    assert story in done.stderr
    asked = str(explain(Trace.load(tmp_path / "t")))
    assert story in asked, "the same from the files alone"
    assert f"rank 1 {told}" in asked


@slow
def test_an_abort_at_the_exit_is_told_from_one_in_the_job(tmp_path):
    at_exit = "import ctypes; ctypes.pythonapi.Py_AtExit(ctypes.CDLL(None).abort)\n"
    done = dlearn_run(tmp_path, "--nproc-per-node=1", "--trace", "t", script(tmp_path, at_exit + DDP), "well")
    assert done.returncode == -signal.SIGABRT, done.stderr
    told = "rank 0 was killed by SIGABRT after its recording was complete: C++ aborted at the exit"
    assert f"dlearn: {told}, as threads of torch may (status 134).\n" in done.stderr


HANG_IN_DDP = "rank 0 waits for rank 1 in all_reduce #5 (train.py:12); rank 1 never called it, it is at train.py:11."


def hanging(folder: Path, text: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A job on two ranks, and the first sentence on its hang."""
    command = [sys.executable, "-m", "dlearn.cli", "run", "--nproc-per-node=2", "--hang-after=2", "--trace", "t"]
    command += [script(folder, text), *arguments]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    told = next(line for line in process.stderr if "nothing has happened" in line)
    return process, told.removeprefix("dlearn: nothing has happened for 2 s: ").strip()


@slow
def test_a_hang_is_told_once_while_it_hangs(tmp_path):
    process, sentence = hanging(tmp_path, DDP, "hang")
    (tmp_path / "go on").touch()
    _, rest = process.communicate(timeout=100)
    assert process.returncode == 0, rest
    assert sentence == HANG_IN_DDP
    assert "nothing has happened" not in rest
    assert not Trace.load(tmp_path / "t").problems


@slow
def test_a_job_that_hung_and_was_ended_tells_its_story_from_the_files(tmp_path):
    process, sentence = hanging(tmp_path, DDP, "hang")
    process.terminate()
    _, rest = process.communicate(timeout=100)
    assert process.returncode == -signal.SIGTERM
    assert sentence == HANG_IN_DDP
    assert f"dlearn: {sentence}" in rest, "and the same again at the end"
    assert sentence in str(explain(Trace.load(tmp_path / "t"))), "and from the files alone"


@slow
def test_a_call_that_does_not_return_is_told_by_the_caller(tmp_path):
    text = """
    import os, time, torch, torch.distributed.rpc as rpc
    def ponder(x):
        while not os.path.exists("go on"):
            time.sleep(0.05)
    rank = int(os.environ["RANK"])
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 1:
        rpc.rpc_sync("worker0", ponder, (torch.ones(100),))
    rpc.shutdown()
    """
    process, sentence = hanging(tmp_path, text)
    (tmp_path / "go on").touch()
    _, rest = process.communicate(timeout=100)
    assert process.returncode == 0, rest
    assert "nothing has happened" not in rest
    assert sentence.startswith("worker1 waits for worker0 in rpc_sync ponder(")
    assert sentence.endswith("worker0 is inside ponder.")


SPAWN = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    dist.all_reduce(torch.ones(10))
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(work, (3,), nprocs=3, start_method=sys.argv[2])
    print("done")
"""


@slow
@pytest.mark.parametrize("how", ["spawn", "fork", "forkserver"])
def test_ranks_that_the_script_starts_itself_are_recorded(tmp_path, how):
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, SPAWN), free_port(), how)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    trace = Trace.load(tmp_path / "t")
    assert (trace.ranks, trace.problems) == ((0, 1, 2), ())
    assert all(process.closed for process in trace.processes)
    assert [len(match.ends) for match in trace.matches] == [3]


@slow
def test_other_pythons_are_recorded_started_or_put_in_place(tmp_path):
    """One rank is a subprocess; the other a program that `exec`s it, after it has imported torch."""
    rank = """
    import sys, torch, torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, sys.argv[2] == "0")
    dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
    dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    """
    script(tmp_path, rank, "rank.py")
    start = """
    import os, subprocess, sys, torch
    child = subprocess.Popen([sys.executable, "rank.py", sys.argv[1], "0"])
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "rank.py", sys.argv[1], "1"])
    os.wait(), os.wait()
    """
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, start), free_port())
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    trace = Trace.load(tmp_path / "t")
    assert (trace.ranks, trace.problems) == ((0, 1), ())


@slow
def test_a_rank_that_puts_another_program_in_its_place_is_one_rank(tmp_path):
    script(tmp_path, DDP, "real.py")
    start = "import os, sys, torch; os.execv(sys.executable, [sys.executable, 'real.py', *sys.argv[1:]])"
    done = dlearn_run(tmp_path, "--nproc-per-node=2", "--trace", "t", script(tmp_path, start), "well")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "t").glob("*.jsonl"))) == 4
    trace = Trace.load(tmp_path / "t")
    assert (trace.ranks, trace.problems) == ((0, 1), ())
    assert [len(match.ends) for match in trace.matches] == [2] * 6


@slow
def test_a_restarted_job_keeps_every_attempt(tmp_path):
    # torchrun keeps its store over a restart, and the ranks then find the old addresses in it, now and then: so a file.
    text = DDP.replace("sys.argv[1]\n", "'exit' if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else ''\n")
    where = "f'file://{os.getcwd()}/meet' + os.environ['TORCHELASTIC_RESTART_COUNT']"
    mine = "rank=int(os.environ['RANK']), world_size=2"
    text = text.replace('("gloo")', f'("gloo", init_method={where}, {mine})')
    done = dlearn_run(
        tmp_path, "--nproc-per-node=2", "--max-restarts=1", "--trace", "t", script(tmp_path, text), "well"
    )
    assert done.returncode == 0, done.stderr
    last, first = Trace.load(tmp_path / "t"), Trace.load(tmp_path / "t", attempt=0)
    assert len(last.matches) == 6
    assert [len(match.ends) for match in first.matches] == [2, 2, 2, 2, 1]
    assert "the job began 2 times" in last.problems[0]


@slow
def test_a_module_and_its_signal_handlers_run_as_without_dlearn(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    text = """
    import signal, sys, time, torch
    signal.signal(signal.SIGTERM, lambda *_: (print("told to end", flush=True), sys.exit(5)))
    print("ready", sys.argv[1:], flush=True)
    time.sleep(60)
    """
    script(package, text, "__main__.py")
    command = [sys.executable, "-m", "dlearn.cli", "run", "--trace", "t", "-m", "package", "--nnodes", "x"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready ['--nnodes', 'x']\n"
        process.terminate()
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (5, "told to end\n")
    assert "nothing was recorded: no process of this script used torch.distributed" in err
    assert not (tmp_path / "t").exists()


@slow
@pytest.mark.parametrize("options", [[], ["--nproc-per-node=2"]])
def test_no_orphans_when_the_command_is_killed(tmp_path, options):
    text = """
    import os, time, torch
    open(f"pid {os.getpid()}", "w").close()
    time.sleep(600)
    """
    command = [sys.executable, "-m", "dlearn.cli", "run", *options, "--trace", "t", script(tmp_path, text)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert comes_true(lambda: len(list(tmp_path.glob("pid *"))) == (2 if options else 1))
    finally:
        process.kill()
        process.wait()
    children = [int(path.name.split()[1]) for path in tmp_path.glob("pid *")]
    # They are told to end when their launcher is gone.
    assert comes_true(lambda: not any(map(psutil.pid_exists, children)))


@slow
def test_the_users_own_sitecustomize_still_runs(tmp_path):
    (tmp_path / "own").mkdir()
    script(tmp_path / "own", "import builtins; builtins.hello = 'from the user'", "sitecustomize.py")
    text = "import sys, torch; print(hello, sum(path.endswith('dlearn/scripts/site') for path in sys.path))"
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, text), PYTHONPATH=str(tmp_path / "own"))
    assert done.stdout == "from the user 0\n", done.stderr


@slow
def test_workers_of_a_data_loader_leave_no_files(tmp_path):
    text = """
    import torch, torch.distributed as dist
    from torch.utils.data import DataLoader, TensorDataset
    if __name__ == "__main__":
        dist.init_process_group("gloo")
        data = TensorDataset(torch.ones(8, 2))
        for method in ("fork", "spawn"):
            for (batch,) in DataLoader(data, batch_size=2, num_workers=1, multiprocessing_context=method):
                dist.all_reduce(batch)
        dist.destroy_process_group()
    """
    done = dlearn_run(tmp_path, "--nproc-per-node=1", "--trace", "t", script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    (process,) = Trace.load(tmp_path / "t").processes
    assert process.rank == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "usage: dlearn run"),
        (["--trace"], "--trace needs a value"),
        (["--nproc-per-node=2"], "needs a script"),
        (["--steps", "5", "x.py"], "two numbers, as in --steps 10:12"),
        (["--steps", "5:5", "x.py"], "two numbers"),
        (["--hang-after", "soon", "x.py"], "a number of seconds, 0 for never, not 'soon'"),
        (["--sources", "tcpstore", "x.py"], "no source 'tcpstore' is installed; there are: memory, tcp_store"),
        (["missing.py"], "there is no script missing.py"),
        (["--trace", "old", "missing.py"], "old holds a trace already (a-1.jsonl); nothing is overwritten"),
        (["--trace", "file", "missing.py"], "is no folder"),
        (["--trace", "file/new", "missing.py"], "file/new cannot be made: Not a directory"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(tmp_path, monkeypatch, capsys, arguments, told):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "a-1.jsonl").write_text("precious")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", dict(os.environ))  # What it tells the script it would start.
    assert main(["run", *arguments]) == 2
    out, err = capsys.readouterr()
    assert told in out + err
    assert not arguments or len(err.splitlines()) == 1
    assert (tmp_path / "old" / "a-1.jsonl").read_text() == "precious"


@slow
def test_some_steps_of_a_long_job(tmp_path):
    text = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            dist.send(torch.ones(step + 1), 1)
        else:
            dist.recv(torch.ones(step + 1), 0)
    dist.destroy_process_group()
    """
    done = dlearn_run(tmp_path, "--nproc-per-node=2", "--steps=4:6", "--trace", "t", script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    trace = Trace.load(tmp_path / "t")
    assert trace.problems == ()
    assert trace.spans == ("step 4", "step 5")
    # A step begins when the optimizer has made the one before: with the send of that, then one bucket.
    for step in (4, 5):
        sends = [match for match in trace.within(f"step {step}").matches if match.sender is not None]
        assert [[end.tensors[0].shape for end in match.ends] for match in sends] == [[(step,), (step,)]]
    assert all(process.footer.left_out > 20 for process in trace.processes)
    # The kernel's count of the whole is also of what was not recorded.
    assert "measured by the kernel" not in str(reconcile(trace).sentence)
    assert "only some steps were recorded" in reconcile(trace).sentence
    assert reconcile(trace.within("step 4")).whole.residue_bytes == 0


ONE = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
dist.all_reduce(torch.ones(3))
print(sys.argv[1:], flush=True)
if "now" in sys.argv: os._exit(0)
dist.destroy_process_group()  # Or torch itself aborts at the exit, once in a hundred runs, recorded or not.
"""


def test_who_first_asks_whether_there_is_a_torch_is_recorded_too(tmp_path):
    text = f"import importlib.util\nassert importlib.util.find_spec('torch') is not None\n{ONE}"
    done = dlearn_run(tmp_path, "--trace", "a b", "--", script(tmp_path, text), "--", "c d", RANK="0")
    assert (done.returncode, own_words(done.stdout)) == (0, "['--', 'c d']\n")
    assert len(Trace.load(tmp_path / "a b").matches) == 1
    assert "dlearn draw timeline 'a b' -o timeline.svg" in done.stderr, "to be pasted into a shell"


@slow
def test_a_script_that_leaves_without_ceremony_has_ended_well(tmp_path):
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, ONE), "now")
    assert done.returncode == 0
    assert "ended with status" not in done.stderr
    assert len(Trace.load(tmp_path / "t").matches) == 1


@slow
@pytest.mark.parametrize("what", ["vanishes", "is damaged"])
def test_the_scripts_status_counts_whatever_becomes_of_the_trace(tmp_path, what):
    spoil = {
        "vanishes": "import shutil; shutil.rmtree('t'); open('t', 'w').close()",
        "is damaged": "open('t/x-1.jsonl', 'w').write('no trace')",
    }
    text = f"{ONE}\nimport sys\n{spoil[what]}\nsys.exit(9)"
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, text))
    assert done.returncode == 9
    assert "Traceback" not in done.stderr


@slow
def test_torchrun_itself_refuses_what_it_does_not_know(tmp_path):
    done = dlearn_run(tmp_path, "--trace", "t/u", "--bad", script(tmp_path, ONE))
    assert done.returncode == 2
    assert "error: unrecognized arguments: --bad" in done.stderr
    assert not (tmp_path / "t").exists()


def test_how_a_process_ended_is_noted_in_its_own_files_only(tmp_path, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node-12")
    for name in ("node-12-1", "node-12-1-2", "node-12-12"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    command._note_exit(tmp_path, 1, 5)
    noted = {path.stem for path in tmp_path.iterdir() if "exit" in path.read_text()}
    assert noted == {"node-12-1", "node-12-1-2"}


@slow
@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_steps_of_ranks_that_the_script_starts_itself(tmp_path, how):
    """The process that starts them makes no steps, and leaves no file."""
    train = """
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    for _ in range(2):  # Each phase of the training has an optimizer of its own.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
"""
    text = SPAWN.replace("    dist.all_reduce(torch.ones(10))\n", train)
    done = dlearn_run(tmp_path, "--steps=0:3", "--trace", "t", script(tmp_path, text), free_port(), how)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    trace = Trace.load(tmp_path / "t")
    assert (trace.ranks, trace.problems) == ((0, 1, 2), ())
    assert trace.spans == ("step 0", "step 1", "step 2")
    assert len(trace.where(kind="span").events) == 9


@slow
def test_ctrl_c_reaches_the_script_once(tmp_path):
    """A terminal sends it to all processes in front of it, wherever their input comes from."""
    text = """
    import time, torch
    try:
        open("ready", "w").close()
        time.sleep(60)
    except KeyboardInterrupt:
        try:
            time.sleep(1)
            open("once", "w").close()
        except KeyboardInterrupt:
            open("twice", "w").close()
    """
    script(tmp_path, text)
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.execv(sys.executable, [sys.executable, "-m", "dlearn.cli", "run", "--trace", "t", "train.py"])
    try:
        assert comes_true((tmp_path / "ready").exists)
        os.write(terminal, b"\x03")
        with suppress(OSError):  # The terminal's other end is closed.
            while os.read(terminal, 1000):
                pass
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    assert (tmp_path / "once").exists()
    assert not (tmp_path / "twice").exists()


@slow
def test_a_send_that_nobody_waits_for_is_no_hang(tmp_path):
    text = """
    import time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    tensor = torch.ones(4)
    work = dist.isend(tensor, 1) if dist.get_rank() == 0 else dist.irecv(tensor, 0)
    time.sleep(3)
    dist.destroy_process_group()
    """
    done = dlearn_run(tmp_path, "--nproc-per-node=2", "--hang-after=1", "--trace", "t", script(tmp_path, text))
    assert done.returncode == 0
    assert "nothing has happened" not in done.stderr


@slow
def test_a_clusters_ranks_are_recorded_by_the_cluster(tmp_path):
    text = """
    import dlearn, torch, torch.distributed as dist
    run = dlearn.Cluster(2).run(lambda: dist.all_reduce(torch.ones(3)))
    print(len(run.trace.matches), run.trace.problems)
    """
    done = dlearn_run(tmp_path, "--trace", "t", script(tmp_path, text))
    assert (done.returncode, done.stdout) == (0, "1 ()\n"), done.stderr
    assert "nothing was recorded" in done.stderr
