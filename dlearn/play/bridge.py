"""Python's end of a player's link to the same player on the page: an anywidget, whose script is `bridge.js`.

The widget lives as long as the kernel does and needs no output cell: what is shown, saved and exported is the player's
own HTML, which needs neither.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, SupportsIndex

from dlearn.errors import DlearnError, SetupError, optional


class LinkedSteps:
    """A player's step, the same here and on the page. Without a kernel and anywidget it is only remembered."""

    def __init__(self, name: str, last: int, *, step: int = 0) -> None:
        self._name, self._last, self._step = name, last, step
        self._callbacks: list[Callable[[int], object]] = []
        self._widget: Any = None
        self._unlinked = ""  # Why the page that was shown does not follow.

    @property
    def step(self) -> int:
        """Return how many steps have been shown. Set it: in JupyterLab with anywidget the page goes there."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if not isinstance(step, SupportsIndex) or not 0 <= step.__index__() <= self._last:
            raise DlearnError(
                f"this player has no step {step!r}: choose one from 0 (before the first message) to {self._last}"
            )
        self._warn_if_unlinked()
        self._move(step.__index__())
        if self._widget is not None:
            self._widget.state = self._step

    def on_step(self, callback: Callable[[int], object]) -> None:
        """Call `callback(step)` after each change of `step`, made here or on the page."""
        self._warn_if_unlinked()
        self._callbacks.append(callback)

    def _open(self) -> None:
        """Join the players of this name on the page, later ones too."""
        if self._widget is not None or not in_a_notebook():
            return
        try:
            self._widget = _player_widget(self._name)
        except SetupError as error:  # no anywidget: the page plays all the same
            self._unlinked = str(error)
            return
        self._widget.state = self._step
        self._widget.observe(lambda change: self._move(change.new), "state")

    def _warn_if_unlinked(self) -> None:
        if self._unlinked:
            warnings.warn(self._unlinked, stacklevel=3)
            self._unlinked = ""

    def _move(self, step: int) -> None:
        if step == self._step:
            return
        self._step = step
        for callback in self._callbacks:
            callback(step)


def in_a_notebook() -> bool:
    """Return whether a kernel runs this process, so that a page may be shown. A terminal's IPython has none."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


@cache
def _player_widget(name: str) -> Any:
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
