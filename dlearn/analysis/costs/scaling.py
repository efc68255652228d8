"""How each message grows with the batch, over runs of the same job with other batch sizes B.

A message's payload is constant + slope * B. Slopes are fractions: it fits to the byte or not at
all.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import permutations
from math import prod

import msgspec

from dlearn.analysis.ddp.training_steps import last_step
from dlearn.analysis.rpc.iteration import iteration, iterations
from dlearn.errors import DlearnError
from dlearn.events.event import TensorInfo
from dlearn.join.ends import bytes_of
from dlearn.join.message_evidence import messages
from dlearn.join.tables.message_table import Message
from dlearn.join.wording import TENSORS_NAMED, tensor_text
from dlearn.shown import Paragraph, Result, Table, count_text, first_few
from dlearn.trace import Trace

Sizes = tuple[int, ...]
Key = tuple[int, int, str, int]
"""Sender, receiver, op, and how many messages of that kind came before."""

_DIMENSIONS = {3: "BTD", 4: "BCHW", 5: "BCDHW"}
"""The names of a batch's dimensions, by their number."""


class ScalingLine(msgspec.Struct, frozen=True, kw_only=True):
    """One message in all sizes: `payload_bytes[i]` at `sizes[i]`, `slope` bytes for each one more.

    It is `exact` if the tensors' bytes lie on a line; else the slope is from first to last size.
    `factors` says where the slope comes from, if the shapes show it: "4 B × C 3 × H 16 × W 16".
    """

    between: str
    what: str
    sizes: Sizes
    payload_bytes: tuple[int, ...]
    slope: int | float
    exact: bool
    factors: str
    known: bool
    """Whether all of its payload is known: not where C++ packed it."""

    @property
    def varies(self) -> bool:
        return self.slope != 0 or not self.exact

    @property
    def constants(self) -> tuple[int | float, ...]:
        """Return what does not grow, of each run: a longer number takes a few bytes more."""
        pairs = zip(self.payload_bytes, self.sizes, strict=True)
        return tuple(payload - self.slope * size for payload, size in pairs)

    @property
    def constant(self) -> float:
        return sum(self.constants) / len(self.constants)

    @property
    def deviation_bytes(self) -> float:
        """Return the largest distance of a payload from the line."""
        return max(abs(each - self.constant) for each in self.constants)

    def at(self, size: float) -> float:
        """Predict the payload in bytes."""
        return self.constant + self.slope * size

    @property
    def formula(self) -> str:
        """Write "376 B + 3,072 B × B, exactly: 4 B × C 3 × H 16 × W 16 = 3,072 B for each example"."""
        if not self.known:
            return "not known: C++ packed it"
        if not self.varies:
            return f"{_range_text(self.constants)}: does not depend on B"
        if not self.exact:
            line = f"about {self.constant:,.0f} B + {self.slope:,.1f} B × B"
            off = f"up to {self.deviation_bytes:,.0f} B off"
            return f"not linear in B: {line}, and {off}"
        few = " (two sizes always lie on a line: add a third B)"
        sure = ", exactly" if len(self.sizes) > 2 else few
        slope = f"{_number(self.slope)} B"
        line = f"{_range_text(self.constants)} + {slope} × B{sure}"
        return line if not self.factors else f"{line}: {self.factors} = {slope} for each example"


