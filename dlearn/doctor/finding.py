"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warning", "missing", "not known"]


@dataclass(frozen=True)
class Finding:
    """One thing about this machine: what was found, and where that is not good enough what to do about it."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""
