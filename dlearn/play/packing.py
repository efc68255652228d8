"""A walk as the facts that `player.js` reads: steps, sentences, what each rank holds, and where ranks stand."""

from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any

from dlearn.analysis.replay import Change, Step, Walkthrough
from dlearn.draw.animation import WIDTH, Spots, spots_of
from dlearn.draw.autograd_bands import lay_out
from dlearn.draw.palette import GRADIENT, NODE, SERIES, WORK, look
from dlearn.events.printable import printable
from dlearn.join.autograd_graph import AutogradGraph
from dlearn.shown import RankNames

MOST_NAMES = 8  # Of more ranks each is its number alone, if it has no name of its own.
MIDDLE = -1  # The receiver, on the stage of a paused job, of what goes to all ranks.
_OWN_COLORS = {"gradient": GRADIENT, "work": WORK, "node": NODE}
"""Of steps that are no message: a gradient that is ready, work of a rank, a node that runs."""

Pair = tuple[int, int]  # The lanes of sender and receiver.


def player_facts(walk: Walkthrough) -> dict[str, Any]:
    """Return what `player.js` reads. A rank is its lane; times are in µs from the first step on."""
    lanes = {rank: lane for lane, rank in enumerate(walk.labels)}
    names = [printable(name) for name in walk.labels.values()]
    short = [printable(walk.labels.short(rank)) for rank in walk.labels]
    begin_ns = min((step.at_ns for step in walk.steps), default=0)
    numbers = {panel.title: number for number, panel in enumerate(walk.panels)}
    pairs: dict[Pair, int] = {}
    steps = []
    for number, (_, together) in enumerate(groupby(walk.steps, key=lambda step: step.moment)):
        for step in together:
            facts = _step(step, lanes, begin_ns) | {"round": number}
            if facts["dst"] >= 0:
                pair = facts["src"], facts["dst"]
                facts["pair"] = pairs.setdefault(pair, len(pairs))
            steps.append(facts)
    panels = []
    for panel in walk.panels:
        start = _changes(panel.start, lanes, numbers)
        panels.append({"title": printable(panel.title), "lasting": panel.lasting, "start": start})
    return {
        "lanes": short if len(names) > MOST_NAMES else names,
        "begin_us": begin_ns // 1000,
        "steps": steps,
        "sentences": [printable(step.sentence) for step in walk.steps],
        "changes": [_changes(step.changes, lanes, numbers) for step in walk.steps],
        "panels": panels,
        "graphs": [_graph(graph, walk.labels) for graph in walk.graphs],
        "stage": _stage(walk, lanes),
        "hues": SERIES,
        "pairs": [f"{names[src]} → {names[dst]}" for src, dst in pairs],
    }


def _step(step: Step, lanes: Mapping[int, int], begin_ns: int) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "src": lanes[step.rank],
        "dst": -1,
        "bytes": 0,
        "how": "missing" if step.absent else "observed",
        "color": _OWN_COLORS.get(step.op) or look(step.op).color,
        "control": step.control,
        "at": (step.at_ns - begin_ns) // 1000,
        "until": -1 if step.until_ns is None else (step.until_ns - begin_ns) // 1000,
        "part": printable(step.part),
        "mark": printable(_mark_of(step)),
        "highlighted": step.highlighted,
        "hung": None,
    }
    if step.absent:
        waiting = [lanes[rank] for rank in step.waiting]
        absent = [lanes[rank] for rank in step.absent]
        facts["hung"] = waiting, absent, _between(step.never, lanes)
    if (message := step.message) is not None:
        facts |= {"src": lanes[message.src], "dst": lanes[message.dst]}
        facts |= {"bytes": message.payload_bytes, "how": message.how}
    return facts


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


def _changes(changes: Iterable[Change], lanes: Mapping[int, int], numbers: Mapping[str, int]) -> list[list[Any]]:
    """Return each change as the number of its panel, lane, cell, text, share, and the owners' lanes."""
    rows = []
    for change in changes:
        if change.rank in lanes:
            owners = [lanes[rank] for rank in change.owners if rank in lanes]
            cell = [change.index, printable(change.text), change.share, owners]
            rows.append([numbers[change.panel], lanes[change.rank], *cell])
    return rows


def _between(pairs: Iterable[Pair], lanes: Mapping[int, int]) -> list[Pair]:
    return [(lanes[src], lanes[dst]) for src, dst in pairs if src in lanes and dst in lanes]


def _stage(walk: Walkthrough, lanes: Mapping[int, int]) -> dict[str, Any]:
    pairs = [(message.src, message.dst) for message in walk.messages if message.src != message.dst]
    for step in walk.steps:
        pairs += step.never
    wires = dict.fromkeys(_between(pairs, lanes))
    return _stage_facts(spots_of(range(len(lanes)), wires), wires)


def circle(ranks: int, wires: Mapping[Pair, None]) -> dict[str, Any]:
    """Return a stage with the ranks in a circle, as their pairs may not be known yet, and these wires."""
    return _stage_facts(spots_of(range(ranks), ()), wires)


def _stage_facts(spots: Spots, wires: Mapping[Pair, None]) -> dict[str, Any]:
    """Return the stage of `width` pixels that stage.js draws: sizes, middles of boxes, ends of wires."""
    middles = [(round(x, 1), round(y, 1)) for _, (x, y) in sorted(spots.middles.items())]
    center = WIDTH / 2, sum(y for _, y in middles) / len(middles) if middles else 0.0
    spots = spots._replace(middles=spots.middles | {MIDDLE: center})
    facts = []
    for src, dst in wires:
        begin, end = spots.wire((src, dst), wires)
        ends = begin, center if dst == MIDDLE else end
        rounded = [(round(x, 1), round(y, 1)) for x, y in ends]
        facts.append({"src": src, "dst": dst, "ends": rounded})
    size = {"wide": spots.wide, "high": spots.high, "height": round(spots.height, 1), "width": WIDTH}
    return {"spots": middles, "wires": facts, **size}


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
    edges = []
    for edge in graph.edges:
        edges.append([numbers[edge.src], numbers[edge.dst], edge.kind == "wire"])
    return {
        "columns": layout.columns,
        "rows": sum(layout.rows),
        "bands": list(zip(names, tops, layout.rows, strict=True)),
        "nodes": nodes,
        "edges": edges,
    }
