"""DD18: what a hook is: every kind of them in one backward pass under DDP, and the graph that they hang on."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.autograd.graph import register_multi_grad_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from ddp_claims.verdicts import Check, Result, paper_claim
from dlearn import Cluster
from dlearn.draw import canvas
from dlearn.draw.palette import FAINT, INK, LANE, SERIES, TEXT_PT, plain, text_width

RANKS = 2
STEPS = 2
"""In the second one every parameter has a bucket of its own."""
ROW_IN, LABEL_PT = 0.34, 8.0

BEFORE_FORWARD, AFTER_FORWARD = "module: forward pre-hook", "module: forward hook"
BEFORE_BACKWARD, AFTER_BACKWARD = "module: full backward pre-hook", "module: full backward hook"
TENSOR = "tensor: hook"
BEFORE_NODE, AFTER_NODE = "AccumulateGrad node: pre-hook", "AccumulateGrad node: hook"
ACCUMULATED, ALL_GRADIENTS = "tensor: post-accumulate-grad hook", "tensors: multi-grad hook"
COMMUNICATION, ARRIVED = "DDP: communication hook", "all-reduce: callback of its future"
END = "backward pass: callback at its end"
BEFORE_STEP, AFTER_STEP = "optimizer: step pre-hook", "optimizer: step post-hook"
RETURNED = "(backward() returns)"
KINDS = (
    BEFORE_FORWARD, AFTER_FORWARD, BEFORE_BACKWARD, AFTER_BACKWARD, TENSOR, BEFORE_NODE, ACCUMULATED, COMMUNICATION,
    AFTER_NODE, ALL_GRADIENTS, ARRIVED, END, RETURNED, BEFORE_STEP, AFTER_STEP,
)  # fmt: skip
OF_A_PARAMETER = (TENSOR, BEFORE_NODE, ACCUMULATED, COMMUNICATION, AFTER_NODE)
"""In the order in which they fire, where DDP's own hook was set before ours."""
LOSS, LAYER = "loss", "2"
THE_LAYER = f"layer {LAYER}"
OF_DDP = (COMMUNICATION, AFTER_NODE, END)
"""Those that DDP sets, too, or has the user set."""


class Fired(NamedTuple):
    """One call of a hook."""

    kind: str
    what: str


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def hooked_step() -> tuple[list[Fired], list[str]]:
    """On a rank: a step with a hook of every kind; returns what fired, in order, and the names of the graph's nodes."""
    torch.manual_seed(0)
    net = network()
    model = DistributedDataParallel(net, bucket_cap_mb=1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fired: list[Fired] = []

    def note(kind: str, what: str = "") -> Callable[..., None]:
        return lambda *_: fired.append(Fired(kind, what))

    nodes = set_hooks(net, model, optimizer, note)
    for _ in range(STEPS):
        optimizer.zero_grad()
        fired.clear()
        loss = model(torch.randn(8, 64)).sum()
        loss.register_hook(note(TENSOR, LOSS))
        loss.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(note(END)))
        loss.backward()
        note(RETURNED)()
        optimizer.step()
    assert nodes  # A node lives as long as something refers to it, and so do its hooks.
    return fired, [node.name() for node in graph_of(loss.grad_fn)]


