"""`dlearn run`: scripts that know nothing of dlearn, started by torchrun or alone, and how they end."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from installed_torch import own_words
from waiting import all_end, comes_true, free_port

from dlearn import Trace, explain
from dlearn.analysis import reconcile, traffic
from dlearn.cli import main

DDP = """
import os, subprocess, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, turns, what = dist.get_rank(), 0, sys.argv[1]
tensor = torch.ones(100)
for step in range(6):
    if step == 4 and rank == 1:
        if what == "kill": os.kill(os.getpid(), 9)
        while what == "hang": turns += 1; time.sleep(0.05); turns != 100 or open("100 turns", "w").close()
    if step == 2 and rank == 0 and what == "well":  # A child of its own makes it late.
        subprocess.run([sys.executable, "-c", "import torch, time; time.sleep(1)"], check=True)
    dist.all_reduce(tensor)
sys.stdout.write(f"rank {rank} is done: {sys.argv[1:]}" + chr(10))
dist.destroy_process_group()
"""


COMMAND = [sys.executable, "-m", "dlearn.cli", "run"]


def dlearn_run(folder: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, **more)


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(textwrap.dedent(text))
    return name


def test_torchrun_records_every_rank_and_changes_no_output(tmp_path, capsys):
    of_the_script = ["well", "--trace", "mine", "--nproc", "-h"]
    done = dlearn_run(tmp_path, "--nproc-per-node=2", "--tra", "t", script(tmp_path, DDP), *of_the_script)
    assert done.returncode == 0, done.stderr
    said = [f"rank {rank} is done: {of_the_script}" for rank in (0, 1)]
    assert sorted(own_words(done.stdout).splitlines()) == said
    trace = Trace.load(tmp_path / "t")
    assert (trace.ranks, trace.problems) == ((0, 1), ())
    assert len(trace.processes) == 2, "a child of a rank is none"
    assert [len(match.ends) for match in trace.matches] == [2] * 6
    assert "dlearn: the trace is in t\n" in done.stderr
    assert "6 of 6 operations explained by" in done.stderr
    assert " for rank 0; in words: dlearn explain t" in done.stderr, "it was waited for"
    assert main(["explain", str(tmp_path / "t")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("Rank 1 waited ")
    assert "dlearn run --nproc-per-node 2 ..." in dlearn_run(tmp_path, "train.py", "well").stderr


def hanging(folder: Path, text: str, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """A job on two ranks, and the first sentence on its hang."""
    command = [*COMMAND, "--nproc-per-node=2", "--hang-after=2", "--trace", "t"]
    command += [script(folder, text), *arguments]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    told = next(line for line in process.stderr if "nothing has happened" in line)
    return process, told.removeprefix("dlearn: nothing has happened for 2 s: ").strip()


@pytest.mark.slow
def test_a_hang_is_told_while_it_hangs_and_at_the_end_and_from_the_files(tmp_path):
    process, sentence = hanging(tmp_path, DDP, "hang")
    assert comes_true((tmp_path / "100 turns").exists)  # By then it was looked at often.
    process.terminate()
    _, rest = process.communicate(timeout=100)
    assert "nothing has happened" not in rest, "it is told once"
    assert process.returncode == -signal.SIGTERM
    waits = "rank 0 waits for rank 1 in all_reduce #5 (train.py:12); rank 1 never called it"
    assert sentence == f"{waits}, it is at train.py:9."
    assert f"dlearn: {sentence}" in rest
    assert sentence in str(explain(Trace.load(tmp_path / "t")))


@pytest.mark.slow
def test_a_call_that_does_not_return_is_told_once_by_the_caller(tmp_path):
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
    again = [line for line in rest.splitlines() if "nothing has happened" in line]
    assert not any("ponder" in line for line in again), "a slow shutdown is another wait"
    assert sentence.startswith("worker1 waits for worker0 in rpc_sync ponder(")
    assert sentence.endswith("worker0 is inside ponder.")


SPAWN = """
import os, sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank, size):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    for _ in range(2):  # Each phase of the training has an optimizer of its own.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(work, (2,), nprocs=2, start_method=sys.argv[2])
    print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_steps_of_ranks_that_the_script_starts_itself(tmp_path, how):
    """The process that starts them makes no steps, and is quiet for as long as they import torch: no rank, no file."""
    options = ["--steps=0:3", "--hang-after", "0.5", "--trace", "t"]
    done = dlearn_run(tmp_path, *options, script(tmp_path, SPAWN), free_port(), how)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    trace = Trace.load(tmp_path / "t")
    assert (trace.ranks, trace.problems) == ((0, 1), ())
    assert all(process.closed for process in trace.processes)
    assert trace.spans == ("step 0", "step 1", "step 2")
    assert len(trace.where(kind="span").events) == 6


