"""The claims, in the order of our table; each stands in its module, beside the function that runs it."""

from __future__ import annotations

from ddp_claims import (
    accumulation,
    buckets,
    compression,
    construction,
    hooks,
    interception,
    knobs,
    latency,
    message_size,
    order,
    overlapping,
    ready_gradients,
    round_robin,
    rules,
    scaling_out,
    skipping,
    unused,
)
from ddp_claims.verdicts import Claim

CLAIMS: tuple[Claim, ...] = (
    message_size.DD1,
    ready_gradients.DD2,
    buckets.DD3,
    overlapping.DD4,
    order.DD5,
    accumulation.DD6,
    scaling_out.DD7,
    latency.DD8,
    round_robin.DD9,
    buckets.DD10,
    unused.DD11,
    compression.DD12,
    skipping.DD13,
    construction.DD14,
    interception.DD15,
    knobs.DD16,
    rules.DD17,
    hooks.DD18,
)


def claim(id: str) -> Claim:
    """Return the claim of this id; KeyError if there is none."""
    return {each.id: each for each in CLAIMS}[id]