def set_hooks(
    net: nn.Module, model: DistributedDataParallel, optimizer: torch.optim.Optimizer, note: Callable[..., Any]
) -> list[Any]:
    """Set a hook of every kind that `note`s when it fires; return the AccumulateGrad nodes."""
    layer = net.get_submodule(LAYER)
    layer.register_forward_pre_hook(note(BEFORE_FORWARD, THE_LAYER))
    layer.register_forward_hook(note(AFTER_FORWARD, THE_LAYER))
    layer.register_full_backward_pre_hook(note(BEFORE_BACKWARD, THE_LAYER))
    layer.register_full_backward_hook(note(AFTER_BACKWARD, THE_LAYER))
    nodes = []
    for name, parameter in net.named_parameters():
        parameter.register_hook(note(TENSOR, name))  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(note(ACCUMULATED, name))  # type: ignore[no-untyped-call]
        node: Any = torch.autograd.graph.get_gradient_edge(parameter).node
        node.register_prehook(note(BEFORE_NODE, name))
        node.register_hook(note(AFTER_NODE, name))
        nodes.append(node)
    register_multi_grad_hook(list(net.parameters()), note(ALL_GRADIENTS))
    names = {id(parameter): name for name, parameter in net.named_parameters()}

    def average(_: object, bucket: GradBucket) -> Future[Tensor]:
        name = ", ".join(names[id(each)] for each in bucket.parameters())
        note(COMMUNICATION, name)()
        work = dist.all_reduce(bucket.buffer().div_(RANKS), async_op=True)
        assert work is not None

        def arrived(future: Future[list[Tensor]]) -> Tensor:
            note(ARRIVED, name)()
            return future.value()[0]

        future: Future[list[Tensor]] = work.get_future()
        return future.then(arrived)

    model.register_comm_hook(None, average)
    optimizer.register_step_pre_hook(note(BEFORE_STEP))
    optimizer.register_step_post_hook(note(AFTER_STEP))
    return nodes


def graph_of(end: Any) -> list[Any]:
    """Return the nodes that a backward pass from here visits."""
    found: dict[Any, None] = {}
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in found:
            found[node] = None
            waiting += [follower for follower, _ in node.next_functions]
    return list(found)


@paper_claim(
    "DD18",
    "hooks and the graph of the computation",
    paper="sections 2.2, 3.2 and 4.2",
    says="Autograd hooks tell DDP of every gradient: it sets one on each gradient accumulator, and sends a bucket when"
    " the last of its hooks has fired.",
    runs=f"one step with every kind of hook, on {RANKS} ranks, each parameter in a bucket of its own",
)
def every_hook() -> Result:
    """Test which hooks fire on rank 0, how often, and in which order."""
    fired, nodes = Cluster(RANKS).run(hooked_step).results[0]
    parameters = [name for name, _ in network().named_parameters()]
    count = len(parameters)
    times = Counter(each.kind for each in fired)
    expected = {kind: count if kind in (*OF_A_PARAMETER, ARRIVED) else 1 for kind in KINDS} | {TENSOR: count + 1}
    orders = {
        name: tuple(each.kind for each in fired if each.what == name and each.kind != ARRIVED) for name in parameters
    }
    begin = [place_of(fired, kind) for kind in (BEFORE_FORWARD, AFTER_FORWARD, TENSOR, BEFORE_BACKWARD, BEFORE_NODE)]
    end = [
        max(places(fired, AFTER_NODE)),
        *(place_of(fired, kind) for kind in (END, RETURNED, BEFORE_STEP, AFTER_STEP)),
    ]
    to_come = sum(place > place_of(fired, COMMUNICATION) for place in places(fired, ACCUMULATED))
    arrivals = [(name, places(fired, COMMUNICATION, name)[0], places(fired, ARRIVED, name)[0]) for name in parameters]
    leaves = Counter(name.rpartition("::")[2] for name in nodes)
    checks = (
        Check(
            f"every kind fires in one step: those of a parameter {count} times, the others once",
            "; ".join(f"{kind} {times[kind]}" for kind in KINDS) + f" (tensor: {count} parameters and the loss)",
            times == expected,
        ),
        Check(
            "of each parameter they fire in one order: " + ", ".join(OF_A_PARAMETER),
            f"so for {sum(each == OF_A_PARAMETER for each in orders.values())} of {count} parameters",
            all(each == OF_A_PARAMETER for each in orders.values()),
        ),
        Check(
            "forward hooks, then those of the backward pass, its callback, its return, the optimizer's",
            f"places in the order of {len(fired)} calls: {', '.join(map(str, [*begin, *end]))}",
            [*begin, *end] == sorted([*begin, *end]),
        ),
        Check(
            "DDP's communication hook is called inside the backward pass, while other gradients are still to come",
            f"at the first one {to_come} of {count} gradients are to come",
            to_come > 0 and max(places(fired, COMMUNICATION)) < place_of(fired, RETURNED),
        ),
        Check(
            "no bucket arrives before its hook has sent it, and all have arrived when backward() returns",
            "; ".join(f"{name}: sent at place {sent}, there at {there}" for name, sent, there in arrivals)
            + f"; backward() returns at {place_of(fired, RETURNED)}",
            all(sent < there < place_of(fired, RETURNED) for _, sent, there in arrivals),
        ),
        Check(
            "the graph of the computation ends in an AccumulateGrad node for each parameter",
            f"{len(nodes)} nodes: {', '.join(f'{number} {name}' for name, number in sorted(leaves.items()))}",
            leaves["AccumulateGrad"] == count,
        ),
    )
    conditions = f"order only; one step of rank 0 of {RANKS}"
    return Result(checks, picture(fired, to_come, count), conditions)


