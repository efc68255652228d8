"""The static picture of a player, for pages that run no scripts: the first messages as a sequence diagram, in SVG.

It is an `<img>`, which notebooks that are not trusted keep, while they take out scripts and inline SVG.
"""

import base64
import html
from collections.abc import Sequence

from dlearn.analysis.replay import Step, Walkthrough
from dlearn.draw.palette import DARK, FAINT, INK, MISSING
from dlearn.events.printable import printable
from dlearn.play.page import dashes
from dlearn.shown import size_text

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


def static_frame(walk: Walkthrough) -> str:
    """Return an `<img>` of the first messages of the walk, or of the last before one that never came."""
    rows = [step for step in walk.steps if step.message is not None or step.absent]
    hung = bool(rows) and bool(rows[-1].absent)
    where, shown = ("last", rows[-MOST_ROWS:]) if hung else ("first", rows[:MOST_ROWS])
    part = f"the {where} {len(shown)} of " if len(shown) < len(rows) else ""
    said = f"Sequence diagram of {part}{len(rows):,} messages: see the words below"
    return image(said, _svg(shown, walk.labels))


def image(text: str, svg: str) -> str:
    """Return an SVG as an `<img>` that no script needs; `text` says what it shows."""
    data = base64.b64encode(svg.encode()).decode()
    alt = html.escape(text, quote=True)
    return f'<img class="still" alt="{alt}" src="data:image/svg+xml;base64,{data}">'


def _svg(shown: Sequence[Step], labels: dict[int, str]) -> str:
    x = {rank: int(_LANE_PX * (lane + 0.5)) for lane, rank in enumerate(labels)}
    width, height = _LANE_PX * max(1, len(labels)), _TOP_PX + _ROW_PX * len(shown) + 8
    parts = [f'<path d="M{at} {_TOP_PX - 6}V{height}" stroke="{FAINT}"/>' for at in x.values()]
    for rank, at in x.items():
        name = printable(labels[rank])
        if len(name) > _MOST_LETTERS:
            name = name[: _MOST_LETTERS - 1] + "…"
        parts.append(f'<text x="{at}" y="13" font-weight="700">{html.escape(name)}</text>')
    for row, step in enumerate(shown):
        parts.append(_row(step, x, _TOP_PX + _ROW_PX * row + 18))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="sans-serif" font-size="11" text-anchor="middle" fill="{INK}">'
        f"<style>@media(prefers-color-scheme:dark){{{_NIGHT}}}</style>"
        f'<path d="M0 0H{width}V{height}H0z" fill="#fff"/>{"".join(parts)}</svg>'
    )


def _row(step: Step, x: dict[int, int], y: int) -> str:
    message = step.message
    if message is None:
        waits = [f'<circle cx="{x[rank]}" cy="{y - 4}" r="5"/>' for rank in step.waiting]
        never = [f'<text x="{x[rank]}" y="{y}">✖ never came</text>' for rank in step.absent]
        return f'<g fill="{FAINT}">{"".join(waits)}</g><g fill="{MISSING}">{"".join(never)}</g>'
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
