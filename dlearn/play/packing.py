"""A walk as the facts that `player.js` reads: steps, sentences, what each rank holds, and where ranks stand."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dlearn.analysis.replay.steps import Change, Step, Walkthrough
from dlearn.draw.autograd_bands import lay_out
from dlearn.draw.palette import BACKWARD, FORWARD, OPTIMIZER, WHOLE, at_night, look, look_of
from dlearn.draw.traffic_graph import STAGE_WIDTH, Middles, Pair, spots_of
from dlearn.events.event import Collective
from dlearn.events.printable import printable
from dlearn.join.autograd_graph import AutogradGraph
from dlearn.join.ends import family_of_op
from dlearn.join.tables.message_table import Message
from dlearn.shown import RankNames

MOST_NAMES = 8  # Of more ranks each is its number alone, if it has no name of its own.
MIDDLE = -1  # The receiver, on the stage of a paused job, of what goes to all ranks.
_COMPUTES = {"optimizer": OPTIMIZER, "backward": BACKWARD, "gradient": BACKWARD, "node": BACKWARD}


def player_facts(walk: Walkthrough) -> dict[str, Any]:
    """Return what `player.js` reads. A rank is its lane; times are in µs from the first step on."""
    lanes = {rank: lane for lane, rank in enumerate(walk.labels)}
    names = [printable(name) for name in walk.labels.values()]
    short = [printable(walk.labels.short(rank)) for rank in walk.labels]
    begin_ns = min((step.at_ns for step in walk.steps), default=0)
    numbers = {panel.title: number for number, panel in enumerate(walk.panels)}
    pairs: dict[Pair, int] = {}
    rounds: dict[tuple[object, ...], int] = {}
    calls: dict[int, dict[str, Any]] = {}
    steps, panels = [], []
    for step in walk.steps:
        facts = _step(step, lanes, begin_ns)
        facts["round"] = rounds.setdefault(step.moment, len(rounds))
        if (sent := step.message) is not None:
            if (key := id(sent.operation)) not in calls:
                calls[key] = _call(sent, len(calls))
            call = calls[key]
            call["rounds"] |= {facts["round"]: True}
            pair = pairs.setdefault((facts["src"], facts["dst"]), len(pairs))
            facts |= {"pair": pair, "call": call["number"], "color": call["color"]}
        steps.append(facts)
    for panel in walk.panels:
        number = -1 if panel.operation is None else calls[id(panel.operation)]["number"]
        facts = {"title": printable(panel.title), "lasting": panel.lasting, "call": number}
        panels.append(facts | {"start": _changes(panel.start, lanes, numbers)})
    return {
        "lanes": short if len(names) > MOST_NAMES else names, "begin_us": begin_ns // 1000,
        "steps": steps, "panels": panels, "whole": WHOLE, "stage": _stage(walk, lanes),
        "sentences": [printable(step.sentence) for step in walk.steps],
        "changes": [_changes(step.changes, lanes, numbers) for step in walk.steps],
        "calls": [{**call, "rounds": [*call["rounds"]]} for call in calls.values()],
        "graphs": [_graph(graph, walk.labels) for graph in walk.graphs],
        "nights": {step["color"]: at_night(step["color"], least=3) for step in steps},
        "pairs": [f"{names[src]} → {names[dst]}" for src, dst in pairs],
    }  # fmt: skip


def _call(message: Message, number: int) -> dict[str, Any]:
    """Return the operation's name, if it is a collective, and its hue: of a bucket the bucket's."""
    operation = message.operation
    bucket = operation.bucket
    name = f"{operation.op} #{operation.seq}{operation.group.over}"
    name *= isinstance(operation.ends[0], Collective)
    if bucket is not None:
        name += f" (bucket {bucket.index})"
    return {
        "number": number, "name": printable(name), "color": look_of(operation).color, "rounds": {},
        "family": family_of_op(operation.op), "bytes": message.whole_bytes,
        "bucket": -1 if bucket is None or bucket.model else bucket.index,
    }  # fmt: skip


def _step(step: Step, lanes: Mapping[int, int], begin_ns: int) -> dict[str, Any]:
    until = -1 if step.until_ns is None else (step.until_ns - begin_ns) // 1000
    drops = any(not change.share for change in step.changes)  # A micro-batch: it goes backward.
    color = BACKWARD if drops else _COMPUTES.get(step.mark, _COMPUTES.get(step.op, FORWARD))
    facts: dict[str, Any] = {
        "src": lanes[step.rank], "dst": -1, "bytes": 0, "color": color, "site": "", "hung": None,
        "at": (step.at_ns - begin_ns) // 1000, "until": until, "highlighted": step.highlighted,
        "part": printable(step.part), "mark": printable(_mark_of(step)), "control": step.control,
        "how": "missing" if step.absent else "observed",
    }  # fmt: skip
    if step.absent:
        waiting = [lanes[rank] for rank in step.waiting]
        absent = [lanes[rank] for rank in step.absent]
        facts["hung"], facts["color"] = (waiting, absent, _between(step.never, lanes)), look(step.op).color
    if (message := step.message) is not None:
        sites = [end.site for end in message.operation.ends if end.rank == message.src]
        facts |= {"src": lanes[message.src], "dst": lanes[message.dst], "how": message.how}
        facts |= {"bytes": message.payload_bytes, "site": printable("".join(sites[:1]))}
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
    middles, wide, high = spots_of(range(len(lanes)), wires)
    families = {family_of_op(message.op) for message in walk.messages}
    tree = _tree([*wires], len(lanes)) if families == {"broadcast"} else {}
    if families == {"reduce"}:  # Its last round is the highest row.
        tree = _tree([(dst, src) for src, dst in reversed(wires)], len(lanes))
    if len(lanes) > 2 and len({y for _, y in middles.values()}) == 1:  # A line.
        row = sorted(middles, key=lambda lane: middles[lane][0])
        tree = {lane: (place, 0) for place, lane in enumerate(row)}
        wide = max(wide, (STAGE_WIDTH - 24 - 118 * (len(lanes) - 1)) / len(lanes))
    if tree:
        across, down = (STAGE_WIDTH - wide - 24) / max(1, len(tree) - 1), high + 52
        left, top = wide / 2 + 12, high / 2 + 24
        middles = {lane: (left + across * x, top + down * y) for lane, (x, y) in tree.items()}
    elif 4 < len(lanes) <= 8:  # Room for what stands above and below a box.
        middles = {lane: (x, 1.25 * y) for lane, (x, y) in middles.items()}
    return _stage_facts(middles, wide, high, wires)


def _tree(pairs: Sequence[Pair], ranks: int) -> dict[int, Pair]:
    """Return column and row of each rank of a tree, a row for each round; none if it is no tree."""
    order, rows = [pairs[0][0]], {pairs[0][0]: 0}
    last = dict(rows)  # The row of what a rank received, or sent last.
    for src, dst in pairs:
        if src not in rows or dst in rows:
            return {}
        rows[dst] = last[dst] = last[src] = last[src] + 1
        order.insert(order.index(src) + 1, dst)  # So that no two wires cross.
    places = {lane: (column, rows[lane]) for column, lane in enumerate(order)}
    return places if len(order) == ranks else {}


def hue(op: str) -> str:
    """Return the colour of an operation, as in all pictures."""
    return look(op).color


def circle(ranks: int, wires: Mapping[Pair, None]) -> dict[str, Any]:
    """Return a stage with the ranks in a circle, as their pairs may not be known yet, and these wires."""
    return _stage_facts(*spots_of(range(ranks), ()), wires)


def _stage_facts(
    places: Middles, wide: float, high: float, wires: Iterable[Pair]
) -> dict[str, Any]:  # fmt: skip
    """Return middles and sizes of boxes on `width` pixels; stage.js makes them fit, with wires."""
    middles = [(round(x, 1), round(y, 1)) for _, (x, y) in sorted(places.items())]
    pairs = [{"src": src, "dst": dst} for src, dst in wires]
    return {"wide": wide, "high": high, "width": STAGE_WIDTH, "spots": middles, "wires": pairs}


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
    edges = [[numbers[edge.src], numbers[edge.dst], edge.kind == "wire"] for edge in graph.edges]
    bands = list(zip(names, tops, layout.rows, strict=True))
    size = {"columns": layout.columns, "rows": sum(layout.rows)}
    return {**size, "bands": bands, "nodes": nodes, "edges": edges}
