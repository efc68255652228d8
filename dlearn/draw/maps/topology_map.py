"""The map of NCCL's wiring: hosts as boxes, ranks in them, and an arrow for each link, coloured by its kind."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Rectangle

from dlearn import analysis
from dlearn.analysis.volume.topology import LinkSum, Topology
from dlearn.draw import canvas
from dlearn.draw.arrows import draw_arrow
from dlearn.draw.canvas import points
from dlearn.draw.layout.circle_layout import Point, on_circle
from dlearn.draw.palette import FAINT, INK, LANE, SERIES
from dlearn.draw.text import plain
from dlearn.shown import count_text
from dlearn.trace import Trace

COLORS = {"P2P": SERIES[2], "NET": SERIES[1], "SHM": SERIES[0]}
KINDS = {"P2P": "GPU to GPU (P2P)", "NET": "over the network (NET)", "SHM": "through the host's memory (SHM)"}
MOST_RANKS, MOST_HOSTS = 64, 36
_NODE_PT = 10.0
_NAME_PT = 22.0
_APART_PT = 46.0
_HIGHEST_PT = 300.0


def topology(trace: Trace, *, group: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw the links of NCCL's rings, from each rank to the next; of a group without a whole ring, all its links.

    The wider an arrow, the more channels. Of more than 64 ranks only the links between hosts are drawn.
    """
    found = analysis.topology(trace, group=group)
    why = ""
    if found is None or not found.edges:
        why = "No log of NCCL's tells how these ranks are wired."
    elif len(found.hosts) > MOST_HOSTS:
        why = f"{len(found.hosts)} hosts are too many for a map: analysis.topology has their rings."
    if found is None or why:
        return canvas.draw_message_instead(ax or canvas.new_axes(height_in=1.0, left_in=0.15), why)
    edges = drawn(found)
    width = canvas.points_wide(ax, left_in=0.15)
    columns = min(len(found.hosts), max(1, int(width // 150)), math.ceil(math.sqrt(len(found.hosts) * 2)))
    rows = math.ceil(len(found.hosts) / columns)
    cell = (width - _APART_PT * (columns - 1)) / columns
    high = min(cell, _HIGHEST_PT)
    height = rows * high + (rows - 1) * _APART_PT
    ax = ax or canvas.new_axes(height_in=height / 72, left_in=0.15)
    high *= points(ax, 1.0, along="y") / height
    height = points(ax, 1.0, along="y")
    canvas.describe(ax, *found.sentences, *_told(found, edges))
    ax.set(xlim=(-1, width + 1), ylim=(height + 1, -1), xticks=[], yticks=[])
    ax.set_axis_off()
    places: dict[int, Point] = {}
    for number, (host, ranks) in enumerate(found.hosts.items()):
        down, across = divmod(number, columns)
        corner = across * (cell + _APART_PT), down * (high + _APART_PT)
        ax.add_patch(Rectangle(corner, cell, high, facecolor=LANE, edgecolor=FAINT, linewidth=0.8, gid=f"host {host}"))
        canvas.write(ax, corner[0] + 6, corner[1] + _NAME_PT / 2, plain(host, most=max(8, int(cell / 6))))
        if len(found.host_of) > MOST_RANKS:
            (middle,) = _around(corner, (cell, high), 1)
            places |= dict.fromkeys(ranks, middle)
            canvas.write(ax, *middle, count_text(len(ranks), "rank"), ha="center", zorder=4)
            continue
        for rank, spot in zip(ranks, _around(corner, (cell, high), len(ranks)), strict=True):
            places[rank] = spot
            ax.add_patch(Circle(spot, _NODE_PT, facecolor="white", edgecolor=INK, linewidth=0.8, zorder=3))
            canvas.write(ax, *spot, found.labels.short(rank), ha="center", zorder=4)
    _draw_edges(ax, edges, places)
    return canvas.frame(ax, title=title(found), legend=_legend(edges), notes=_notes(found, edges), below_in=0.08)


def drawn(found: Topology) -> list[LinkSum]:
    """Return the links of whole rings, or all where the log has none; of many ranks those between hosts, summed."""
    edges = [edge for edge in found.edges if edge.use == "ring"] if found.rings else []
    edges = edges or list(found.edges)
    if len(found.host_of) <= MOST_RANKS:
        return edges
    host_of = found.host_of
    sums: dict[tuple[int, int, str, str], list[LinkSum]] = defaultdict(list)
    for edge in edges:
        src, dst = host_of[edge.src], host_of.get(edge.dst)
        if dst is not None and src != dst:
            sums[found.hosts[src][0], found.hosts[dst][0], edge.kind, edge.use].append(edge)
    return [LinkSum(*ends, sum(edge.channels for edge in parts), parts[0].vias, ()) for ends, parts in sums.items()]


def title(found: Topology) -> str:
    """Say how many rings there are, and where they go."""
    hosts = count_text(len(found.hosts), "host")
    ranks = count_text(len(found.group.members), "rank")
    rings = sum(len(ring.channels) for ring in found.rings)
    if not rings:
        return f"{ranks} on {hosts}: links, but no whole ring in the log"
    orders = f" in {count_text(len(found.rings), 'order')}" if len(found.rings) > 1 else ""
    return f"{ranks} on {hosts}: {count_text(rings, 'ring')}{orders}"


def _around(corner: Point, size: Point, count: int) -> list[Point]:
    """Return points on an ellipse inside of a host's box, clockwise from the top."""
    x, y = corner[0] + size[0] / 2, corner[1] + _NAME_PT + (size[1] - _NAME_PT) / 2
    if count == 1:
        return [(x, y)]
    wide, high = size[0] / 2 - 2.2 * _NODE_PT, (size[1] - _NAME_PT) / 2 - 1.5 * _NODE_PT
    return [(x + wide * across, y - high * up) for across, up in on_circle(count)]


def _draw_edges(ax: Axes, edges: Sequence[LinkSum], places: Mapping[int, Point]) -> None:
    most = max(edge.channels for edge in edges) if edges else 1
    for edge in edges:
        if edge.dst not in places:
            continue
        width, color = 0.7 + 1.8 * edge.channels / most, COLORS.get(edge.kind, FAINT)
        style: dict[str, Any] = {"mutation_scale": 7 + 1.5 * width, "linewidth": width, "joinstyle": "round"}
        style |= {"shrinkA": _NODE_PT + 1, "shrinkB": _NODE_PT + 1, "connectionstyle": "arc3,rad=0.12", "zorder": 2}
        gid = f"link {edge.src} to {edge.dst} {edge.kind}"
        draw_arrow(ax, places[edge.src], places[edge.dst], how="observed", color=color, gid=gid, **style)


def _legend(edges: Sequence[LinkSum]) -> list[Artist]:
    handles: list[Artist] = []
    for kind in dict.fromkeys(edge.kind for edge in edges):
        cards = sorted({card for edge in edges for card in edge.cards if edge.kind == kind})
        label = KINDS.get(kind, plain(kind)) + f", {count_text(len(cards), 'card')} of each host" * bool(cards)
        handles.append(Line2D([], [], color=COLORS.get(kind, FAINT), linewidth=1.6, label=label))
    return handles


def _told(found: Topology, edges: Sequence[LinkSum]) -> list[str]:
    """Say the same in words, for readers who do not see it."""
    names = found.labels
    return [
        f"{names[edge.src]} to {names[edge.dst]}: {edge.vias[0]}, {count_text(edge.channels, 'channel')}."
        for edge in edges[:200]
    ]


def _notes(found: Topology, edges: Sequence[LinkSum]) -> list[str]:
    notes = []
    if len(found.host_of) > MOST_RANKS:
        notes.append("Only links between hosts are drawn, all ranks of a host together.")
    if len({edge.channels for edge in edges}) > 1:
        notes.append("The wider an arrow, the more channels use it.")
    unseen = sorted(set(found.group.members) - set(found.host_of))
    if unseen:
        notes.append(f"Not in the log: {found.labels.together(unseen)}.")
    if found.rings and any(choice.algorithm != "RING" for choice in found.choices):
        others = sorted({choice.algorithm for choice in found.choices} - {"RING"})
        notes.append(f"For some calls NCCL chose {', '.join(others)}: those did not go round these rings.")
    return notes