class Scaling(Result, frozen=True, kw_only=True):
    """Every message of one iteration with its line, in the order of sending."""

    sizes: Sizes
    lines: tuple[ScalingLine, ...]

    @property
    def growing(self) -> tuple[ScalingLine, ...]:
        return tuple(line for line in self.lines if line.known and line.varies)

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Return the sum over all messages, at each size."""
        return _sums(self.lines)

    @property
    def finding(self) -> str:
        """Write "3 of 14 messages grow with B: 11,264 B for each example"."""
        count, growing = count_text(len(self.lines), "message"), self.growing
        if not growing:
            total = _range_text(self.payload_bytes)
            return f"No message depends on B: {count}, {total} at every size"
        grow = "grows" if len(growing) == 1 else "grow"
        text = f"{len(growing)} of {count} {grow} with B"
        if not all(line.exact for line in growing):
            return f"{text}, and not all of them linearly"
        slope = sum(line.slope for line in growing)
        return f"{text}: {_number(slope)} B for each example"

    def records(self) -> Iterator[dict[str, object]]:
        """Yield a row for each message at each size."""
        for line in self.lines:
            for size, payload in zip(line.sizes, line.payload_bytes, strict=True):
                row: dict[str, object] = {"between": line.between, "what": line.what, "size": size}
                row["payload_bytes"] = payload if line.known else None
                yield row | {"slope": line.slope if line.known else None, "exact": line.exact}

    def paragraphs(self) -> Iterator[Paragraph]:
        """Give each message that grows a sentence, the others one together, and all a table."""
        yield f"{self.finding}."
        unknown = [line for line in self.lines if not line.known]
        for line in (*self.growing, *unknown):
            yield f"{line.between}, {line.what}: {line.formula}."
        rest = [line for line in self.lines if line.known and not line.varies]
        if rest and self.growing:
            does = "does" if len(rest) == 1 else "do"
            others = f"The other {count_text(len(rest), 'message')} {does}"
            yield f"{others} not depend on B: {_range_text(_sums(rest))}."
        yield ""
        rows = [["message", *(f"B = {size:,}" for size in self.sizes), "slope"]]
        for line in self.lines:
            cells = ["?"] * (len(line.sizes) + 1)
            if line.known:
                about = "" if line.exact else "~"
                cells = [*(f"{each:,} B" for each in line.payload_bytes), about + _number(line.slope)]
            rows.append([f"{line.between}: {line.what}", *cells])
        yield Table(rows)


def scaling(runs: Mapping[int, Trace]) -> Scaling:
    """Find how each message depends on the batch: `scaling({1: trace, 8: trace, 32: trace})`.

    What is compared is the last iteration over RPC, else the last span "step ...", else all of each
    trace. Raises DlearnError for fewer than two sizes, and where a message of one run has none in
    another.
    """
    _check(runs)
    sizes = tuple(sorted(runs))
    found = {size: _messages(runs[size]) for size in sizes}
    for size in sizes:
        if not found[size]:
            run = f"the run with B = {size:,}"
            raise DlearnError(f"no message is known in {run}: there is nothing to compare.")
    for size, other in permutations(sizes, 2):
        for (src, dst, op, before), message in found[size].items():
            if (src, dst, op, before) not in found[other]:
                between = f"from {runs[size].label(src)} to {runs[size].label(dst)}"
                raise DlearnError(
                    f"the run with B = {size:,} has {op} #{before + 1} {between}"
                    f" ({message.what}), and that with B = {other:,} has none:"
                    " scaling compares runs of the same job."
                )
    lines = []
    for key in found[sizes[0]]:
        between = " -> ".join(map(runs[sizes[0]].label, key[:2]))
        lines.append(_line(between, [found[size][key] for size in sizes], sizes))
    return Scaling(sizes=sizes, lines=tuple(lines))


def _check(runs: Mapping[int, Trace]) -> None:
    if not isinstance(runs, Mapping) or not all(isinstance(run, Trace) for run in runs.values()):
        example = "{1: run_1.trace, 8: run_8.trace}"
        raise DlearnError(f"scaling takes a dict of sizes and traces, as in {example}.")
    for size in runs:
        if not isinstance(size, int) or size < 0:
            raise DlearnError(f"a size is a whole number, not {size!r}.")
    if len(runs) < 2:
        few = f"scaling compares at least two sizes, and got {len(runs)}"
        raise DlearnError(f"{few}: run the job with another one too.")


def _messages(trace: Trace) -> dict[Key, Message]:
    step = last_step(trace) if trace.selected_from is None else ""
    if iterations(trace):
        part: Sequence[Message] = iteration(trace).messages
    else:
        part = messages(trace.within(step) if step else trace)
    seen: Counter[tuple[int, int, str]] = Counter()
    found: dict[Key, Message] = {}
    for message in part:
        kind = (message.src, message.dst, message.op)
        found[*kind, seen[kind]] = message
        seen[kind] += 1
    return found


def _line(between: str, same: Sequence[Message], sizes: Sizes) -> ScalingLine:
    over_rpc = any(each.operation.exchange is not None for each in same)
    payloads = [each.payload_bytes or 0 for each in same]
    # What RPC packs around the tensors is no part of the line; a collective's message is all data.
    data = [bytes_of(each.tensors) for each in same] if over_rpc else payloads
    slope = Fraction(data[-1] - data[0], sizes[-1] - sizes[0])
    points = zip(sizes, data, strict=True)
    what, factors = _shapes(same, sizes, slope)
    return ScalingLine(
        between=between, what=what, sizes=sizes, payload_bytes=tuple(payloads),
        slope=slope.numerator if slope.denominator == 1 else float(slope),
        exact=all(count - data[0] == slope * (size - sizes[0]) for size, count in points),
        factors=factors, known=not over_rpc or all(each.packed_bytes is not None for each in same),
    )  # fmt: skip


def _shapes(same: Sequence[Message], sizes: Sizes, slope: Fraction) -> list[str]:
    """Say what travels ("gradient float32[B, 8, 16]"), and which factors make the slope."""
    carried = [message.carried for message in same]
    if len({tuple(len(each.shape) for each in tensors) for tensors in carried}) > 1:
        return [same[0].what, ""]
    texts, factors, bytes_for_one = [], [], 0
    for tensors in zip(*carried, strict=True):
        dimensions = []
        for column in zip(*(each.shape for each in tensors), strict=True):
            varying = "B" if column == sizes else "…"
            dimensions.append(str(column[0]) if len(set(column)) == 1 else varying)
        texts.append(tensor_text(tensors[0], dimensions))
        if "B" in dimensions and tensors[-1].logical_bytes:
            factors.append(_product(tensors[-1], dimensions.index("B")))
            bytes_for_one += tensors[-1].logical_bytes // sizes[-1]
    what = same[0].describe(tensors=first_few(texts, TENSORS_NAMED))
    return [what, " + ".join(factors) if bytes_for_one == slope else ""]


def _product(tensor: TensorInfo, axis: int) -> str:
    """Return "4 B × C 3 × H 16": an item, and the dimensions beside the one that is the size."""
    shape = tensor.shape
    names = _DIMENSIONS.get(len(shape), "") if axis == 0 else ""
    parts = [f"{tensor.logical_bytes // prod(shape)} B"]
    for dimension, size in enumerate(shape):
        if dimension != axis:
            parts.append(f"{names[dimension : dimension + 1]} {size:,}".strip())
    return " × ".join(parts)


def _sums(lines: Sequence[ScalingLine]) -> tuple[int, ...]:
    return tuple(map(sum, zip(*(line.payload_bytes for line in lines), strict=True)))


def _number(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _range_text(values: Sequence[int | float]) -> str:
    """Return "376 B", or "376 to 377 B"."""
    low, high = _number(min(values)), _number(max(values))
    return f"{low} B" if low == high else f"{low} to {high} B"
