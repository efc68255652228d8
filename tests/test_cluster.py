"""Real ranks: functions, names, output, state; every fault; and never an orphan."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import programs
import pytest
import torch
import torch.distributed as dist
from hanging import all_of, end_when, in_calls, said
from installed_torch import gloo_gives_up_when_a_call_says, own_words
from waiting import all_end, comes_true, lives

from dlearn import Cluster, DlearnError
from dlearn.analysis.hanging.stuck import CALLS_SEEN, hangs
from dlearn.cluster import crew, launch, spares
from dlearn.cluster.output import MOST_BYTES, Printed
from dlearn.cluster.run import Run
from dlearn.errors import RankError, SetupError
from dlearn.live.live_display import LiveDisplay

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture(autouse=True)
def _no_orphans():
    """After each test, no rank that it started is left (by pid); fresh spares, which have run nothing, end too."""
    started: list[int] = []

    def remember(start: str) -> launch.RankProcess:
        rank = launch.start_rank(start)
        started.append(rank.process.pid)
        return rank

    spares.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spares, "start_rank", remember)
        yield
        spares.close()
    assert [pid for pid in started if lives(pid)] == []


def test_results_and_output_by_rank(capsys):
    run = Cluster(3).run(programs.say, "hello")
    assert run.results == {0: 0, 1: 1, 2: 2}
    assert [own_words(run.output[rank]) for rank in range(3)] == ["hello 0\n", "hello 1\n", "hello 2\n"]
    assert sorted(own_words(capsys.readouterr().out).splitlines()) == [f"[rank {r}] hello {r}" for r in range(3)]


def test_names_and_a_function_each():
    run = Cluster(["ps", "trainer"]).run({"trainer": programs.listening_addresses, "ps": programs.listening_addresses})
    assert set(run.results) == {"ps", "trainer"}
    assert [process.label for process in run.trace.processes] == ["ps", "trainer"]


def test_a_name_without_a_function_serves():
    def alone() -> str:
        return "done"

    run = Cluster(["ps", "trainer"]).run({"trainer": alone})
    assert run.results == {"trainer": "done"}


def test_output_from_everywhere_is_kept():
    run = Cluster(1).run(programs.talk_everywhere)
    assert sorted(own_words(run.output[0]).splitlines()) == ["child", "descriptor", "no end", "python"]


def test_what_a_cell_defines_travels_by_value():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

    data, net = torch.arange(4.0), Net()

    def use() -> tuple[float, Net]:
        return data.sum().item(), net

    run = Cluster(2).run(use)
    total, back = run.results[1]
    assert total == 6.0  # 0 + 1 + 2 + 3
    assert type(back) is Net
    assert torch.equal(back.layer.weight, net.layer.weight)


def test_ranks_stay_and_keep_their_state_inside_with():
    with Cluster(2) as kept:
        first = kept.run(os.getpid).results
        assert [kept.run(programs.count).results[0] for _ in range(3)] == [1, 2, 3]
        assert kept.run(os.getpid).results == first
        assert kept.run(programs.train_ddp, 2).trace.spans == ("step 0", "step 1")
    assert Cluster(2).run(programs.count).results == {0: 1, 1: 1}


def test_ranks_that_had_to_start_afresh_inside_with_are_told(capsys):
    with Cluster(2) as kept:
        kept.run(programs.count)
        with pytest.raises(RankError, match="exited with code 3"):
            kept.run(programs.all_reduce_then, "exit")
        assert kept.run(programs.count).results == {0: 1, 1: 1}
        assert "start afresh; the state that they kept is gone" in capsys.readouterr().err
        with pytest.raises(SetupError, match="inside a `with` already"), kept:
            pass


def test_ranks_are_fresh_without_with():
    pair = Cluster(2)
    assert pair.run(programs.count).results == pair.run(programs.count).results == {0: 1, 1: 1}
    pids = [pid for _ in range(3) for pid in pair.run(os.getpid).results.values()]
    assert len(set(pids)) == 6


def test_a_spare_that_died_is_not_used():
    Cluster(2).run(programs.count)
    spares._worker.join()
    waiting = spares._spares["forkserver"]
    assert len(waiting) == 2
    for spare in waiting:
        spare.kill()
        spare.process.join()
    assert Cluster(2).run(programs.count).results == {0: 1, 1: 1}


def test_a_tutorials_own_init_works_unchanged():
    # 0 + 1 + 2 = 3
    assert Cluster(3, init=False).run(programs.tutorial_init).results == {0: [3.0], 1: [3.0], 2: [3.0]}


@pytest.mark.slow
def test_spawned_ranks_are_fresh_and_wait_for_the_next_run():
    pair = Cluster(2, start="spawn")
    first = pair.run(os.getpid).results
    spares._worker.join()
    waiting = {spare.pid for spare in spares._spares["spawn"]}
    assert set(pair.run(os.getpid).results.values()) == waiting != set(first.values())
    assert pair.run(programs.say, "again").results == {0: 0, 1: 1}
    with pytest.raises(RankError, match="rank 1 failed first: ValueError"):
        pair.run(programs.all_reduce_then, "exception")


def test_random_numbers_differ_between_ranks_and_runs():
    def draw() -> tuple[float, float]:
        import random

        import numpy

        return random.random(), float(numpy.random.random())

    drawn = [numbers for _ in range(2) for pair in Cluster(2).run(draw).results.values() for numbers in pair]
    assert len(set(drawn)) == 8


@pytest.mark.slow
def test_a_script_without_a_main_guard_runs_once(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "from dlearn import Cluster\n"
        "print('once')\n"
        "def where(): return __name__\n"
        "for start in ('forkserver', 'spawn'):\n"
        "    print(Cluster(2, start=start).run(where).results)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["once", *["{0: '__main__', 1: '__main__'}"] * 2]


def test_a_module_beside_the_notebook_is_fresh_in_every_run(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))

    def look() -> str:
        import beside

        return beside.VALUE

    for value in ("first", "second"):
        (tmp_path / "beside.py").write_text(f"VALUE = {value!r}\n")
        assert Cluster(1).run(look).results == {0: value}


@pytest.mark.slow
def test_the_progress_line_disappears_from_a_terminal(tmp_path):
    seen = tmp_path / "seen"
    script = (
        f"import programs\nfrom dlearn import Cluster\nCluster(1).run(programs.wait_for, {str(seen)!r})\nprint('done')"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    master, terminal = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", script], stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # The terminal closes with its last process.
        while data := os.read(master, 1024):
            shown += data
            if b"at work" in shown:
                seen.touch()
    os.close(master)
    assert process.wait(timeout=60) == 0
    seconds = re.search(rb"\r\033\[Kdlearn: 1 of 1 ranks at work, (\d+) s", shown)
    assert seconds is not None
    assert int(seconds[1]) >= LiveDisplay.AFTER_SECONDS
    assert re.search(rb" s\r\nrank 0 +computes", shown)
    assert shown.endswith(b"\r\033[K\033[1A\033[Kdone\r\n")  # Both lines are gone.


# Loopback only --------------------------------------------------------------------------------------------------------

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_listening_socket_is_on_loopback():
    for init in (True, False):
        run = Cluster(2, init=init).run(programs.listening_addresses if init else _own_init_then_listen)
        addresses = [address for found in run.results.values() for address in found]
        assert addresses, "rank 0 listens for the store at least"
        assert set(addresses) <= LOOPBACK


def _own_init_then_listen() -> list[str]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return programs.listening_addresses()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux namespaces")
def test_loopback_under_a_hostname_that_resolves_elsewhere(tmp_path):
    """In a namespace of its own the host is called `elsewhere`, which is 10.77.0.9 on a real interface."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.77.0.9 elsewhere\n")
    script = tmp_path / "job.py"
    script.write_text(
        "import socket, programs\n"
        "from dlearn import Cluster\n"
        "assert socket.gethostbyname(socket.gethostname()) == '10.77.0.9'\n"
        "run = Cluster(2).run(programs.listening_addresses)\n"
        "print('LISTENS', *sorted({a for found in run.results.values() for a in found}))\n"
    )
    setup = (
        "ip link set lo up && ip link add there type veth peer name here && ip addr add 10.77.0.9/24 dev there &&"
        f" ip link set there up && hostname elsewhere && mount --bind {hosts} /etc/hosts"
    )
    probe = subprocess.run(["unshare", "--net", "--uts", "--mount", "sh", "-c", setup], capture_output=True, text=True)
    if probe.returncode != 0:
        pytest.skip(f"namespaces are not permitted here: {probe.stderr.strip()[:80]}")
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--mount", "sh", "-c", f"{setup} && exec {sys.executable} {script}"],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.returncode == 0, done.stderr
    listens = next(line for line in done.stdout.splitlines() if line.startswith("LISTENS")).split()[1:]
    assert listens
    assert set(listens) <= LOOPBACK


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux namespaces")
def test_a_loopback_interface_that_is_down_is_told_before_the_start():
    own_network = ["unshare", "--net"]
    probe = subprocess.run([*own_network, "true"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"namespaces are not permitted here: {probe.stderr.strip()[:80]}")
    script = (
        "import os\n"
        "from dlearn import Cluster, DlearnError\n"
        "try:\n"
        "    Cluster(2).run(os.getpid)\n"
        "except DlearnError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([*own_network, sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == (
        "the ranks cannot reach each other at 127.0.0.1: Network is unreachable. Bring the loopback interface up"
        " (ip link set lo up).\n",
        "",
    )


# Faults ---------------------------------------------------------------------------------------------------------------


def _fail(fault: str) -> RankError:
    with pytest.raises(RankError) as caught:
        Cluster(3).run(programs.all_reduce_then, fault)
    return _check_what_is_left(caught.value)


def _check_what_is_left(error: RankError) -> RankError:
    assert Cluster(2).run(programs.say, "next").results == {0: 0, 1: 1}
    # The first all_reduce was whole, and all that was recorded up to the fault is there.
    calls = error.run.trace.where(op="all_reduce").events
    assert sum(call.end_ns is not None and not call.failed for call in calls) >= 3
    return error


def test_an_exception_names_its_rank_and_shows_its_lines():
    error = _fail("exception")
    assert error.rank == 1
    assert error.what.startswith("rank 1 failed first: ValueError: a wrong value\nthen: rank 0 was in all_reduce #2")
    assert 'raise ValueError("a wrong value")' in error.details
    assert "dlearn/cluster" not in error.details


@pytest.mark.parametrize(
    ("fault", "told"), [("exit", "died: it exited with code 3"), ("sigkill", "was killed by SIGKILL")]
)
def test_a_rank_that_exits_or_is_killed(fault, told):
    error = _fail(fault)
    assert error.rank == 1
    assert f"rank 1 {told}" in error.what


def test_a_cpp_abort_shows_its_last_line():
    with pytest.raises(RankError) as caught:
        Cluster(2).run(programs.swap_sizes)
    error = caught.value
    assert "aborted in C++ (SIGABRT). Its last line: " in error.what
    assert "op.preamble.length <= op.nbytes" in error.what
    assert Cluster(2).run(programs.say, "next").results == {0: 0, 1: 1}
    # Each rank's first call at least is in its file: gloo may reset the other's connection before its second.
    assert {event.rank for event in error.run.trace.where(op="all_reduce").events} == {0, 1}


def test_different_sizes_are_named_even_where_gloo_ends_the_process():
    with pytest.raises(RankError) as caught:
        Cluster(2).run(programs.sum_of_different_sizes)
    assert "aborted in C++" in caught.value.what
    assert "in all_reduce #1 (" in caught.value.what
    assert "; the ranks called it with different sizes: 200, 400 B." in caught.value.what


def test_a_hang_is_told_in_one_sentence():
    stuck = all_of(said("asleep", 1), in_calls(2, 2))
    error = _check_what_is_left(end_when(stuck, Cluster(3), programs.all_reduce_then, "sleep").error)
    assert error.rank is None
    line = _line_of("    dist.all_reduce(torch.ones(4))", after="meet(fault)")
    asleep = _line_of("            time.sleep(600)", after='case "sleep"')
    assert "ranks" not in error.what.split(":")[0]
    assert (
        f"rank 0 and rank 2 wait for rank 1 in all_reduce #2 (tests/programs.py:{line}); rank 1 never called it,"
        f" it is at tests/programs.py:{asleep}" in error.what
    )


def test_a_run_that_is_only_slow_is_told_as_slow():
    def reduce() -> None:
        while True:
            dist.all_reduce(torch.ones(1))

    def went_on(run: Run) -> bool:
        # A short run on a busy machine may end in its longest wait, which then looks like a hang.
        return len(run.trace.matches) > CALLS_SEEN and not hangs(run.trace)

    run = end_when(went_on, Cluster(2), reduce)
    assert re.match(r"not done after \d+ s: slow, not hung: [0-9,]+ operations in ", run.error.what)
    assert "timeout=" in run.error.hint
    assert hangs(run.trace) == ()


def test_a_rank_that_is_stopped_is_told():
    def stop() -> None:
        if dist.get_rank():
            print("stops")
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    run = end_when(all_of(said("stops", 1), in_calls(1)), Cluster(2), stop)
    assert "rank 1 never called it, it is stopped (SIGSTOP or a debugger: state T)" in run.error.what


def test_an_exception_without_a_text_ends_in_no_colon():
    def run_out_of_memory() -> None:
        if dist.get_rank():
            raise MemoryError

    error = Cluster(2).run(run_out_of_memory, check=False).error
    assert error.what.splitlines()[0] == "rank 1 failed first: MemoryError"


def test_an_abort_without_a_word_shows_no_last_line():
    error = Cluster(1, init=False).run(os.abort, check=False).error
    assert error.what == "rank 0 aborted in C++ (SIGABRT)"


def test_a_rank_that_has_called_sys_exit_is_told_to_those_that_wait_for_it():
    """By itself that is no fault: a script may end so on every rank."""

    def leave() -> None:
        if dist.get_rank():
            print("leaves")
            sys.exit()
        dist.barrier()

    assert Cluster(1).run(sys.exit).error is None
    run = end_when(all_of(said("leaves", 1), in_calls(1)), Cluster(2), leave)
    assert "rank 1 never called it, it has called sys.exit." in run.error.what


def test_a_rank_shows_no_warning_of_ours():
    def show_warnings() -> None:
        warnings.simplefilter("always")

    with Cluster(1) as kept:
        assert [own_words(kept.run(show_warnings).output[0]) for _ in range(3)] == ["", "", ""]


def _line_of(text: str, *, after: str) -> int:
    lines = Path(programs.__file__).read_text().splitlines(keepends=True)
    first = next(i for i, line in enumerate(lines) if after in line)
    return next(i for i, line in enumerate(lines) if i > first and line.rstrip() == text.rstrip()) + 1


def test_two_ranks_that_wait_for_each_other_share_a_sentence():
    def both_send() -> None:
        import torch.distributed as dist

        dist.send(torch.ones(4), 1 - dist.get_rank())

    error = end_when(in_calls(1, 1), Cluster(2), both_send).error
    assert "rank 0 and rank 1 wait for each other: rank 0 in send #1 (" in error.what
    assert "a longer run" not in str(error)


def test_what_the_end_of_one_rank_does_to_another_is_not_recorded_as_the_end_of_its_send(monkeypatch):
    def both_send() -> None:
        import torch.distributed as dist

        dist.send(torch.ones(4), 1 - dist.get_rank())

    kill = launch.RankProcess.kill

    def kill_slowly(rank: launch.RankProcess) -> None:
        kill(rank)
        rank.process.join(5)  # Its connections are closed now, while the next rank is not yet killed.
        time.sleep(0.3)

    monkeypatch.setattr(launch.RankProcess, "kill", kill_slowly)
    run = end_when(in_calls(1, 1), Cluster(2), both_send)
    assert [event.pending for event in run.trace.where(kind="p2p").events] == [True, True]


def test_the_same_exception_everywhere_is_told_once():
    def wrong() -> None:
        raise KeyError("x")

    with pytest.raises(RankError) as caught:
        Cluster(3).run(wrong)
    assert caught.value.what == "all 3 ranks failed: KeyError: 'x'"


@pytest.mark.skipif(not gloo_gives_up_when_a_call_says(), reason="gloo of this torch heeds no timeout but its group's")
def test_a_hang_that_torch_itself_ends_names_who_was_waited_for():
    def short_timeout() -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(4))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1))
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(4))
        else:
            time.sleep(600)

    with pytest.raises(RankError) as caught:
        Cluster(2, init=False).run(short_timeout)
    assert caught.value.rank == 0
    assert "rank 0 waits for rank 1 in all_reduce #2 (" in caught.value.what
    assert "rank 1 never called it" in caught.value.what


