"""How each message grows with the batch, or with anything else that a job was run with in several sizes.

The same job is recorded once for each size; what is the same message in all of them gets a line: its payload is
constant + slope * B. In whole numbers, so that a line is exact or it is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

import msgspec
import numpy as np

from dlearn.analysis.ddp.training_steps import last_step
from dlearn.analysis.rpc.iteration import iteration, iterations
from dlearn.errors import DlearnError
from dlearn.join.confirming import messages
from dlearn.shown import Answer, Paragraph, RankNames, Table, count_text, first_few
from dlearn.trace.event import TensorInfo
from dlearn.trace.message import Message
from dlearn.trace.trace import Trace
from dlearn.trace.wording import TENSORS_NAMED, tensor_text

Key = tuple[int, int, str, int]
"""Who sends it to whom, its op, and the how many-th of that kind it is."""

_DIMENSIONS = {3: "BTD", 4: "BCHW", 5: "BCDHW"}
"""What the dimensions of a batch are called, by their number."""


class ScalingLine(msgspec.Struct, frozen=True, kw_only=True):
    """One message in all sizes: `payload_bytes[i]` at `sizes[i]`, of which `tensor_bytes[i]` are tensors.

    `slope` is in bytes for each one more. It is exact if the tensors' bytes lie on a line; else it is that of least
    squares. `constants[i]` is what is left at `sizes[i]`: of an exact line all the same, but for a few bytes that a
    longer number takes in the rest of the payload.
    """

    src: int
    dst: int
    op: str
    what: str
    name: str
    sizes: tuple[int, ...]
    payload_bytes: tuple[int, ...]
    tensor_bytes: tuple[int, ...]
    slope: int | float
    exact: bool
    known: bool = True
    """Whether all of its payload is known: not where C++ packed it."""
    factors: str = ""
    """Where the slope comes from: "4 B × C 3 × H 16 × W 16"; nothing where the shapes do not tell."""

    @property
    def constants(self) -> tuple[int | float, ...]:
        """Payload less slope * size."""
        return tuple(payload - self.slope * size for payload, size in zip(self.payload_bytes, self.sizes, strict=True))

    @property
    def constant(self) -> int | float:
        """The payload without anything that grows; of several, the mean."""
        found = self.constants
        return found[0] if len(set(found)) == 1 else sum(found) / len(found)

    @property
    def deviation_bytes(self) -> int | float:
        """From the smallest of the constants to the largest; of a line that is not exact, the largest distance."""
        found = self.constants
        return max(found) - min(found) if self.exact else max(abs(each - self.constant) for each in found)

    @property
    def varies(self) -> bool:
        """Whether its tensors depend on the size."""
        return len(set(self.tensor_bytes)) > 1

    def at(self, size: float) -> float:
        """The payload that the line predicts, in bytes."""
        return self.constant + self.slope * size

    @property
    def formula(self) -> str:
        """ "376 B + 3,072 B × B, exactly: 4 B × C 3 × H 16 × W 16 = 3,072 B for each example"."""
        if not self.known:
            return "not known: C++ packed it"
        if not self.varies:
            return f"{_range_text(self.constants)}: does not depend on {self.name}"
        if not self.exact:
            line = f"about {self.constant:,.0f} B + {self.slope:,.1f} B × {self.name}"
            return f"not linear in {self.name}: {line}, and up to {self.deviation_bytes:,.0f} B off"
        line = f"{_range_text(self.constants)} + {_number(self.slope)} B × {self.name}"
        sure = ", exactly" if len(self.sizes) > 2 else f" (two sizes always lie on a line: add a third {self.name})"
        return (
            f"{line}{sure}: {self.factors} = {_number(self.slope)} B for {self._each}" if self.factors else line + sure
        )

    @property
    def _each(self) -> str:
        return "each example" if self.name == "B" else f"each of {self.name}"


class Scaling(Answer, frozen=True, kw_only=True):
    """Every message of one iteration with its line, in the order of sending."""

    name: str
    sizes: tuple[int, ...]
    lines: tuple[ScalingLine, ...]
    labels: RankNames

    @property
    def growing(self) -> tuple[ScalingLine, ...]:
        """Those that depend on the size."""
        return tuple(line for line in self.lines if line.known and line.varies)

    @property
    def slope(self) -> int | float:
        """Bytes that all messages together grow by, for each one more."""
        return sum(line.slope for line in self.growing)

    @property
    def payload_bytes(self) -> tuple[int, ...]:
        """Of all messages together, at each size."""
        return tuple(sum(column) for column in zip(*(line.payload_bytes for line in self.lines), strict=True))

    @property
    def finding(self) -> str:
        """ "3 of 14 messages grow with B: 11,264 B for each example"."""
        if not self.growing:
            total = _range_text(self.payload_bytes)
            return f"No message depends on {self.name}: {count_text(len(self.lines), 'message')}, {total} at every size"
        grow = "grows" if len(self.growing) == 1 else "grow"
        told = f"{len(self.growing)} of {count_text(len(self.lines), 'message')} {grow} with {self.name}"
        if not all(line.exact for line in self.growing):
            return f"{told}, and not all of them linearly"
        return f"{told}: {_number(self.slope)} B for {self.growing[0]._each}"

    def between(self, line: ScalingLine) -> str:
        """ "stage0 -> stage1"."""
        return f"{self.labels[line.src]} -> {self.labels[line.dst]}"

    def sentences(self) -> list[str]:
        """The finding, a formula for each message that grows, and the others together."""
        told = [f"{self.finding}."]
        unknown = [line for line in self.lines if not line.known]
        told += [f"{self.between(line)}, {line.what}: {line.formula}." for line in (*self.growing, *unknown)]
        rest = [line for line in self.lines if line.known and not line.varies]
        if rest and self.growing:
            totals = [sum(column) for column in zip(*(line.payload_bytes for line in rest), strict=True)]
            does = "does" if len(rest) == 1 else "do"
            others = f"The other {count_text(len(rest), 'message')} {does} not depend on {self.name}"
            told.append(f"{others}: {_range_text(totals)}.")
        return told

    def rows(self) -> list[list[str]]:
        """Payload bytes as text: a row for each message, a column for each size, and its slope."""
        table = [["message", *(f"{self.name} = {size:,}" for size in self.sizes), "slope"]]
        for line in self.lines:
            sizes = [f"{size:,} B" if line.known else "?" for size in line.payload_bytes]
            slope = _number(line.slope) if line.exact else f"~{_number(line.slope)}"
            table.append([f"{self.between(line)}: {line.what}", *sizes, slope if line.known else "?"])
        return table

    def paragraphs(self) -> tuple[Paragraph, ...]:
        return *self.sentences(), "", Table(self.rows())


def scaling(runs: Mapping[int, Trace], *, name: str = "B") -> Scaling:
    """How each message depends on a size, from traces of the same job: `{1: trace, 8: trace, 32: trace}`.

    What is compared is the last iteration over RPC, else the last span "step ...", else all of each trace. Raises
    DlearnError for fewer than two sizes, and where a message of one run has none in another.
    """
    sizes = _sizes(runs)
    found = {size: _messages(runs[size]) for size in sizes}
    _refuse_strangers(found, runs, name)
    first = found[sizes[0]]
    return Scaling(
        name=name,
        sizes=sizes,
        lines=tuple(_line(key, [found[size][key] for size in sizes], sizes, name) for key in first),
        labels=runs[sizes[0]].labels,
    )


def _sizes(runs: Mapping[int, Trace]) -> tuple[int, ...]:
    if not isinstance(runs, Mapping) or not all(isinstance(trace, Trace) for trace in runs.values()):
        raise DlearnError("scaling takes a dict of sizes and traces, as in {1: run_1.trace, 8: run_8.trace}.")
    wrong = next((size for size in runs if isinstance(size, bool) or not isinstance(size, int) or size < 0), None)
    if wrong is not None:
        raise DlearnError(f"a size is a whole number, not {wrong!r}.")
    if len(runs) < 2:
        few = f"scaling compares at least two sizes, and got {len(runs)}"
        raise DlearnError(f"{few}: run the job with another one too.")
    return tuple(sorted(runs))


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


def _refuse_strangers(found: Mapping[int, Mapping[Key, Message]], runs: Mapping[int, Trace], name: str) -> None:
    """Every message has its like in all runs, or the first that has none is named."""
    for size, mine in found.items():
        if not mine:
            raise DlearnError(f"no message is known in the run with {name} = {size:,}: there is nothing to compare.")
        for other, theirs in found.items():
            lacking = next((key for key in mine if key not in theirs), None)
            if lacking is not None:
                src, dst, op, place = lacking
                trace = runs[size]
                message = f"{op} #{place + 1} from {trace.label(src)} to {trace.label(dst)} ({mine[lacking].what})"
                raise DlearnError(
                    f"the run with {name} = {size:,} has {message}, and that with {name} = {other:,} has none: scaling"
                    " compares runs of the same job."
                )


def _line(key: Key, same: Sequence[Message], sizes: tuple[int, ...], name: str) -> ScalingLine:
    src, dst, op, _ = key
    over_rpc = any(message.operation.exchange is not None for message in same)
    tensors = [sum(tensor.payload_bytes for tensor in message.tensors) for message in same]
    payloads = [message.payload_bytes or 0 for message in same]
    # Of an RPC, what is packed around the tensors is told apart; a message of a collective is all data.
    data = tensors if over_rpc else payloads
    slope = _slope(sizes, data)
    shapes = [[tensor for tensor in message.tensors if tensor.payload_bytes] for message in same]
    return ScalingLine(
        src=src,
        dst=dst,
        op=op,
        what=_what(same, sizes, name),
        name=name,
        sizes=sizes,
        payload_bytes=tuple(payloads),
        tensor_bytes=tuple(data),
        slope=slope if slope is not None else float(np.polyfit(sizes, payloads, 1)[0]),
        exact=slope is not None,
        known=not over_rpc or all(message.packed_bytes is not None for message in same),
        factors=_factors(shapes, sizes, name) if slope is not None else "",
    )


# Lines ----------------------------------------------------------------------------------------------------------------


def _slope(xs: Sequence[int], ys: Sequence[int]) -> int | float | None:
    """The slope of the line on which all points lie, in whole numbers; None if there is none."""
    run, rise = xs[-1] - xs[0], ys[-1] - ys[0]
    if any((x - xs[0]) * rise != (y - ys[0]) * run for x, y in zip(xs, ys, strict=True)):
        return None
    return rise / run if rise % run else rise // run


def _factors(tensors: Sequence[Sequence[TensorInfo]], sizes: Sequence[int], name: str) -> str:
    """Of each tensor the size of an element and the dimensions that stay: where the slope comes from."""
    if len({len(each) for each in tensors}) != 1:
        return ""
    columns = zip(*tensors, strict=True)
    products = [_product(same, sizes, name) for same in columns if len({each.shape for each in same}) > 1]
    return " + ".join(products) if all(products) else ""


def _product(same: Sequence[TensorInfo], sizes: Sequence[int], name: str) -> str:
    """ "4 B × C 3 × H 16": of one tensor that varies; empty if its shapes do not show it."""
    first = same[0]
    alike = len({(len(each.shape), each.dtype) for each in same}) == 1
    dense = all(not each.sparse and each.payload_bytes == each.logical_bytes and all(each.shape) for each in same)
    if not alike or not dense or not all(sizes):
        return ""
    shapes = np.array([each.shape for each in same])
    (varying,) = np.nonzero((shapes != shapes[0]).any(axis=0))
    times, rest = np.divmod(shapes[:, varying[0]], sizes)
    if len(varying) != 1 or rest.any() or len(set(times.tolist())) != 1:
        return ""
    names = _DIMENSIONS.get(shapes.shape[1], "")
    if not names or (varying[0] and names[varying[0]] != name):
        names = " " * shapes.shape[1]
    stay = [f"{names[i]} {size:,}".strip() for i, size in enumerate(first.shape) if i != varying[0]]
    several = [f"{times[0]:,}"] if times[0] != 1 else []
    return " × ".join([f"{first.logical_bytes // prod(first.shape)} B", *several, *stay])


# Words ----------------------------------------------------------------------------------------------------------------


def _what(same: Sequence[Message], sizes: tuple[int, ...], name: str) -> str:
    """What the first carries; a dimension that is the size has its name: "gradient float32[B, 4, 16, 16]"."""
    carried = [message.carried for message in same]
    if len({tuple((each.dtype, len(each.shape)) for each in tensors) for tensors in carried}) > 1:
        return same[0].what
    texts = []
    for tensors in zip(*carried, strict=True):
        dimensions = []
        for column in zip(*(each.shape for each in tensors), strict=True):
            varying = name if column == sizes else "…"
            dimensions.append(str(column[0]) if len(set(column)) == 1 else varying)
        texts.append(tensor_text(tensors[0], dimensions))
    return same[0].describe(tensors=first_few(texts, TENSORS_NAMED))


def _number(value: int | float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _range_text(values: Sequence[int | float]) -> str:
    """ "376 B", or "376 to 377 B"."""
    low, high = min(values), max(values)
    return f"{_number(low)} B" if low == high else f"{_number(low)} to {_number(high)} B"
