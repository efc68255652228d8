"""What a cluster's run leaves behind."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlearn.errors import DlearnError, RankError, SetupError, TraceError
from dlearn.live.live_display import LiveDisplay
from dlearn.network.carried import Carried
from dlearn.shown import Paragraph, Shown, count_text
from dlearn.trace.trace import Trace

_AT_ONCE_BYTES = 10_000_000
"""A trace of this size is read in less than half a second: then a run shows what its messages are."""

RUNS_KEPT = 20
_HELD = "held"
"""A file in a run's folder with the pid of the process that has its `Run` in hand, so that nobody tidies it away."""


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
    network: Carried | None = None
    """What the switch has measured, where a network was chosen."""
    private: bool = False
    """Whether its ranks were in a network that nobody else is in, and that has no way out."""
    exposed: str = ""
    """Who else could have had its RPC workers run anything, and why; "" where nobody could, or there were none."""
    display: LiveDisplay | None = field(default=None, init=False)
    """What stood in the cell while it ran."""

    @cached_property
    def trace(self) -> Trace:
        """Everything that was recorded, up to a fault too."""
        if not self.recorded:
            raise DlearnError("this run was not recorded (record=False)")
        return Trace.load(self.folder / "trace")

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> None:
            """Say what to give where a Trace is wanted: `explain(run)` asks a Run for what its trace has."""
            what = f"a Run has no {name!r}; where a Trace is wanted, give run.trace"
            raise AttributeError(what, name=name, obj=self)

    def paragraphs(self) -> Iterator[Paragraph]:
        yield f"failed: {self.error.what}" if self.error else f"{count_text(len(self.results), 'rank')} returned"
        if self.network is not None:
            yield f"over {next(self.network.paragraphs())}"
        if self.exposed:
            yield self.exposed
        if self.recorded:
            if self._is_small():
                # Only where somebody looks at a run: whoever starts one need not wait for this.
                from dlearn.analysis.telling.words import overview

                try:
                    yield overview(self.trace)
                except TraceError as error:  # Who looks at a run wants to see the rest of it, too.
                    yield str(error)
            yield "look at it: explain(run.trace), draw.timeline(run.trace), play.player(run.trace)"
        yield f"kept in {self.folder}"

    def _repr_html_(self) -> str:
        if self.display is not None:
            self.display.make_way()
        return super()._repr_html_()

    def _is_small(self) -> bool:
        files = (self.folder / "trace").glob("*")
        return "trace" in self.__dict__ or sum(path.stat().st_size for path in files) < _AT_ONCE_BYTES


# Its folder ----------------------------------------------------------------------------------------------------------


def new_folder() -> Path:
    """A new folder in `.dlearn/runs`, where the newest 20 runs are kept, and those that a notebook still holds."""
    home = Path(".dlearn", "runs").resolve()  # The notebook may change its directory later.
    folder = home / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    try:
        # What ran here, and on which hosts, is the business of no other user of the machine.
        home.parent.mkdir(mode=0o700, exist_ok=True)
        (folder / "trace").mkdir(parents=True)
        (folder / _HELD).write_text(str(os.getpid()))
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "Make room on its disk" if full else "Work in a folder that you may write to"
        raise SetupError(f"runs cannot be kept in {home} here: {error.strerror}. {hint}.") from None
    runs = sorted((path for path in home.iterdir() if path.is_dir()), key=_changed_ns)
    for old in runs[:-RUNS_KEPT]:
        if not _is_held(old):
            shutil.rmtree(old, ignore_errors=True)
    return folder


def keep_folder(run: Run) -> None:
    weakref.finalize(run, (run.folder / _HELD).unlink, missing_ok=True).atexit = False  # Then the pid is nobody's.


def _changed_ns(folder: Path) -> int:
    try:
        return folder.stat().st_mtime_ns
    except FileNotFoundError:
        return 0  # Another notebook of this folder has just tidied it away.


def _is_held(folder: Path) -> bool:
    try:
        os.kill(int((folder / _HELD).read_text()), 0)
    except (OSError, ValueError):
        return False
    return True
