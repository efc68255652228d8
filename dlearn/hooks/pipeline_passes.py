"""torch's pipeline schedules: their passes as spans, and whose data each message carries.

For micro-batch 2 of a stage the spans are F2, its forward pass, B2, its backward pass, and W2, the
part of that which zero-bubble schedules put off. Of several stages of a rank each is in a "stage 1".
"""

import sys
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dlearn.hooks import Undo
from dlearn.hooks.host import Host
from dlearn.hooks.patches import AfterImport, Patches, guarded

_STAGE = "torch.distributed.pipelining.stage"
_PASSES = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}
_SENT = {"fwd": "forward", "bwd": "backward"}

_carries: Any = WeakTensorKeyDictionary()
"""A tensor that a schedule is about to send or to receive -> its phase and micro-batch."""


def pass_of(tensor: torch.Tensor) -> tuple[str, int] | None:
    """Return, once, phase and micro-batch of a tensor that a schedule sends or receives."""
    return _carries.pop(tensor, None) if _carries else None


def install(host: Host) -> Undo:
    """Report each pass that is in no span of its name, from the schedules' import on."""
    undo = Patches()
    undo.callback(_carries.clear)

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

    def carries(phase: str, ops: Any, stage: Any, micro_batch: int) -> None:
        for op in ops:
            _carries[op.tensor] = phase, micro_batch

    def watch() -> None:
        base = sys.modules[_STAGE].PipelineStage.__base__
        for name, kind in _PASSES.items():
            undo.wrap(base, name, partial(run, kind))
        for way, phase in _SENT.items():
            for ops in ("send", "recv"):
                undo.around(host, base, f"get_{way}_{ops}_ops", after=partial(carries, phase))

    undo.callback(AfterImport(_STAGE, watch, host).go)
    return undo.close
