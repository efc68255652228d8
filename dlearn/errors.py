"""Every error that dlearn raises on purpose."""

from importlib import import_module
from types import ModuleType
from typing import Any


class DlearnError(Exception):
    """The root: `except DlearnError` catches all that dlearn raises on purpose."""


class SetupError(DlearnError):
    """Something is missing on this machine: the text says what, and how to get it."""


_INSTALL = {
    "ipywidgets": "pip install ipywidgets, and load the page again",
    "mpi4py": "pip install mpi4py mpich",
}


def optional(package: str, *, needed_by: str) -> ModuleType:
    """Import a package that dlearn does not depend on; raise SetupError where it is missing."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
    how = _INSTALL.get(package, f"pip install {package}")
    raise SetupError(f"{needed_by} needs {package}, which is not installed: {how}")


class WrongArguments(SetupError):
    """A command cannot be meant as it was typed: the text says what to try. Exit status 2."""


class TraceError(DlearnError):
    """A trace cannot be read: the text names the file, and the line where there is one."""


class PeerError(DlearnError, RuntimeError):
    """A collective waited for a rank in vain: the text names the algorithm, the step and the rank.

    A RuntimeError too, as the errors of torch's own collectives are.
    """


class TrafficError(DlearnError, AssertionError):
    """The traffic is not the one that was asked for: the text says what is wrong, and shows it.

    An AssertionError too, so that pytest and unittest count a test that failed, not one that broke.
    """


class RankError(DlearnError):
    """One rank (or all of them, when they hang) did not finish its function.

    `rank` is the cluster's index or name of the rank that failed first (None for a hang), `what` says what
    happened to it, `hint` what to try, `details` holds the rank's own traceback, and `run` everything that was
    recorded up to the fault: `run.trace`, `run.output`, `run.results`.
    """

    def __init__(
        self,
        *,
        rank: int | str | None,
        what: str,
        hint: str = "",
        details: str = "",
        run: Any = None,
    ) -> None:
        self.rank, self.what, self.hint, self.details, self.run = rank, what, hint, details, run
        super().__init__(what)

    def __str__(self) -> str:
        parts = [self.what, self.details.rstrip(), f"Try: {self.hint}" if self.hint else ""]
        return "\n".join(part for part in parts if part)

    def _render_traceback_(self: DlearnError) -> list[str]:
        """Return the text for IPython, without a traceback of dlearn's own code."""
        return [f"{type(self).__name__}: {self}"]


class GateError(DlearnError):
    """A held job does not go on: the text says which ranks wait for which."""

    _render_traceback_ = RankError._render_traceback_


class Interrupted(KeyboardInterrupt):
    """The user stopped a run. Its ranks have been ended; the text names the folder of their trace."""

    def _render_traceback_(self) -> list[str]:
        """Return one line for IPython: a traceback of dlearn's own code would not help."""
        return [f"KeyboardInterrupt: {self}"]
