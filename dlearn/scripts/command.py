"""`dlearn run [options] script.py args`: torchrun, or plain Python, with every process of the job recorded."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dlearn.errors import SetupError, WrongArguments, optional
from dlearn.events.job_facts import Exit
from dlearn.events.source import find
from dlearn.events.writer import note_end
from dlearn.scripts.live_terminal import live_rows
from dlearn.scripts.order import Order
from dlearn.scripts.prompt import held_at_a_prompt
from dlearn.scripts.wired import wired_run

USAGE = """\
usage: dlearn run [the options below, and torchrun's own] (script.py | -m module) [args ...]

Run a script as it is, and record its processes: torchrun's ranks, those that it spawns or starts, and theirs. Without
options of torchrun it is started as `python script.py`; with any, as by torchrun: `dlearn run --nproc-per-node 2 x.py`.

  --trace DIR           folder for the trace (default: traces/SCRIPT-TIME); it must not hold one already
  --steps A:B           only the steps A to B-1, counted by the optimizer's; each becomes a span "step A"
  --hang-after SECONDS  say who waits for whom when nothing has happened for so long (default: 60; 0: never)
  --graph               the graph of each distributed autograd context, too
  --gather              at the end, bring the files of other hosts to rank 0's folder
  --live                what each rank does now, in rows at the foot of the terminal
  --hold                every call waits until you let it through, at a prompt; help there says how (docs/live.md)
  --sources NAME,NAME   recorders that are off by default: memory, tcp_store, or another that is installed
  --network WORDS       the ranks talk over a network that is so slow: "100 Mbit/s, 2 ms" (Linux; docs/network.md)
"""


def run(arguments: Sequence[str]) -> int:
    """Run one script; returns its exit status. A script that was killed by a signal ends this process by it, too."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    own, rest = _take_own_options(arguments)
    torchrun = rest[0].startswith("-") and rest[0] not in _MODULE
    several_hosts = torchrun and any(each.split("=")[0].replace("_", "-") == "--nnodes" for each in rest)
    if "--hold" in own and (several_hosts or "--live" in own or sys.platform == "win32"):
        raise WrongArguments("dlearn run --hold is for the ranks of one host (without --nnodes), and without --live.")
    folder = Path(own.get("--trace") or _default_folder(rest)).resolve()
    order = Order(
        folder=str(folder),
        job="" if several_hosts else f"{socket.gethostname()}-{secrets.token_hex(4)}",
        launcher=os.getpid(),
        graph="--graph" in own,
        steps=_steps(own["--steps"]) if "--steps" in own else None,
        hang_after=_seconds(own.get("--hang-after", "60")),
        gather="--gather" in own,
        sources=_sources(own.get("--sources", "")),
    )
    made = _make(folder)
    try:
        if not several_hosts and sys.platform != "win32":
            _lock(folder)
        _refuse_old_trace(folder, several_hosts=several_hosts)
        args = _arguments_of_torchrun(rest) if torchrun else None
        words = own.get("--network")
        with (
            wired_run(words, args, folder) if words is not None else nullcontext() as wired,
            live_rows(folder) if "--live" in own else nullcontext(),
            held_at_a_prompt(folder) if "--hold" in own else nullcontext() as held,
        ):
            order = msgspec.structs.replace(order, gate=held.keeper.address if held is not None else "")
            os.environ.update(order.environment())
            status, ended = _python(rest) if args is None else _torchrun(args)
            if wired is not None:
                wired.note()
        _tell(folder, ended, alone=not torchrun)
    finally:
        for each in made:
            with suppress(OSError):  # It holds a trace.
                each.rmdir()
    if status < 0:
        _die_by(-status)
    return status


# Arguments ------------------------------------------------------------------------------------------------------------

_WITH_VALUE = ("--trace", "--steps", "--hang-after", "--sources", "--network")
_MODULE = ("-m", "--module")
_STARTERS = ("torchrun", "python", "python3")
_ALONE = ("--graph", "--gather", "--live", "--hold")


def _take_own_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return our options, which may stand among torchrun's, and the rest, untouched."""
    own: dict[str, str] = {}
    rest = list(arguments)
    place = 0
    while place < len(rest) and rest[place].startswith("-") and rest[place] not in (*_MODULE, "--"):
        name, equals, value = rest[place].partition("=")
        if name in _ALONE:
            own[name] = ""
            del rest[place]
        elif name in _WITH_VALUE:
            if not equals and place + 1 >= len(rest):
                raise WrongArguments(f"dlearn run {name} needs a value; see dlearn run --help.")
            own[name] = value if equals else rest.pop(place + 1)
            del rest[place]
        else:
            # An option of torchrun's with a value of its own: that is skipped, too.
            takes_value = not equals and place + 1 < len(rest) and _takes_value(name)
            place += 2 if takes_value else 1
    if rest[place : place + 1] == ["--"]:
        del rest[place]  # The options end here; so they do without it.
    if place >= len(rest):
        raise WrongArguments("dlearn run needs a script, as in dlearn run --nproc-per-node 2 train.py.")
    return own, rest


def _takes_value(name: str) -> bool:
    """Return whether this option of torchrun's, which may be shortened, takes a value."""
    optional("torch", needed_by=f"dlearn run {name}")
    from torch.distributed.run import get_args_parser

    options = get_args_parser()._option_string_actions
    meant = [options[name]] if name in options else [options[each] for each in options if each.startswith(name)]
    return any(action.nargs != 0 for action in meant)


def _arguments_of_torchrun(rest: Sequence[str]) -> Any:
    """Read them as torchrun does. Where it refuses them it says why, under its own name, and ends this process."""
    from torch.distributed import run as engine

    parser = engine.get_args_parser()
    parser.prog, parser.usage = "torchrun", "see dlearn run --help, and torchrun --help"
    args = parser.parse_args(list(rest))
    try:
        args.nproc_per_node = str(engine.determine_local_world_size(args.nproc_per_node))
        engine.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError) as error:
        raise WrongArguments(f"torchrun: {error}; see torchrun --help.") from None
    if not (args.module or args.no_python):
        _check_script(args.training_script)
    return args


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not colon or not first.isdecimal() or not last.isdecimal() or int(first) >= int(last):
        what = "two numbers, as in --steps 10:12 for the steps 10 and 11"
        raise WrongArguments(f"dlearn run --steps is {what}, not {text!r}.")
    return int(first), int(last)