@pytest.mark.slow
def test_a_restarted_job_keeps_every_attempt(tmp_path):
    # torchrun keeps its store over a restart, and the ranks then find the old addresses in it, now and then: so a file.
    text = DDP.replace("sys.argv[1]\n", "'kill' if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else ''\n")
    where = "f'file://{os.getcwd()}/meet' + os.environ['TORCHELASTIC_RESTART_COUNT']"
    mine = "rank=int(os.environ['RANK']), world_size=2"
    text = text.replace('("gloo")', f'("gloo", init_method={where}, {mine})')
    options = ["--nproc-per-node=2", "--max-restarts=1", "--trace", "t"]
    done = dlearn_run(tmp_path, *options, script(tmp_path, text), "well")
    assert done.returncode == 0, done.stderr
    last, first = Trace.load(tmp_path / "t"), Trace.load(tmp_path / "t", attempt=0)
    assert len(last.matches) == 6
    assert [len(match.ends) for match in first.matches] == [2, 2, 2, 2, 1]
    assert "the job began 2 times" in last.problems[0]


@pytest.mark.slow
def test_no_orphans_when_the_command_is_killed(tmp_path):
    text = """
    import os, time, torch
    open(f"pid {os.getpid()}", "w").close()
    time.sleep(600)
    """
    command = [*COMMAND, "--nproc-per-node=2", "--trace", "t", script(tmp_path, text)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            assert comes_true(lambda: len(list(tmp_path.glob("pid *"))) == 2)
        finally:
            process.kill()
    # They are told to end when their launcher is gone.
    assert all_end([int(path.name.split()[1]) for path in tmp_path.glob("pid *")])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--trace"], "--trace: expected one argument. See dlearn run --help."),
        (["--nproc-per-node=2"], "arguments are required: script.py"),
        (["--steps", "5", "a.py"], "--steps: two numbers, as 10:12 for the steps 10 and 11, not '5'. See dlearn run"),
        (["--steps=5:5", "a.py"], "two numbers"),
        (["--hang-after", "soon", "a.py"], "a number of seconds, 0 for never, not 'soon'"),
        (["--sources", "tcpstore", "x.py"], "no source 'tcpstore' is installed; there are: memory, tcp_store"),
        (["--live", "--hold", "--nproc-per-node=2", "a.py"], "--hold is for the ranks of one host (without --nnodes)"),
        (["--network", "2 apples", "--nproc-per-node=2", "a.py"], "dlearn run --network: "),
        (["--network", "1 Gbit/s", "a.py"], "is for ranks that torchrun starts: say --nproc-per-node, too"),
        (["--nproc-per-node=two", "a.py"], "torchrun: Unsupported nproc_per_node value: two; see torchrun --help."),
        (["torchrun", "--nproc-per-node=2", "a.py"], "there is no script torchrun. Drop the word torchrun: dlearn run"),
        (["--frobnicate", "3", "a.py"], "dlearn: unrecognized arguments: --frobnicate. See dlearn run --help."),
        (["--nproc-per-node=2", "missing.py"], "there is no script missing.py"),
        (["missing.py"], "there is no script missing.py"),
        (["--trace", "old", "a.py"], "old holds a trace already (a-1.jsonl); nothing is overwritten"),
        (["--trace", "a.py/new", "a.py"], "a.py/new cannot be made: Not a directory"),
    ],
)
def test_a_run_that_is_refused_is_one_sentence_and_leaves_nothing(own_folder, monkeypatch, capsys, arguments, told):
    Path("old").mkdir()
    Path("old", "a-1.jsonl").write_text("precious")
    Path("a.py").touch()
    monkeypatch.setattr(os, "environ", dict(os.environ))  # What it tells the script it would start.
    assert main(["run", *arguments]) == 2
    [sentence] = capsys.readouterr().err.splitlines()
    assert told in sentence
    assert sorted(os.listdir()) == ["a.py", "old"]
    assert Path("old", "a-1.jsonl").read_text() == "precious"


