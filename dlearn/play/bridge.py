"""A player in Python leads and follows the same player on the page, through an anywidget (`bridge.js`).

The widget lives as long as the kernel does and has no place in the notebook: what is shown, saved and exported is the
player's own HTML, which needs neither.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, SupportsIndex

from dlearn.errors import DlearnError, SetupError, optional


class Bridge:
    """The step at which a player stands. Without a kernel and anywidget it is only remembered."""

    def __init__(self, name: str, last: int, *, step: int = 0) -> None:
        self._name, self._last = name, last
        self._step = step
        self._callbacks: list[Callable[[int], object]] = []
        self._widget: Any = None
        self._alone = ""  # why the page that was shown does not follow

    @property
    def step(self) -> int:
        """0: nothing is sent yet."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        if not isinstance(step, SupportsIndex) or not 0 <= step.__index__() <= self._last:
            raise DlearnError(
                f"this player has no step {step!r}: choose one from 0 (before the first message) to {self._last}"
            )
        self._warn_if_alone()
        self._move(step.__index__())
        if self._widget is not None:
            self._widget.step = self._step

    def on_step(self, callback: Callable[[int], object]) -> None:
        """Call `callback(step)` whenever the step has changed."""
        self._warn_if_alone()
        self._callbacks.append(callback)

    def open(self) -> None:
        """Join the players of this name on the page, those that come later, too."""
        if self._widget is not None or not _in_a_notebook():
            return
        try:
            self._widget = _widget(self._name)
        except SetupError as error:  # no anywidget: the page plays all the same
            self._alone = str(error)
            return
        self._widget.step = self._step
        self._widget.observe(lambda change: self._move(change.new), "step")

    def _warn_if_alone(self) -> None:
        if self._alone:
            warnings.warn(self._alone, stacklevel=4)
            self._alone = ""

    def _move(self, step: int) -> None:
        if step == self._step:
            return
        self._step = step
        for callback in self._callbacks:
            callback(step)


def _in_a_notebook() -> bool:
    """Whether a kernel runs us, so that a page may be shown. A terminal's IPython has none."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


@cache
def _widget(name: str) -> Any:
    """The widget of all players of this name: those of a cell that was run again move together."""
    anywidget = optional("anywidget", needed_by="a page that follows Python, and is followed,")
    import traitlets

    class BridgeWidget(anywidget.AnyWidget):  # type: ignore[misc, name-defined]
        _esm = (files("dlearn.play") / "bridge.js").read_text(encoding="utf-8")
        player = traitlets.Unicode().tag(sync=True)
        step = traitlets.Int().tag(sync=True)

    return BridgeWidget(player=name)
