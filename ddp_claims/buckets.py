"""DD3 and DD10: which gradients travel together, in which order, and how DDP corrects its first guess."""

from itertools import pairwise

import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from ddp_claims import seen
from ddp_claims.training import backward, first_digits, gradients_of, under_ddp
from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster, Trace, draw, span
from dlearn.draw import canvas
from dlearn.draw.palette import INK, SERIES, TEXT_PT
from dlearn.events.event import Bucket, Gradient, PhaseSpan
from dlearn.lessons import models

RANKS = 2
STEPS = 3
"""The first has other buckets (see DD10); what counts is the last."""
WAYS = {"each parameter by itself": 1e-6, "in buckets": models.SMALL_BUCKETS, "all at once": 25.0}
"""`bucket_cap_mb`: one byte is full with any parameter, 25 MB never here."""
FIRST = "as first built"


def train_in_buckets() -> dict[str, Tensor]:
    """Train a ConvNet in each of the ways; returns the gradients of the last step, as one tensor."""
    batch = first_digits(25)
    gradients: dict[str, Tensor] = {}
    # With find_unused_parameters DDP keeps the buckets that it first built, before it has seen any gradient.
    for name, cap in {**WAYS, FIRST: models.SMALL_BUCKETS}.items():
        model = under_ddp(models.ConvNet, bucket_cap_mb=cap, find_unused_parameters=name == FIRST)
        for step in range(STEPS):
            model.zero_grad()
            with span(f"{name}, step {step}"):
                backward(model, batch)
        gradients[name] = gradients_of(model)
    return gradients


@paper_claim(
    "DD3",
    "buckets",
    paper="sections 3.2.2 and 3.2.3",
    says="Between an all-reduce for each gradient and one for all, buckets of gradients take the middle; they follow"
    " the reverse of model.parameters().",
    runs=f"ConvNet on {RANKS} ranks with bucket_cap_mb of {', '.join(f'{cap:g}' for cap in WAYS.values())}",
)
def bucketing() -> Result:
    """Send the same bytes in many, some, or one all-reduce; list the parameters of each bucket."""
    run = seen.run_quietly(Cluster(RANKS), train_in_buckets)
    registered = [name for name, _ in models.ConvNet().named_parameters()]
    size = seen.parameter_bytes(models.ConvNet())
    last = {name: run.trace.within(f"{name}, step {STEPS - 1}") for name in (*WAYS, FIRST)}
    sent = {name: seen.reductions(last[name]) for name in WAYS}
    counts = {name: len(asked) for name, asked in sent.items()}
    sizes = {name: seen.handed_bytes(asked) for name, asked in sent.items()}
    each, some, one = WAYS
    gradients = [run.results[rank][name] for rank in range(RANKS) for name in WAYS]
    checks = [
        Check(
            f"all three ways send the {size:,} B of the {len(registered)} parameters, a step and rank",
            "; ".join(f"{name}: {sizes[name]:,} B" for name in WAYS),
            all(found == size for found in sizes.values()),
        ),
        Check(
            f"in {len(registered)} all-reduces, in one, and in buckets in a number between",
            "; ".join(f"{name}: {counts[name]}" for name in WAYS),
            counts[each] == len(registered) > counts[some] > counts[one] == 1,
        ),
        Check(
            "the gradients are the same in every bit, on all ranks",
            f"{len(gradients)} results of {gradients[0].numel():,} numbers",
            all(torch.equal(gradients[0], other) for other in gradients),
        ),
    ]
    for name, when in ((FIRST, "as DDP first builds them"), (some, "as it rebuilds them after the first step")):
        table = seen.buckets(last[name])
        checks.append(
            Check(
                f"{when}, buckets hold the parameters in the reverse of model.parameters(), and go in this order",
                "; ".join(f"bucket {each.index}: {each.bytes:,} B: {', '.join(each.parameters)}" for each in table),
                is_reversed(table, registered) and [each.index for each in table] == list(range(len(table))),
            )
        )
    built = seen.buckets(last[some])
    names = [f"Bucket {each.index} of {len(built)}: {', '.join(each.parameters)}" for each in built]
    numbers = f"{counts[each]}, in {counts[some]} or in {counts[one]}"
    title = f"The same {size:,} B of gradients go in {numbers} all-reduces a step"
    return Result(tuple(checks), strips({name: last[name] for name in WAYS}, title=title, notes=names))


