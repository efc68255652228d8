"""Python's end of a page's link to the kernel: an anywidget, whose script is `bridge.js`.

The widget lives as long as the kernel does and needs no output cell: what is shown, saved and exported is the page's
own HTML, which needs neither.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from dlearn.errors import optional


@cache
def player_widget(name: str) -> Any:
    """Return the widget of all players of this name: those of a cell that was run again move together."""
    return widget(name, 0, needed_by="a page that follows Python, and is followed,")


def widget(name: str, state: Any, *, needed_by: str) -> Any:
    """Return a widget that shares its `state` with the pages of this name. SetupError without anywidget."""
    anywidget = optional("anywidget", needed_by=needed_by)
    import traitlets

    class BridgeWidget(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        _esm = (files("dlearn.play") / "bridge.js").read_text(encoding="utf-8")
        name = traitlets.Unicode().tag(sync=True)
        state = traitlets.Any().tag(sync=True)

    return BridgeWidget(name=name, state=state)
