"""Explore a trace: controls for the drawing, and for the part of the trace that it is drawn of.

`Choice` says what the controls do, in words of the library; `Explorer` puts controls and a picture around it.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dlearn import draw
from dlearn.analysis import measured_traffic, operations, predicted_traffic, traffic
from dlearn.analysis.findings import size_text
from dlearn.draw.still import Still, still
from dlearn.draw.traffic import Bytes
from dlearn.errors import DlearnError, optional
from dlearn.shown import count_text
from dlearn.trace.event import AutogradNode, Bucket, Counters, Event, Stretch
from dlearn.trace.selecting import FAMILIES, family_of
from dlearn.trace.store import printable
from dlearn.trace.trace import Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALL = 0
"""Where a list stands that leaves nothing out. (A list at None shows nothing, and "" may be the name of a span.)"""
MOST_SPANS = 500
"""Names of spans in the list; of more, the first."""


class Drawing(NamedTuple):
    """A drawing, and of which events it tells: without one of these in the trace, it is not offered."""

    draw: Callable[[Trace], Axes]
    tells_of: type[Event] = Event


DRAWINGS = {
    "timeline": Drawing(draw.timeline),
    "sequence": Drawing(draw.sequence),
    "traffic": Drawing(draw.traffic),
    "traffic_graph": Drawing(draw.traffic_graph),
    "reconcile": Drawing(draw.reconcile),
    "buckets": Drawing(draw.buckets, Bucket),
    "breakdown": Drawing(draw.breakdown, Stretch),
    "autograd": Drawing(draw.autograd, AutogradNode),
}
BYTES: dict[str, Bytes] = {
    "payload": "payload",
    "on the wire, predicted": "predicted",
    "on the wire, measured": "measured",
}


@dataclass(frozen=True)
class Choice:
    """What is drawn, and of which part of the trace; None is all. `bytes` are those of the traffic matrix.

    `window_ms` is from when, and before when, in ms from the first event of the whole trace.
    """

    drawing: str = "timeline"
    bytes: Bytes = "payload"
    kind: str | None = None
    op: str | None = None
    phase: str | None = None
    span: str | None = None
    ranks: tuple[int, ...] | None = None
    window_ms: tuple[float, float | None] | None = None

    def part(self, trace: Trace) -> Trace:
        """What is selected of the trace."""
        part = trace if self.span is None else trace.within(self.span)
        wanted: dict[str, Any] = {"kind": self.kind, "op": self.op, "phase": self.phase, "rank": self.ranks}
        if any(each is not None for each in wanted.values()):
            part = part.where(**wanted)
        return part if self.window_ms is None else part.between(*self.window_ms)

    def draw(self, part: Trace) -> Axes:
        """The drawing of this part, on a figure of its own."""
        if self.drawing == "traffic":
            return draw.traffic(part, bytes=self.bytes)
        return DRAWINGS[self.drawing].draw(part)


class Explorer:
    """`widget` is what a notebook shows, `controls` are the ipywidgets in it, by the names of a `Choice`'s fields.

    `choice` is where the controls stand, and moves them: `explorer.choice = Choice("traffic", op="all_reduce")`.
    """

    def __init__(self, trace: Trace) -> None:
        self.whole = trace
        # What was asked for once is there at once when a control is turned back.
        self._part: Callable[[Choice], Trace] = lru_cache(maxsize=8)(lambda choice: choice.part(trace))
        self._still: Callable[[Choice], Still] = lru_cache(maxsize=64)(self._picture)
        self._moving = False
        self.controls = controls_of(trace)
        self._window = self.controls["window_ms"].value
        self._page = _Page(self.controls)
        self.widget = self._page.widget
        for control in self.controls.values():
            control.observe(lambda _: self._turned(), names="value")
        self.widget.observe(lambda change: self.close() if change["new"] is None else None, names="comm")
        self._turned()

    @property
    def choice(self) -> Choice:
        """Where the controls stand. DlearnError for one that they cannot stand at."""
        values = {name: control.value for name, control in self.controls.items()}
        values = {name: None if value == ALL else value for name, value in values.items()}
        everybody = tuple(rank for _, rank in self.controls["ranks"].options)
        values["ranks"] = None if values["ranks"] == everybody else values["ranks"]
        (start, end), (least, most) = values["window_ms"], self._window
        ends_ms = None if end >= most else end  # Its right end is the end of the trace, with what begins just there.
        values["window_ms"] = None if start <= least and ends_ms is None else (start, ends_ms)
        return Choice(**values)

    @choice.setter
    def choice(self, choice: Choice) -> None:
        named = {field.name: getattr(choice, field.name) for field in fields(choice)}
        values = {name: ALL if value is None else value for name, value in named.items()}
        everybody = tuple(rank for _, rank in self.controls["ranks"].options)
        least, most = self._window
        values["ranks"] = everybody if choice.ranks is None else tuple(choice.ranks)
        start, end = choice.window_ms or (least, None)
        values["window_ms"] = (start, most if end is None else end)
        for name, value in values.items():
            _check(name, value, self.controls[name])
        self._moving = True
        try:
            for name, value in values.items():
                self.controls[name].value = value
        finally:
            self._moving = False
        self._turned()

    @property
    def trace(self) -> Trace:
        """What is selected."""
        return self._part(_selection(self.choice))

    @property
    def axes(self) -> Axes:
        """The picture, drawn anew: to be changed, or saved with `draw.save`."""
        return self.choice.draw(self.trace)

    @property
    def sentence(self) -> str:
        """What is selected, in words."""
        return said_of(self.choice, self.trace, self.whole)

    def _picture(self, choice: Choice) -> Still:
        return still(lambda: choice.draw(self._part(_selection(choice))))

    def close(self) -> None:
        """Take the controls from the page."""
        self._page.close()

    def _turned(self) -> None:
        """Draw what the controls ask for; what goes wrong is said in place of the picture."""
        if self._moving:
            return
        choice = self.choice
        self.controls["bytes"].disabled = choice.drawing != "traffic"
        try:
            self._page.show(self._still(choice), self.sentence)
        except DlearnError as error:
            self._page.say(str(error))

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The controls where there is a kernel; else the picture as it stood when this was shown."""
        bundle: dict[str, Any] = self.widget._repr_mimebundle_()
        text = {"text/plain": f"{self._page.title}\n{self.sentence}"}
        if not self._page.png:
            return {**bundle, **text}, {}
        return {**bundle, **text, "image/png": self._page.png}, {"image/png": {"alt": self._page.title}}


