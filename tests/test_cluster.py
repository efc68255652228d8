"""Real ranks: functions, names, output, state; every fault; and never an orphan."""

import contextlib
import multiprocessing
import os
import random
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy
import programs
import pytest
import torch
import torch.distributed as dist
from hanging import end_when, in_calls
from installed_torch import own_words
from waiting import all_end, comes_true, lives

from dlearn import Cluster, DlearnError
from dlearn.errors import RankError, SetupError

slow = pytest.mark.slow
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, or needs namespaces")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory) -> Iterator[Path]:
    """All runs of this file are kept in one folder."""
    home = tmp_path_factory.mktemp("runs")
    with contextlib.chdir(home):
        yield home


@pytest.fixture(scope="module")
def pair(folder) -> Iterator[Cluster]:
    """Two ranks that stay, for all questions that one run of theirs answers."""
    with Cluster(2) as kept:
        yield kept


@pytest.fixture(autouse=True)
def no_orphans(pair, folder):
    """After each test no rank lives but the two that stay; each has left a file with its pid in the name."""
    yield
    stay = set(pair.run(os.getpid).results.values())
    files = folder.glob(".dlearn/runs/*/trace/*.jsonl")
    assert all_end({int(file.stem.rsplit("-", 1)[1]) for file in files} - stay)


def test_results_and_output_by_rank(capsys):
    run = Cluster(3).run(programs.say, "hello")
    assert run.results == {0: 0, 1: 1, 2: 2}
    assert [own_words(run.output[rank]) for rank in range(3)] == ["hello 0\n", "hello 1\n", "hello 2\n"]
    assert sorted(own_words(capsys.readouterr().out).splitlines()) == [f"[rank {r}] hello {r}" for r in range(3)]


def rates(lr, *, timeout=1, epochs=2):
    return lr, timeout, epochs


def test_functions_get_keywords_and_what_they_do_not_take_is_told_before_a_rank_starts(pair):
    assert pair.run({0: rates, 1: lambda lr: lr}, lr=3).results == {0: (3, 1, 2), 1: 3}
    assert pair.run(partial(rates, timeout=5), 4, epochs=6, timeout=60).results[1] == (4, 5, 6)
    before = [*Path(".dlearn/runs").iterdir()]
    for options, told in (
        ({"lrr": 1}, ": got an unexpected keyword argument 'lrr'. (run() itself takes timeout= and"),
        ({}, "rates(lr, *, timeout=1, epochs=2): missing a required argument: 'lr'"),
        ({"lr": 1, "timeout": 9}, "is an option of run(), too; functools.partial(rates, timeout=...) gives"),
    ):
        with pytest.raises(TypeError, match=re.escape(told)):
            pair.run(rates, **options)
    assert [*Path(".dlearn/runs").iterdir()] == before


def test_the_default_limit_of_a_run_is_named(monkeypatch, capsys):
    for module in ("rank_pool", "faults"):
        monkeypatch.setattr(f"dlearn.cluster.{module}.DEFAULT_SECONDS", limit := 1.5)
    monkeypatch.setitem(Cluster.run.__kwdefaults__, "timeout", limit)
    run = Cluster(1).run(time.sleep, 600, check=False)
    assert run.error.what.startswith("not done after 1.5 s, the default limit: rank 0 is still at work")
    assert "has used half of its 1.5 s, the default limit; run(..., timeout=)" in capsys.readouterr().err
    assert "after 0.5 s: " in Cluster(1).run(time.sleep, 600, timeout=0.5, check=False).error.what


def test_of_named_ranks_each_has_its_function_and_one_without_serves():
    run = Cluster(["ps", "trainer"]).run({"trainer": lambda: "done"})
    assert run.results == {"trainer": "done"}
    assert [process.label for process in run.trace.processes] == ["ps", "trainer"]


def test_output_from_everywhere_is_kept(pair):
    run = pair.run(programs.talk_everywhere)
    assert sorted(own_words(run.output[1]).splitlines()) == ["child", "descriptor", "no end", "python"]


def test_of_what_is_printed_without_end_the_first_and_the_last_is_kept(pair):
    def flood() -> None:
        for letter in b"abcdefghi" * (dist.get_rank() == 0):
            os.write(1, bytes([letter]) * (8 << 20))

    first, told, last = pair.run(flood).output[0].split("\n")
    half = 16 << 20
    assert (set(first), len(first), set(last), len(last)) == ({"a", "b"}, half, {"h", "i"}, half)
    assert told == f"... {40 << 20:,} bytes of output left out ..."  # 72 MiB less 32, in two parts


