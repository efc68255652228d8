"""DD16: buffers, devices, and DDP's knobs one by one: what each of them changes in a step's bytes."""

from typing import Any

import torch
from torch import nn

from ddp_claims import seen
from ddp_claims.figures import table
from ddp_claims.training import backward, first_digits, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, Trace, operations, span

RANKS = 2
STEPS = 3
"""The first has other buckets (see DD10); what counts is the last."""
DEFAULT = "default"
NO_BUFFERS, SMALL, UNUSED, VIEW = "buffers not sent", "small buckets", "find unused", "bucket views"
KNOBS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    NO_BUFFERS: {"forward_sync_buffers": False},
    SMALL: {"bucket_cap_mb": 0.001},
    UNUSED: {"find_unused_parameters": True},
    VIEW: {"gradient_as_bucket_view": True},
}


def network() -> nn.Module:
    """Make a model with a BatchNorm, whose statistics are buffers: state without gradients."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def train() -> None:
    """Train a few steps with each of the options."""
    batch = first_digits(25)
    for name, knob in KNOBS.items():
        model = under_ddp(network, **knob)
        for step in range(STEPS):
            with span(f"{name}, step {step}"):
                backward(model, batch)


@paper_claim(
    "DD16",
    "buffers, devices, knobs",
    paper="sections 4.1 and 4.2",
    says="Before a forward pass rank 0's buffers are broadcast; bucket size, buffers and unused parameters are knobs.",
    runs=f"a model with BatchNorm, each knob by itself, on {RANKS} ranks",
)
def turn_knobs() -> Result:
    """Test the last step of each: gradients, buffers, map of used parameters."""
    trace = seen.run_quietly(Cluster(RANKS), train).trace
    net = network()
    gradients, buffers = seen.parameter_bytes(net), sum(each.nbytes for each in net.buffers())
    kinds = len({each.dtype for each in net.buffers()})
    parameters = len(list(net.parameters()))
    last = {name: trace.within(f"{name}, step {STEPS - 1}") for name in KNOBS}
    found = {name: parts(step) for name, step in last.items()}
    broadcasts = {name: len(seen.called(step, seen.BUFFERS)) for name, step in last.items()}
    counts = {name: len(seen.reductions(step)) for name, step in last.items()}
    totals = {name: sum(each.values()) for name, each in found.items()}
    all_bytes = sum(seen.handed_bytes(operations(step)) for step in last.values())
    devices = torch.cuda.device_count()
    checks = (
        Check(
            f"each forward pass sends the {buffers:,} B of buffers from rank 0, a broadcast for each of {kinds} dtypes",
            f"{found[DEFAULT][BUFFERS]:,} B in {broadcasts[DEFAULT]} broadcasts",
            (found[DEFAULT][BUFFERS], broadcasts[DEFAULT]) == (buffers, kinds)
            and all(end.phase == "forward" for each in seen.called(last[DEFAULT], seen.BUFFERS) for end in each.ends),
        ),
        Check(
            "without forward_sync_buffers (once broadcast_buffers) none; the gradients stay",
            f"{found[NO_BUFFERS][BUFFERS]} B of buffers, {found[NO_BUFFERS][GRADIENTS]:,} B of gradients",
            found[NO_BUFFERS] == {GRADIENTS: gradients, BUFFERS: 0, USED_MAP: 0},
        ),
        Check(
            "a smaller bucket_cap_mb makes more all-reduces of the same bytes",
            f"{counts[DEFAULT]} and {counts[SMALL]} all-reduces; {found[SMALL][GRADIENTS]:,} B",
            counts[SMALL] > counts[DEFAULT] and found[SMALL] == found[DEFAULT],
        ),
        Check(
            f"find_unused_parameters adds an int32 for each of {parameters} parameters, no more",
            f"{totals[UNUSED] - totals[DEFAULT]} B more than {totals[DEFAULT]:,} B",
            found[UNUSED] == {**found[DEFAULT], USED_MAP: 4 * parameters},
        ),
        Check(
            "gradient_as_bucket_view changes memory, and not a byte of traffic",
            f"{totals[VIEW]:,} B in {counts[VIEW]} all-reduces",
            (found[VIEW], counts[VIEW]) == (found[DEFAULT], counts[DEFAULT]),
        ),
        Check("nothing else is sent", f"{sum(totals.values()):,} B in all", sum(totals.values()) == all_bytes),
        Check(
            "the buckets of a model that spans several devices stay on the device of their gradients",
            f"needs two GPUs for a rank; here are {devices}",
            None,
        ),
    )
    head = ["a step and rank", "set to", GRADIENTS, BUFFERS, USED_MAP, "all-reduces"]
    rows = [
        [name, _set_to(name), *(f"{size:,} B" for size in found[name].values()), f"{counts[name]}"] for name in KNOBS
    ]
    picture = table(
        [head, *rows],
        title=f"No knob changes the {found[DEFAULT][GRADIENTS]:,} B of gradients; two change"
        f" {found[DEFAULT][BUFFERS]} B of buffers, {found[UNUSED][USED_MAP]} B of a map",
    )
    return Result(checks, picture)


def _set_to(name: str) -> str:
    return ", ".join(f"{key}={value}" for key, value in KNOBS[name].items())


GRADIENTS, BUFFERS, USED_MAP = "gradients", "buffers", "map of used parameters"


def parts(step: Trace) -> dict[str, int]:
    """Return the bytes that a rank hands over in a step, by kind."""
    return {
        GRADIENTS: seen.handed_bytes(seen.reductions(step)),
        BUFFERS: seen.handed_bytes(seen.called(step, seen.BUFFERS)),
        USED_MAP: seen.handed_bytes(seen.called(step, seen.USED_MAP)),
    }