def explore(trace: Trace) -> Explorer:
    """Controls for a trace: which drawing; of which kind, op, phase, span, ranks, window of time; which bytes.

    Each turn draws anew, and says how much is selected. It needs ipywidgets; all controls can be reached and
    turned by keyboard.
    """
    optional("ipywidgets", needed_by="explore")
    return Explorer(trace)


def _selection(choice: Choice) -> Choice:
    """The same part of the trace, whatever is drawn of it."""
    own = {field.name: getattr(choice, field.name) for field in fields(choice)}
    return Choice(**{**own, "drawing": "timeline", "bytes": "payload"})


# In words -------------------------------------------------------------------------------------------------------------


def said_of(choice: Choice, part: Trace, whole: Trace) -> str:
    """ "3 of 12 operations, 18 of 96 messages, 1.2 MB of payload." """
    if not part.events and not operations(part):
        return "Nothing is selected: no event of this trace is all of that. Set a control back to all."
    found, everything = traffic(part), traffic(whole)
    counts = [
        f"{len(operations(part)):,} of {count_text(len(operations(whole)), 'operation')}",
        f"{sum(found.message_count.values()):,} of {count_text(sum(everything.message_count.values()), 'message')}",
        _bytes_text(choice, part),
    ]
    said = [", ".join(counts) + "."]
    if found.unexplained:
        said.append(f"The messages of {count_text(found.unexplained, 'operation')} are not known.")
    if choice.ranks is not None and operations(part):
        said.append("An operation stays whole, with all the ranks that take part in it.")
    if len(whole.spans) > MOST_SPANS:
        said.append(f"The list has the first {MOST_SPANS:,} of {len(whole.spans):,} spans.")
    return " ".join(said)


def _bytes_text(choice: Choice, part: Trace) -> str:
    if choice.drawing != "traffic" or choice.bytes == "payload":
        return f"{size_text(traffic(part).total_bytes)} of payload"
    if choice.bytes == "predicted":
        return f"{size_text(predicted_traffic(part).total_bytes)} predicted on the wire"
    measured = measured_traffic(part)
    return "not measured" if measured.not_measured else f"{size_text(measured.total_bytes)} measured on the wire"


# Controls -------------------------------------------------------------------------------------------------------------


