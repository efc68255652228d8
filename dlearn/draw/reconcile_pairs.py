"""Predicted against measured: for each pair of ranks what its messages should take on the wire, and what they took."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from dlearn import analysis
from dlearn.analysis.findings import size_text
from dlearn.analysis.volume.reconcile import Reconciliation, WirePart
from dlearn.draw import canvas
from dlearn.draw.canvas import TEXT_PT, cut, plain, points, text_width, write
from dlearn.draw.palette import FAINT
from dlearn.join.ledger import Pair
from dlearn.shown import count_text
from dlearn.trace.trace import Trace

_ROW_IN = 0.25
_MOST_PAIRS = 12
_GAP_PT, _LEAST_GAP_PT = 16.0, 7.0


def reconcile(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw a table with a row for each pair of ranks: payload, what it takes on the wire, and what the kernel counted.

    A residue, what lies between the two, is bold.
    """
    found = analysis.reconcile(trace)
    most = _MOST_PAIRS if ax is None else max(1, int(points(ax, 1.0, along="y") / 72 / _ROW_IN) - 2)
    pairs = pairs_shown(found, most)
    # A head, and the sum below.
    ax = ax or canvas.new_axes(height_in=(len(pairs) + 2) * _ROW_IN, left_in=0.15)
    if not pairs:
        return canvas.say_empty(ax, "This trace holds no messages whose bytes could be compared.")
    canvas.describe(ax, *(exact_text(f"{_name(found, pair)}: ", pair) for pair in pairs))
    draw_table(ax, found, pairs)
    return canvas.frame(ax, title=title_of(found), notes=notes(found, len(pairs)), below_in=0.08)


def pairs_shown(found: Reconciliation, most: int) -> list[Pair]:
    """Of too many those with the largest residue, then those with the most bytes."""
    pairs = list(found.whole.pairs)
    if len(pairs) <= most:
        return pairs
    return sorted(pairs, key=lambda pair: (-abs(pair.residue_bytes or 0), -pair.predicted_bytes))[:most]


def title_of(found: Reconciliation) -> str:
    """The finding; why nothing was measured stands below."""
    if found.not_measured or found.whole.measured_bytes is None:
        return f"{found.whole.predicted_bytes:,} B predicted on the wire, not measured"
    return found.finding


def draw_table(ax: Axes, found: Reconciliation, pairs: Sequence[Pair]) -> None:
    """Numbers stand right in their columns; in a narrow picture what the prediction is made of is left out."""
    width = points(ax, 1.0, along="x")
    ax.set(xlim=(0, width), ylim=((len(pairs) + 2) * _ROW_IN, 0))
    ax.set_axis_off()
    columns = list(zip(*rows_of(found, pairs), strict=True))
    texts = [max(text_width(text, size=TEXT_PT, bold=True) for text in column) for column in columns]
    while sum(texts) + len(texts) * _LEAST_GAP_PT > width and len(columns) > 3:
        least = 1 if columns[2][0] in ("predicted", "measured") else 2
        del columns[least], texts[least]  # What the prediction is made of, then the payload, then itself.
    gap = _GAP_PT if sum(texts) + len(texts) * _GAP_PT <= width else _LEAST_GAP_PT
    widths = [text + gap for text in texts]
    widths[0] = min(widths[0], width - sum(widths[1:]))
    spread = min(3 * _GAP_PT, (width - sum(widths)) / len(widths))
    for place, column in enumerate(columns):
        right = sum(widths[: place + 1]) + place * spread
        for row, text in enumerate(column):
            is_off = column[0] == "residue" and text not in ("?", "0 B")
            bold = "bold" if is_off or row in (0, len(pairs) + 1) else "normal"
            x, align = (right, "right") if place else (0.0, "left")
            shown = cut(text, widths[place], size=TEXT_PT)
            write(ax, x, (row + 0.5) * _ROW_IN, shown, ha=align, fontweight=bold)
    ax.hlines([_ROW_IN, (len(pairs) + 1) * _ROW_IN], 0, right, colors=FAINT, linewidth=0.6)


