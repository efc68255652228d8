"""All checks, one after the other: each looks at one thing and returns a Finding. Nothing here prints.

What needs torch is asked in a process of its own (probe.py): torch may be missing, crash, or hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dlearn.doctor import machine, network, software, torch_answers
from dlearn.doctor.finding import Finding

NEEDED = ("loopback", "torch", "recorder", "gloo")
"""To record a job here. All else is good to have."""


def examine(tell: Callable[[str], None]) -> Iterator[Finding]:
    """One finding after the other, as they become known; `tell` gets a line where the next one takes longer."""
    probe = torch_answers.Probe()  # it loads torch while we look at the rest
    try:
        yield from (machine.system(), machine.python(), machine.cores(), machine.memory(), machine.shared_memory())
        yield from (network.hostname(), network.loopback(), network.other_people())
        yield from (software.start_method(), software.jupyter(), software.mpi(tell))
        yield from torch_answers.findings(probe, tell)
    finally:
        probe.end()


def lacking(findings: Sequence[Finding]) -> list[str]:
    """The names of what keeps a job from being recorded on this machine."""
    fit = {finding.name for finding in findings if finding.verdict in ("ok", "warning")}
    return [name for name in NEEDED if name not in fit]
