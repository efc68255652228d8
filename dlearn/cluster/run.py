"""What a cluster's run leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dlearn.errors import DlearnError, RankError
from dlearn.trace.trace import Trace


@dataclass(eq=False)
class Run:
    """`results` and `output` by the cluster's names (ints for `Cluster(4)`), the `trace`, the `error` if one failed.

    A rank that did not return has no entry in `results`. Of what a rank prints, the first and the last 16 MiB are kept.
    """

    folder: Path
    recorded: bool
    results: dict[Any, Any] = field(default_factory=dict)
    output: dict[Any, str] = field(default_factory=dict)
    error: RankError | None = None

    @cached_property
    def trace(self) -> Trace:
        """Everything that was recorded, up to a fault too."""
        if not self.recorded:
            raise DlearnError("this run was not recorded (record=False)")
        return Trace.load(self.folder / "trace")

    def __str__(self) -> str:
        state = f"failed: {self.error.what}" if self.error else f"{len(self.results)} ranks returned"
        return f"Run in {self.folder}: {state}"

    __repr__ = __str__
