"""Turn the knobs: batch, channels and image size on sliders, and real ranks that send what they then have to send.

`Bytes` holds the ranks and asks them; `knobs` puts sliders and a picture around it.
"""

from __future__ import annotations

import html
import time
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from dlearn.analysis import iteration, reconcile
from dlearn.cluster import Cluster
from dlearn.draw import canvas
from dlearn.draw.palette import COUNTED, INK, LINES, TEXT_PT, look, text_width
from dlearn.draw.save import closed_after, figure_of, html_of
from dlearn.errors import DlearnError, SetupError, optional
from dlearn.lessons import split
from dlearn.lessons.split import Size
from dlearn.shown import size_text
from dlearn.trace import Trace

if TYPE_CHECKING:
    from ipywidgets import SelectionSlider, VBox

CHOICES = {"B": (1, 2, 4, 8, 16, 32, 64), "C": (1, 2, 4, 8, 16), "H": (4, 8, 16, 32), "W": (4, 8, 16, 32)}
MEANINGS = {"B": "B: batch", "C": "C: channels", "H": "H: height", "W": "W: width"}


class Answer(NamedTuple):
    """Bytes of one step between two ranks, both directions together: (predicted, measured) of DDP and of RPC.

    Measured is what the kernel counted, less what the recorder added. `traces` are those of both runs.
    """

    size: Size
    ddp: tuple[int, int]
    rpc: tuple[int, int]
    traces: tuple[Trace, Trace]


class Bytes:
    """Two ranks that stay, and train one model in two ways for whatever size they are asked."""

    def __init__(self) -> None:
        stack, cluster = ExitStack(), Cluster(["stage0", "stage1"], rpc=True, measure="phase")
        self._cluster = stack.enter_context(cluster)
        self.close = weakref.finalize(self, stack.close)
        """Ends the ranks; so do the end of this object and of the notebook."""

    def ask(self, size: Size) -> Answer:
        """Train for a few steps, under DDP and then cut in two, and count."""
        if not self.close.alive:
            raise DlearnError("these knobs are closed, and their ranks have ended: make new ones with knobs().")
        ddp = self._cluster.run(split.data_parallel, size, timeout=60).trace
        rpc = self._cluster.run({"stage0": split.model_parallel}, size, timeout=60).trace
        for_ddp, for_rpc = split.predicted(size)
        return Answer(size, (for_ddp, _step_bytes(ddp)), (for_rpc, _iteration_bytes(rpc)), (ddp, rpc))


def _step_bytes(trace: Trace) -> int:
    """Return the bytes that all ranks wrote in the last step."""
    parts = [part for part in reconcile(trace).parts if part.what == f"step {split.STEPS}"]
    measured = _counted(parts[-1].measured_bytes if parts else None)
    return measured - parts[-1].observer_bytes


def _iteration_bytes(trace: Trace) -> int:
    """Return the bytes to and from the driver in the last iteration."""
    return sum(_counted(phase.measured_bytes) - phase.observer_bytes for phase in iteration(trace).phases)


def _counted(size: int | None) -> int:
    if size is None:
        raise SetupError("the kernel's counters cannot be read here: nothing is measured. Linux has them.")
    return size


# Sliders --------------------------------------------------------------------------------------------------------------


class Knobs:
    """`widget` is what a notebook shows; `answer` what the ranks said last, `seconds` how long that took, picture too.

    The ranks end with `close()` or that of the widget, with the last reference to this object, or with the notebook.
    """

    def __init__(self, size: Size) -> None:
        import ipywidgets

        self.bytes = Bytes()
        # As many beside each other as there is room for: on a narrow page one.
        wide = ipywidgets.Layout(flex="1 1 320px", min_width="280px", max_width="480px", width="auto")
        self.sliders: dict[str, SelectionSlider] = {
            name: ipywidgets.SelectionSlider(
                options=choices,
                value=getattr(size, name),
                description=MEANINGS[name],
                continuous_update=False,
                layout=wide,
            )
            for name, choices in CHOICES.items()
        }
        self.picture, self.said = ipywidgets.HTML(), ipywidgets.HTML()
        wrapped = ipywidgets.Layout(flex_flow="row wrap")
        above = ipywidgets.Box([*self.sliders.values()], layout=wrapped)
        self.widget: VBox = ipywidgets.VBox([above, self.said, self.picture])
        # The sliders live as long as the page; what is asked of a Knobs that is gone does nothing.
        mine = weakref.WeakMethod(self.turn)

        def on_change(_: object) -> None:
            if (turn := mine()) is not None:
                turn()

        for slider in self.sliders.values():
            slider.observe(on_change, names="value")
        end = self.bytes.close
        self.widget.observe(lambda change: end() if change["new"] is None else None, names="comm")
        self._ask_and_draw()

    def turn(self) -> None:
        """Run the job for where the sliders stand now, and draw; what goes wrong is said beside the sliders."""
        try:
            self._ask_and_draw()
        except DlearnError as error:
            self.said.value = f"<pre>{html.escape(str(error))}</pre>"

    def _ask_and_draw(self) -> None:
        start = time.monotonic()
        self.said.value = "Both jobs run again: the picture is still that of the sliders before."
        size = Size(**{name: slider.value for name, slider in self.sliders.items()})
        self.answer = self.bytes.ask(size)
        self.bars = bars_of(self.answer)
        with closed_after():
            self.picture.value = html_of(figure_of(byte_bars(self.bars)))
        self.seconds = time.monotonic() - start
        self.said.value = html.escape(f"Both jobs ran again, and were counted, in {self.seconds:.2f} s.")

    def close(self) -> None:
        """End the ranks, and take the sliders from the page."""
        self.bytes.close()
        self.widget.close()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        """Show the sliders where there is a kernel, else the picture at the time of showing."""
        bundle: dict[str, Any] = self.widget._repr_mimebundle_()
        return {**bundle, "text/html": self.picture.value, "text/plain": self.bars.title}


