"""The still picture of a player, for pages that run no scripts: the first messages as a sequence diagram, in SVG.

It stands in an `<img>`, which survives where scripts and inline SVG are taken out, as in a notebook nobody trusts yet.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from dlearn.analysis.findings import size_text
from dlearn.analysis.walking import Step, Walkthrough
from dlearn.draw.palette import DARK, FAINT, INK, LINES, MISSING
from dlearn.events.printable import printable

MOST_ROWS = 24
_ROW_PX = 24
_TOP_PX = 26
_LANE_PX = 110
_MOST_LETTERS = 15
_AT_NIGHT = {"#fff": DARK["paper"], INK: DARK["ink"], FAINT: DARK["faint"], MISSING: DARK["missing"]}
_NIGHT = "".join(
    f"[fill='{day}']{{fill:{night}}}[stroke='{day}']{{stroke:{night}}}" for day, night in _AT_NIGHT.items()
)
"""On a dark page each colour has another, as in all pictures."""


def still(walk: Walkthrough) -> str:
    """An `<img>` with the first messages of the walk, or the last before one that never came; it says how many."""
    rows = [step for step in walk.steps if step.message is not None or step.absent]
    where, shown = ("last", rows[-MOST_ROWS:]) if rows and rows[-1].absent else ("first", rows[:MOST_ROWS])
    svg = base64.b64encode(_svg(shown, walk.labels).encode()).decode()
    part = f"the {where} {len(shown)} of " if len(shown) < len(rows) else ""
    said = f"Sequence diagram of {part}{len(rows):,}"
    return f'<img class="still" alt="{said} messages: see the words below" src="data:image/svg+xml;base64,{svg}">'


def _svg(shown: Sequence[Step], labels: dict[int, str]) -> str:
    x = {rank: int(_LANE_PX * (place + 0.5)) for place, rank in enumerate(labels)}
    width, height = _LANE_PX * max(1, len(labels)), _TOP_PX + _ROW_PX * len(shown) + 8
    lanes = "".join(f'<path d="M{at} {_TOP_PX - 6}V{height}" stroke="{FAINT}"/>' for at in x.values())
    names = "".join(f'<text x="{at}" y="13" font-weight="700">{_name(labels[rank])}</text>' for rank, at in x.items())
    rows = "".join(_row(step, x, _TOP_PX + _ROW_PX * row + 18) for row, step in enumerate(shown))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="sans-serif" font-size="11" text-anchor="middle" fill="{INK}">'
        f"<style>@media(prefers-color-scheme:dark){{{_NIGHT}}}</style>"
        f'<path d="M0 0H{width}V{height}H0z" fill="#fff"/>{lanes}{names}{rows}</svg>'
    )


def _row(step: Step, x: dict[int, int], y: int) -> str:
    message = step.message
    if message is None:
        waits = "".join(f'<circle cx="{x[rank]}" cy="{y - 4}" r="5"/>' for rank in step.waiting)
        never = "".join(f'<text x="{x[rank]}" y="{y}">✖ never came</text>' for rank in step.absent)
        return f'<g fill="{FAINT}">{waits}</g><g fill="{MISSING}">{never}</g>'
    color = MISSING if message.how == "missing" else INK
    line = dashes(message.how)
    dashed = f' stroke-dasharray="{line}"' if line else ""
    src, dst = x[message.src], x[message.dst]
    label = "never came: " * (message.how == "missing") + size_text(message.payload_bytes)
    if src == dst:
        path, head, middle = f"M{src} {y - 8}h20v8H{src + 8}", (src, -1), src - 24
    else:
        path, head, middle = f"M{src} {y}H{dst}", (dst, 1 if dst > src else -1), (src + dst) // 2
    tip, way = head
    return (
        f'<g fill="{color}"><path d="{path}" fill="none" stroke="{color}"{dashed}/>'
        f'<path d="M{tip} {y}l{-8 * way}-4v8z"/><text x="{middle}" y="{y - 4}">{label}</text></g>'
    )


def dashes(how: str) -> str:
    """ "6.0 3.0", as SVG wants it; empty where the line is solid."""
    line = LINES[how]
    return "" if isinstance(line, str) else " ".join(str(1.5 * length) for length in line[1])


def _name(label: str) -> str:
    text = printable(label)
    return html.escape(text if len(text) <= _MOST_LETTERS else text[: _MOST_LETTERS - 1] + "…")
