"""The claims, in the order of our table; each stands in its module, beside the function that runs it."""

from __future__ import annotations

from dlearn.lessons.ddp_paper import (
    compression,
    latency,
    message_size,
    overlapping,
    round_robin,
    rules,
    skipping,
)
from dlearn.lessons.ddp_paper.verdicts import Claim

CLAIMS: tuple[Claim, ...] = (
    message_size.DD1,
    overlapping.DD4,
    latency.DD8,
    round_robin.DD9,
    compression.DD12,
    skipping.DD13,
    rules.DD17,
)


def claim(id: str) -> Claim:
    """The claim of this id; KeyError if there is none."""
    return {each.id: each for each in CLAIMS}[id]
