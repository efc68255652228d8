"""Training steps, counted without the user's help: each time the optimizer has made one."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from dlearn.hooks import Undo
from dlearn.hooks.compiler import untraced


def install(begin: Callable[[int], None]) -> Undo:
    """Call `begin(n)` when the program's optimizer has made its n-th step; of several, the first's that is still there.

    So where each phase of a training has an optimizer of its own, the count goes on.
    """
    numbers = itertools.count(1)
    counted: weakref.ref[Any] | None = None

    @untraced
    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal counted
        if counted is None or counted() is None:
            counted = weakref.ref(optimizer)
        if counted() is optimizer:
            begin(next(numbers))

    handle = register_optimizer_step_post_hook(stepped)
    return lambda: handle.remove()
