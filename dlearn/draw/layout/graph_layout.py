"""Where the nodes of an autograd graph stand: a band per worker, columns in the direction of the backward pass.

A gradient crosses straight up or down: its recv and its send share a column, and no other node is in its way. What
leads to another worker is in the first row of its band, the nodes before parameters below. All lengths in points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import TopologicalSorter
from heapq import heappop, heappush

from dlearn.join.autograd_graph import AutogradGraph, Key

Cell = tuple[int, int, int]
"""Band, column, row."""


@dataclass(frozen=True)
class Layout:
    """The cell of each node, and what stands how far apart."""

    cells: dict[Key, Cell]
    bands: tuple[int, ...]
    rows: tuple[int, ...]
    """Of each band."""

    @property
    def columns(self) -> int:
        return 1 + max((column for _, column, _ in self.cells.values()), default=-1)


def lay_out(graph: AutogradGraph) -> Layout:
    """Give each node a cell, in the order of the backward pass."""
    bands = tuple(sorted({node.key.rank for node in graph.nodes}))
    canvas = _Canvas({rank: band for band, rank in enumerate(bands)})
    following: dict[Key, list[Key]] = {node.key: [] for node in graph.nodes}
    for edge in graph.edges:
        following[edge.src].append(edge.dst)
    to_send = {edge.src: edge.dst for edge in graph.wires}
    waiting = Counter(edge.dst for edge in graph.edges)
    column = {node.key: 0 for node in graph.nodes}
    length, leads = _look_ahead(graph, following)
    ready: list[tuple[int, int, int, Key]] = []
    for node in graph.nodes:
        if not waiting[node.key]:
            heappush(ready, (0, -length[node.key], 0, node.key))
    while ready:
        first, _, _, key = heappop(ready)
        if key in to_send:
            column[key] = canvas.cross(key, to_send[key], first)
        elif key not in canvas.cells:  # A send has come with its recv.
            column[key] = canvas.place(key, first, row=0 if leads[key] else 1)
        for each in following[key]:
            column[each] = max(column[each], column[key] + (to_send.get(key) != each))
            waiting[each] -= 1
            if not waiting[each]:
                heappush(ready, (column[each], -length[each], canvas.cells[key][2], each))
    rows = [1] * len(bands)
    for band, _, row in canvas.cells.values():
        rows[band] = max(rows[band], row + 1)
    return Layout(canvas.cells, bands, tuple(rows))


class _Canvas:
    def __init__(self, band: Mapping[int, int]) -> None:
        self.cells: dict[Key, Cell] = {}
        self._band = band
        self._taken: set[Cell] = set()
        self._closed: set[tuple[int, int]] = set()
        """Bands and columns that a gradient passes from top to bottom."""

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
