"""Training steps, counted without the user's help: each time the optimizer has made one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from dlearn.hooks import Undo
from dlearn.hooks.compiler import untraced


def install(begin: Callable[[int], None]) -> Undo:
    """Call `begin(n)` when the program's optimizer has made its n-th step; of several optimizers, the first's."""
    numbers = itertools.count(1)
    counted: list[int] = []

    @untraced
    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not counted:
            counted.append(id(optimizer))
        if counted == [id(optimizer)]:
            begin(next(numbers))

    handle = register_optimizer_step_post_hook(stepped)
    return lambda: handle.remove()
