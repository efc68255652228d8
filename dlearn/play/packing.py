"""A walk as the data of `player.js`: a column for each fact, as JSON, packed by zlib, as text that any page can hold.

Packed it is a small part of the JSON's size, and a browser unpacks it without a library (DecompressionStream).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

from dlearn.analysis.walking import Board, Change, Step, Walkthrough
from dlearn.draw.layout.graph_layout import lay_out
from dlearn.draw.layout.stage_spots import WIDTH, Spots, spots_of
from dlearn.draw.palette import GRADIENT, NODE, SERIES, WORK, look
from dlearn.events.printable import printable
from dlearn.join.autograd_graph import AutogradGraph
from dlearn.shown import RankNames

MOST_NAMES = 8
"""Of more ranks each is its number alone, if it has no name of its own."""
_HOW = ("observed", "derived", "inferred", "missing")
_OWN_COLORS = {"gradient": GRADIENT, "work": WORK, "node": NODE}
"""Of what is no message: a gradient that is ready, work of a rank, a node that runs."""


def packed(walk: Walkthrough) -> str:
    text = json.dumps(columns(walk), separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode(), level=9)).decode()


def columns(walk: Walkthrough) -> dict[str, Any]:
    """What `player.js` reads. Times in µs from the first step on; names are numbers of the lists beside them."""
    lanes = {rank: place for place, rank in enumerate(walk.labels)}
    names = [printable(name) for name in walk.labels.values()]
    short = [printable(walk.labels.short(rank)) for rank in walk.labels]
    pairs, colors, parts, marks, texts = _List(), _List(), _List(), _List(), _List()
    begins = min((step.at_ns for step in walk.steps), default=0)
    steps: dict[str, list[Any]] = defaultdict(list)
    moment: object = None
    number = -1
    for step in walk.steps:
        message = step.message
        src, dst = (lanes[step.rank], -1) if message is None else (lanes[message.src], lanes[message.dst])
        how = message.how if message is not None else "missing" if step.absent else "observed"
        moment, number = step.moment, number + (step.moment != moment)
        row = {
            "src": src,
            "dst": dst,
            "pair": pairs.place((src, dst)) if message is not None else -1,
            "color": colors.place(color_of(step)),
            "bytes": message.payload_bytes if message is not None else 0,
            "how": _HOW.index(how),
            "control": int(step.control),
            "at": (step.at_ns - begins) // 1000,
            "until": (step.until_ns - begins) // 1000 if step.until_ns is not None else -1,
            "part": parts.place(printable(step.part)),
            "mark": marks.place(printable(name_of(step))),
            "lit": list(step.lit) if step.lit is not None else 0,
            "hung": _hung(step, lanes) if step.absent else 0,
            "round": number,
        }
        for name, value in row.items():
            steps[name].append(value)
    boards = {board.title: place for place, board in enumerate(walk.boards)}

    def change(each: Change) -> list[int]:
        owners = tuple(lanes[rank] for rank in each.owners if rank in lanes)
        text = texts.place((printable(each.text), each.share, owners))
        return [boards[each.board], lanes[each.rank], each.place, text]

    def board(each: Board) -> dict[str, Any]:
        start = [change(one) for one in each.start if one.rank in lanes]
        return {"title": printable(each.title), "lasting": each.lasting, "start": start}

    lists = {"colors": colors, "parts": parts, "marks": marks, "texts": texts}
    return {
        "lanes": short if len(names) > MOST_NAMES else names,
        "begin_us": begins // 1000,
        "steps": steps,
        "sentences": [printable(step.sentence) for step in walk.steps],
        "changes": [[change(each) for each in step.changes if each.rank in lanes] for step in walk.steps],
        "boards": [board(each) for each in walk.boards],
        "graphs": [_graph(each, walk.labels) for each in walk.graphs],
        "stage": _stage(walk, lanes),
        "pairs": [f"{names[src]} → {names[dst]}" for src, dst in pairs.items],
        "hues": SERIES,
        **{name: each.items for name, each in lists.items()},
    }


def color_of(step: Step) -> str:
    return _OWN_COLORS.get(step.op) or look(step.op).color


def name_of(step: Step) -> str:
    """What a picture calls it: its own mark, the bucket or the function of a message, else the operation."""
    if step.message is None or step.mark:
        return step.mark
    operation, exchange = step.message.operation, step.message.operation.exchange
    if exchange is not None and step.message.step:
        return "reply"
    if exchange is not None and exchange.call is not None:
        return f"{exchange.call.function.rpartition('.')[2]}()"
    if operation.bucket is not None:
        return f"bucket {operation.bucket.index}"
    return look(step.op).family if step.op.isupper() else step.op


class _List:
    """Each item once, in the order of first mention."""

    def __init__(self) -> None:
        self._places: dict[Any, int] = {}

    def place(self, item: Hashable) -> int:
        return self._places.setdefault(item, len(self._places))

    @property
    def items(self) -> list[Any]:
        return list(self._places)


def _hung(step: Step, lanes: dict[int, int]) -> list[Any]:
    """Who waits, who never came, and between whom nothing was sent."""
    never = [[lanes[src], lanes[dst]] for src, dst in step.never if {src, dst} <= {*lanes}]
    return [*([lanes[rank] for rank in side] for side in (step.waiting, step.absent)), never]


def _stage(walk: Walkthrough, lanes: dict[int, int]) -> dict[str, Any]:
    """Where the ranks stand, in their order, and which of them send to which."""
    sent = [(each.src, each.dst) for each in walk.messages if each.src != each.dst]
    never = [pair for step in walk.steps for pair in step.never if {*pair} <= {*lanes}]
    pairs = dict.fromkeys((lanes[src], lanes[dst]) for src, dst in [*sent, *never])
    return _packed(spots_of(range(len(lanes)), pairs), pairs)


def circle(ranks: int, wires: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """A stage on which the ranks stand in a circle, whichever of them send to which: that may not be known yet."""
    return _packed(spots_of(range(ranks), ()), wires)


def _packed(spots: Spots, wires: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """As stage.js takes it: sizes and places on a stage of `width` pixels."""
    middles = [[round(part, 1) for part in middle] for _, middle in sorted(spots.middles.items())]
    size = {"wide": spots.wide, "high": spots.high, "height": round(spots.height, 1), "width": WIDTH}
    return {"spots": middles, "pairs": [list(wire) for wire in wires], "row": int(spots.in_row), **size}


def _graph(graph: AutogradGraph, labels: RankNames) -> dict[str, Any]:
    """Nodes as [column, row, name], edges between them as [from, to, over the wire], a band of rows for each worker."""
    layout = lay_out(graph)
    tops = [sum(layout.rows[:band]) for band in range(len(layout.rows))]
    places = {node.key: place for place, node in enumerate(graph.nodes)}
    return {
        "columns": layout.columns,
        "rows": sum(layout.rows),
        "bands": [[printable(labels[rank]), tops[band], layout.rows[band]] for band, rank in enumerate(layout.bands)],
        "nodes": [
            [column, tops[band] + row, printable(node.parameter or node.short)]
            for node in graph.nodes
            for band, column, row in (layout.cells[node.key],)
        ],
        "edges": [[places[edge.src], places[edge.dst], int(edge.kind == "wire")] for edge in graph.edges],
    }