def places(fired: Sequence[Fired], kind: str, what: str | None = None) -> list[int]:
    return [place for place, each in enumerate(fired) if each.kind == kind and what in (None, each.what)]


def place_of(fired: Sequence[Fired], kind: str) -> int:
    """Return the index of the first one."""
    return places(fired, kind)[0]


class Label(NamedTuple):
    """Text over one mark, or, right-aligned at the last one, over several that stand too close for a text each."""

    text: str
    place: int
    alone: bool

    def ends(self, step_pt: float) -> tuple[float, float]:
        """Return its left and right end in points, on a screen, where each letter begins at a whole pixel."""
        width, at = 1.025 * text_width(self.text, size=LABEL_PT), self.place * step_pt
        return (at - width / 2, at + width / 2) if self.alone else (at - width, at)


def labels_of(fired: Sequence[Fired], marks: Sequence[int], step_pt: float) -> list[Label]:
    """Return the labels over the marks of a row, which are multiples of `step_pt` apart."""
    labels: list[Label] = []
    for mark in marks:
        label = Label(plain(fired[mark].what), mark, alone=True)
        while labels and labels[-1].ends(step_pt)[1] + 2 > label.ends(step_pt)[0]:
            label = Label(f"{labels.pop().text}, {label.text}", mark, alone=False)
        labels.append(label)
    return labels


def picture(fired: Sequence[Fired], to_come: int, count: int) -> Axes:
    """Draw a row for each kind, from left to right in the order of firing."""
    labels = [f"{kind} *" if kind in OF_DDP else kind for kind in KINDS]
    ax = canvas.new_axes(height_in=ROW_IN * len(KINDS), left_in=canvas.left_margin_in(labels))
    ax.set_xlim(-2, len(fired) + 0.5)
    ax.set_ylim(len(KINDS) - 0.4, -0.6)
    ax.axvspan(place_of(fired, TENSOR) - 0.5, place_of(fired, RETURNED) + 0.5, color=FAINT, alpha=0.12, linewidth=0)
    for row, kind in enumerate(KINDS):
        color = SERIES[0] if kind in (COMMUNICATION, ARRIVED) else INK
        ax.axhspan(row - 0.42, row + 0.42, color=LANE, linewidth=0, zorder=0)
        marks = places(fired, kind)
        ax.plot(marks, [row + 0.2] * len(marks), "|", markersize=7, markeredgewidth=1.6, color=color)
        for label in labels_of(fired, marks, canvas.points(ax, 1 / (len(fired) + 2.5), along="x")):
            ax.annotate(
                label.text, (label.place, row + 0.2), (0, 4), textcoords="offset points", va="bottom",
                ha="center" if label.alone else "right", fontsize=LABEL_PT, color=color, parse_math=False,
            )  # fmt: skip
    ax.set_yticks(range(len(KINDS)), labels, fontsize=TEXT_PT, color=INK)
    for kind, name in zip(KINDS, ax.get_yticklabels(), strict=True):
        name.set_color(SERIES[0] if kind in (COMMUNICATION, ARRIVED) else INK)
    canvas.quiet(ax, "order of the calls on rank 0")
    return canvas.frame(
        ax,
        title=f"{len(KINDS) - 1} kinds of hooks; the first bucket goes when {to_come} of {count} gradients are to come",
        notes=["Shaded: the backward pass. Blue: a bucket is sent, and arrives. * set by DDP itself, too, or for it."],
    )
