"""Claims, checks and verdicts. A verdict is computed from the checks, never written by hand."""

import html
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from matplotlib.axes import Axes

from ddp_claims.figures import stamp
from dlearn.shown import Table, count_text

Verdict = Literal["confirmed", "partly tested", "not confirmed here", "cannot be tested here"]


@dataclass(frozen=True)
class Check:
    """One thing that must be so if the claim is true.

    `says` is what must be so, `seen` the figures that decide it. `holds` is None where it cannot be tested here; then
    `seen` is the reason.
    """

    says: str
    seen: str
    holds: bool | None

    @property
    def verdict(self) -> Verdict:
        if self.holds is None:
            return "cannot be tested here"
        return "confirmed" if self.holds else "not confirmed here"


@dataclass(frozen=True)
class Result:
    """What running a claim gave. `conditions` are those of its times: "2 ranks on 2 cores, 12 pairs"."""

    checks: tuple[Check, ...]
    picture: Axes | None = None
    conditions: str = ""


@dataclass(frozen=True)
class Claim:
    """A row of the table: what the paper says, what is run, and the function that runs it."""

    id: str
    title: str
    paper: str
    """Section, figure or table of the paper, arXiv 2006.15704."""
    says: str
    runs: str
    test: Callable[[], Result]

    def find(self) -> "Finding":
        """Run it, on real ranks."""
        found = Finding(self, self.test())
        if found.result.picture is not None:
            stamp(found.result.picture, found.verdict, found.mark, f"The paper ({self.paper}): {self.says}")
        return found


CLAIMS: dict[str, Claim] = {}
"""By id, as far as their modules are imported; `reproduction` imports all."""


def paper_claim(
    id: str, title: str, *, paper: str, says: str, runs: str
) -> Callable[[Callable[[], Result]], Callable[[], Result]]:
    """Enter the decorated function in the table, as the test of this claim."""

    def enter(test: Callable[[], Result]) -> Callable[[], Result]:
        CLAIMS[id] = Claim(id, title, paper, says, runs, test)
        return test

    return enter


@dataclass(frozen=True)
class Finding:
    """A claim and what came out; shows itself in a notebook."""

    claim: Claim
    result: Result

    @property
    def verdict(self) -> Verdict:
        """Return the verdict: one failed check decides, then checks that cannot run here."""
        tested = [check.holds for check in self.result.checks if check.holds is not None]
        if not tested:
            return "cannot be tested here"
        if not all(tested):
            return "not confirmed here"
        return "partly tested" if self.untested else "confirmed"

    @property
    def mark(self) -> str:
        """Return ✓, ✗ or ?; ? also for partly tested."""
        return {"confirmed": "✓", "not confirmed here": "✗"}.get(self.verdict, "?")

    @property
    def untested(self) -> tuple[Check, ...]:
        return tuple(check for check in self.result.checks if check.holds is None)

    @property
    def headline(self) -> str:
        """Return "DD17 three rules: partly tested; 1 of 3 checks cannot be tested here"."""
        said = f"{self.claim.id} {self.claim.title}: {self.verdict}"
        failed = [check for check in self.result.checks if check.holds is False]
        if failed and len(self.result.checks) > 1:
            said += f"; {count_text(len(failed), 'check')} of {len(self.result.checks)} failed"
        if self.untested and self.verdict != "cannot be tested here":
            said += f"; {len(self.untested)} of {count_text(len(self.result.checks), 'check')} cannot be tested here"
        return said

    def __str__(self) -> str:
        lines = [self.headline, f"  the paper ({self.claim.paper}): {self.claim.says}", f"  run: {self.claim.runs}"]
        lines += [f"  - {check.says}: {check.verdict}. {check.seen}" for check in self.result.checks]
        if self.result.conditions:
            lines.append(f"  ({self.result.conditions})")
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(check.says, check.seen, check.verdict) for check in self.result.checks]
        checks = Table([("must be so", "seen", "verdict"), *rows], names=3).html()
        conditions = f"<p>{html.escape(self.result.conditions)}</p>" if self.result.conditions else ""
        return (
            f"<p><b>{html.escape(self.headline)}</b>"
            f"<br>{html.escape(self.claim.says)} ({html.escape(self.claim.paper)})"
            f"<br>Run: {html.escape(self.claim.runs)}</p>"
            f"{checks}{conditions}"
        )