def _seconds(text: str) -> float | None:
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds or None
    raise WrongArguments(f"dlearn run --hang-after is a number of seconds, 0 for never, not {text!r}.")


def _sources(text: str) -> tuple[str, ...]:
    names = tuple(filter(None, text.split(",")))
    try:
        for name in names:
            find(name)  # Better said now than by each rank.
    except SetupError as error:
        raise WrongArguments(f"dlearn run --sources: {error}") from None
    return names


def _default_folder(rest: Sequence[str]) -> str:
    name = next((Path(each).stem for each in rest if each.endswith(".py")), "run")
    return f"traces/{name}-{time.strftime('%Y%m%d-%H%M%S')}"


# The folder -----------------------------------------------------------------------------------------------------------


def _make(folder: Path) -> list[Path]:
    """Make the folder before the job runs. Return the new folders, the innermost first."""
    try:
        new = [each for each in (folder, *folder.parents) if not each.exists()]
        if not new and not folder.is_dir():
            raise WrongArguments(f"{folder} is no folder. Give another --trace.")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongArguments(f"the folder {folder} cannot be made: {error.strerror}. Give another --trace.") from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise WrongArguments(f"nothing can be written into the folder {folder}. Give another --trace.")
    return new


def _lock(folder: Path) -> None:
    """Keep other runs out of the folder until this process ends: the system unlocks it then."""
    import fcntl

    try:
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WrongArguments(f"another run writes into {folder} now. Give another --trace.") from None
    except OSError:
        return  # A network's disk that has no locks.


def _refuse_old_trace(folder: Path, *, several_hosts: bool) -> None:
    """Raise WrongArguments if the folder holds a trace; on a shared disk, one of this host."""
    mine = f"{socket.gethostname()}-*.jsonl" if several_hosts else "*.jsonl"
    for old in folder.glob(mine):
        holds = f"{folder} holds a trace already ({old.name})"
        raise WrongArguments(f"{holds}; nothing is overwritten. Give another --trace.")


# Running --------------------------------------------------------------------------------------------------------------


def _python(rest: Sequence[str]) -> tuple[int, dict[int, int]]:
    """Run the script as `python script.py` does. Return its exit status, and how its process ended."""
    module = rest[0] in _MODULE
    if module and len(rest) < 2:
        raise WrongArguments("dlearn run -m needs the name of a module.")
    if not module:
        _check_script(rest[0])
    child = subprocess.Popen([sys.executable, *(["-m", *rest[1:]] if module else rest)])

    def hand_on(number: int, _: Any) -> None:
        if number != signal.SIGINT or not _in_front_of_a_terminal():
            child.send_signal(number)

    before = {each: signal.signal(each, hand_on) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        status = child.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    return status, {child.pid: status}


def _check_script(name: str) -> None:
    if not Path(name).exists():
        drop = f" Drop the word {name}: dlearn run stands in its place." if name in _STARTERS else ""
        raise WrongArguments(f"there is no script {name}.{drop}")


def _in_front_of_a_terminal() -> bool:
    """Return whether Ctrl-C reaches the script itself: both are in the terminal's foreground."""
    with suppress(OSError), open("/dev/tty") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def _torchrun(args: Any) -> tuple[int, dict[int, int]]:
    """Run torchrun in this process. Return the status of the first rank that failed, and of all that did."""
    from torch.distributed import run as engine
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        engine.run(args)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        _, first = error.get_first_failure()
        return first.exitcode, {each.pid: each.exitcode for each in error.failures.values()}
    except SignalException as error:
        return -int(error.sigval), {}
    return 0, {}


def _tell(folder: Path, ended: dict[int, int], *, alone: bool) -> None:
    """Say on stderr what was recorded. Whatever goes wrong here, the script's status counts."""
    from dlearn.scripts.summary import summary  # What reads traces is not needed before.

    try:
        for pid, how in ended.items():
            _note_exit(folder, pid, how)
        print(summary(folder, alone=alone), file=sys.stderr, flush=True)
    except Exception as error:  # A full disk, a folder that has gone.
        print(f"dlearn: what was recorded in {folder} cannot be told: {error}", file=sys.stderr)


def _note_exit(folder: Path, pid: int, status: int) -> None:
    """Add to the file of a process how it ended: it cannot do that itself."""
    name = f"{socket.gethostname()}-{pid}"
    for path in folder.glob(f"{name}*.jsonl"):
        if path.stem.removeprefix(name)[:1] in ("", "-"):
            note_end(path, Exit(status=status))


def _die_by(number: int) -> NoReturn:
    """End by the same signal as the script, so that the parent sees the same status."""
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)
