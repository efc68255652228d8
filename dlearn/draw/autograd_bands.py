"""The graph of distributed autograd: a band per worker, columns in the direction of the backward pass.

A gradient crosses straight up or down: its recv and its send share a column, and no other node is in its way. What
leads to another worker is in the first row of its band, the nodes before parameters below. All lengths in points.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from dlearn.draw import canvas
from dlearn.draw.canvas import draw_arrow, points
from dlearn.draw.palette import FAINT, INK, LANE, MISSING, TEXT_PT, Color, cut, look, plain, text_width
from dlearn.draw.traffic_graph import Spot, curve, meets
from dlearn.join.autograd_graph import AutogradGraph, Edge, Key, Node, contexts_with_graph, join_graph
from dlearn.shown import first_few, size_text
from dlearn.trace import Trace

_BOX_PT = 17.0
_ROW_PT = 28.0
_BETWEEN_PT = 34.0  # Between two bands: room for two lines beside an arrow.
_EDGE_PT = 9.0  # Between two boxes: room for an arrow's head.
_PAD_PT = 7.0
_WIDEST_PT = 90.0
_CROSSING_IN, _MOST_CROSSINGS = 0.36, 40
Cell = tuple[int, int, int]  # Band, column, row.


@canvas.for_cells
def autograd(trace: Trace, *, context: int | None = None, ax: Axes | None = None) -> Axes:
    """Draw the graph that the backward pass went through in a context, by default the last: to the right is later.

    Where there is no room for its nodes, only what crosses: from the top, in the order in which it went.
    """
    whole = join_graph(trace, context)
    ranks = {node.key.rank for node in whole.nodes}
    left_in = canvas.left_margin_in(plain(trace.label(rank)) for rank in ranks)
    width = canvas.points_wide(ax, left_in=left_in)
    contexts = len(contexts_with_graph(trace)) if context is None else 1
    for graph in (whole, whole.condensed()):
        layout = lay_out(graph)
        columns = place_columns(graph, layout, width)
        if columns is not None:
            break
    else:
        return draw_crossings(trace, whole, contexts, ax)
    bands, top = [], 4.0
    for rows in layout.rows:
        bands.append((top, top + rows * _ROW_PT + 8))
        top = bands[-1][1] + _BETWEEN_PT
    height = bands[-1][1] + 4 if bands else 72.0
    ax = ax or canvas.new_axes(height_in=max(1.0, height / 72), left_in=left_in)
    if not whole.nodes:
        text = "This trace holds no autograd graph: record it with graph=True, or dlearn run --graph."
        return canvas.draw_message_instead(ax, text)
    nodes = "a box for each node of the graph, and arrows to those that come after it"
    canvas.describe(ax, f"A band for each worker; in it {nodes}.")
    ax.set(xlim=(0, width), ylim=(height, 0))
    canvas.draw_lanes(ax, bands)
    names = [plain(trace.label(rank)) for rank in layout.bands]
    canvas.name_rows(ax, [(top + bottom) / 2 for top, bottom in bands], names)
    ax.set_xticks([])
    canvas.names_only(ax)
    boxes: dict[Key, Spot] = {}
    for node in graph.nodes:
        band, column, row = layout.cells[node.key]
        middle = bands[band][0] + 4 + (row + 0.5) * _ROW_PT
        boxes[node.key] = Spot((columns[column], middle), _box_width(node) / 2, _BOX_PT)
    for edge in graph.edges:
        draw_edge(ax, edge, boxes)
    for node in graph.nodes:
        draw_node(ax, node, boxes[node.key], graph)
    notes = ["To the right is the direction of the backward pass; distances are no times.", *_notes(whole, contexts)]
    if len(graph.nodes) < len(whole.nodes):
        notes.append(f"Drawn as one box: nodes that only one other leads to ({len(whole.nodes):,} nodes in all).")
    return canvas.frame(ax, title=whole.finding, legend=legend(graph), notes=notes, above_in=0.05, below_in=0.1)


def draw_crossings(trace: Trace, graph: AutogradGraph, contexts: int, ax: Axes | None) -> Axes:
    """Draw a column for each worker, and from the top an arrow for each gradient that crosses, in their order."""
    count = Counter(node.key.rank for node in graph.nodes)
    place = {rank: column for column, rank in enumerate(sorted(count))}
    ax = ax or canvas.new_axes(height_in=max(1, len(graph.wires)) * _CROSSING_IN, left_in=0.15)
    wide = points(ax, 1 / len(place), along="x")
    if wide < TEXT_PT + 2 or len(graph.wires) > _MOST_CROSSINGS:
        large = f"A graph of {len(graph.nodes):,} nodes is too large to draw"
        return canvas.draw_message_instead(ax, f"{large}: see analysis.autograd_graph.")
    canvas.describe(ax, "A column for each worker; from the top an arrow for each gradient that crosses.")
    ax.set(xlim=(-0.5, len(place) - 0.5), ylim=(len(graph.wires), 0))
    ax.set_yticks([])
    above_in = canvas.names_on_top(ax, [*place.values()], [trace.label(rank) for rank in place], wide)
    ax.vlines([*place.values()], 0, len(graph.wires), colors=FAINT, linewidth=0.8, zorder=1)
    for y, wire in enumerate(graph.wires):
        start, end, label = place[wire.src.rank], place[wire.dst.rank], " ".join(wire_label(wire))
        _draw_wire(ax, wire, (start, y + 0.75), (end, y + (0.75 if start != end else 0.95)))
        half = (text_width(label) / 2 + 2) / wide
        middle = min(max((start + end) / 2, half - 0.5), len(place) - 0.5 - half)
        canvas.write(ax, middle, y + 0.4, label, on="white", ha="center", zorder=3, gid="wire label")
    held = first_few([f"{plain(trace.label(rank))} {count[rank]:,}" for rank in place], 8)
    room = f"Only what crosses, in the order it went: there is no room for {len(graph.nodes):,} nodes ({held})."
    title, notes = graph.finding, [room, *_notes(graph, contexts)]
    return canvas.frame(ax, title=title, notes=notes, above_in=above_in, below_in=0.1)


def place_columns(graph: AutogradGraph, layout: Layout, width: float) -> list[float] | None:
    """Return the middle of each column; None if they need more than this width."""
    if not graph.nodes:
        return []
    widths = [0.0] * layout.columns
    beside = [0.0] * layout.columns
    for node in graph.nodes:
        column = layout.cells[node.key][1]
        widths[column] = max(widths[column], _box_width(node))
    for wire in graph.wires:
        column = layout.cells[wire.src][1]
        beside[column] = max(beside[column], *(text_width(line) + 12 for line in wire_label(wire)))
    middles = [_PAD_PT + widths[0] / 2]
    for i in range(1, layout.columns):
        middles.append(middles[-1] + max((widths[i - 1] + widths[i]) / 2 + _EDGE_PT, beside[i - 1]))
    needed = middles[-1] + max(widths[-1] / 2, beside[-1]) + _PAD_PT
    if needed > width:
        return None
    more = min(30.0, (width - needed) / max(1, layout.columns - 1))
    return [middle + i * more for i, middle in enumerate(middles)]


def _box_width(node: Node) -> float:
    return text_width(node_label(node)) + 8


def node_label(node: Node) -> str:
    """Return what a node does; if it collects a gradient, for what."""
    if node.short == "AccumulateGrad":
        shape = list(node.shapes[0]) if node.shapes else ""
        return cut(plain(node.parameter or f"grad {shape}"), _WIDEST_PT)
    return cut(plain(node.short), _WIDEST_PT)


def wire_label(wire: Edge) -> list[str]:
    """Return two lines: bytes and shape."""
    if not wire.tensors:
        return ["not seen", "to cross"]
    more = f" +{len(wire.tensors) - 1}" if len(wire.tensors) > 1 else ""
    return [size_text(wire.payload_bytes), f"{list(wire.tensors[0].shape)}{more}"]


def draw_edge(ax: Axes, edge: Edge, boxes: dict[Key, Spot]) -> None:
    """Draw an arrow between two nodes, straight if it is free, and the label of one that crosses to another worker."""
    (x, y), half, _ = boxes[edge.src]
    (to_x, to_y), to_half, _ = boxes[edge.dst]
    if edge.kind == "wire":
        down = 1 if to_y > y else -1
        _draw_wire(ax, edge, (x, y + down * _BOX_PT / 2), (to_x, to_y - down * _BOX_PT / 2))
        above, label = max(y, to_y) - _ROW_PT / 2 - 4 - _BETWEEN_PT / 2, "\n".join(wire_label(edge))
        canvas.write(ax, to_x + 5, above, label, va="center", linespacing=1.1, zorder=5, gid="wire label")
        return
    start, end = (x + half, y), (to_x - to_half, to_y)
    others = [box.box(2) for key, box in boxes.items() if key not in (edge.src, edge.dst)]
    distance, rad = max(1.0, math.dist(start, end)), 0.0
    for bend in (0.0, 0.8, -0.8, 1.2, -1.2, 1.8, -1.8):
        # `arc3` bends to the other side where y grows downwards, as here.
        points = curve(start, end, rad=-bend * _ROW_PT / distance)
        if not any(meets(box, [points]) for box in others):
            rad = bend * _ROW_PT / distance
            break
    style: dict[str, Any] = {"mutation_scale": 7, "linewidth": 0.8, "joinstyle": "round", "zorder": 2}
    bent = f"arc3,rad={rad:.4f}"
    draw_arrow(ax, start, end, how="observed", color=FAINT, connectionstyle=bent, gid="edge", **style)


def _draw_wire(ax: Axes, wire: Edge, start: tuple[float, float], end: tuple[float, float]) -> None:
    how, gid = "observed" if wire.tensors else "inferred", f"wire {wire.src.rank} to {wire.dst.rank}"
    draw_arrow(ax, start, end, how=how, gid=gid, linewidth=1.2)


def draw_node(ax: Axes, node: Node, box: Spot, graph: AutogradGraph) -> None:
    """Draw a box with what the node does; red, the end of a message whose other end is not known."""
    (x, y), half, _ = box
    joined = {key for wire in graph.wires for key in (wire.src, wire.dst)}
    crosses = node.short in ("send", "recv")
    alone = crosses and node.key not in joined
    face = look("send").pale if crosses else LANE if node.short == "AccumulateGrad" else "white"
    style: dict[str, Any] = {"edgecolor": MISSING, "linewidth": 1.4} if alone else {"edgecolor": INK, "linewidth": 0.7}
    style["linestyle"] = "solid" if node.timed_by or alone else "dotted"
    style |= {"facecolor": face, "zorder": 3, "gid": "node"}
    ax.add_patch(Rectangle((x - half, y - _BOX_PT / 2), 2 * half, _BOX_PT, **style))
    canvas.write(ax, x, y, node_label(node), ha="center", zorder=5)


def legend(graph: AutogradGraph) -> list[Artist]:
    names = {node.short for node in graph.nodes}
    unseen = any(not node.timed_by for node in graph.nodes)
    kinds: list[tuple[object, Color, str, str]] = [
        (names & {"send", "recv"}, look("send").pale, "solid", "end of a message of the forward pass"),
        ("AccumulateGrad" in names, LANE, "solid", "gradient collected"),
        (unseen, "white", "dotted", "not seen to run"),
    ]
    return [Patch(facecolor=face, edgecolor=INK, ls=line, label=label) for there, face, line, label in kinds if there]


def _notes(whole: AutogradGraph, contexts: int) -> list[str]:
    notes = [f"The last of {contexts:,} contexts that have a graph."] if contexts > 1 else []
    sent = [each for wire in whole.wires for each in wire.tensors]
    for each in [each for each in sent if each.payload_bytes < each.logical_bytes][:1]:
        shape, size = list(each.shape), size_text(each.payload_bytes)
        notes.append(f"A gradient that repeats its numbers is sent without the repetitions: {shape} in {size}.")
    return notes + [f"Incomplete: {problem}." for problem in whole.problems]


@dataclass(frozen=True)
class Layout:
    """The cell of each node, and what stands how far apart."""

    cells: dict[Key, Cell]
    bands: tuple[int, ...]
    rows: tuple[int, ...]  # Of each band.

    @property
    def columns(self) -> int:
        return 1 + max((column for _, column, _ in self.cells.values()), default=-1)


def lay_out(graph: AutogradGraph) -> Layout:
    """Give each node a cell, in the order of the backward pass."""
    bands = tuple(sorted({node.key.rank for node in graph.nodes}))
    grid = _Grid({rank: band for band, rank in enumerate(bands)})
    following: dict[Key, list[Key]] = {node.key: [] for node in graph.nodes}
    for edge in graph.edges:
        following[edge.src].append(edge.dst)
    to_send = {edge.src: edge.dst for edge in graph.wires}
    waiting = Counter(edge.dst for edge in graph.edges)
    column = {node.key: 0 for node in graph.nodes}
    length, leads = _look_ahead(graph, following)
    first_of_all = (key for key in column if not waiting[key])
    ready = sorted((0, -length[key], 0, key) for key in first_of_all)  # A sorted list is a heap.
    while ready:
        first, _, _, key = heappop(ready)
        if key in to_send:
            column[key] = grid.cross(key, to_send[key], first)
        elif key not in grid.cells:  # A send has come with its recv.
            column[key] = grid.place(key, first, row=0 if leads[key] else 1)
        for each in following[key]:
            column[each] = max(column[each], column[key] + (to_send.get(key) != each))
            waiting[each] -= 1
            if not waiting[each]:
                heappush(ready, (column[each], -length[each], grid.cells[key][2], each))
    rows = [1] * len(bands)
    for band, _, row in grid.cells.values():
        rows[band] = max(rows[band], row + 1)
    return Layout(grid.cells, bands, tuple(rows))


class _Grid:
    def __init__(self, band: Mapping[int, int]) -> None:
        self.cells: dict[Key, Cell] = {}
        self._band = band
        self._taken: set[Cell] = set()
        self._closed: set[tuple[int, int]] = set()  # Bands and columns that a gradient passes.

    def place(self, key: Key, column: int, *, row: int) -> int:
        band = self._band[key.rank]
        while (band, column) in self._closed:
            column += 1
        while (band, column, row) in self._taken:
            row += 1
        self._put(key, (band, column, row))
        return column

    def cross(self, recv: Key, send: Key, column: int) -> int:
        """Put both into the first row. Down, it passes the rows below the recv; up, the rows below the send."""
        top, bottom = sorted((self._band[recv.rank], self._band[send.rank]))
        passed = range(top, bottom) if top != bottom else range(top, top + 1)
        while (
            any((band, column) in self._closed for band in range(top, bottom + 1))
            or (bottom, column, 0) in self._taken
            or any(at in passed and its == column for at, its, _ in self._taken)
        ):
            column += 1
        self._closed.update((band, column) for band in passed)
        self._put(recv, (self._band[recv.rank], column, 0))
        self._put(send, (self._band[send.rank], column, 0 if top != bottom else 1))
        return column

    def _put(self, key: Key, cell: Cell) -> None:
        self.cells[key] = cell
        self._taken.add(cell)


def _look_ahead(graph: AutogradGraph, following: Mapping[Key, list[Key]]) -> tuple[dict[Key, int], dict[Key, bool]]:
    """Count the nodes that follow each; return whether a recv does, or more than one parameter."""
    ends = {node.key for node in graph.nodes if node.short in ("send", "recv")}
    length: dict[Key, int] = {}
    leads: dict[Key, bool] = {}
    for key in TopologicalSorter(following).static_order():  # What follows a node comes before it.
        then = following[key]
        length[key] = max((length[each] + 1 for each in then), default=0)
        leads[key] = key in ends or len(then) > 1 or any(leads[each] for each in then)
    return length, leads