def controls_of(trace: Trace) -> dict[str, Any]:
    """A control for each field of a `Choice`, with what there is to choose in this trace."""
    import ipywidgets

    families = {family_of(event) for event in trace.events} - {"counters"}
    drawings = [name for name, each in DRAWINGS.items() if any(isinstance(e, each.tells_of) for e in trace.events)]
    ranks = [(printable(trace.label(rank)), rank) for rank in trace.ranks]
    left_ms, right_ms = _window_ms(trace)
    return {
        "drawing": ipywidgets.Dropdown(options=drawings or ["timeline"], description="Drawing", style=_STYLE),
        "bytes": ipywidgets.Dropdown(options=list(BYTES.items()), description="Bytes", style=_STYLE),
        "kind": _dropdown("Kind", [kind for kind in FAMILIES if kind in families]),
        "op": _dropdown("Operation", sorted({str(event.op) for event in trace.events if hasattr(event, "op")})),
        "phase": _dropdown("Phase", trace.phases),
        "span": _dropdown("Span", trace.spans[:MOST_SPANS]),
        "ranks": ipywidgets.SelectMultiple(
            options=ranks, value=trace.ranks, description="Ranks", rows=min(4, max(2, len(ranks))), style=_STYLE
        ),
        "window_ms": ipywidgets.FloatRangeSlider(
            min=left_ms, max=right_ms, value=(left_ms, right_ms), step=(right_ms - left_ms) / 1000,
            description="Began within (ms)", readout_format=".2f" if right_ms > 10 else ".4f", continuous_update=False,
            style=_STYLE, layout=ipywidgets.Layout(width="auto", max_width="100%"),
        ),
    }  # fmt: skip


_STYLE = {"description_width": "initial"}


def _dropdown(description: str, names: Any) -> Any:
    import ipywidgets

    options = [("all", ALL), *((printable(name), name) for name in names)]
    return ipywidgets.Dropdown(
        options=options, value=ALL, description=description, disabled=len(options) < 2, style=_STYLE
    )


def _window_ms(trace: Trace) -> tuple[float, float]:
    """When the first and the last event began that can be seen, in ms from the first event of the whole trace."""
    begins = [event.start_ns for event in trace.events if not isinstance(event, Counters)]
    left, right = (edge(begins, default=trace.first_ns) - trace.first_ns for edge in (min, max))
    return left / 1e6, max(right, left + 1000) / 1e6


def _check(name: str, value: Any, control: Any) -> None:
    """DlearnError for what a control cannot stand at."""
    if name == "window_ms":
        start, end = value
        if not control.min <= start <= end <= control.max:
            raise DlearnError(f"a window lies between {control.min:g} ms and {control.max:g} ms here, not {value}.")
        return
    options = [option[1] if isinstance(option, tuple) else option for option in control.options]
    names = options[1:] if ALL in options and name != "ranks" else options
    for each in value if name == "ranks" else (value,):
        if each not in options:
            known = ", ".join(map(str, names[:12])) + (", ..." if len(names) > 12 else "")
            raise DlearnError(f"{name} is one of {known} in this trace, not {each!r}.")


class _Page:
    """The controls above, what is selected and the picture below."""

    def __init__(self, controls: dict[str, Any]) -> None:
        import ipywidgets

        self.title = ""
        self.png = ""
        self._said, self._picture = ipywidgets.HTML(), ipywidgets.HTML()
        wrapped = ipywidgets.Layout(flex_flow="row wrap")
        *chosen, window = controls.values()
        rows = [ipywidgets.Box(chosen, layout=wrapped), window]
        self.widget = ipywidgets.VBox([*rows, self._picture, self._said])
        self._widgets = [*controls.values(), rows[0], self._said, self._picture, self.widget]

    def show(self, picture: Still, sentence: str) -> None:
        self.title, self.png = picture.title, base64.b64encode(picture.png).decode()
        alt = html.escape(printable(picture.title))
        self._picture.value = (
            f'<img alt="{alt}" style="display:block;max-width:100%" src="data:image/png;base64,{self.png}">'
        )
        self._said.value = f'<p role="status">{html.escape(printable(sentence))}</p>'

    def say(self, sentence: str) -> None:
        """In place of the picture."""
        self.title, self.png = sentence, ""
        self._picture.value = ""
        self._said.value = f'<p role="status">{html.escape(printable(sentence))}</p>'

    def close(self) -> None:
        for widget in self._widgets:
            for each in (getattr(widget, "style", None), widget.layout, widget):
                if each is not None:
                    each.close()