def test_without_a_trace_a_hang_claims_nothing():
    error = end_when(said("spinning", 0, 1), Cluster(2, record=False), programs.spin).error
    told = r"rank 0, rank 1 are still at work .rank 0 is at tests/programs.py:[0-9]+; rank 1 is"
    assert re.search(told, error.what)


@pytest.mark.slow
def test_an_interrupt_while_torch_is_loading_leaves_the_fork_server_alone():
    script = (
        "import os, signal, time\n"
        "from dlearn import Cluster\n"
        "time.sleep(0.5)\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "os.killpg(0, signal.SIGINT)\n"
        "print(Cluster(2).run(os.getpid).error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, start_new_session=True
    )
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / ".dlearn").write_text("a file, where the folder should be")
    with pytest.raises(SetupError, match="Work in a folder that you may write to"):
        Cluster(1).run(programs.count)


def test_other_users_of_the_machine_cannot_look_into_the_runs(tmp_path):
    Cluster(1).run(programs.count)
    assert stat.S_IMODE((tmp_path / ".dlearn").stat().st_mode) == 0o700


def test_without_check_the_error_stands_in_the_run():
    run = Cluster(3).run(programs.all_reduce_then, "exception", check=False)
    assert isinstance(run.error, RankError)
    assert run.results == {}
    assert run.error.run is run


