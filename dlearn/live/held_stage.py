"""The stage of a held job at one moment: ranks, calls that wait at the gate, ranks that hang."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dlearn.diagnosis.hang_detection import Hang
from dlearn.events.printable import printable
from dlearn.live.gate_server import GateServer, Name, rank_text
from dlearn.shown import Shown, count_text, waits

MESSAGES = ("send", "recv")  # torch numbers them apart from the collectives.
State = dict[str, Any]


@dataclass(frozen=True, repr=False)
class HeldHang(Shown):
    """Which ranks wait inside torch without end, and for which; false if none: `why` says why."""

    sentences: tuple[str, ...]
    why: str
    stage: State  # As it was then.

    def __bool__(self) -> bool:
        return bool(self.sentences)

    def paragraphs(self) -> tuple[str, ...]:
        return self.sentences or (f"no rank hangs: {self.why}",)

    def _repr_html_(self) -> str:
        """Return the stage as it was, titled with the first sentence: ranks that hang are red."""
        title, *rest = self.paragraphs()
        return snippet("", title, self.stage | {"hang": "\n".join(rest), "state": "then"})


def snippet(name: str, title: str, stage: State) -> str:
    """Return the HTML of a stage. Without scripts it lists the calls and ranks in words."""
    from dlearn.play.page import frame, name_for, pack

    data = pack(stage, {})
    return frame("paused", name or name_for(title, data), title, data, words=stage["words"])


def stage_of(gate: GateServer, doing: Mapping[Name, str], hung: Iterable[Hang], inside: Iterable[int] = ()) -> State:
    """Return what a page shows: what ranks do, calls at the gate, who waits without end."""
    from dlearn.play.packing import MIDDLE, circle, hue

    names, calls = gate.names, [*gate.calls]
    number = {name: rank for rank, name in enumerate(names)}
    made = Counter((passed.rank, passed.op in MESSAGES) for passed in list(gate.passed))
    ops = {passed.op for passed in list(gate.passed)}
    waiting, wires, guilty = [], list[tuple[int, int]](), set[int]()
    for call in calls:
        ends = number[call.rank], MIDDLE if call.to in (None, call.rank) else number[call.to]
        wire = ends[::-1] if call.op == "recv" and MIDDLE not in ends else ends
        gate.wires[wire] = None
        ops.add(call.op)
        made[call.rank, call.op in MESSAGES] += 1
        facts: State = {"rank": ends[0], "wire": wire, "color": hue(call.op), "bytes": call.bytes}
        facts |= {"op": printable(call.op), "number": made[call.rank, call.op in MESSAGES]}
        waiting.append(facts | {"site": printable(call.site)})
    for hang in hung:
        operation, exchange = hang.operation, hang.operation.exchange
        ranks = (hang.waiting, operation.missing) if exchange is None else ((exchange.src,), (exchange.dst,))
        guilty.update(ranks[1])
        to_all = exchange is None and not operation.is_message
        pairs = product(ranks[0], (MIDDLE,) if to_all else ranks[1])
        wires += [pair[::-1] if operation.ends[0].op == "recv" else pair for pair in pairs]
    gate.wires.update(dict.fromkeys(wires))
    here = {number[call.rank] for call in calls}
    words = [f"{rank_text(name)}: {now}" for name, now in doing.items()]
    # Without the call and its line of code: a box is small, and the call is on its wire.
    now = [doing.get(name, "has ended").partition(": ")[0].partition(" (")[0] for name in names]
    return {
        "lanes": [*map(printable, map(rank_text, names))],
        "stage": circle(len(names), {**gate.wires}),
        "waiting": waiting,
        "now": [*map(printable, now)],
        "position": position(gate, now),
        "hung": wires,
        "inside": sorted({*inside} - here),
        "guilty": sorted(guilty - here),
        "ops": sorted(map(printable, ops)),
        "words": [*map(str, calls), *words],
    }


def position(gate: GateServer, now: Sequence[str]) -> str:
    through = f"{len(gate.passed):,} let through"
    if count := len(gate.calls):
        return f"{through}, {count_text(count, 'call')} {waits(count)} at the gate"
    words = [f"{count_text(count, 'rank')}: {what}" for what, count in Counter(now).items()]
    return f"{through}, no call waits; {printable('; '.join(words)) or 'no rank has come yet'}"
