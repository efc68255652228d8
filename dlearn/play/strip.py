"""The strip: all calls of all ranks of a run over time, to zoom into, point at and select, in a page without a kernel.

`strip.js` draws what is in view. Here the calls become columns of numbers, which pack well; of operations that are
alike the words, and who sends how much to whom, stand there once.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import zlib
from typing import Any

import numpy as np

from dlearn import draw
from dlearn.analysis.ddp.step_times import RunSteps, step_times
from dlearn.draw.palette import SERIES, ink_on, look
from dlearn.draw.save import closed_after, svg_of
from dlearn.errors import DlearnError
from dlearn.events.event import Span
from dlearn.events.event_table import Column
from dlearn.events.printable import printable
from dlearn.join.joining import everybody, operations
from dlearn.join.operation_messages import sums_of, why_unknown
from dlearn.join.tables.operation_table import Operation
from dlearn.join.tables.operations import Operations
from dlearn.play.page import Page, script, style
from dlearn.shown import count_text, first_few
from dlearn.trace import Trace

_LEAST_UNIT_NS = 100
_HIGHEST = 2**31 - 2
"""Of a number in four bytes."""
_ROOM_FOR_STUCK = 1.15
"""The page is so much longer than all that was seen, where a call has not come out."""
_NAMES_SHOWN = 3
"""Of one colour, in the legend."""


class Strip(Page):
    """All of a trace over time. A notebook shows it, also without a kernel; `to_html` gives a page of its own."""

    def __init__(self, trace: Trace) -> None:
        self.steps = step_times(trace)
        calls = len(operations(trace).calls)
        counted = f"{count_text(calls, 'call')} of {count_text(len(trace.ranks), 'rank')}"
        found = f": {self.steps.finding}" if self.steps.titles else ""
        self.title = printable(f"{counted}{found}")
        self.snippet = _snippet(self.title, packed(trace, self.steps))
        self._trace = trace

    def _repr_html_(self) -> str:
        """With a picture, for a notebook that runs no scripts, as one that nobody trusts yet."""
        return self.snippet.replace("</p>", f"</p>{_still(self._trace, self.steps)}", 1)

    def __repr__(self) -> str:
        return self.title


def strip(trace: Trace) -> Strip:
    """Travel through all calls of a trace: the whole run with a frame to move, below it a lane for each rank.

    Drag, wheel and keys move and zoom; what is chosen is told in words, with its line of code, its bytes and how they
    are known, and in Python that selects the same. DlearnError for a trace without calls.
    """
    if not len(operations(trace).calls):
        raise DlearnError("there is nothing to travel through: this trace holds no call of an operation.")
    return Strip(trace)


def packed(trace: Trace, steps: RunSteps) -> bytes:
    """The JSON's length, the JSON, and the columns, all numbers in four bytes, compressed by zlib."""
    data, columns = contents(trace, steps)
    text = json.dumps(data, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    parts = [np.array([len(text)], "<i4").tobytes(), text, *(column.astype("<i4").tobytes() for column in columns)]
    return zlib.compress(b"".join(parts), level=6)


def contents(trace: Trace, steps: RunSteps) -> tuple[dict[str, Any], list[Column]]:
    """What `strip.js` reads. Times are in `unit_ns` from the trace's first event on.

    Columns of calls, by rank and start: the start after the one before, how long it took (-1: it has not come out,
    -2: its end was not seen) and waited, and its operation; of operations: the kind, and the span it lies in.
    """
    shown = operations(trace)
    calls = shown.calls
    ranks = sorted(everybody(trace) | {*trace.labels})
    last_ns = max(int(calls.start_ns.max()), int(calls.end_ns.max()))  # NONE is lower than any time.
    begin_ns = trace.whole.first_ns
    seen_ns = last_ns - begin_ns
    shown_ns = int(seen_ns * _ROOM_FOR_STUCK) if calls.pending.any() else seen_ns
    unit_ns = max(_LEAST_UNIT_NS, -(-shown_ns // _HIGHEST))

    order = np.lexsort((calls.start_ns, calls.rank))
    start = np.maximum(0, calls.start_ns[order] - begin_ns) // unit_ns
    end_ns = np.where(calls.ended, calls.end_ns, last_ns)[order]
    took = np.where(calls.ended[order], (end_ns - begin_ns) // unit_ns - start, np.where(calls.pending[order], -1, -2))
    waits_ns = np.minimum(calls.transfer_ns[order], end_ns) - calls.start_ns[order]
    alone = shown.table.waits_for_none[shown.rows][calls.operation[order]]
    first = np.searchsorted(calls.rank[order], [*ranks, ranks[-1] + 1])
    lanes = {rank: place for place, rank in enumerate(ranks)}
    differences = np.diff(start, prepend=0)
    begins = first[:-1][np.diff(first) > 0]  # of the ranks that call anything
    differences[begins] = start[begins]

    kinds, kind = _kinds(trace, shown, lanes)
    families: dict[str, list[str]] = {}
    for each in kinds:
        families.setdefault(each["color"], []).append(each["family"] or each["mark"])
    colors = list(families)
    for each in kinds:
        each["look"] = colors.index(each["color"])
    named, within = _in_steps(trace, shown, steps)
    cells = _cells(steps, lanes, begin_ns, last_ns, unit_ns)
    data = {
        "lanes": [printable(trace.label(rank)) for rank in ranks],
        "begin_us": begin_ns // 1000,
        "unit_ns": unit_ns,
        "length": max(1, shown_ns // unit_ns + 1),
        "first": first.tolist(),
        "operations": len(shown),
        "kinds": kinds,
        "colors": colors,
        "legend": [first_few([*dict.fromkeys(names)], _NAMES_SHOWN) for names in families.values()],
        "inks": {color: ink_on(color) for color in colors},
        "spans": list(named),
        "steps": [
            [printable(title), min(cell[1] for cell in mine), max(cell[2] for cell in mine) + 1, named.get(title, -1)]
            for title, mine in zip(steps.titles, cells, strict=True)
        ],
        "heat": [cell for mine in cells for cell in mine],
    }
    waited = np.where(alone, 0, np.maximum(0, waits_ns // unit_ns))
    return data, [differences, took, waited, calls.operation[order], kind, within]


def _kinds(trace: Trace, shown: Operations, lanes: dict[int, int]) -> tuple[list[dict[str, Any]], Column]:
    """What is the same for operations that differ in nothing but their times, each once; and the kind of each."""
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    places: dict[tuple[Any, ...], int] = {}
    kind = np.zeros(len(shown), np.int64)
    for one, alike in shown.alike():
        described = _kind(one, trace, lanes)
        key = tuple(described.values())
        kinds[key] = described
        kind[alike] = places.setdefault(key, len(places))
    return [*kinds.values()], kind


def _kind(one: Operation, trace: Trace, lanes: dict[int, int]) -> dict[str, Any]:
    expected = sums_of(one)
    pairs = [
        (lanes[each.src], lanes[each.dst], each.payload_bytes or 0, each.message_count, each.how)
        for each in expected
        if each.how != "missing"
    ]
    reason = why_unknown(one)
    sites = dict.fromkeys(end.site for end in one.ends if end.site)
    where = f" ({', '.join(sites)})" if sites else ""
    never = [trace.label(rank) for rank in one.missing]
    where += f", which {first_few(never, _NAMES_SHOWN)} never called" if never else ""
    return {
        "op": one.ends[0].op,
        "text": printable(f"{one.op} of {one.what}{where}"),
        "mark": printable(f"bucket {one.bucket.index}" if one.bucket is not None else one.op),
        "color": look(one.op).color if one.bucket is None else SERIES[one.bucket.index % len(SERIES)],
        "family": look(one.op).family if one.bucket is None else "",
        "how": ", ".join(sorted({each.how for each in expected})) or "none",
        "why": "" if reason is None else printable(f"No messages known: {reason}"),
        "pairs": tuple(pairs),
        "absent": tuple(lanes[rank] for rank in one.missing if rank in lanes),
    }


def _in_steps(trace: Trace, shown: Operations, steps: RunSteps) -> tuple[dict[str, int], Column]:
    """The place of each step that is a span of that name; and of each operation the one it lies in, or -1.

    It lies there as for `Trace.within`: one of its calls does. With RPC the page selects by time.
    """
    spans = [title for title in steps.titles if title in trace.spans] if not trace.rpc.exchanges else []
    named = {title: place for place, title in enumerate(spans)}
    table = shown.table.events
    inside = table.of_firsts(lambda event: named.get(event.name, -1) if isinstance(event, Span) else -1, np.int64)
    inside = np.append(np.append(inside, -1)[table.parent_row], -1)
    while True:  # As deep as calls lie in each other.
        deeper = np.where(inside[:-1] < 0, inside[table.parent_row], inside[:-1])
        if (deeper == inside[:-1]).all():
            break
        inside[:-1] = deeper
    calls = shown.table.end_row[shown.table.ends_of(shown.rows)]
    first = np.cumsum(np.append(0, np.diff(shown.table.first)[shown.rows]))[:-1]
    within = np.maximum.reduceat(inside[calls], first) if len(calls) else np.empty(0, np.int64)
    return named, within


_Cell = tuple[int, int, int, int]
"""Lane, start, end, and a shade from 0 to 255, as `draw.steps` shades it; -1: never finished."""


def _cells(steps: RunSteps, lanes: dict[int, int], begin_ns: int, last_ns: int, unit_ns: int) -> list[list[_Cell]]:
    found: list[list[_Cell]] = []
    for each, shades in zip(steps.cells, steps.shades, strict=True):
        found.append([])
        for rank, cell in each.items():
            end_ns = last_ns if cell.length_ns is None else cell.start_ns + cell.length_ns
            shade = int(255 * shades[rank])
            ends = (cell.start_ns - begin_ns) // unit_ns, (end_ns - begin_ns) // unit_ns
            found[-1].append((lanes[rank], *ends, -1 if cell.length_ns is None else shade))
    return found


# HTML -----------------------------------------------------------------------------------------------------------------

_KEYS = {
    "Home": "Whole", "+": "Zoom in", "-": "Zoom out", "p": "Previous call", "n": "Next call",
    "Escape": "Choose none",
}  # fmt: skip
_BUTTONS = "".join(f'<button type="button" data-key="{key}">{name}</button>' for key, name in _KEYS.items())
_PARTS = f"""
<div class="travel" hidden>
<div class="bar buttons"><select aria-label="Go to a step"></select>{_BUTTONS}</div>
<canvas class="overview" role="img" aria-label="The whole run: drag to choose what is shown below"></canvas>
<p class="note legend"></p>
<canvas class="lanes" tabindex="0" role="application" aria-label="A lane for each rank. Left and right move, plus and
minus zoom, N and P go to the next and the previous call, up and down to another rank, Escape chooses none."></canvas>
<p class="sentence" aria-live="polite"></p>
<p class="note">The same in Python: <code></code> <button type="button" class="copy">Copy</button></p>
<p class="note">Who sent to whom in it: from a row's rank to a column's, the stronger the more bytes.</p>
<canvas class="traffic" role="img" aria-label="Traffic matrix of what is chosen; the sentence has its sum"></canvas>
</div>
"""


def _still(trace: Trace, steps: RunSteps) -> str:
    """The picture for pages that run no scripts."""
    with closed_after():
        axes = draw.steps(trace) if steps.titles else draw.timeline(trace)
        svg = svg_of(axes)
    told = html.escape(str(axes.get_label()), quote=True)
    return f'<img class="still" alt="{told}" src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}">'


def _snippet(title: str, data: bytes) -> str:
    text = base64.b64encode(data).decode()
    unique = hashlib.sha256(data).hexdigest()[:8]
    return (
        f'<div class="dlearn-player dlearn-strip mathjax_ignore tex2jax_ignore" data-strip="{unique}"'
        f' data-lm-suppress-shortcuts="true"><style>{style()}</style>'
        f'<p class="title">{html.escape(title)}</p>{_PARTS}'
        f'<script type="application/dlearn">{text}</script>{script("elements.js", "strip.js")}</div>'
    )
