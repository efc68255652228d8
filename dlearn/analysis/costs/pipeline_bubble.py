"""One step of a pipeline: the passes of micro-batches, and the idle time between, the bubble."""

from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from dlearn.analysis.ddp.breakdown import LAUNCHED
from dlearn.analysis.replay.local_activity import PASS, stages_of
from dlearn.events.event import Span
from dlearn.join.message_evidence import messages
from dlearn.join.tables.message_table import Message
from dlearn.shown import Paragraph, RankNames, Result, Table, ms, time_text
from dlearn.trace import Trace

NO_PIPELINE = "No pipeline was recorded: no pass of torch's schedules, no span F0 or B0"
_UNEVEN = 1.25  # The slowest rank computes so many times as long as any other.


class StagePass(msgspec.Struct, frozen=True, gc=False):
    """A micro-batch in a stage: `kind` is F (forward), B (backward) or W (B's late part)."""

    rank: int
    stage: int | None  # Known where a rank has several.
    kind: str
    micro_batch: int
    start_ns: int
    end_ns: int


class Pipeline(Result, frozen=True):
    """A step from its first pass's start to its last pass's end: what each rank does and sends."""

    passes: tuple[StagePass, ...]
    busy_ns: dict[int, int]
    sent: tuple[Message, ...]
    labels: RankNames
    notes: tuple[str, ...]

    @property
    def length_ns(self) -> int:
        return max(each.end_ns for each in self.passes) - self.passes[0].start_ns

    def idle(self, *ranks: int) -> float:
        """Return the share of the time of these ranks, or of all, without a pass, 0 to 1."""
        busy = [self.busy_ns[rank] for rank in ranks or self.busy_ns]
        return 1 - sum(busy) / max(1, len(busy) * self.length_ns)

    @property
    def slowest(self) -> int | None:
        """Return the rank that computes much longer than any other, if there is one."""
        *others, last = sorted(self.busy_ns, key=lambda rank: self.busy_ns[rank])
        return last if others and self.busy_ns[last] > _UNEVEN * self.busy_ns[others[-1]] else None

    @property
    def finding(self) -> str:
        """Write "A step of 741 ms, 48% of it bubble", and name the slowest rank."""
        if not self.passes:
            return NO_PIPELINE
        text = f"A step of {time_text(self.length_ns)}, {self.idle():.0%} of it bubble"
        if self.slowest is None:
            return text
        *_, most, slowest = map(time_text, sorted(self.busy_ns.values()))
        return f"{text}: {self.labels[self.slowest]} computes {slowest}, the others at most {most}"

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each pass, in the order of start."""
        for each in self.passes:
            yield msgspec.structs.asdict(each) | {"rank": self.labels[each.rank]}

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        rows = [["rank", "busy ms", "idle"]]
        for rank, busy_ns in self.busy_ns.items():
            rows.append([self.labels[rank], ms(busy_ns), f"{self.idle(rank):.0%}"])
        if self.passes:
            yield Table(rows)
        yield from self.notes


def pipeline(trace: Trace) -> Pipeline:
    """Find the last whole step of torch's pipeline schedules, or of spans F0, B0, ..."""
    steps, notes = _steps(trace), []
    most = max(map(len, steps), default=0)
    step = next((step for step in reversed(steps) if len(step) == most), [])
    busy_ns, until_ns = dict.fromkeys(sorted({each.rank for each in step}), 0), Counter[int]()
    for each in step:  # In the order of start; what overlaps counts once.
        busy_ns[each.rank] += max(0, each.end_ns - max(each.start_ns, until_ns[each.rank]))
        until_ns[each.rank] = max(each.end_ns, until_ns[each.rank])
    over_ns, found = max(until_ns.values(), default=0), messages(trace) if step else ()
    sent = [each for each in found if step[0].start_ns <= (each.sent_ns or 0) < over_ns]
    if len(steps) > 1:
        notes.append(f'The last whole step of {len(steps):,}; trace.within("step 1") takes another.')
    if any(tensor.device != "cpu" for message in sent for tensor in message.carried):
        notes.append(LAUNCHED)
    return Pipeline(tuple(step), busy_ns, tuple(sent), trace.labels, tuple(notes))


def _steps(trace: Trace) -> list[list[StagePass]]:
    """Return the passes that ended, by step: a rank that repeats one begins the next step."""
    stages, steps = stages_of(trace), list[list[StagePass]]()
    number, made = Counter[int](), defaultdict[int, set[object]](set)
    for span in trace.of(Span):
        if (name := PASS.fullmatch(span.name)) is None or span.end_ns is None:
            continue
        what = stages.get((span.rank, span.parent)), name[1], int(name[2])
        if what in made[span.rank]:
            number[span.rank] += 1
            made[span.rank].clear()
        made[span.rank].add(what)
        if number[span.rank] == len(steps):
            steps.append([])
        steps[number[span.rank]].append(StagePass(span.rank, *what, span.start_ns, span.end_ns))
    return steps
