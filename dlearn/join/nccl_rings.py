"""The messages inside NCCL's collectives, from the job's own rings as NCCL's log tells them.

Read from NCCL's source (src/device/: all_reduce.h, all_gather.h, reduce_scatter.h, broadcast.h,
reduce.h). Every channel has a ring, and an equal share of the data. (NCCL sends a share in rounds
of a few MB; here it goes round once.) Messages are derived where the log says that NCCL chose
"RING", and inferred where it does not say (NCCL_DEBUG_SUBSYS without TUNING).
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, chain, islice, pairwise

from dlearn.events.event import Collective
from dlearn.events.wiring import Ring, Wiring
from dlearn.join.ends import bytes_of, family_of_op
from dlearn.join.gloo import MOST_MESSAGES, unknown
from dlearn.join.gloo_schedules import Schedule, Send
from dlearn.join.wording import ReasonKind

ALWAYS_RINGS = ("broadcast", "reduce")
KNOWN = (*ALWAYS_RINGS, "all_reduce", "all_gather", "reduce_scatter")


def schedule_of(call: Collective, ranks: int, wiring: Wiring) -> Schedule:
    """Return the messages of one operation, of which `call` is one rank's; none, and why, where it was no ring."""
    family = family_of_op(call.op)
    if family not in KNOWN:
        return unknown(ReasonKind.NO_SCHEDULE, "NCCL", call.op)
    if ranks == 1:
        return Schedule()
    if family in ALWAYS_RINGS and (call.root is None or call.root >= ranks):
        return unknown(ReasonKind.ROOT_OUTSIDE)
    given = bytes_of(call.inputs or call.outputs)
    # As NCCL counts: of an all-gather what a rank gives, of a reduce-scatter what it gets.
    size = given // ranks if family == "reduce_scatter" else given
    choices = [each for each in wiring.choices if (family_of_op(each.op), each.bytes) == (family, size)]
    whole = given * ranks if family == "all_gather" else given
    others = sorted({each.algorithm for each in choices} - {"RING"})
    if others:
        return unknown(ReasonKind.RAN_OTHERWISE, tuple(others))
    if not choices and wiring.switch and family not in ALWAYS_RINGS:
        return unknown(ReasonKind.SWITCH_OR_RING)
    rings = _of_channels(wiring, {each.channels for each in choices})
    if not rings:
        return unknown(ReasonKind.RING_UNKNOWN)
    return _schedule(family, rings, whole, call.root or 0, inferred=not choices and family not in ALWAYS_RINGS)


def _of_channels(wiring: Wiring, chosen: set[tuple[int, ...]]) -> tuple[Ring, ...]:
    """Return the rings of the channels that were chosen, else of all; () where one is not whole."""
    rings = wiring.rings
    first, last = 0, wiring.channels - 1
    if len(chosen) == 1 and len(bounds := next(iter(chosen))) == 2:
        first, last = bounds
    kept = [(ring.order, tuple(at for at in ring.channels if first <= at <= last)) for ring in rings]
    found = tuple(Ring(order, channels) for order, channels in kept if channels)
    return found if sum(len(ring.channels) for ring in found) == last + 1 - first else ()


@lru_cache(maxsize=64)
def _schedule(family: str, rings: tuple[Ring, ...], whole: int, root: int, *, inferred: bool) -> Schedule:
    """Return the messages of all rings; channels with the same ring are one."""
    ranks = len(rings[0].order)
    # Of what every rank has a block, each channel has a share of each block.
    block = whole // ranks if family in ("all_gather", "reduce_scatter") else whole
    before = list(accumulate((len(ring.channels) for ring in rings), initial=0))
    bounds = [block * channels // before[-1] for channels in before]
    made = [
        _messages(family, ring.order, start, end - start, block, root)
        for ring, (start, end) in zip(rings, pairwise(bounds), strict=True)
    ]
    sends = tuple(islice(chain.from_iterable(made), MOST_MESSAGES + 1))
    if len(sends) > MOST_MESSAGES:
        return unknown(ReasonKind.LONG_SCHEDULE, MOST_MESSAGES)
    return Schedule(tuple(sorted(sends, key=lambda send: send.step)), inferred=inferred)


def _messages(family: str, order: tuple[int, ...], start: int, length: int, block: int, root: int) -> Iterator[Send]:
    """Yield the messages of one ring, which has `length` bytes of the data (of each block), from `start` on."""
    ranks = len(order)
    if family in ALWAYS_RINGS:
        # A broadcast goes from the root to the rank before it; a reduce from the rank after the root to it.
        at = order.index(root) + (family == "reduce")
        for step in range(ranks - 1):
            yield Send(step, order[(at + step) % ranks], order[(at + step + 1) % ranks], start, length)
        return
    parts = [start + length * part // ranks for part in range(ranks + 1)]
    steps = 2 * (ranks - 1) if family == "all_reduce" else ranks - 1
    for step in range(steps):
        for place in range(ranks):
            src, dst = order[place], order[(place + 1) % ranks]
            # A reduce-scatter begins with the part of the rank before, which comes home in its last step.
            part = (place - step - (family != "all_gather")) % ranks
            if family == "all_reduce":
                yield Send(step, src, dst, parts[part], parts[part + 1] - parts[part])
            else:
                yield Send(step, src, dst, order[part] * block + start, length)
