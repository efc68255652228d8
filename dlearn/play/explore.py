"""Explore a trace: controls for the drawing, and for the part of the trace that it is drawn of."""

from __future__ import annotations

import base64
import html
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from dlearn import draw
from dlearn.analysis import operations, traffic
from dlearn.analysis.findings import size_text
from dlearn.draw.save import png_of
from dlearn.errors import DlearnError, optional
from dlearn.shown import count_text
from dlearn.trace.event import AutogradNode, Bucket, Event, Stretch
from dlearn.trace.selecting import FAMILIES, family_of
from dlearn.trace.store import printable
from dlearn.trace.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALL = 0
"""The value of a list that leaves nothing out: ipywidgets shows nothing for None, and "" may be a span's name."""
MOST_SPANS = 500
"""Names of spans in the list; of more, the first."""

DRAWINGS: dict[str, tuple[Callable[[Trace], Axes], type[Event]]] = {
    "timeline": (draw.timeline, Event),
    "sequence": (draw.sequence, Event),
    "traffic": (draw.traffic, Event),
    "traffic, predicted": (partial(draw.traffic, bytes="predicted"), Event),
    "traffic, measured": (partial(draw.traffic, bytes="measured"), Event),
    "traffic_graph": (draw.traffic_graph, Event),
    "reconcile": (draw.reconcile, Event),
    "buckets": (draw.buckets, Bucket),
    "breakdown": (draw.breakdown, Stretch),
    "autograd": (draw.autograd, AutogradNode),
}
"""Each with the kind of event that it needs: without one in the trace it is not offered."""


class Explorer:
    """Show `controls` above a picture of what they select. From Python, set a control's `value`."""

    def __init__(self, trace: Trace) -> None:
        import ipywidgets

        self.whole = trace
        self.controls = controls_of(trace)
        self._page = ipywidgets.HTML()
        wrapped = ipywidgets.Layout(flex_flow="row wrap")
        above = ipywidgets.Box([*self.controls.values()], layout=wrapped)
        self.widget = ipywidgets.VBox([above, self._page])
        for control in self.controls.values():
            control.observe(lambda _: self._redraw(), names="value")
        self._redraw()

    @property
    def trace(self) -> Trace:
        """The selected part of the trace."""
        chosen = {name: control.value for name, control in self.controls.items()}
        part = self.whole if chosen["span"] == ALL else self.whole.within(chosen["span"])
        wanted = {name: chosen[name] for name in ("kind", "op", "phase") if chosen[name] != ALL}
        if chosen["ranks"] != self.whole.ranks:
            wanted["rank"] = chosen["ranks"]
        part = part.where(**wanted) if wanted else part
        start_ms, end_ms = chosen["window_ms"]
        last_ms = self.controls["window_ms"].max
        if (start_ms, end_ms) == (0, last_ms):
            return part
        return part.between(start_ms, None if end_ms == last_ms else end_ms)

    @property
    def axes(self) -> Axes:
        """The picture, drawn anew: to be changed, or saved with `draw.save`."""
        draw_it, _ = DRAWINGS[self.controls["drawing"].value]
        return draw_it(self.trace)

    @property
    def sentence(self) -> str:
        """How much is selected: "3 of 12 operations, 18 of 96 messages, 1.2 MB of payload." """
        part = self.trace
        if not part.events and not operations(part):
            return "Nothing is selected: no event of this trace is all of that. Set a control back to all."
        found, everything = traffic(part), sum(traffic(self.whole).message_count.values())
        told = (
            f"{len(operations(part)):,} of {count_text(len(operations(self.whole)), 'operation')}, "
            f"{sum(found.message_count.values()):,} of {count_text(everything, 'message')}, "
            f"{size_text(found.total_bytes)} of payload."
        )
        if found.unexplained:
            told += f" The messages of {count_text(found.unexplained, 'operation')} are not known."
        return told

    def _redraw(self) -> None:
        """Show what the controls ask for; an error's sentence stands in place of the picture."""
        image = ""
        try:
            (finding, content), told = png_of(lambda: self.axes), self.sentence
            png = base64.b64encode(content).decode()
            image = f'<img alt="{_text(finding)}" style="max-width:100%" src="data:image/png;base64,{png}">'
        except DlearnError as error:
            told = str(error)
        self._page.value = f'{image}<p role="status">{_text(told)}</p>'

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        shown: dict[str, Any] = self.widget._repr_mimebundle_()
        return {**shown, "text/plain": self.sentence}


def explore(trace: Trace) -> Explorer:
    """Controls for a trace: which drawing; of which kind, op, phase, span, ranks, window of time.

    Each change draws anew, and says how much is selected. It needs ipywidgets; all controls can be reached and
    changed by keyboard.
    """
    optional("ipywidgets", needed_by="explore")
    return Explorer(trace)


def controls_of(trace: Trace) -> dict[str, Any]:
    """The widgets by name, with what there is to choose in this trace."""
    import ipywidgets

    kinds = {type(event) for event in trace.events}
    drawings = [name for name, (_, needs) in DRAWINGS.items() if any(issubclass(kind, needs) for kind in kinds)]
    families = {family_of(event) for event in trace.events} - {"counters"}
    ranks = [(printable(trace.label(rank)), rank) for rank in trace.ranks]
    last_ns = max((event.start_ns for event in trace.events), default=0)
    last_ms = max(last_ns - trace.first_ns, 1000) / 1e6
    return {
        "drawing": ipywidgets.Dropdown(options=drawings or ["timeline"], description="Drawing"),
        "kind": _dropdown("Kind", sorted(families, key=_place_of_family)),
        "op": _dropdown("Operation", sorted({str(event.op) for event in trace.events if hasattr(event, "op")})),
        "phase": _dropdown("Phase", trace.phases),
        "span": _dropdown("Span", trace.spans[:MOST_SPANS]),
        "ranks": ipywidgets.SelectMultiple(options=ranks, value=trace.ranks, description="Ranks", rows=3),
        "window_ms": ipywidgets.FloatRangeSlider(
            min=0, max=last_ms, value=(0, last_ms), step=last_ms / 1000, description="Began (ms)",
            readout_format=".2f" if last_ms > 10 else ".4f", continuous_update=False,
        ),
    }  # fmt: skip


def _place_of_family(family: str) -> tuple[int, str]:
    """In dlearn's own order; those of other Sources follow."""
    return FAMILIES.index(family) if family in FAMILIES else len(FAMILIES), family


def _dropdown(description: str, names: Iterable[str]) -> Any:
    import ipywidgets

    options = [("all", ALL), *((printable(name), name) for name in names)]
    return ipywidgets.Dropdown(options=options, value=ALL, description=description, disabled=len(options) < 2)


def _text(words: str) -> str:
    return html.escape(printable(words))
