"""`dlearn run [options] script.py args`: torchrun, or plain Python, with every process of the job recorded."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dlearn.analysis.telling.explanations import overview, problem_sentences, rpc_overview
from dlearn.analysis.volume.reconcile import reconcile
from dlearn.diagnosis.post_mortem import story
from dlearn.errors import SetupError, TraceError, WrongArguments, optional
from dlearn.events.options import Options
from dlearn.join.wait_times import waiting
from dlearn.live.live_rows import LiveRows
from dlearn.scripts.attach import Order, note_exit, watch_exits
from dlearn.scripts.prompt import paused_at_a_prompt
from dlearn.scripts.wired import WiredRun
from dlearn.shown import count_text, time_text
from dlearn.trace import Trace

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
    """Run one script; return its exit status. If a signal killed it, end by the same signal."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    own, rest = _take_own_options(arguments)
    by_torchrun = rest[0].startswith("-") and rest[0] not in _MODULE
    names = [word.split("=")[0].replace("_", "-") for word in rest]
    several_hosts = by_torchrun and "--nnodes" in names
    if "--hold" in own and (several_hosts or "--live" in own):
        raise WrongArguments("dlearn run --hold is for the ranks of one host (without --nnodes), and without --live.")
    script = next((Path(word).stem for word in rest if word.endswith(".py")), "run")
    default = f"traces/{script}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(own.get("--trace") or default).resolve()
    job = "" if several_hosts else f"{socket.gethostname()}-{secrets.token_hex(4)}"
    steps = _steps(own["--steps"]) if "--steps" in own else None
    order = Order(str(folder), job, launcher=os.getpid(), options=_options(own), steps=steps)
    made = _claim(folder, several_hosts=several_hosts)
    try:
        args = _arguments_of_torchrun(rest) if by_torchrun else None
        status = _run_script(rest, args, own, order)
        _say_what_was_recorded(folder, alone=not by_torchrun)
    finally:
        for new in made:
            with suppress(OSError):  # It holds a trace.
                new.rmdir()
    if status < 0:
        _die_by(-status)
    return status


def _run_script(rest: Sequence[str], args: Any, own: dict[str, str], order: Order) -> int:
    """Run the script inside what the options ask for, and return its status."""
    folder = Path(order.folder)
    with ExitStack() as around:
        if "--network" in own:
            around.enter_context(WiredRun(own["--network"], args, folder))
        if "--live" in own:
            around.enter_context(live_rows(folder))
        if "--hold" in own:
            gate = around.enter_context(paused_at_a_prompt(folder)).gate_server.address
            order = msgspec.structs.replace(order, gate=gate)
        os.environ.update(order.environment())
        return _python(rest, folder) if args is None else _torchrun(args, folder)


_WITH_VALUE = ("--trace", "--steps", "--hang-after", "--sources", "--network")
_MODULE = ("-m", "--module")
_STARTERS = ("torchrun", "python", "python3")
_ALONE = ("--graph", "--gather", "--live", "--hold")


