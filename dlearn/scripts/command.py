"""`dlearn run [options] script.py args`: torchrun, or plain Python, with every process of the job recorded."""

import argparse
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from dlearn.analysis.telling.explanations import overview, problem_sentences, rpc_overview
from dlearn.analysis.telling.sums import late_text
from dlearn.analysis.volume.reconcile import reconcile
from dlearn.diagnosis.post_mortem import story
from dlearn.errors import SetupError, TraceError, WrongArguments, optional
from dlearn.events.options import Options
from dlearn.live.live_rows import LiveRows
from dlearn.notices import notice
from dlearn.scripts.attach import Order, note_exit, watch_exits
from dlearn.scripts.prompt import paused_at_a_prompt
from dlearn.scripts.sentence_parser import SentenceParser
from dlearn.scripts.wired import WiredRun
from dlearn.shown import count_text
from dlearn.trace import Trace

USAGE = "dlearn run [options] [torchrun's options] (script.py | -m module) [its arguments ...]"
ABOUT = """\
Run a script as it is, and record its processes: torchrun's ranks, those that it starts, and theirs.
Without options of torchrun it is started as `python script.py`, with any of them as by torchrun;
torchrun --help lists them.
"""
_SWITCHES = {
    "graph": "each graph of distributed autograd",
    "gather": "at the end, bring the files of other hosts to rank 0's folder",
    "live": "what each rank does now, in rows at the foot of the terminal",
    "hold": "each call waits until you let it through, at a prompt; help there says how",
}
EXAMPLE = "example: dlearn run --steps 10:12 --nproc-per-node 2 train.py --epochs 3"
_WANTED = "If torchrun is to start it, say with how many ranks: dlearn run --nproc-per-node 2 ..."


def run(arguments: Sequence[str]) -> int:
    """Run one script; return its exit status. If a signal killed it, end by the same signal."""
    if not arguments:
        _Parser().print_help()
        return 2
    options, by_torchrun = _parsed(arguments)
    name = options.training_script
    if not (options.module or getattr(options, "no_python", False) or Path(name).exists()):
        is_starter = name in ("torchrun", "python", "python3")
        drop = f" Drop the word {name}: dlearn run stands in its place." * is_starter
        raise WrongArguments(f"there is no script {name}.{drop}")
    several_hosts = "nnodes" in by_torchrun
    if options.hold and (several_hosts or options.live):
        raise WrongArguments("dlearn run --hold is for the ranks of one host (without --nnodes), and without --live.")
    script = name if options.module else Path(name).stem
    default = f"traces/{script}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(options.trace or default).resolve()
    job = "" if several_hosts else f"{socket.gethostname()}-{secrets.token_hex(4)}"
    own = {name: getattr(options, name) for name in ("graph", "gather", "hang_after", "sources")}
    order = Order(str(folder), job, launcher=os.getpid(), options=own, steps=options.steps)
    made = _claim(folder, several_hosts=several_hosts)
    try:
        status = _run_script(options, order, by_torchrun=bool(by_torchrun))
        _say_what_was_recorded(folder, alone=not by_torchrun)
    finally:
        for new in made:
            with suppress(OSError):  # It holds a trace.
                new.rmdir()
    if status < 0:
        _die_by(-status)
    return status


class _Parser(SentenceParser):
    """Our own options, before those of a `parent`."""

    def __init__(self, *parents: argparse.ArgumentParser) -> None:
        super().__init__(
            prog="dlearn run",
            usage=USAGE,
            description=ABOUT,
            epilog=EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=parents,
            add_help=not parents,
            allow_abbrev=bool(parents),
        )
        add = self.add_argument_group("dlearn's own options").add_argument
        trace = "folder for the trace (default: traces/SCRIPT-TIME); it must not hold one already"
        add("--trace", metavar="DIR", help=trace)
        steps = 'only the steps A to B-1, counted by the optimizer\'s; each becomes a span "step A"'
        add("--steps", metavar="A:B", type=_steps, help=steps)
        hang = "say who waits for whom when nothing happens for so long (default: 60; 0: never)"
        add("--hang-after", metavar="SECONDS", type=_seconds, default="60", help=hang)
        for name, text in _SWITCHES.items():
            add(f"--{name}", action="store_true", help=text)
        sources = "recorders that are off by default: memory, tcp_store, or an installed one"
        add("--sources", metavar="NAME,NAME", type=_sources, default=[], help=sources)
        network = 'ranks talk over a network so slow: "100 Mbit/s, 2 ms" (Linux; docs/network.md)'
        add("--network", metavar="WORDS", help=network)