def rows_of(found: Reconciliation, pairs: Sequence[Pair]) -> list[list[str]]:
    """A head, the pairs, the sum of all that there are; what was measured, if anything was."""
    observed = found.whole.observer_bytes > 0
    measured = any(pair.measured_bytes is not None for pair in found.whole.pairs)
    head = ["", "payload", "framing", *(["recorder's ids"] if observed else []), "predicted"]
    switched = found.switched and len({pair.group for pair in found.whole.pairs}) == 1
    head += (["measured", *(["switch"] if switched else []), "residue"]) if measured else []
    all_pairs = f"in all ({count_text(len(found.whole.pairs), 'pair')})"
    named = [(_name(found, pair), pair) for pair in pairs] + [(all_pairs, found.whole)]
    table = [[name, *_sizes(part, observed)] for name, part in named]
    for (_, part), row in zip(named, table, strict=True):
        ends = [(part.src, part.dst)] if isinstance(part, Pair) else [*found.switched]
        sizes = [found.switched[each][0] for each in ends if each in found.switched]
        row[-1:-1] = [size_text(sum(sizes)) if sizes else ""] if switched else []
    return [head, *(row[: len(head)] for row in table)]


def _sizes(part: Pair | WirePart, observed: bool) -> list[str]:
    framing = part.predicted_bytes - part.payload_bytes
    # Of calls that are not predicted the payload is known, and not what it takes.
    told = [size_text(part.payload_bytes), size_text(framing) if framing >= 0 else "?"]
    told += [size_text(part.observer_bytes)] if observed else []
    told.append(size_text(part.predicted_bytes + part.observer_bytes))
    if part.measured_bytes is None:
        return [*told, "not measured", "?"]
    residue = part.measured_bytes - part.predicted_bytes - part.observer_bytes
    return [*told, size_text(part.measured_bytes), f"{residue:+,} B" if residue else "0 B"]


def _name(found: Reconciliation, pair: Pair) -> str:
    src, dst = (plain(found.labels[rank]) for rank in (pair.src, pair.dst))
    several = len({each.group for each in found.whole.pairs}) > 1
    return f"{src} to {dst}" + (f", group {plain(pair.whose, most=12)}" if several else "")


def exact_text(name: str, part: Pair | WirePart) -> str:
    """ "rank 0 to rank 1: payload 200 B, predicted on the wire 776 B, measured 776 B, residue 0 B." """
    ids = f" ({part.observer_bytes:,} B of it the recorder's own ids)" if part.observer_bytes else ""
    predicted = part.predicted_bytes + part.observer_bytes
    told = f"{name}payload {part.payload_bytes:,} B, predicted on the wire {predicted:,} B{ids}"
    if part.measured_bytes is None:
        return f"{told}, not measured."
    residue = part.residue_text if isinstance(part, WirePart) else f"{part.residue_bytes or 0:,} B"
    return f"{told}, measured {part.measured_bytes:,} B, residue {residue}."


def notes(found: Reconciliation, shown: int) -> list[str]:
    """The exact bytes, why they differ or were not measured, and what is not drawn."""
    told = [exact_text("Exactly, in all: ", found.whole)]
    why = "; ".join(note for note in (found.not_measured, found.whole.note) if note)
    if why:
        told.append(plain(f"Why: {why}.", most=300))
    told += [f"{found.third_witness}."] if found.switched else []
    left_out = len(found.whole.pairs) - shown
    if left_out:
        told.append(f"{count_text(left_out, 'more pair')} of ranks not drawn: see analysis.reconcile.")
    off = sum(part.residue_bytes != 0 for part in found.parts)
    if found.whole.measured_bytes is not None and off:
        told.append(f"Of {count_text(len(found.parts), 'part')} {off:,} have a residue: see analysis.reconcile.")
    return told
