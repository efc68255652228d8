"""Every sentence about gradients: who reduced those of each step, and where ranks parted."""

from collections.abc import Iterator

import msgspec

from dlearn.diagnosis import reductions
from dlearn.diagnosis.parting import parting
from dlearn.diagnosis.reductions import GradientStep, gradient_steps
from dlearn.join.tables.operation_table import Operation
from dlearn.shown import Paragraph, RankNames, Result, Table, count_text, listed
from dlearn.trace import Trace

_PARAMETERS_LISTED = 4
_STEPS_LISTED = 4
_NOT_SYNCED = {"DDP": "model.no_sync()", "FSDP2": "model.set_requires_gradient_sync(False)"}
"""How a program asks each to leave a backward pass out."""
_NONE = "No optimizer step was seen: they are recorded of programs that use DDP or FSDP2."
_WHY = {"no forward": "none: DDP's forward was not called", "no sync": "none: inside no_sync"}


class GradientSteps(Result, frozen=True):
    """Each optimizer step of each rank, and who reduced its gradients; `sentences` tell of faults."""

    steps: tuple[GradientStep, ...]
    sentences: tuple[str, ...]
    labels: RankNames

    def paragraphs(self) -> Iterator[Paragraph]:
        count = len({(each.optimizer, each.number) for each in self.steps})
        seen = f"{count_text(count, 'optimizer step')} seen"
        yield f"{seen}: by what the gradients of each were reduced." if count else _NONE
        yield from self.sentences
        if self.steps:
            yield Table(self.rows(), names=2, numbers=3)

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each step of each rank: the fields of `GradientStep`, `by` in words."""
        for each in self.steps:
            row = msgspec.structs.asdict(each) | {"rank": self.labels[each.rank]}
            del row["by_hand"]
            yield row | {"by": _by_text(each)}

    def rows(self) -> list[tuple[str, ...]]:
        table: list[tuple[str, ...]] = [("rank", "optimizer", "step", "passes", "reduced", "by")]
        for each in self.steps:
            counts = (each.number, each.passes, each.reduced)
            optimizer = f"{each.optimizer} {each.name}".strip()
            table.append((self.labels[each.rank], optimizer, *map(str, counts), _by_text(each)))
        return table


def gradients(trace: Trace) -> GradientSteps:
    """Tell for each optimizer step how often, and by what, its gradients were reduced."""
    steps = tuple(each for each in gradient_steps(trace) if each.rank in trace.ranks)
    return GradientSteps(steps, tuple(training_sentences(trace)), trace.labels)


def _by_text(step: GradientStep) -> str:
    """Return "DDP", "all_reduce by hand (train.py:31)", "none: inside no_sync"."""
    if step.reduced:
        return step.by
    if step.by_hand is not None:
        return f"perhaps {step.by_hand.op} by hand ({step.by_hand.site})"
    return _WHY.get(step.why, "none that was seen")


def training_sentences(trace: Trace) -> list[str]:
    """Say which gradients were not reduced, or as good as for nothing."""
    texts = [_unsent_text(each, trace) for each in reductions.unsent(trace)]
    texts += [_unreduced_text(each, trace) for each in reductions.unreduced(trace)]
    texts += [_repeated_text(each) for each in reductions.repeated(trace)]
    return [f"{text}." for text in texts]


def _unsent_text(unsent: reductions.Unsent, trace: Trace) -> str:
    """Write "rank 0 never produced the gradients of a and b in backward pass 2, so DDP ..."."""
    names = listed(unsent.parameters, _PARAMETERS_LISTED)
    who = trace.labels.listed(unsent.ranks)
    did = f"{who} never produced the gradients of {names} in backward pass {unsent.backward_pass}"
    buckets = listed([f"bucket {index}" for index in unsent.buckets])
    return f"{did}, so DDP never sent {buckets}: they were frozen after DDP took them, or not used"


def _unreduced_text(found: reductions.Unreduced, trace: Trace) -> str:
    """Write "3 steps of optimizer 0 (SGD) used gradients that no rank reduced: ..."."""
    steps = count_text(len(found.steps), "step")
    if len(found.steps) <= _STEPS_LISTED and found.steps[0] > 1:
        steps = f"step{'s' * (len(found.steps) > 1)} {listed(list(map(str, found.steps)))}"
    steps += f" of optimizer {found.optimizer} ({found.name})"
    at = f" ({found.site})" if found.site else ""
    who = trace.labels.listed(found.ranks)
    if found.why == "no sync":
        where = f"{who} only" if found.others else "each rank"
        follow = "follows a backward pass" if len(found.steps) == 1 else "follow backward passes"
        return f"{steps} {follow} inside no_sync on {where}{at}: it used its own gradients alone"
    reduced = "that no rank reduced" if not found.others else f"that {who} did not reduce"
    never = "not called before them" if found.ever else "never called"
    call = ", ".join(filter(None, ("`ddp.module(...)`", found.site)))
    return f"{steps} used gradients {reduced}: DDP's forward was {never} ({call})"


def _repeated_text(found: reductions.Repeated) -> str:
    """Write "Note: 4 reductions of the same parameters before one step, in 2 steps of ..."."""
    what = f"Note: {found.times} reductions of the same parameters before one step"
    steps = f"in {count_text(found.steps, 'step')} of optimizer {found.optimizer} ({found.name})"
    why = f"accumulation saves nothing here; {found.by} leaves one out by {_NOT_SYNCED[found.by]}"
    return f"{what}, {steps} ({found.site}): {why}"


def parting_text(hung: Operation, trace: Trace) -> str:
    """Write "; from all_reduce #7 on, rank 1 was 1 forward pass ahead: it skipped backward ..."."""
    found = parting(hung, trace)
    if found is None:
        return ""
    who, operation = trace.label(found.rank), found.operation
    at = f" ({found.site})" if found.site else ""
    did = {
        "skipped": f"skipped backward after forward pass {found.number}{at}",
        "no sync": f"made backward pass {found.number} inside no_sync{at}",
    }.get(found.why, "")
    if not found.ahead:
        return f"; {who} {did}"
    ahead = f"{who} was {count_text(found.ahead, found.what)} ahead"
    why = f"{ahead}: it {did}" if did else ahead
    mixed = f"{count_text(found.mixed, 'all-reduce')} before this one mixed different passes"
    return f"; from {operation.op} #{operation.seq} on, {why}; {mixed}"