def test_ranks_keep_their_state_inside_with_until_they_have_to_start_afresh(capsys):
    with Cluster(2) as kept:
        assert [kept.run(programs.count).results for _ in range(3)] == [{0: n, 1: n} for n in (1, 2, 3)]
        with pytest.raises(SetupError, match="inside a `with` already"), kept:
            pass
        with pytest.raises(RankError, match="exited with code 3"):
            kept.run(programs.all_reduce_then, "exit")
        assert kept.run(programs.count).results == {0: 1, 1: 1}
        assert "start afresh; the state that they kept is gone" in capsys.readouterr().err


def test_ranks_are_fresh_without_with_and_draw_random_numbers_of_their_own():
    def draw() -> tuple[int, int, float, float]:
        return programs.count(), os.getpid(), random.random(), float(numpy.random.random())

    again = Cluster(2)
    drawn = [row for _ in range(2) for row in again.run(draw).results.values()]
    counts, *others = zip(*drawn, strict=True)
    assert counts == (1, 1, 1, 1)
    assert [len(set(each)) for each in others] == [4, 4, 4]


def test_a_run_without_record_has_no_trace():
    run = Cluster(2, record=False).run(programs.say, "quiet")
    assert run.results == {0: 0, 1: 1}
    with pytest.raises(DlearnError, match="not recorded"):
        _ = run.trace


def test_kept_ranks_refuse_a_second_run_at_the_same_time(pair, tmp_path):
    began, refused = tmp_path / "began", tmp_path / "refused"

    def work() -> None:
        began.touch()
        programs.wait_for(str(refused))

    thread = threading.Thread(target=pair.run, args=(work,))
    thread.start()
    assert comes_true(began.exists)
    with pytest.raises(SetupError, match="at work on another run"):
        pair.run(programs.count)
    refused.touch()
    thread.join()


# Loopback only, and private -------------------------------------------------------------------------------------------

LOOPBACK = {"127.0.0.1", "::ffff:127.0.0.1", "::1"}


def own_init_then_listen() -> list[str]:
    dist.init_process_group("gloo")
    return programs.listening_addresses()


@on_linux
def test_every_listening_socket_is_on_loopback(pair):
    for run in (pair.run(programs.listening_addresses), Cluster(2, init=False).run(own_init_then_listen)):
        addresses = {address for found in run.results.values() for address in found}
        assert addresses, "rank 0 listens for the store at least"
        assert addresses <= LOOPBACK


def test_other_users_cannot_look_into_the_runs_and_a_folder_that_cannot_be_made_is_told(folder, tmp_path, monkeypatch):
    Cluster(1).run(programs.count)
    assert stat.S_IMODE((folder / ".dlearn").stat().st_mode) == 0o700
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".dlearn").write_text("a file, where the folder should be")
    with pytest.raises(SetupError, match="Work in a folder that you may write to"):
        Cluster(1).run(programs.count)


ELSEWHERE = """
ip link set lo up && ip link add there type veth peer name here && ip addr add 10.77.0.9/24 dev there &&
ip link set there up && hostname elsewhere && mount --bind hosts /etc/hosts"""
LISTEN = """
import socket, programs
from dlearn import Cluster
found = Cluster(2).run(programs.listening_addresses).results.values()
print(socket.gethostbyname(socket.gethostname()), *sorted({address for each in found for address in each}))
"""


