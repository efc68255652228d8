"""What a cluster's run leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dlearn.errors import DlearnError, RankError, TraceError
from dlearn.network.carried import Carried
from dlearn.shown import Paragraph, Shown, count_text
from dlearn.trace.trace import Trace

_AT_ONCE_BYTES = 10_000_000
"""A trace of this size is read in less than half a second: then a run shows what its messages are."""


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

    @cached_property
    def trace(self) -> Trace:
        """Everything that was recorded, up to a fault too."""
        if not self.recorded:
            raise DlearnError("this run was not recorded (record=False)")
        return Trace.load(self.folder / "trace")

    def paragraphs(self) -> Iterator[Paragraph]:
        yield f"failed: {self.error.what}" if self.error else f"{count_text(len(self.results), 'rank')} returned"
        if self.network is not None:
            yield f"over {next(self.network.paragraphs())}"
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

    def _is_small(self) -> bool:
        files = (self.folder / "trace").glob("*")
        return "trace" in self.__dict__ or sum(path.stat().st_size for path in files) < _AT_ONCE_BYTES