def test_a_ranks_own_children_end_with_it(tmp_path):
    def pids() -> list[int]:
        return [int(pid) for file in tmp_path.glob("pids*") for pid in file.read_text().split()]

    run = end_when(lambda _: len(pids()) == 4, Cluster(2), programs.with_helper_then_hang, str(tmp_path / "pids"))
    assert run.error is not None
    assert len(pids()) == 4
    assert all_end(pids())


def _start_a_helper(pid_file: str, end: str) -> None:
    import multiprocessing

    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    helper.start()
    Path(pid_file).write_text(f"{helper.pid} {_start_a_daemon()}")
    if end != "return":
        programs.meet(end)


def _start_a_daemon() -> int:
    """Its pid. It is in a session of its own, and its parent is gone."""
    from_daemon, to_rank = os.pipe()
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(to_rank, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(from_daemon, 20))


@pytest.mark.parametrize("end", ["return", "exception", "exit", "sigkill"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_ranks_helpers_end_however_it_ends(tmp_path, end, kept):
    pid_file = tmp_path / "pid"
    pair = Cluster(1)
    if kept:
        with pair:
            run = pair.run(_start_a_helper, str(pid_file), end, check=False)
    else:
        run = pair.run(_start_a_helper, str(pid_file), end, check=False)
    assert (run.error is None) == (end == "return")
    assert all_end([int(pid) for pid in pid_file.read_text().split()])


def test_what_the_notebook_and_other_ranks_have_started_is_left_alone():
    """A process of the notebook's own fork server; and a daemon of a rank that is kept, which ends with that."""
    import multiprocessing

    own = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    own.start()
    try:
        with Cluster(1) as kept:
            daemon = kept.run(_start_a_daemon).results[0]
            Cluster(1).run(os._exit, 3, check=False)
            spares.close()
            assert lives(daemon)
        assert all_end([daemon])
        assert own.is_alive()
    finally:
        own.kill()
        own.join()


@pytest.mark.slow
def test_a_spawned_ranks_daemon_ends_with_it():
    run = Cluster(1, start="spawn").run(_start_a_daemon)
    assert all_end([run.results[0]])


def test_a_rank_that_lost_the_fork_server_is_not_blamed():
    def end_the_fork_server() -> None:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    run = Cluster(1).run(end_the_fork_server, timeout=60, check=False)
    assert run.error.what == ("rank 0 lost the process that had started it, the fork server, which has ended")
    assert Cluster(1).run(programs.count).results == {0: 1}


def test_a_fork_server_that_is_dying_is_not_asked_twice_in_vain():
    """It refuses, until the system says that it has ended; then there is another."""

    class Dying:
        refused = 0

        def connect_to_new_process(self, descriptors):
            if self.refused < 3:
                self.refused += 1
                raise ConnectionRefusedError
            return 7, 8

    assert launch._ask(Dying(), []) == (7, 8)


def test_a_stack_is_read_when_all_of_it_is_written(tmp_path, monkeypatch):
    """A busy rank is stopped between two of its lines."""
    lines = [
        "Current thread 0x1 (most recent call first):\n",
        f'  File "{torch.__file__}", line 1 in wait\n',
        '  File "train.py", line 7 in train\n',
        '  File "dlearn/cluster/rank.py", line 214 in serve\n',
    ]
    file, rank = tmp_path / "stack-0.txt", SimpleNamespace(process=SimpleNamespace(pid=1))
    file.touch()

    def write_line_by_line(seconds):
        with file.open("a") as stream:
            stream.write(lines.pop(0) if lines else "")

    monkeypatch.setattr(launch, "ask_for_stack", lambda pid: None)
    monkeypatch.setattr(launch.time, "sleep", write_line_by_line)
    call = SimpleNamespace(folder=tmp_path, rank=0, surroundings=SimpleNamespace(cells={}))
    assert ("train.py", 7) in launch.RankProcess.stack(rank, call)


PROGRAM_WITH_THREADS = """
import faulthandler, os, signal, sys, threading
faulthandler.register(signal.SIGUSR1, file=open("stack.txt", "w"), all_threads=False)
for _ in range(10): threading.Thread(target=threading.Event().wait, daemon=True).start()
def main_thread():
    print("ready", flush=True)
    while True: pass
main_thread()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "tgkill"), reason="no signal can be sent to one thread here")
def test_the_main_thread_writes_its_stack_also_when_the_rank_was_stopped_just_now(tmp_path):
    stacks, program = tmp_path / "stack.txt", [sys.executable, "-c", PROGRAM_WITH_THREADS]
    last_line = re.compile(r"in (<module>|_bootstrap)\n")  # Of the main thread, and of any other.
    with subprocess.Popen(program, stdout=subprocess.PIPE, cwd=tmp_path) as process:
        try:
            process.stdout.readline()
            for asked in range(1, 11):
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED)
                process.send_signal(signal.SIGCONT)
                launch.ask_for_stack(process.pid)
                assert comes_true(lambda asked=asked: len(last_line.findall(stacks.read_text())) == asked)
        finally:
            process.kill()
    assert stacks.read_text().count("in main_thread") == 10


def test_ranks_start_processes_as_the_notebook_does():
    def method() -> str:
        import multiprocessing

        return multiprocessing.get_start_method()

    assert Cluster(1).run(method).results == {0: method()}


def _fork_copies_that_leave(late: str) -> list[int]:
    """Their exit codes. The rank goes on when all have left, and is not disturbed."""

    def fail() -> None:
        raise ValueError("of a copy")

    codes = []
    for leave in (bool, sys.exit, partial(sys.exit, 3), partial(sys.exit, "not well"), fail):
        if os.fork() == 0:
            return leave()
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    Path(late + os.environ["RANK"]).touch()
    return codes


@pytest.mark.parametrize("rpc", [False, True])
def test_only_the_rank_answers_however_a_copy_that_it_forked_leaves(tmp_path, rpc):
    with Cluster(2, rpc=rpc) as kept:
        for late in ("first", "second"):
            run = kept.run(_fork_copies_that_leave, str(tmp_path / late))
            assert run.results == {0: [0, 0, 3, 1, 1], 1: [0, 0, 3, 1, 1]}
            assert "not well\nTraceback" in own_words(run.output[0])
            assert "ValueError: of a copy" in run.output[1]
    run = Cluster(2, rpc=rpc).run(_fork_copies_that_leave, str(tmp_path / "last"))
    assert len(run.results) == 2
    assert len(list(tmp_path.glob("*[01]"))) == 6


def test_clusters_in_threads_do_not_meet():
    results = []

    def many() -> None:
        for _ in range(4):
            results.append(Cluster(2).run(programs.count).results)

    threads = [threading.Thread(target=many) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{0: 1, 1: 1}] * 12


def test_kept_ranks_refuse_a_second_run_at_the_same_time(tmp_path):
    with Cluster(1) as kept:
        refused = tmp_path / "refused"
        thread = threading.Thread(target=kept.run, args=(programs.wait_for, str(refused)))
        kept.run(programs.count)
        thread.start()
        assert comes_true(kept._crew._busy.locked)
        with pytest.raises(SetupError, match="at work on another run"):
            kept.run(programs.count)
        refused.touch()
        thread.join()


def test_large_arguments_for_a_rank_that_does_not_read_are_held_to_the_timeout():
    with Cluster(1) as kept:
        (pid,) = kept.run(os.getpid).results.values()
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankError, match="not done after 2 s"):
            kept.run(len, b"x" * 5_000_000, timeout=2)


def test_the_earliest_fault_is_blamed(monkeypatch):
    def one_after_the_other() -> None:
        if dist.get_rank() == 0:
            raise ValueError("root cause")
        while not any(b'"ended":"ValueError"' in file.read_bytes() for file in Path().glob(".dlearn/runs/*/trace/*")):
            time.sleep(0.01)
        os._exit(3)

    monkeypatch.setattr(crew, "GRACE_SECONDS", 60.0)
    with pytest.raises(RankError, match=r"rank 0 failed first: ValueError: root cause\n.*code 3"):
        Cluster(2).run(one_after_the_other)


class Unmade(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a)


class Untold(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_strange_exceptions_and_results_are_told():
    def raise_untold() -> None:
        raise Untold

    def raise_long() -> None:
        raise ValueError("x" * 1_000_000)

    def close_stdout() -> str:
        sys.stdout = None
        return "done"

    with pytest.raises(RankError, match="its result cannot be taken apart here: TypeError"):
        Cluster(1).run(lambda: Unmade(1, 2))
    with pytest.raises(RankError, match=r"Untold: .its text cannot be made: RuntimeError"):
        Cluster(1).run(raise_untold)
    with pytest.raises(RankError) as caught:
        Cluster(1).run(raise_long)
    assert len(str(caught.value)) < 50_000
    assert Cluster(1).run(close_stdout).results == {0: "done"}
    with pytest.raises(RankError, match=f"killed by signal {signal.SIGRTMIN + 1}"):
        Cluster(1).run(lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1))


def test_a_death_is_seen_though_a_child_holds_the_ranks_pipes():
    def die_with_a_child() -> None:
        if os.fork() == 0:
            time.sleep(600)
        print("last words")
        os._exit(5)

    start = time.monotonic()
    with pytest.raises(RankError, match="rank 0 died: it exited with code 5"):
        Cluster(1).run(die_with_a_child, timeout=100)
    assert time.monotonic() - start < 50  # Before the timeout; no measurement.


def test_a_flood_without_a_lines_end_is_kept():
    def flood() -> None:
        os.write(1, b"x" * 20_000_000)

    assert len(own_words(Cluster(1).run(flood).output[0])) == 20_000_000


def test_of_what_is_printed_without_end_the_first_and_the_last_is_kept():
    printed = Printed()
    for number in range(100):
        printed.add(f"{number:07}\n".encode() * 131_072)  # 1 MiB
    first, told, last = printed.text.split("\n... ")[0], printed.text.split("...")[1], printed.text[-8:]
    assert (first[:8], last) == ("0000000\n", "0000099\n")
    assert told == f" {68 << 20:,} bytes of output left out "  # 100 MiB less 32
    assert len(printed.text) < MOST_BYTES + 100


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks", [0, -1, 65, "ab", ["a", "a"], [], [1, 2], ["0", "1"], ["\x1b[2J"], ["x" * 41], 2.5, True, None]
)
def test_wrong_ranks_are_refused_in_a_sentence(ranks):
    with pytest.raises(SetupError):
        Cluster(ranks)


def test_wrong_functions_are_refused_in_a_sentence():
    with pytest.raises(SetupError, match="no rank 'trainer3'"):
        Cluster(["ps", "trainer1"]).run({"trainer3": programs.count})
    with pytest.raises(SetupError, match="empty dict"):
        Cluster(2).run({})
    with pytest.raises(SetupError, match="not int"):
        Cluster(2).run(3)
    with pytest.raises(SetupError, match="rank 0 got int, which cannot be called"):
        Cluster(2).run({0: 5})
    with pytest.raises(TypeError, match=r"give run\(\) a functools.partial\(function, lr=...\)"):
        Cluster(2).run(programs.count, lr=0.1)

    async def later() -> None:
        pass

    with pytest.raises(SetupError, match="async"):
        Cluster(2).run(later)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "5"])
def test_a_wrong_timeout_is_refused_in_a_sentence(timeout):
    with pytest.raises(SetupError, match="timeout is a number of seconds above 0"):
        Cluster(1).run(programs.count, timeout=timeout)


def test_an_argument_that_cannot_travel():
    with pytest.raises(SetupError, match="cannot be sent to the ranks"):
        Cluster(2).run(programs.say, (number for number in range(3)))


def test_a_result_that_cannot_travel():
    def generator() -> object:
        return (number for number in range(3))

    with pytest.raises(RankError, match="the result, a generator, cannot be sent back"):
        Cluster(2).run(generator)


@pytest.mark.skipif(torch.cuda.device_count() >= 2, reason="there are two GPUs here")
def test_nccl_without_gpus_says_what_is_missing():
    with pytest.raises(RankError, match="needs one GPU per rank: 2, and this machine has"):
        Cluster(2, backend="nccl").run(programs.count)


def test_a_run_without_record_has_no_trace():
    run = Cluster(2, record=False).run(programs.say, "quiet")
    assert run.results == {0: 0, 1: 1}
    with pytest.raises(DlearnError, match="not recorded"):
        _ = run.trace


# Another notebook -----------------------------------------------------------------------------------------------------

NOTEBOOK = """
import os, resource, sys
from multiprocessing.forkserver import read_signed
from dlearn import Cluster, DlearnError
from dlearn.cluster import launch, spares

def part(name):
    for stream in (sys.stdout, sys.stderr):
        print("\\n== " + name, file=stream, flush=True)

part("a rank that is half told what it is")
launch.warm_up()  # Before there is a run: who ends one sees off what of its ranks is left.
for half_of_what_it_is in (b'', b'\\x80\\x05X'):
    status, told = launch._servers['forkserver'].connect_to_new_process([])
    os.write(told, half_of_what_it_is)
    os.close(told)
    pid, exit_code = read_signed(status), read_signed(status)
    os.close(status)
    print(exit_code)

part("globals")
steps, rate = 0, 1
def setup():
    global model
    model = 'kept'
def train():
    global steps
    steps += rate
    return model, steps
with Cluster(1) as c:
    c.run(setup)
    print(c.run(train).results, c.run(train).results)
    rate = 10
    print(c.run(train).results)

part("a forked copy")
if os.fork() == 0:
    try:
        Cluster(1).run(os.getpid)
    except DlearnError as error:
        print(error, flush=True)
    os._exit(0)
os.wait()
print(len(Cluster(1).run(os.getpid).results))

part("many runs")
for _ in range(22):
    Cluster(1, record=False).run(os.getpid)

part("files")
spares.close()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
Cluster(8).run(os.getpid)
server = launch._servers['forkserver']._forkserver_pid
try:
    Cluster(64).run(os.getpid)
except DlearnError as error:
    print(error)
print(len(Cluster(8).run(os.getpid).results), launch._servers['forkserver']._forkserver_pid == server)
spares.close()

part("the end")
"""


@dataclass(frozen=True)
class Notebook:
    """What a process of its own printed, part by part, and a run of ours in the same folder that is older than its."""

    printed: dict[str, str]
    errors: dict[str, str]
    first: Run


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """One for all: each loads torch into a fork server of its own, for 3 s."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "notebook.py").write_text(NOTEBOOK)
    with contextlib.chdir(folder):
        first = Cluster(1).run(programs.count)
        done = subprocess.run([sys.executable, "notebook.py"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return Notebook(_parts(done.stdout), _parts(done.stderr), first)


def _parts(text: str) -> dict[str, str]:
    return dict(part.split("\n", 1) for part in own_words(text).split("\n== ")[1:])


def test_globals_stay_inside_with_unless_the_notebook_changes_them(notebook):
    # 0 + 1, + 1, + 10: the counter is the rank's, the changed rate the notebook's.
    told = "{0: ('kept', 1)} {0: ('kept', 2)}\n{0: ('kept', 12)}\n"
    assert (notebook.printed["globals"], notebook.errors["globals"]) == (told, "")


def test_a_forked_copy_says_that_it_cannot(notebook):
    refused, went_on = notebook.printed["a forked copy"].splitlines()
    assert "cannot start ranks of its own" in refused
    assert went_on == "1"


def test_a_rank_whose_notebook_goes_while_it_is_forked_goes_quietly(notebook):
    part = "a rank that is half told what it is"
    assert (notebook.printed[part], notebook.errors[part]) == ("1\n1\n", "")


def test_where_no_more_files_can_be_opened_spares_are_done_without(notebook):
    """The fork server stays, nothing is printed, and a rank that is needed is refused in a sentence."""
    assert (notebook.printed["files"].splitlines(), notebook.errors["files"]) == (
        [
            "this process may open no more files, and each rank needs five of them: use fewer ranks,"
            " or raise the limit (ulimit -n).",
            "8 True",
        ],
        "",
    )
    assert notebook.errors["the end"] == "", "nor by the process as it ends"


def test_runs_that_are_held_are_kept_and_found_from_another_folder(notebook, tmp_path):
    """22 runs of the other notebook have come into its folder since; and we work in another one."""
    assert Path.cwd() == tmp_path
    assert "many runs" in notebook.printed
    assert len(notebook.first.trace.processes) == 1