@slow
@on_linux
def test_ranks_stay_on_loopback_under_a_hostname_that_resolves_elsewhere(tmp_path):
    """In a network of its own the host is called `elsewhere`, which is 10.77.0.9 on a real interface."""
    (tmp_path / "hosts").write_text("127.0.0.1 localhost\n10.77.0.9 elsewhere\n")
    (tmp_path / "job.py").write_text(LISTEN)
    own = ["unshare", "--net", "--uts", "--mount", "sh", "-c"]
    probe = subprocess.run([*own, ELSEWHERE], capture_output=True, text=True, cwd=tmp_path)
    if probe.returncode:
        pytest.skip(f"namespaces are not permitted here: {probe.stderr.strip()[:80]}")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    command = [*own, f"{ELSEWHERE} && exec {sys.executable} job.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path)
    here, *listens = done.stdout.splitlines()[-1].split()
    assert here == "10.77.0.9", done.stderr
    assert listens
    assert set(listens) <= LOOPBACK


def fork_copies_that_leave(late: str) -> list[int]:
    """Their exit codes. The rank goes on when all have left, and is not disturbed."""
    codes = []
    exits = (bool, sys.exit, partial(sys.exit, 3), partial(sys.exit, "not well"))
    for leave in (*exits, partial(fail, ValueError, "bad")):
        if os.fork() == 0:
            return leave()
        codes.append(os.waitstatus_to_exitcode(os.wait()[1]))
    Path(late + os.environ["RANK"]).touch()
    return codes


@pytest.mark.parametrize("rpc", [False, True])
def test_only_the_rank_answers_however_a_copy_that_it_forked_leaves(tmp_path, rpc):
    with Cluster(2, rpc=rpc) as kept:
        for late in ("first", "second"):
            run = kept.run(fork_copies_that_leave, str(tmp_path / late))
            assert run.results == {0: [0, 0, 3, 1, 1], 1: [0, 0, 3, 1, 1]}
            assert "not well\nTraceback" in own_words(run.output[0])
            assert "ValueError: bad" in run.output[1]
    assert len(list(tmp_path.glob("*[01]"))) == 4


# Faults ---------------------------------------------------------------------------------------------------------------


def fail(error: type[BaseException], *arguments: object) -> None:
    raise error(*arguments)


def fail_on_rank_1() -> None:
    if dist.get_rank():
        raise MemoryError


def fail_when_the_other_has_lost_the_connection() -> None:
    if dist.get_rank():
        dist.destroy_process_group()
        programs.wait_for("lost")
        raise ValueError
    try:
        dist.all_reduce(torch.ones(4))
    finally:
        Path("lost").touch()


def die_with_a_child() -> None:
    """The child holds the rank's pipes."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(5)


def end_the_fork_server() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


@pytest.mark.parametrize(
    ("ranks", "program", "told"),
    [
        (2, programs.swap_sizes, r"aborted in C\+\+ \(SIGABRT\). Its last line: .*op.preamble.length <= op.nbytes"),
        (2, programs.sum_of_different_sizes, "different sizes: 200 B on rank 0, 400 B on rank 1."),
        (2, fail_on_rank_1, r"^rank 1 failed first: MemoryError(\n|$)"),
        (2, fail_when_the_other_has_lost_the_connection, r"^rank 1 failed first: ValueError"),
        (2, partial(fail, KeyError, "x"), "^all 2 ranks failed: KeyError: 'x'$"),
        (1, os.abort, r"^rank 0 aborted in C\+\+ \(SIGABRT\)$"),
        (1, partial(fail, ValueError, "x" * 1_000_000), "ValueError: x"),
        (1, lambda: (n for n in range(3)), "the result, a generator, cannot be sent back"),
        (1, lambda: os.kill(os.getpid(), signal.SIGRTMIN + 1), f"killed by signal {signal.SIGRTMIN + 1}"),
        (1, die_with_a_child, "rank 0 died: it exited with code 5"),
        (1, sys.exit, None),
        pytest.param(1, end_the_fork_server, "^rank 0 lost the process that had started it, the fork ser", marks=slow),
    ],
)
def test_how_a_run_failed_is_told(ranks, program, told):
    run = Cluster(ranks, init=ranks > 1).run(program, timeout=100, check=False)
    assert (run.error is None) == (told is None)
    if told is not None:
        assert re.search(told, run.error.what)
        assert len(str(run.error)) < 50_000


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("exception", "rank 1 failed first: ValueError: a wrong value\nthen: rank 0 was in all_reduce #2"),
        ("exit", "rank 1 died: it exited with code 3"),
        ("sigkill", "rank 1 was killed by SIGKILL"),
    ],
)
def test_the_rank_that_failed_is_named_what_was_recorded_is_kept_and_the_next_run_works(fault, told):
    with pytest.raises(RankError) as caught:
        Cluster(3).run(programs.all_reduce_then, fault)
    error = caught.value
    assert (error.rank, error.run.error, error.run.results) == (1, error, {})
    assert told in error.what
    assert fault != "exception" or 'raise ValueError("a wrong value")' in error.details
    assert "dlearn/cluster" not in error.details
    calls = error.run.trace.where(op="all_reduce").events
    assert sum(call.end_ns is not None and not call.failed for call in calls) >= 3
    assert Cluster(2).run(programs.say, "next").results == {0: 0, 1: 1}


def stop_or_leave(how: str) -> None:
    if dist.get_rank():
        print(how)
        sys.exit() if how == "leaves" else os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


@pytest.mark.parametrize(
    ("program", "stuck", "told"),
    [
        (
            partial(programs.all_reduce_then, "sleep"),
            lambda run: "asleep" in run.output[1] and in_calls(2)(run),
            r"rank 0 waits for rank 1 in all_reduce #2 \(tests/programs.py:\d+\); rank 1 never called it, it is at",
        ),
        (
            partial(stop_or_leave, "stops"),
            lambda run: "stops" in run.output[1] and in_calls(1)(run),
            r"rank 1 never called it, it is stopped \(SIGSTOP or a debugger: state T\)",
        ),
        (
            partial(stop_or_leave, "leaves"),
            lambda run: "sys.exit" in run.error.what and in_calls(1)(run),
            "rank 1 never called it, it has called sys.exit.",
        ),
        (
            lambda: dist.send(torch.ones(4), 1 - dist.get_rank()),
            in_calls(1, 1),
            r"rank 0 and rank 1 wait for each other: rank 0 in send #1 \(",
        ),
    ],
)
def test_a_hang_is_told_in_one_sentence(program, stuck, told):
    run = end_when(stuck, Cluster(2), program)
    assert run.error.rank is None
    assert re.search(told, run.error.what)
    # What the end of one rank does to another is not recorded as the end of its send.
    assert {event.pending for event in run.trace.where(kind="p2p").events} <= {True}


def start_a_helper(pid_file: str, end: str) -> None:
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    helper.start()
    Path(pid_file).write_text(f"{helper.pid} {start_a_daemon()}")
    if end != "return":
        programs.meet(end)


def start_a_daemon() -> int:
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


@pytest.mark.parametrize("end", ["return", "exception", "exit", "sigkill", "skip"])
def test_a_ranks_helpers_end_however_it_ends(tmp_path, end):
    pid_file = tmp_path / "pid"

    def is_over(run):
        """All but one end by themselves."""
        return pid_file.exists() and (end == "skip" or "not done after" not in str(run.error))

    run = end_when(is_over, Cluster(1), start_a_helper, str(pid_file), end)
    assert (run.error is None) == (end == "return")
    pids = [int(pid) for pid in pid_file.read_text().split()]
    assert len(pids) == 2
    assert all_end(pids)


def test_what_the_notebook_and_other_ranks_have_started_is_left_alone():
    """A process of the notebook's own fork server; and a daemon of a rank that is kept, which ends with that."""
    own = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(600,))
    own.start()
    try:
        with Cluster(1) as kept:
            daemon = kept.run(start_a_daemon).results[0]
            Cluster(1).run(os._exit, 3, check=False)
            assert lives(daemon)
        assert all_end([daemon])
        assert own.is_alive()
    finally:
        own.kill()
        own.join()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        *(
            (partial(Cluster, ranks), "")
            for ranks in (0, 65, "ab", ["a", "a"], [], [1, 2], ["0", "1"], 2.5, True, None)
        ),
        *((partial(Cluster, [name]), "") for name in ("\x1b[2J", "x" * 41)),
        (lambda: Cluster(["ps", "trainer1"]).run({"trainer3": print}), "no rank 'trainer3'"),
        (lambda: Cluster(2).run({}), "empty dict"),
        (lambda: Cluster(2).run(3), "not int"),
        (lambda: Cluster(2).run({0: 5}), "rank 0 got int, which cannot be called"),
        (lambda: Cluster(2).run(programs.say, (n for n in range(3))), "cannot be sent to the ranks"),
        *(
            (partial(Cluster(1).run, print, timeout=seconds), "timeout is a number of seconds above 0")
            for seconds in (0, -1, float("nan"), float("inf"), "5")
        ),
    ],
)
def test_what_cannot_be_run_is_refused_in_a_sentence(make, told):
    with pytest.raises(SetupError) as refused:
        make()
    assert told in str(refused.value)
    assert str(refused.value).endswith(".")


NOTEBOOK = """
import os
from dlearn.cluster.fork_server import SERVER
SERVER.loads_torch = {}  # False: as on macOS, where ranks load it themselves.
from dlearn import Cluster
print('once', flush=True)
def where(): return __name__
print(Cluster(2).run(where).results, flush=True)
steps, rate = 0, 1
def train():
    global steps
    steps += rate
    return steps
with Cluster(1) as c:
    c.run(train)
    second = c.run(train).results
    rate = 10
    print(second, c.run(train).results, flush=True)
print(len(Cluster(2).run(os.getpid).results))
"""


@slow
@pytest.mark.parametrize("forked", [True, False])
def test_a_script_runs_once_and_its_ranks_see_the_globals_that_it_has_changed(tmp_path, forked):
    (tmp_path / "notebook.py").write_text(NOTEBOOK.format(forked))
    command = [sys.executable, "notebook.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    once, names, counted, went_on = own_words(done.stdout).splitlines()
    assert (once, names, went_on) == ("once", "{0: '__main__', 1: '__main__'}", "2"), done.stderr
    assert counted == "{0: 2} {0: 12}"  # 0 + 1, + 1, + 10: the counter is the rank's, the changed rate the notebook's.
