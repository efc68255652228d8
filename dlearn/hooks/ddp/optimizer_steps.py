"""Training steps, counted without the user's help: each time the optimizer has made one."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from dlearn.hooks import Undo
from dlearn.hooks.host import Host
from dlearn.hooks.private import untraced


def install(host: Host) -> Undo:
    """Where only some steps are recorded, tell `host` when the program's optimizer has made its n-th step.

    Of several optimizers, the first's that is still there: where each phase of a training has one of its own, the count
    goes on.
    """
    if host.options.steps is None:
        return lambda: None
    host.begin_step(0)
    numbers = itertools.count(1)
    counted: weakref.ref[Any] | None = None

    @untraced
    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal counted
        if counted is None or counted() is None:
            counted = weakref.ref(optimizer)
        if counted() is optimizer:
            host.begin_step(next(numbers))

    handle = register_optimizer_step_post_hook(stepped)
    return lambda: handle.remove()
