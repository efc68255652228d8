"""An event of the source "memory": what a rank holds."""

from typing import ClassVar

from dlearn.events.event import Count, Event


class MemoryHeld(Event, tag="memory", frozen=True, kw_only=True):
    """Bytes that this rank holds from now on. `gathered` are whole parameters that FSDP has put together for a while.

    `model` is the size of all parameters before they were cut, `optimizers` names the classes, `way` says who cuts
    what: "DDP", "ZeRO-1", "FSDP2", or "".
    """

    ends: ClassVar[bool] = False

    parameters: Count
    gathered: Count
    gradients: Count
    buckets: Count
    state: Count
    activations: Count
    model: Count
    optimizers: str
    way: str
    ranks: Count
