"""What a cluster's run leaves behind."""

import errno
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlearn.errors import DlearnError, RankError, SetupError, TraceError
from dlearn.events.this_host import kernel_id, status_of
from dlearn.live.live_rows import playable
from dlearn.network.forwarded import Forwarded
from dlearn.shown import Paragraph, Shown, count_text
from dlearn.trace import Trace

_AT_ONCE_BYTES = 10_000_000  # Read in less than half a second: a run shows what its messages are.

RUNS_KEPT = 20
_NAME = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_IN_USE = "in-use"  # In a run's folder, which stays: names the process that refers to its `Run`.
UNSEEN_SECONDS = 24 * 3600  # For runs whose process is on another host or in another container.


@dataclass(eq=False, repr=False)
class Run(Shown):
    """`results` and `output` by the cluster's names (ints for `Cluster(4)`), the `trace`, the `error` if one failed.

    A rank that did not return has no entry in `results`. Of what a rank prints, the first and the last 16 MiB are kept.
    """

    folder: Path
    recorded: bool
    results: dict[Any, Any] = field(default_factory=dict)
    output: dict[Any, str] = field(default_factory=dict)
    error: RankError | None = None
    network: Forwarded | None = None
    private: bool = False
    """Whether its ranks were in a network of their own, from which they reach nothing else."""
    exposed: str = ""
    """Who else could have had its RPC workers run anything, and why; "" if no other user could."""

    @cached_property
    def trace(self) -> Trace:
        if not self.recorded:
            raise DlearnError("this run was not recorded (record=False)")
        return Trace.load(self.folder / "trace")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            """Say what to give where a Trace is wanted: `explain(run)` asks a Run for what its trace has."""
            what = f"a Run has no {name!r}; where a Trace is wanted, give run.trace"
            raise AttributeError(what, name=name, obj=self)

    def paragraphs(self) -> Iterator[Paragraph]:
        returned = f"{count_text(len(self.results), 'rank')} returned"
        yield from f"failed: {self.error.what}".splitlines() if self.error else [returned]
        if self.network is not None:
            yield f"over {next(self.network.paragraphs())}"
        if self.exposed:
            yield self.exposed
        if self.recorded:
            if self._is_small():
                # Here, since only a run that is shown needs it.
                from dlearn.analysis.telling.explanations import overview

                try:
                    yield overview(self.trace)
                except TraceError as error:  # The rest of the run is shown, too.
                    yield str(error)
            yield "look at it: explain(run.trace), draw.timeline(run.trace), play.player(run.trace)"
        yield f"kept in {self.folder}"

    def _repr_html_(self) -> str:
        """Return the card, and below it the player of a small trace."""
        card = super()._repr_html_()
        with suppress(TraceError):  # The card says it.
            return card + (playable(self.trace) if self.recorded and self._is_small() else "")
        return card

    def _is_small(self) -> bool:
        files = (self.folder / "trace").glob("*")
        return "trace" in self.__dict__ or sum(path.stat().st_size for path in files) < _AT_ONCE_BYTES


def new_folder() -> Path:
    """Make a folder in `.dlearn/runs`, where the newest 20 runs stay, and those in use."""
    home = Path.cwd() / ".dlearn" / "runs"  # The notebook may change its directory later.
    folder = home / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    try:
        _refuse_links(home)
        # Other users of the machine must not see what ran here, and on which hosts.
        home.parent.mkdir(mode=0o700, exist_ok=True)
        (folder / "trace").mkdir(parents=True)
        _refuse_others(home, folder)
        (folder / _IN_USE).write_text(f"{kernel_id('pid')}\n{_process(os.getpid())}")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Make room on its disk" if full else "Work in a folder that you may write to"
        raise SetupError(f"runs cannot be kept in {home} here: {error.strerror}. {hint}.") from None
    runs = sorted((path for path in home.iterdir() if _is_run(path)), key=_changed_ns)
    for old in runs[:-RUNS_KEPT]:
        if not _is_in_use(old):
            shutil.rmtree(old, ignore_errors=True)
    return folder


def _refuse_links(home: Path) -> None:
    """Raise SetupError if the folder is a link: old runs are deleted there."""
    for path in (home.parent, home):
        if path.is_symlink():
            raise SetupError(f"runs cannot be kept in {path}: it is a symbolic link. Remove it.")


def _refuse_others(home: Path, folder: Path) -> None:
    """Raise SetupError if another user owns the folder. A shared disk may give all new folders to one owner."""
    for path in (home.parent, home):
        if path.stat().st_uid != folder.stat().st_uid:
            shutil.rmtree(folder)
            raise SetupError(f"runs cannot be kept in {path}: it is another user's. Work elsewhere.")


def _is_run(path: Path) -> bool:
    return bool(_NAME.fullmatch(path.name)) and not path.is_symlink() and (path / "trace").is_dir()


def keep_folder(run: Run) -> None:
    weakref.finalize(run, (run.folder / _IN_USE).unlink, missing_ok=True).atexit = False


def _changed_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0  # Another notebook of this folder has just tidied it away.


def _is_in_use(folder: Path) -> bool:
    try:
        numbering, _, process = (folder / _IN_USE).read_text().partition("\n")
        if numbering != kernel_id("pid"):
            return time.time() - (folder / _IN_USE).stat().st_mtime < UNSEEN_SECONDS
        return process == _process(int(process.split()[0]))
    except (OSError, ValueError, IndexError):
        return False


def _process(pid: int) -> str:
    """Return its pid and when it began, as pids are used again. ProcessLookupError if it has ended."""
    os.kill(pid, 0)
    with suppress(OSError):
        return f"{pid} {status_of(pid)[19]}"
    return str(pid)
