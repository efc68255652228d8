"""Recorded once: a program that several tests look at runs on real ranks once in a test run, for whoever asks first.

def test_something(recorded):
    trace = recorded(workloads.ddp, ranks=4)
"""

import contextlib
import fcntl
import pickle
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dlearn import Cluster, Trace


class Recorder:
    """Runs a program once and keeps its trace below `home`, which all processes of a test run share."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.load = cache(Trace.load)

    def __call__(self, program: Callable[..., object], ranks: int | Sequence[str] = 2, **options: Any) -> Trace:
        """Return the trace of `program` on these ranks, which has to run through."""
        return self.load(self.folder(program, ranks, **options))

    def folder(self, program: Callable[..., object], ranks: int | Sequence[str] = 2, **options: Any) -> Path:
        """Return the folder of its trace; copy it before you change a file. Options are those of Cluster."""
        return Path((self._home(program, ranks, **options) / "folder").read_text())

    def results(self, program: Callable[..., object], ranks: int | Sequence[str] = 2, **options: Any) -> dict[Any, Any]:
        """Return what it returned on each rank."""
        return pickle.loads((self._home(program, ranks, **options) / "results").read_bytes())

    def _home(
        self, program: Callable[..., object], ranks: int | Sequence[str], *, arguments: tuple = (), **options: Any
    ) -> Path:
        def quiet(*given: object) -> object:
            warnings.simplefilter("ignore")  # Torch's own, of deprecations, are not what is tested.
            return program(*given)

        name = "-".join(map(str, [program.__module__, program.__name__, ranks, *arguments, *options.items()]))
        home = self.home / "".join(letter if letter.isalnum() else "_" for letter in name)
        home.mkdir(parents=True, exist_ok=True)
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (home / "folder").exists():
                with contextlib.chdir(home):
                    run = Cluster(ranks, **options).run(quiet, *arguments, timeout=100)
                (home / "results").write_bytes(pickle.dumps(run.results))
                (home / "folder").write_text(str(run.folder / "trace"))
        return home
