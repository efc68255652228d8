"""Ranges of the program for torch's profiler, and passes of its pipeline schedules, as spans.

For micro-batch 2 of a stage these are F2, its forward pass, B2, its backward pass, and W2, the part
of that which zero-bubble schedules put off. Of several stages of a rank each is in a "stage 1".
"""

import os
import sys
from functools import partial
from itertools import chain
from threading import get_ident
from traceback import walk_stack
from typing import Any

import torch
from torch.autograd.profiler import record_function

from dlearn.hooks import Undo
from dlearn.hooks.host import Host
from dlearn.hooks.patches import AfterImport, Patches, guarded

_STAGE = "torch.distributed.pipelining.stage"
_PASSES = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
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


def install_passes(host: Host) -> Undo:
    """Report each pass that is in no span of its name, from the schedules' import on."""
    undo = Patches()

    def begin(kind: str, stage: Any, *args: Any, **kwargs: Any) -> list[int]:
        name = f"{kind}{[*args, *kwargs.values()][0]}"
        if name in host.span_names() or not (kind == "F" or stage.has_backward):
            return []
        outer = [f"stage {stage.stage_index}"] if stage.num_stages > stage.group_size else []
        return [host.open_span(each, of_profiler=True) for each in (*outer, name)]

    def run(kind: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        spans = guarded(host, "a pass of a pipeline", begin, kind, *args, **kwargs) or []
        try:
            return original(*args, **kwargs)
        finally:
            for number in reversed(spans):
                host.close_span(number)

    def watch() -> None:
        base = sys.modules[_STAGE].PipelineStage.__base__
        for name, kind in _PASSES.items():
            undo.wrap(base, name, partial(run, kind))

    undo.callback(AfterImport(_STAGE, watch, host).go)
    return undo.close
