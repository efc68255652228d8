"""Where the time of a training step goes: forward, backward, communication not hidden, optimizer.

All are observed: on a GPU by CUDA events, else on the CPU that calls. (Of a GPU without these that
is the time to launch its kernels, which run on by themselves.)
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from dlearn.analysis.ddp.step_clock import on_device, step_note
from dlearn.analysis.ddp.training_steps import (
    COMMUNICATION,
    Phase,
    TrainingStep,
    by_number,
    training_steps,
)
from dlearn.events.event import Collective
from dlearn.shown import Paragraph, RankNames, Result, Table, capitalized, ms, time_text
from dlearn.trace import Trace

LAUNCHED = "On a GPU: the times of the CPU that launches the kernels, which run on by themselves."
_SHOWN: tuple[Phase, ...] = ("forward", "backward", "transfer", "waiting", "optimizer", "between")
_HEAD = "forward", "backward", "exposed transfer", "exposed waiting", "optimizer", "between"


class Breakdown(Result, frozen=True):
    """The parts of each training step on each rank; `note`: of a GPU's or a held job's times."""

    items: tuple[TrainingStep, ...]
    labels: RankNames
    note: str = ""

    @property
    def middle(self) -> tuple[TrainingStep, ...]:
        """Return all ranks of the step of median length, which is that of its longest rank."""
        steps = by_number(self.items)
        most = max(map(len, steps), default=0)
        whole = [step for step in steps if len(step) == most]
        return tuple(sorted(whole, key=_longest_ns)[(len(whole) - 1) // 2]) if whole else ()

    def _share(self, *phases: Phase) -> float:
        """Return the share of all ranks' time together in the median step, 0 to 1."""
        spent = sum(each.length_ns(*phases) for each in self.middle)
        return spent / sum(each.total_ns for each in self.middle)

    @property
    def exposed(self) -> float | None:
        """Return the share of communication that is not hidden; None if not observed."""
        if not self.middle or not all(each.observed for each in self.middle):
            return None
        return self._share("transfer", "waiting")

    @property
    def shares(self) -> dict[str, float]:
        """Return the shares of all ranks' time together in the median step, by the part's name."""
        shares = {"forward": self._share("forward"), "backward": self._share("backward")}
        if self.exposed is not None:
            shares["communication that is not hidden"] = self.exposed
        return shares

    @property
    def shares_text(self) -> str:
        """Return "7% forward, 50% backward, 40% communication that is not hidden"."""
        parts = [f"{share:.0%} {part}" for part, share in self.shares.items()]
        return ", ".join(parts if self.exposed is not None else [*parts, "communication included"])

    @property
    def finding(self) -> str:
        """Say how long the median step took, and how all its ranks' time together was spent."""
        if not self.middle:
            return "No training step of a DDP model"
        count = len({each.number for each in self.items})
        which = f" (the median of {count} by length)" if count > 1 else ""
        ranks = len(self.middle)
        together = f"of {ranks} ranks' time together, " if ranks > 1 else ""
        unseen = ": its end was not seen" if self.exposed is None else ""
        return f"{self._step(which)}: {together}{self.shares_text}{unseen}"

    @property
    def headline(self) -> str:
        """Name the largest share, as a title: "Step 1, 35.0 ms: 50% of all ranks' time is backward"."""
        if not self.middle:
            return self.finding
        shares = self.shares
        if shares.pop("communication that is not hidden", None) is not None:
            # Which of the two it is decides what to do: a slow rank, or a slow network.
            shares["transfer that is not hidden"] = self._share("transfer")
            shares["waiting for later ranks"] = self._share("waiting")
            waits: Counter[int] = sum((each.waits for each in self.middle), Counter())
            for rank, waited_ns in waits.most_common(1):
                if 2 * waited_ns > waits.total():
                    del shares["waiting for later ranks"]
                    total_ns = sum(each.total_ns for each in self.middle)
                    shares[f"waiting for {self.labels[rank]}"] = waited_ns / total_ns
        part, share = max(shares.items(), key=lambda item: item[1])
        whose = " of all ranks' time" * (len(self.middle) > 1)
        return f"{self._step()}: {share:.0%}{whose} is {part}"

    def _step(self, which: str = "") -> str:
        longest = time_text(_longest_ns(self.middle))
        return f"{capitalized(self.middle[0].title)}{which}, {longest}"

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each rank in each step: a column for each part, without those not observed."""
        for each in self.items:
            row: dict[str, object] = {"step": each.title, "number": each.number}
            row |= {"rank": self.labels[each.rank], "start_ns": each.start_ns}
            for phase in (*_SHOWN, "hidden"):
                seen = each.observed or phase not in COMMUNICATION
                row[f"{phase}_ns"] = each.length_ns(phase) if seen else None
            yield row | {"total_ns": each.total_ns}

    def rows(self) -> list[list[str]]:
        """Return a head, and a row for each rank of the median step; ms."""
        table = [["step", "rank", *_HEAD, "all", "(hidden)"]]
        for each in self.middle:
            cells = [ms(each.length_ns(phase)) for phase in _SHOWN]
            hidden = ms(each.length_ns("hidden"))
            if not each.observed:
                cells[2:4], hidden = ["not observed"] * 2, "not observed"
            row = [each.title, self.labels[each.rank], *cells, ms(each.total_ns), hidden]
            table.append(row)
        return table

    def paragraphs(self) -> Iterator[Paragraph]:
        yield self.finding
        if self.items:
            yield Table(self.rows(), names=2, title="ms:")
        if self.note:
            yield self.note


def _longest_ns(step: Sequence[TrainingStep]) -> int:
    return max(share.total_ns for share in step)


def breakdown(trace: Trace) -> Breakdown:
    """Return where the time of each training step of a DDP program goes, on each rank."""
    steps = training_steps(on_device(trace))
    calls = (end for step in steps for call in step.calls for end in call.operation.ends)
    given = (tensor for call in calls if isinstance(call, Collective) for tensor in call.inputs)
    launched = LAUNCHED if any(tensor.device != "cpu" for tensor in given) else ""
    return Breakdown(steps, trace.labels, step_note(trace, launched))