def knobs(*, B: int = 8, C: int = 8, H: int = 16, W: int = 16) -> Knobs:
    """Show sliders for batch, channels and image; two ranks train again at each change.

    The picture shows the bytes of a step with DDP, and over RPC: predicted, and as the kernel
    counted them. It needs ipywidgets. Arrow keys move a slider that has the focus.
    """
    for name, value in (("B", B), ("C", C), ("H", H), ("W", W)):
        if value not in CHOICES[name]:
            raise DlearnError(f"{name} is one of {', '.join(map(str, CHOICES[name]))} on this slider, not {value!r}.")
    optional("ipywidgets", needed_by="knobs")
    return Knobs(Size(B, C, H, W))


# The picture ----------------------------------------------------------------------------------------------------------

WAYS = {"DDP (2 P)": look("all_reduce"), "split over RPC (2 · B · 4 C H W)": look("send")}
_ROW_IN = 0.3


class Bars(NamedTuple):
    """Bytes of one step by each of `WAYS`: predicted, and counted by the kernel."""

    title: str
    predicted: tuple[int, ...]
    measured: tuple[int, ...]
    note: str


def bars_of(answer: Answer) -> Bars:
    """Return the bars of the picture; the title says which way sends more."""
    size, (ddp, rpc) = answer.size, (answer.ddp[1], answer.rpc[1])
    less, more = sorted((ddp, rpc))
    who = "DDP" if ddp > rpc else "the split model"
    finding = "both send as much" if less == more else f"{who} sends {more / less:,.1f} times as much"
    return Bars(
        title=f"B = {size.B}, C = {size.C}, {size.H}×{size.W} pixels: {finding}",
        predicted=(answer.ddp[0], answer.rpc[0]),
        measured=(ddp, rpc),
        note=f"Bytes of one step, both directions. Both send as much at B = {split.break_even(size):,.1f}, in theory.",
    )


def byte_bars(bars: Bars) -> Axes:
    """Draw two bars for each way, with their bytes at the end."""
    rows = 3 * len(WAYS)
    ax = canvas.new_axes(height_in=rows * _ROW_IN, left_in=0.15)
    sizes = list(zip(WAYS, bars.predicted, bars.measured, strict=True))
    canvas.describe(ax, *(f"{way}: predicted {_bytes(one)}, counted {_bytes(other)}." for way, one, other in sizes))
    widest = max(text_width(_bytes(size), size=TEXT_PT) for size in (*bars.predicted, *bars.measured)) + 12
    most = max(*bars.predicted, *bars.measured, 1)
    ax.set_xlim(0, most / (1 - widest / canvas.points(ax, 1.0, along="x")))
    ax.set_ylim(rows, 0)
    for top, (way, predicted, measured) in zip(range(0, rows, 3), sizes, strict=True):
        ax.annotate(
            way, (0, top + 0.92), (0, 0), textcoords="offset points", va="bottom", fontsize=TEXT_PT, fontweight="bold",
            color=INK, parse_math=False, annotation_clip=False,
        )  # fmt: skip
        _bar(ax, top + 1, predicted, WAYS[way].pale, LINES["derived"], f"predicted {way}")
        _bar(ax, top + 2, measured, WAYS[way].color, "solid", f"measured {way}")
    ax.set_axis_off()
    handles = [
        Patch(facecolor="white", edgecolor=INK, linestyle=LINES["derived"], label="predicted"),
        Patch(facecolor=COUNTED, edgecolor=INK, label="counted by the kernel, framing too"),
    ]
    return canvas.frame(ax, title=bars.title, legend=handles, notes=[bars.note], below_in=0.08)


def _bar(ax: Axes, top: float, size: int, color: Any, line: Any, gid: str) -> None:
    ax.barh(top + 0.45, size, height=0.8, color=color, edgecolor=INK, linewidth=1.0, linestyle=line, gid=gid)
    ax.annotate(
        _bytes(size), (size, top + 0.45), (5, 0), textcoords="offset points", va="center_baseline",
        fontsize=TEXT_PT, color=INK, annotation_clip=False,
    )  # fmt: skip


def _bytes(size: int) -> str:
    """Format as "287,696 B" below a hundred million, else with three digits."""
    return f"{size:,} B" if size < 10**8 else size_text(size)
