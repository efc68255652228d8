"""Ranges of the program for torch's profiler, as spans."""

import os
import sys
from itertools import chain
from threading import get_ident
from traceback import walk_stack

import torch
from torch.autograd.profiler import record_function

from dlearn.hooks import Undo
from dlearn.hooks.host import Host
from dlearn.hooks.patches import Patches

_TORCH, _HOOKS = (os.path.join(os.path.dirname(file), "") for file in (torch.__file__, __file__))


def install(host: Host) -> Undo:
    """Report each range that the program opens, on any thread, until undone."""
    opened: dict[tuple[int, int], list[int]] = {}
    """A decorator's range is one object, in all its calls and threads."""

    def made(_: None, range_: record_function, *args: object, **kwargs: object) -> None:
        # torch itself makes ranges as well, for DDP, FSDP, optimizers: in its own files.
        files = (frame.f_code.co_filename for frame, _ in walk_stack(sys._getframe()))
        if next(file for file in files if not file.startswith(_HOOKS)).startswith(_TORCH):
            range_.by_torch = True  # type: ignore[attr-defined]

    def begins(range_: record_function) -> None:
        if not hasattr(range_, "by_torch"):
            number = host.open_span(range_.name, of_profiler=True)
            opened.setdefault((id(range_), get_ident()), []).append(number)

    def ends(_: None, range_: record_function, *failure: object) -> None:
        key = id(range_), get_ident()
        if numbers := opened.pop(key, []):
            host.close_span(numbers.pop())
        if numbers:
            opened[key] = numbers

    def close() -> None:
        for number in chain(*opened.values()):
            host.close_span(number)

    undo = Patches()
    undo.callback(close)
    undo.around(host, record_function, "__init__", after=made)
    undo.around(host, record_function, "__enter__", before=begins)
    undo.around(host, record_function, "__exit__", after=ends)
    return undo.close