def _take_own_options(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return our options, which may stand among torchrun's, and the rest, untouched."""
    own: dict[str, str] = {}
    others: list[str] = []
    words = deque(arguments)
    while words and words[0].startswith("-") and words[0] not in (*_MODULE, "--"):
        word = words.popleft()
        name, equals, value = word.partition("=")
        if name in _ALONE:
            own[name] = ""
        elif name in _WITH_VALUE:
            if not equals and not words:
                raise WrongArguments(f"dlearn run {name} needs a value; see dlearn run --help.")
            own[name] = value if equals else words.popleft()
        else:
            others.append(word)
            if not equals and words and _takes_value(name):
                others.append(words.popleft())
    if words and words[0] == "--":
        words.popleft()  # The options end here; so they do without it.
    if not words:
        raise WrongArguments("dlearn run needs a script, as in dlearn run --nproc-per-node 2 train.py.")
    return own, [*others, *words]


def _takes_value(name: str) -> bool:
    """Return whether this option of torchrun's, which may be shortened, takes a value."""
    optional("torch", needed_by=f"dlearn run {name}")
    from torch.distributed.run import get_args_parser

    options = get_args_parser()._option_string_actions
    meant = [name] if name in options else [long for long in options if long.startswith(name)]
    return any(options[long].nargs != 0 for long in meant)


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


def _options(own: dict[str, str]) -> dict[str, Any]:
    """Return the options of each rank's recording; what is wrong is said now, not by each rank."""
    options: dict[str, Any] = {"graph": "--graph" in own, "gather": "--gather" in own}
    options["hang_after"] = _seconds(own.get("--hang-after", "60"))
    options["sources"] = [name for name in own.get("--sources", "").split(",") if name]
    try:
        Options(**options)
    except SetupError as error:
        raise WrongArguments(f"dlearn run --sources: {error}") from None
    return options


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if first.isdecimal() and last.isdecimal() and int(first) < int(last):
        return int(first), int(last)
    what = "two numbers, as in --steps 10:12 for the steps 10 and 11"
    raise WrongArguments(f"dlearn run --steps is {what}, not {text!r}.")


def _seconds(text: str) -> float | None:
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds or None
    raise WrongArguments(f"dlearn run --hang-after is a number of seconds, 0 for never, not {text!r}.")


def _claim(folder: Path, *, several_hosts: bool) -> list[Path]:
    """Make the folder for this run alone. Return the folders that are new, the innermost first.

    Raise WrongArguments if that cannot be, or it holds a trace; on a shared disk, one of this host.
    Other runs are kept out until this process ends: the system unlocks the folder then.
    """
    import fcntl  # Windows, where traces can be read, has none.

    try:
        new = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongArguments(f"the folder {folder} cannot be made: {error.strerror}. Give another --trace.") from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise WrongArguments(f"nothing can be written into the folder {folder}. Give another --trace.")
    try:
        if not several_hosts:
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise WrongArguments(f"another run writes into {folder} now. Give another --trace.") from None
    except OSError:
        pass  # A network's disk that has no locks.
    for old in folder.glob(f"{socket.gethostname()}-*.jsonl" if several_hosts else "*.jsonl"):
        holds = f"{folder} holds a trace already ({old.name})"
        raise WrongArguments(f"{holds}; nothing is overwritten. Give another --trace.")
    return new


def _python(rest: Sequence[str], folder: Path) -> int:
    """Run the script as `python script.py` does. Return its exit status, and note it in its file."""
    if rest[0] in _MODULE:
        rest = ["-m", *rest[1:]]  # Python does not know the long name.
    else:
        _check_script(rest[0])
    child = subprocess.Popen([sys.executable, *rest])

    def forward(number: int, _: Any) -> None:
        if number != signal.SIGINT or not _in_front_of_a_terminal():
            child.send_signal(number)

    with ExitStack() as before:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before.callback(signal.signal, number, signal.signal(number, forward))
        status = child.wait()
    note_exit(folder, child.pid, status)
    return status


def _check_script(name: str) -> None:
    if not Path(name).exists():
        drop = f" Drop the word {name}: dlearn run stands in its place." if name in _STARTERS else ""
        raise WrongArguments(f"there is no script {name}.{drop}")


def _in_front_of_a_terminal() -> bool:
    """Return whether Ctrl-C reaches the script itself: both are in the terminal's foreground."""
    with suppress(OSError), open("/dev/tty") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


def _torchrun(args: Any, folder: Path) -> int:
    """Run torchrun in this process. Return the status of the first failure; note those of all ranks."""
    from torch.distributed import run as engine
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with watch_exits(folder, subprocess.Popen):
        try:
            engine.run(args)  # type: ignore[no-untyped-call]
        except ChildFailedError as error:
            print(error, file=sys.stderr)
            return error.get_first_failure()[1].exitcode
        except SignalException as error:
            return -int(error.sigval)
    return 0


def _say_what_was_recorded(folder: Path, *, alone: bool) -> None:
    """Summarize on stderr. Whatever goes wrong, the status counts."""
    try:
        print(summary(folder, alone=alone), file=sys.stderr, flush=True)
    except Exception as error:  # A full disk, a folder that has gone.
        print(f"dlearn: what was recorded in {folder} cannot be told: {error}", file=sys.stderr)


def _die_by(number: int) -> NoReturn:
    """End by the same signal as the script, so that the parent sees the same status."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)


AGAIN_SECONDS = 1.0
PRINTED_AGAIN_SECONDS = 10.0
_SAVE, _RESTORE, _ALL_SCROLLS = "\0337", "\0338", "\033[r"


@contextmanager
def live_rows(folder: Path) -> Iterator[None]:
    """Show the ranks' rows during the block; where stderr is no terminal, print them now and then."""
    over, rows, start = threading.Event(), LiveRows(folder), time.monotonic()

    def lines() -> list[str]:
        shown = rows.lines()
        return [f"dlearn: {time.monotonic() - start:.0f} s", *shown] if shown else []

    show = _at_the_foot if sys.stderr.isatty() else _printed
    thread = threading.Thread(target=show, args=(lines, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _printed(lines: Callable[[], list[str]], over: threading.Event) -> None:
    while not over.wait(PRINTED_AGAIN_SECONDS):
        if shown := lines():
            print("\n".join(shown), file=sys.stderr, flush=True)


def _at_the_foot(lines: Callable[[], list[str]], over: threading.Event) -> None:
    taken = 0
    while not over.wait(AGAIN_SECONDS):
        width, height = os.get_terminal_size(2)
        shown = [line[: width - 1] for line in lines()][: height // 2]
        shown = [""] * (taken - len(shown)) + shown  # A line that is no longer needed is empty.
        more = len(shown) - taken
        # What stands there moves up, and what is printed from now on scrolls above.
        up = "\n" * more + f"\033[{more}A" if more else ""
        _paint(up, shown, f"\033[1;{height - len(shown)}r", height)
        taken = len(shown)
    if taken:
        _paint("", [""] * taken, _ALL_SCROLLS, os.get_terminal_size(2).lines)


def _paint(before: str, lines: list[str], scrolls: str, height: int) -> None:
    """Write rows at the foot in one piece: other processes write to this terminal, too."""
    rows = (f"\033[{height - len(lines) + 1 + n};1H\033[K{line}" for n, line in enumerate(lines))
    os.write(2, f"{before}{_SAVE}{scrolls}{''.join(rows)}{_RESTORE}".encode(errors="replace"))


SENTENCES = 4
"""About what went wrong; the rest is in the trace."""
WORTH_SAYING = 0.1
"""A rank that was waited for this share of the time is worth a look."""


def summary(folder: Path, *, alone: bool = True) -> str:
    """Return a few lines for stderr. A script that ran `alone` may have wanted torchrun."""
    if not folder.is_dir() or not any(folder.glob("*.jsonl")):
        nothing = "dlearn: nothing was recorded: no process of this script used torch.distributed."
        wanted = "If it wants to be started by torchrun, say with how many ranks: dlearn run --nproc-per-node 2 ..."
        return f"{nothing} {wanted}" if alone else nothing
    try:
        trace = Trace.load(folder)
    except TraceError as error:
        return f"dlearn: what was recorded is in {folder}, and cannot be read: {error}"
    here = Path.cwd()
    shown = str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
    lines = [f"the trace is in {shown}", overview(trace)]
    lines += [rpc_overview(trace)] if trace.rpc.exchanges else []
    not_seen = reconcile(trace).whole.not_seen_bytes
    lines += [f"not seen: {not_seen:,} B were written that no recorded call accounts for"] if not_seen else []
    lines += _look_at(trace, shown)
    lines += problem_sentences(trace, SENTENCES)
    return "\n".join(f"dlearn: {line}" for line in lines)


def _look_at(trace: Trace, shown: str) -> list[str]:
    sentences = list(story(trace))
    if len(sentences) > SENTENCES:
        more = count_text(len(sentences) - SENTENCES, "more sentence")
        sentences[SENTENCES:] = [f"and {more} in dlearn.explain"]
    if sentences or not trace.events:
        return sentences
    where = shlex.quote(shown)
    draw = f"in words: dlearn explain {where}; as a picture: dlearn draw timeline {where} -o timeline.svg"
    lasted = max(event.end_ns or event.start_ns for event in trace.events) - trace.first_ns
    rank, waited = max(waiting(trace).items(), key=lambda pair: pair[1], default=(0, 0))
    if waited <= WORTH_SAYING * lasted:
        return [draw]
    of = f"{time_text(waited)} of {time_text(lasted)}"
    return [f"the others waited {of} for {trace.label(rank)}; {draw}"]
