"""A walk as the facts that `player.js` reads: a column for each fact about the steps, and each text once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from dlearn.analysis.replay import Change, StatePanel, Step, Walkthrough
from dlearn.draw.animation import WIDTH, Spots, spots_of
from dlearn.draw.autograd_bands import lay_out
from dlearn.draw.palette import GRADIENT, NODE, SERIES, WORK, look
from dlearn.events.printable import printable
from dlearn.join.autograd_graph import AutogradGraph
from dlearn.shown import RankNames

MOST_NAMES = 8
"""Of more ranks each is its number alone, if it has no name of its own."""
_OWN_COLORS = {"gradient": GRADIENT, "work": WORK, "node": NODE}
"""Of what is no message: a gradient that is ready, work of a rank, a node that runs."""


def player_facts(walk: Walkthrough) -> dict[str, Any]:
    """Return what `player.js` reads. Times are in µs from the first step on; names are numbers of the lists."""
    lanes = {rank: lane for lane, rank in enumerate(walk.labels)}
    names = [printable(name) for name in walk.labels.values()]
    short = [printable(walk.labels.short(rank)) for rank in walk.labels]
    lists: dict[str, dict[Any, int]] = {"pairs": {}, "parts": {}, "texts": {}}
    begin_ns = min((step.at_ns for step in walk.steps), default=0)
    steps = _step_columns(walk, lanes, begin_ns, lists)
    panels = {panel.title: number for number, panel in enumerate(walk.panels)}

    def changes(some: Iterable[Change]) -> list[list[int]]:
        found = []
        for each in some:
            if each.rank in lanes:
                owners = tuple(lanes[rank] for rank in each.owners if rank in lanes)
                text = _number(lists["texts"], (printable(each.text), each.share, owners))
                found.append([panels[each.panel], lanes[each.rank], each.index, text])
        return found

    def panel(each: StatePanel) -> dict[str, Any]:
        title = printable(each.title)
        return {"title": title, "lasting": each.lasting, "start": changes(each.start)}

    facts = {
        "lanes": short if len(names) > MOST_NAMES else names,
        "begin_us": begin_ns // 1000,
        "steps": steps,
        "sentences": [printable(step.sentence) for step in walk.steps],
        "changes": [changes(step.changes) for step in walk.steps],
        "panels": list(map(panel, walk.panels)),
        "graphs": [_graph(each, walk.labels) for each in walk.graphs],
        "stage": _stage(walk, lanes),
        "hues": SERIES,
        **{name: list(items) for name, items in lists.items()},
    }
    facts["pairs"] = [f"{names[src]} → {names[dst]}" for src, dst in lists["pairs"]]
    return facts


def _step_columns(
    walk: Walkthrough, lanes: Mapping[int, int], begin_ns: int, lists: Mapping[str, dict[Any, int]]
) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = defaultdict(list)
    moment: object = None
    number = -1
    for step in walk.steps:
        number += step.moment != moment
        moment = step.moment
        facts: dict[str, Any] = {
            "src": lanes[step.rank],
            "dst": -1,
            "pair": -1,
            "bytes": 0,
            "how": "missing" if step.absent else "observed",
            "color": _OWN_COLORS.get(step.op) or look(step.op).color,
            "control": int(step.control),
            "at": (step.at_ns - begin_ns) // 1000,
            "until": -1 if step.until_ns is None else (step.until_ns - begin_ns) // 1000,
            "part": _number(lists["parts"], printable(step.part)),
            "mark": printable(_mark_of(step)),
            "highlighted": step.highlighted,
            "hung": _hung(step, lanes) if step.absent else None,
            "round": number,
        }
        if (message := step.message) is not None:
            pair = lanes[message.src], lanes[message.dst]
            facts |= {"src": pair[0], "dst": pair[1], "pair": _number(lists["pairs"], pair)}
            facts |= {"bytes": message.payload_bytes, "how": message.how}
        for name, value in facts.items():
            columns[name].append(value)
    return columns


def _number(items: dict[Any, int], item: Hashable) -> int:
    """Return the item's number, in the order of first mention."""
    return items.setdefault(item, len(items))


def _mark_of(step: Step) -> str:
    """Return the step's own mark, the bucket or the function of its message, or else the operation."""
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


def _hung(step: Step, lanes: Mapping[int, int]) -> list[Any]:
    """Return the lanes that wait, those that never came, and the pairs between which nothing was sent."""
    waiting, absent = ([lanes[rank] for rank in side] for side in (step.waiting, step.absent))
    return [waiting, absent, _between(step.never, lanes)]


def _between(pairs: Iterable[tuple[int, int]], lanes: Mapping[int, int]) -> list[tuple[int, int]]:
    return [(lanes[src], lanes[dst]) for src, dst in pairs if src in lanes and dst in lanes]


def _stage(walk: Walkthrough, lanes: Mapping[int, int]) -> dict[str, Any]:
    pairs = [(each.src, each.dst) for each in walk.messages if each.src != each.dst]
    for step in walk.steps:
        pairs += step.never
    wires = dict.fromkeys(_between(pairs, lanes))
    return _placed(spots_of(range(len(lanes)), wires), wires)


def circle(ranks: int, wires: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Return a stage with the ranks in a circle, whichever of them send to which: that may not be known yet."""
    return _placed(spots_of(range(ranks), ()), wires)


def _placed(spots: Spots, wires: Iterable[tuple[int, int]]) -> dict[str, Any]:
    """Return sizes and points on a stage of `width` pixels, as stage.js takes it."""
    middles = [(round(x, 1), round(y, 1)) for _, (x, y) in sorted(spots.middles.items())]
    size = {"wide": spots.wide, "high": spots.high, "height": round(spots.height, 1), "width": WIDTH}
    return {"spots": middles, "pairs": [list(wire) for wire in wires], "row": int(spots.in_row), **size}


def _graph(graph: AutogradGraph, labels: RankNames) -> dict[str, Any]:
    """Return nodes as [column, row, name], edges as [from, to, over the wire], and a band of rows for each worker."""
    layout = lay_out(graph)
    tops = [sum(layout.rows[:band]) for band in range(len(layout.rows))]
    numbers = {node.key: number for number, node in enumerate(graph.nodes)}
    nodes = []
    for node in graph.nodes:
        band, column, row = layout.cells[node.key]
        nodes.append([column, tops[band] + row, printable(node.parameter or node.short)])
    names = [printable(labels[rank]) for rank in layout.bands]
    edges = [[numbers[each.src], numbers[each.dst], int(each.kind == "wire")] for each in graph.edges]
    return {
        "columns": layout.columns,
        "rows": sum(layout.rows),
        "bands": list(zip(names, tops, layout.rows, strict=True)),
        "nodes": nodes,
        "edges": edges,
    }