def strips(steps: dict[str, Trace], *, title: str, notes: list[str]) -> Axes:
    """Draw rank 0's backward pass for each setting: a tick per gradient, a bar per all-reduce."""
    labels = {name: f"{name}: {len(seen.reductions(step))}" for name, step in steps.items()}
    ax = canvas.new_axes(height_in=0.95 * len(steps), left_in=canvas.left_margin_in(labels.values()))
    canvas.describe(ax, *(f"{label} all-reduces." for label in labels.values()))
    for row, step in enumerate(steps.values()):
        mine = step.where(rank=0).events
        (around,) = (event for event in mine if isinstance(event, PhaseSpan) and event.phase == "backward")
        percent = 100 / ((around.end_ns or 0) - around.start_ns)
        ready = [(each.start_ns - around.start_ns) * percent for each in mine if isinstance(each, Gradient)]
        ax.vlines(ready, row + 0.05, row + 0.25, colors=INK, linewidth=1.2)
        ends = [each.ends[0] for each in seen.reductions(step)]
        high = 0.6 / len(ends)
        for place, end in enumerate(ends):
            begin, until = ((at - around.start_ns) * percent for at in (end.start_ns, end.end_ns or end.start_ns))
            top = row + 0.3 + high * (place + 0.5)
            ax.barh(top, until - begin, left=begin, height=0.85 * high, color=SERIES[place % len(SERIES)], gid="sent")
    canvas.draw_lanes(ax, [(row + 0.02, row + 0.95) for row in range(len(steps))])
    ax.set_ylim(len(steps), 0)
    ax.set_yticks([row + 0.6 for row in range(len(steps))], list(labels.values()), fontsize=TEXT_PT, color=INK)
    canvas.quiet(ax, "% of the backward pass; above: a tick for each gradient that is ready")
    return canvas.frame(ax, title=title, notes=notes, below_in=0.5)


def is_reversed(table: list[Bucket], registered: list[str]) -> bool:
    """Return True if all of a bucket was registered after all of the next one, throughout."""
    places = [[registered.index(name) for name in each.parameters] for each in table]
    return all(min(ours) > max(theirs) for ours, theirs in pairwise(places))


# The rebuild ----------------------------------------------------------------------------------------------------------

SMALL = 0.0158
"""A bucket for each of the larger layers of `Backwards`."""
REBUILD_STEPS = 4


class Backwards(nn.Module):
    """Its layers are registered in the opposite of the order in which they are used: DDP's first guess is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = nn.Linear(64, 10), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.last(self.middle(self.first(images.flatten(1)).relu()).relu())
        return logits


def train_backwards() -> None:
    """Train a few steps, each in a span."""
    batch = first_digits(25)
    model = under_ddp(Backwards, bucket_cap_mb=SMALL)
    for step in range(REBUILD_STEPS):
        with span(f"step {step}"):
            backward(model, batch)


@paper_claim(
    "DD10",
    "gradient order prediction",
    paper="section 6.2.1 (future work then)",
    says="If the order of gradients is not that of model.parameters() reversed, DDP could trace it in a backward pass"
    " and map parameters to buckets anew.",
    runs=f"a model that is registered backwards, {REBUILD_STEPS} steps on {RANKS} ranks",
)
def rebuild() -> Result:
    """Rebuild the buckets by the first step's order of gradients, agreed on in two broadcasts."""
    trace = Cluster(RANKS).run(train_backwards).trace
    steps = [trace.within(f"step {step}") for step in range(REBUILD_STEPS)]
    registered = [name for name, _ in Backwards().named_parameters()]
    agreed = [seen.called(step, seen.REBUILT) for step in steps]
    tables = [seen.buckets(step) for step in steps]
    came = seen.ready_parameters(steps[0], rank=0)
    rebuilt = [name for each in tables[1] for name in each.parameters]
    sizes = [each.given_bytes for each in agreed[1]]
    count = len(tables[1])
    checks = (
        Check(
            "the buckets are rebuilt once, in the forward pass of the second step, with two broadcasts of rank 0",
            f"broadcasts in steps 0 to {REBUILD_STEPS - 1}: {', '.join(str(len(each)) for each in agreed)}",
            [len(each) for each in agreed] == [0, 2, *[0] * (REBUILD_STEPS - 2)]
            and all(end.phase == "forward" for each in agreed[1] for end in each.ends)
            and all(each.op == "broadcast" for each in agreed[1]),
        ),
        Check(
            f"they hold an int32 for each of {len(registered)} parameters and one for the number of buckets, then an"
            f" int32 for each of {count} buckets",
            " and ".join(f"{size} B" for size in sizes),
            sizes == [4 * (len(registered) + 1), 4 * count],
        ),
        Check(
            "the new buckets hold the parameters in the order in which their gradients came in the first step",
            "; ".join(f"bucket {each.index}: {each.bytes:,} B: {', '.join(each.parameters)}" for each in tables[1]),
            rebuilt == came and all(tables[1][i].parameters == tables[-1][i].parameters for i in range(count)),
        ),
        Check(
            "here that is not the reverse of model.parameters(), which DDP starts from",
            f"registered: {', '.join(registered)}; came: {', '.join(came)}",
            came != registered[::-1] and not is_reversed(tables[1], registered),
        ),
    )
    return Result(checks, draw.buckets(trace))
