"""Keep torch.compile from tracing into hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Neither this function nor what it calls is compiled; hooks run below compiled code, and are no part of it.

    The same as `torch.compiler.disable`, which would import torch._dynamo (seconds) in every job that we record.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
