"""`dlearn run --hold`: a prompt lets the job's calls through the gate, by lines or single keys."""

import os
import select
import signal
import sys
import termios
import threading
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlearn.errors import DlearnError
from dlearn.live.gate_server import GateServer
from dlearn.live.paused_job import PATIENCE_SECONDS, PausedJob
from dlearn.shown import Table

HELP = """\
space, 0 to 9    keys of a terminal: step; release this rank
waiting          the calls that wait at the gate, and who hangs
ranks            what each rank does now
step [N]         let the call through that waits longest; N of them
release RANK [N] let the next call of this rank through; N of them
until OP         let all through up to the first such call: until all_reduce
until span NAME  let all through up to the first call in this span: until span step 3
free             open the gate for good
end              end the job (SIGTERM)
"""
KEYS = {" ": "step"} | {str(rank): f"release {rank}" for rank in range(10)}  # No command begins so.
BACKSPACE, END_OF_INPUT = "\x7f", "\x04"
LOOK_SECONDS = 0.2
SHOW_SECONDS = 2.0  # At most, for ranks that compute: a prompt cannot be interrupted.


class PausedScript(PausedJob):
    """The ranks of a script, as many as come."""

    def __init__(self, folder: Path) -> None:
        self.gate_server, self.trace_folder = GateServer(None, True), folder
        self.gate_server.on_trouble = lambda: os.kill(os.getpid(), signal.SIGTERM)

    @property
    def under_way(self) -> bool:
        return not self.gate_server.over


@contextmanager
def paused_at_a_prompt(folder: Path) -> Iterator[PausedScript]:
    """Read commands from the standard input while the block lasts; the script has none."""
    job, over = PausedScript(folder), threading.Event()
    terminal, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    thread = threading.Thread(target=_serve, args=(job, terminal, over), daemon=True, name="dlearn-prompt")
    before = _read_keys(terminal)
    _say("dlearn: this job is held: a prompt comes with its first call; help says how")
    thread.start()
    try:
        yield job
    finally:
        if job.gate_server.trouble:
            _say(f"dlearn: {job.gate_server.trouble}")
        over.set()
        job.gate_server.close()
        thread.join()
        if before is not None:
            termios.tcsetattr(terminal, termios.TCSADRAIN, before)
        os.dup2(terminal, 0)
        os.close(terminal)


def _read_keys(terminal: int) -> list[Any] | None:
    """Let a terminal deliver each key at once; return how it was. None if it is no terminal."""
    if not os.isatty(terminal):
        return None
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSADRAIN)
    return before


def _serve(job: PausedScript, terminal: int, over: threading.Event) -> None:
    prompt = "held> " if os.isatty(terminal) else ""
    with job.gate_server.changed:
        while not (job.gate_server.calls or over.is_set()):
            job.gate_server.changed.wait(LOOK_SECONDS)
    if not over.is_set():
        _waiting(job)
    _say(prompt, end="")
    for line in (_keys if prompt else _lines)(terminal, over):
        if line.strip() == "free" or over.is_set():
            break
        if line.strip() == "end":
            os.kill(os.getpid(), signal.SIGTERM)
            over.wait()  # The gate stays closed until the ranks have ended.
            break
        try:
            _obey(job, line.split())
        except (DlearnError, ValueError) as error:  # A number of thousands of digits is none.
            _say(f"dlearn: {error}")
        _say(prompt, end="")
    if not over.is_set():
        _say("dlearn: the gate is open")
    job.free()


def _lines(terminal: int, over: threading.Event) -> Iterator[str]:
    """Yield each line of the input when it is whole, until its end, or that of the job."""
    unfinished, more = b"", b"more"
    while more and not over.is_set():
        if select.select([terminal], (), (), LOOK_SECONDS)[0]:  # A file is always ready.
            more = os.read(terminal, 4096)
            *whole, unfinished = (unfinished + more).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace")
    yield unfinished.decode(errors="replace")


def _keys(terminal: int, over: threading.Event) -> Iterator[str]:
    """Yield the command of each key, or a whole line that begins with another letter."""
    line = key = ""
    while key != END_OF_INPUT and not over.is_set():
        if not select.select([terminal], (), (), LOOK_SECONDS)[0]:
            continue
        key = os.read(terminal, 1).decode(errors="replace") or END_OF_INPUT
        if key == "\n" or (not line and key in KEYS):
            _say(KEYS.get(key, ""))
            yield KEYS.get(key, line)
            line = ""
        elif key == BACKSPACE:
            _say("\b \b" * bool(line), end="")
            line = line[:-1]
        elif key.isprintable():
            _say(key, end="")
            line += key


def _obey(job: PausedScript, words: list[str]) -> None:
    """Carry out one command. DlearnError if there is no such one, or it cannot be done."""
    match words:
        case []:
            return  # An empty line.
        case ["help"]:
            _say(HELP, end="")
        case ["waiting"]:
            _waiting(job)
        case ["ranks"]:
            rows = [("rank", "now"), *((str(name), now) for name, now in job.ranks.items())]
            _say("\n".join(Table(rows, numbers=0).lines()))
        case ["step"] | ["release", _]:
            _obey(job, [*words, "1"])
        case ["step", count] if count.isdecimal():
            _step(job, int(count))
        case ["release", rank, count] if rank.isdecimal() and count.isdecimal():
            job.release(int(rank), int(count), patience=PATIENCE_SECONDS)
            _say(f"let through: rank {rank}'s {job.schedule[-1].op}")
        case ["until", "span", *name] if name:
            _reached(job.run_until(span=" ".join(name), patience=PATIENCE_SECONDS))
        case ["until", op]:
            _reached(job.run_until(op=op, patience=PATIENCE_SECONDS))
        case _:
            raise DlearnError(f"{' '.join(words)!r} is no command here; help shows them.")


def _step(job: PausedScript, count: int) -> None:
    for _ in range(count):
        if (call := job.step(patience=PATIENCE_SECONDS)) is None:
            raise DlearnError("all ranks have ended, or the gate is open.")
        _say(f"let through: {call}")


def _reached(call: object) -> None:
    _say(f"waits: {call}" if call is not None else "no such call came; all ranks have ended")


def _waiting(job: PausedScript) -> None:
    waiting = job.waiting_within(SHOW_SECONDS)
    _say(repr(waiting))
    here = {call.rank for call in waiting}
    if 0 < len(here) < len(job.gate_server.names):
        _say(str(job.hang_by(settled=False)))


def _say(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
