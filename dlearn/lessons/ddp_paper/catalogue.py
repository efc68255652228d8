"""The claims, in the order of our table; each stands in its module, beside the function that runs it."""

from __future__ import annotations

from dlearn.lessons.ddp_paper import compression, message_size, skipping
from dlearn.lessons.ddp_paper.verdicts import Claim

CLAIMS: tuple[Claim, ...] = (
    message_size.DD1,
    compression.DD12,
    skipping.DD13,
)


def claim(id: str) -> Claim:
    """The claim of this id; KeyError if there is none."""
    return {each.id: each for each in CLAIMS}[id]