def test_help_needs_no_torch_and_has_a_line_for_each_option_of_ours(tmp_path):
    text = "import sys; sys.modules['torch'] = None; from dlearn.cli import main; sys.exit(main(sys.argv[1:]))"
    command, said = [sys.executable, "-c", text, "run"], []
    for words in (["--help"], ["--nproc-per-node", "2", "x.py"]):
        said.append(subprocess.run([*command, *words], capture_output=True, text=True, cwd=tmp_path, check=False))
    ours = ("trace", "steps", "hang-after", "graph", "gather", "live", "hold", "sources", "network")
    assert [name for name in ours if f"\n  --{name} " not in said[0].stdout] == []
    assert said[0].stdout.splitlines()[-1].startswith("example: dlearn run ")
    assert said[1].returncode == 1
    assert said[1].stderr.startswith("dlearn: dlearn run --nproc-per-node needs torch,")


def test_a_second_run_into_the_folder_of_one_that_has_not_ended_is_refused(own_folder, tmp_path, capsys):
    Path("waits.py").write_text("print('runs', flush=True); input()")
    command = [sys.executable, "-m", "dlearn", "run", "--trace", "t", "waits.py"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        assert first.stdout.readline() == b"runs\n"
        assert main(["run", "--trace", "t", "waits.py"]) == 2
        assert capsys.readouterr().err == f"dlearn: another run writes into {tmp_path}/t now. Give another --trace.\n"
        assert (tmp_path / "t").is_dir()
        first.communicate(b"go on\n", timeout=60)
    assert first.returncode == 0


@pytest.mark.slow
def test_some_steps_of_a_long_job(tmp_path):
    text = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    another = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
    for step in range(8):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        with torch.profiler.record_function("optimizer"):
            optimizer.step()
        another.step()
        if dist.get_rank() == 0:
            for peer in (1, 2) if step % 2 else (1, 2, 2):
                dist.send(torch.ones(step + 1), peer)
        else:
            for _ in range(1 if step % 2 or dist.get_rank() == 1 else 2):
                dist.recv(torch.ones(step + 1), 0)
    dist.destroy_process_group()
    """
    done = dlearn_run(tmp_path, "--nproc-per-node=3", "--steps=4:6", "--trace", "t", script(tmp_path, text))
    assert done.returncode == 0, done.stderr
    trace = Trace.load(tmp_path / "t")
    assert trace.problems == ()
    assert trace.spans == ("step 4", "optimizer", "step 5")
    # A step begins when the optimizer has made the one before: with the sends of that, then one bucket.
    for step, sends in ((4, 2), (5, 3)):
        matches = [match for match in trace.within(f"step {step}").matches if match.sender is not None]
        assert [[end.tensors[0].shape for end in match.ends] for match in matches] == [[(step,), (step,)]] * sends
    # The kernel's count of the whole is also of what was not recorded.
    assert "only some steps were recorded" in reconcile(trace).sentence
    assert reconcile(trace.within("step 4")).whole.residue_bytes == 0
    together = f"{traffic(trace).total_bytes} B in all."
    [told] = [each for each in explain(trace).sentences if each.startswith("Some steps only")]
    assert "In step 4 and step 5 together rank 0 sends" in told
    assert told.endswith(together)