def _parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, set[str]]:
    """Return all options, and which of torchrun's were typed. Torch is loaded where any may be."""
    alone = _Parser()
    alone.add_argument("-m", "--module", action="store_true", help="run a module, as python -m")
    alone.add_argument("training_script", metavar="script.py")
    alone.add_argument("training_script_args", metavar="args", nargs=argparse.REMAINDER)
    options, others = alone.parse_known_args(arguments)
    if not others:
        return options, set()
    optional("torch", needed_by=f"dlearn run {others[0]}")
    from torch.distributed import run as engine

    parser, words = _Parser(engine.get_args_parser()), list(arguments)
    for end in range(1, len(words)):  # Up to the script: what follows may look like ours.
        with suppress(WrongArguments):
            parser.parse_args(words[:end])
            words[end:] = []
    args = parser.parse_args(words)
    args.training_script_args += arguments[len(words) :]
    not_typed = object()
    parser.set_defaults(**dict.fromkeys(vars(args), not_typed))
    typed = vars(parser.parse_args(words)).items()
    try:
        args.nproc_per_node = str(engine.determine_local_world_size(args.nproc_per_node))
        engine.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError) as error:
        raise WrongArguments(f"torchrun: {error}; see torchrun --help.") from None
    return args, {name for name, value in typed if value is not not_typed} - vars(options).keys()


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if first.isdecimal() and last.isdecimal() and int(first) < int(last):
        return int(first), int(last)
    raise argparse.ArgumentTypeError(f"two numbers, as 10:12 for the steps 10 and 11, not {text!r}")


def _seconds(text: str) -> float | None:
    with suppress(ValueError):
        if 0 <= (seconds := float(text)) < float("inf"):
            return seconds or None
    raise argparse.ArgumentTypeError(f"a number of seconds, 0 for never, not {text!r}")


def _sources(text: str) -> list[str]:
    """Return the names; what is wrong is said now, not by each rank."""
    names = [name for name in text.split(",") if name]
    try:
        Options(sources=names)
    except SetupError as error:
        raise argparse.ArgumentTypeError(str(error).removesuffix(".")) from None
    return names


def _run_script(options: argparse.Namespace, order: Order, *, by_torchrun: bool) -> int:
    folder = Path(order.folder)
    with ExitStack() as around:
        if options.network is not None:
            args = options if by_torchrun else None
            around.enter_context(WiredRun(options.network, args, folder))
        if options.live:
            around.enter_context(live_rows(folder))
        if options.hold:
            gate = around.enter_context(paused_at_a_prompt(folder)).gate_server.address
            order = msgspec.structs.replace(order, gate=gate)
        os.environ.update(order.environment())
        return _torchrun(options, folder) if by_torchrun else _python(options, folder)


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


def _python(options: argparse.Namespace, folder: Path) -> int:
    """Run the script as `python script.py` does. Return its exit status, and note it in its file."""
    words = ["-m"] * options.module + [options.training_script, *options.training_script_args]
    child = subprocess.Popen([sys.executable, *words])

    def forward(number: int, _: Any) -> None:
        if number != signal.SIGINT or not _in_front_of_a_terminal():
            child.send_signal(number)

    with ExitStack() as before:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            before.callback(signal.signal, number, signal.signal(number, forward))
        status = child.wait()
    note_exit(folder, child.pid, status)
    return status


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
        for line in summary(folder, alone=alone):
            notice(line, alone=True)
    except Exception as error:  # A full disk, a folder that has gone.
        notice(f"what was recorded in {folder} cannot be told: {error}", alone=True)


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

    def lines(width: int | None = None) -> list[str]:
        over.wait(max(0.0, rows.rest_seconds - AGAIN_SECONDS))
        shown = rows.lines(width)
        return [f"dlearn: {time.monotonic() - start:.0f} s", *shown] if shown else []

    # Some terminals say that they have no rows and columns.
    show = _at_the_foot if sys.stderr.isatty() and all(os.get_terminal_size(2)) else _printed
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


def _at_the_foot(lines: Callable[[int], list[str]], over: threading.Event) -> None:
    taken = 0
    while not over.wait(AGAIN_SECONDS):
        width, height = os.get_terminal_size(2)
        shown = lines(width - 1)[: height // 2]
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


def summary(folder: Path, *, alone: bool = True) -> list[str]:
    """Return a few notices. A script that ran `alone` may have wanted torchrun."""
    if not folder.is_dir() or not any(folder.glob("*.jsonl")):
        nothing = "nothing was recorded: no process of this script used torch.distributed."
        return [f"{nothing} {_WANTED}" if alone else nothing]
    try:
        trace = Trace.load(folder)
    except TraceError as error:
        return [f"what was recorded is in {folder}, and cannot be read: {error}"]
    here = Path.cwd()
    shown = str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
    lines = [f"the trace is in {shown}", overview(trace)]
    lines += [rpc_overview(trace)] if trace.rpc.exchanges else []
    not_seen = reconcile(trace).whole.not_seen_bytes
    lines += [f"not seen: {not_seen:,} B were written that no recorded call accounts for"] if not_seen else []
    lines += _look_at(trace, shown)
    lines += [_WANTED] if alone and not len(trace.matches) and story(trace) else []
    return lines + problem_sentences(trace, SENTENCES)


def _look_at(trace: Trace, shown: str) -> list[str]:
    sentences = list(story(trace))
    if len(sentences) > SENTENCES:
        more = count_text(len(sentences) - SENTENCES, "more sentence")
        sentences[SENTENCES:] = [f"and {more} in dlearn.explain"]
    if sentences or not trace.events:
        return sentences
    where = shlex.quote(shown)
    draw = f"in words: dlearn explain {where}; as a picture: dlearn draw timeline {where} -o timeline.svg"
    return ["; ".join(filter(None, (late_text(trace), draw)))]
