"""DD2: when each gradient of a backward pass is ready (the paper's figure 2c and d)."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from matplotlib.axes import Axes

from ddp_claims.samples import Samples
from ddp_claims.training import Build, backward, first_digits, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, Trace, span
from dlearn.draw.palette import FAINT
from dlearn.events.event import Gradient, PhaseSpan
from dlearn.events.this_host import cores
from dlearn.lessons import charts, models

STEPS, WARM_UP = 15, 3
BATCH_SIZE = 64
WIDTH = 512
"""Of MLP: so wide that it computes for longer than autograd takes to go from node to node."""
LEAST_SPREAD = 0.5
"""If all gradients came at the end, they would be spread over nothing; if they came evenly, over the whole pass."""
LEAST_REVERSED = 0.75
"""The order counts as roughly reversed half-way between chance (0.5 of all pairs of parameters) and exactly (1)."""
MODELS: dict[str, Build] = {
    "ConvNet": models.ConvNet,
    "MLP": lambda: models.MLP(WIDTH),
    "Transformer": models.Transformer,
}


def train() -> None:
    """Train on one rank in `no_sync`, so that a pass is computation alone."""
    batch = first_digits(BATCH_SIZE)
    for name, build in MODELS.items():
        model = under_ddp(build)
        for step in range(STEPS):
            model.zero_grad()
            with span(f"{name} {step}"), model.no_sync():
                backward(model, batch)


class Pass(NamedTuple):
    """A backward pass: when each gradient was ready, as a share of the pass, and the bytes of it."""

    parameters: tuple[str, ...]
    ready: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def spread(self) -> float:
        return self.ready[-1] - self.ready[0]

    @property
    def half(self) -> float:
        """Return the time at which half of all bytes were ready."""
        there = accumulate(self.sizes)
        return next(at for at, sum_ in zip(self.ready, there, strict=True) if 2 * sum_ >= sum(self.sizes))


def one_pass(trace: Trace) -> Pass:
    """Return the only backward pass of this part of a trace."""
    gradients = [event for event in trace.events if isinstance(event, Gradient)]
    (around,) = (event for event in trace.events if isinstance(event, PhaseSpan) and event.phase == "backward")
    assert around.end_ns is not None
    lasts = around.end_ns - around.start_ns
    ready = tuple((each.start_ns - around.start_ns) / lasts for each in gradients)
    return Pass(tuple(each.parameter for each in gradients), ready, tuple(each.bytes for each in gradients))


def reversed_share(order: Sequence[str], registered: Sequence[str]) -> float:
    """Return the share of pairs of parameters that are ready in reverse order."""
    places = [registered.index(name) for name in order]
    pairs = [(first, later) for i, first in enumerate(places) for later in places[i + 1 :]]
    return sum(first > later for first, later in pairs) / len(pairs)


@paper_claim(
    "DD2",
    "gradients become ready all along the backward pass",
    paper="section 2.2, figures 2c and 2d",
    says="Gradients become ready one after the other during the backward pass, so they can be sent before it is over.",
    runs=f"{STEPS} backward passes of each of {', '.join(MODELS)}, with a hook on every parameter",
)
def ready_gradients() -> Result:
    """Test how far apart the gradients of each model are ready, and in which order."""
    trace = Cluster(1).run(train).trace
    found = {name: [one_pass(trace.within(f"{name} {step}")) for step in range(WARM_UP, STEPS)] for name in MODELS}
    spreads = {name: Samples(tuple(each.spread for each in passes)) for name, passes in found.items()}
    halves = {name: Samples(tuple(each.half for each in passes)) for name, passes in found.items()}
    checks = [
        Check(
            f"{name}: from the first to the last gradient it is more than {LEAST_SPREAD:.0%} of the backward pass",
            f"{spreads[name].text('%', scale=100, digits=0)}; half of all bytes are ready after"
            f" {halves[name].text('%', scale=100, digits=0)}",
            spreads[name].interval[0] > LEAST_SPREAD,
        )
        for name in MODELS
    ]
    for name, build in MODELS.items():
        registered = [each for each, _ in build().named_parameters()]
        order = found[name][-1].parameters
        share = reversed_share(order, registered)
        checks.append(
            Check(
                f"{name}: all of its {len(registered)} parameters come, roughly in the reverse of their registration",
                f"{share:.1%} of all pairs reversed; ready: {', '.join(order)}",
                sorted(order) == sorted(registered) and share >= LEAST_REVERSED,
            )
        )
    conditions = f"a rank by itself on {cores()} cores, {STEPS - WARM_UP} passes of each model, nothing is sent"
    return Result(tuple(checks), picture(found, halves), conditions)


def picture(found: dict[str, list[Pass]], halves: dict[str, Samples]) -> Axes:
    """Draw for each model the pass whose half time is nearest to the median."""
    series: dict[str, charts.Series] = {}
    for name, passes in found.items():
        usual = min(passes, key=lambda each: abs(each.half - halves[name].median))
        shares = [100 * sum_ / sum(usual.sizes) for sum_ in accumulate(usual.sizes)]
        series[name] = charts.Series([0, *(100 * at for at in usual.ready)], [0, *shares], between="steps")
    told = ", ".join(f"{halves[name].median:.0%} ({name})" for name in found)
    ax = charts.lines(
        series,
        title=f"Half of the bytes are ready after {told} of the pass",
        x="% of the backward pass",
        y="% of the bytes that are ready",
        notes=[f"A step for each parameter. Of each model, the pass nearest to the median of {STEPS - WARM_UP}."],
    )
    ax.axhline(50, color=FAINT, linewidth=1.0)
    return ax
