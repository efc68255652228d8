"""Maps of a job: which rank is in which process group, and how NCCL has wired hosts and ranks."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Rectangle

from dlearn import analysis
from dlearn.analysis.volume.topology import LinkSum, Topology
from dlearn.draw import canvas
from dlearn.draw.canvas import Point, draw_arrow, points
from dlearn.draw.palette import FAINT, INK, LANE, SERIES, SMALLEST_PT, TO_ITSELF, ink_on, plain, text_width
from dlearn.draw.traffic_graph import on_circle
from dlearn.join.ends import Group
from dlearn.join.matching import join_groups
from dlearn.shown import count_text
from dlearn.trace import Trace

_LINE_IN, _NAME_IN = 0.3, 0.24  # A line of cells, and the name of a row above it.
_GAP = 0.12  # Between lines, in lines.
_KINDS_NAMED = 4
COLORS = {"P2P": SERIES[2], "NET": SERIES[1], "SHM": SERIES[0]}
KINDS = {"P2P": "GPU to GPU (P2P)", "NET": "over the network (NET)", "SHM": "through the host's memory (SHM)"}
MOST_RANKS, MOST_HOSTS = 64, 36
_NODE_PT, _NAME_PT = 10.0, 22.0
_APART_PT, _HIGHEST_PT = 46.0, 300.0
GroupRow = Sequence[Group]  # Of a kind, and share no rank: equal in size and in steps.


@canvas.for_cells
def groups(trace: Trace, *, ax: Axes | None = None) -> Axes:
    """Draw ranks from left to right, and a row for each kind of process group.

    Each group has a colour and a number. A row goes on below where a line has no room for all.
    """
    rows = _rows_of(_groups_of(trace))
    members = {rank for row in rows for group in row for rank in group.members}
    ranks = sorted(members.union(trace.ranks))
    names = {rank: plain(trace.label(rank)) for rank in ranks}
    left_in = canvas.left_margin_in(names.values())
    lines = _lines_of(ranks, rows, canvas.points_wide(ax, left_in=left_in))
    row_in = _NAME_IN + _LINE_IN * len(lines)
    height_in = row_in * max(len(rows), 1)
    ax = ax or canvas.new_axes(height_in=height_in, left_in=left_in if lines[1:] else 0.2)
    if not rows:
        return canvas.draw_message_instead(ax, "No process group was recorded.")
    if all(group.default for row in rows for group in row):
        one = f"All {count_text(len(ranks), 'rank')} are in one group, the {_row_text(rows[0])}."
        return canvas.draw_message_instead(ax, one)
    sentences = [_sentence(trace, group) for row in rows for group in row]
    canvas.describe(ax, "A row for each kind of process group, a cell for each member.", *sentences)
    ax.set(xlim=(0, len(lines[0])), ylim=(height_in, 0), xticks=[], yticks=[])
    tops = [row_in * index + _NAME_IN for index in range(len(rows))]
    for top, row in zip(tops, rows, strict=True):
        _draw_row(ax, top, row, lines)
    title = _groups_title(rows, ranks)
    if not lines[1:]:
        middles = [column + 0.5 for column in range(len(ranks))]
        width = points(ax, 1 / len(ranks), along="x")
        above_in = canvas.names_on_top(ax, middles, [*names.values()], width)
        return canvas.frame(ax, title=title, above_in=above_in, below_in=0.08)
    steps = [_LINE_IN * (line + (1 - _GAP) / 2) for line in range(len(lines))]
    middles = [top + step for top in tops for step in steps]
    canvas.name_rows(ax, middles, [names[line[0]] for line in lines] * len(rows))
    canvas.names_only(ax)
    notes = [f"A line has {len(lines[0])} ranks, from the one that is named."]
    return canvas.frame(ax, title=title, notes=notes, below_in=0.08)


def _lines_of(ranks: list[int], rows: Sequence[GroupRow], width: float) -> list[list[int]]:
    """Put all ranks in a line where `width` points hold the groups' numbers; else a power of two."""
    most = max(map(len, rows), default=1) - 1
    room = max(1, int(width / (text_width(str(most), size=SMALLEST_PT) + 4)))
    length = max(1, len(ranks)) if len(ranks) <= room else 2 ** (room.bit_length() - 1)
    return [ranks[at : at + length] for at in range(0, len(ranks), length)]


def _groups_of(trace: Trace) -> list[Group]:
    """Return the groups that the program made or was given, the largest first; none of a backend's."""
    facts = [fact for process in trace.processes for fact in process.groups.values()]
    inner = {fact.name for fact in facts if fact.within}
    all_groups = dict.fromkeys(join_groups(trace.processes).values())
    asked = [group for group in all_groups if group.name not in inner]
    return sorted(asked, key=lambda group: (not group.default, -len(group.members), _steps(group), group.members))


def _rows_of(all_groups: Sequence[Group]) -> list[list[Group]]:
    """Put groups of one kind in one row, or in more where they share ranks."""
    rows: list[list[Group]] = []
    for group in all_groups:
        for row in rows:
            taken = {rank for other in row for rank in other.members}
            if _kind(row[0]) == _kind(group) and taken.isdisjoint(group.members):
                row.append(group)
                break
        else:
            rows.append([group])
    return rows


def _groups_title(rows: Sequence[GroupRow], ranks: Sequence[int]) -> str:
    """Return "A mesh of 2 dp × 2 tp over 4 ranks", "8 ranks in 2 kinds of groups: 2 of 4, ..."."""
    if mesh := _mesh(rows, len(ranks)):
        return f"A mesh of {' × '.join(mesh)} over {count_text(len(ranks), 'rank')}"
    kinds = Counter(_kind(group) for row in rows for group in row if not group.default)
    named = [(f"{many} {plain(name)}".rstrip(), size) for (_, name, size, _), many in kinds.items()]
    sizes = [f"{groups} of {size}" for groups, size in named]
    shown = ", ".join(sizes[:_KINDS_NAMED]) + ", ..." * bool(sizes[_KINDS_NAMED:])
    return f"{count_text(len(ranks), 'rank')} in {count_text(len(kinds), 'kind')} of groups: {shown}"


def _mesh(rows: Sequence[GroupRow], count: int) -> list[str]:
    """Return the dimensions of a mesh of all ranks, "2 dp", "2 tp", if some rows are these."""
    named = [row for row in rows if row[0].dimensions and not row[0].default]
    kinds = [_kind(row[0])[1:] for row in named if len(row) * len(row[0].members) == count]
    kinds.sort(key=lambda kind: kind[1])  # Before a flattened dimension what it is made of.
    mesh: list[str] = []
    inner = 1  # Ranks in all dimensions found yet: so far apart are neighbours in the next.
    while found := next((kind for kind in kinds if kind[-1] == inner), None):
        name, size, _ = found
        mesh.insert(0, f"{size} {plain(name)}")
        inner *= size
    return mesh if inner == count else []


def _draw_row(ax: Axes, top: float, row: GroupRow, lines: Sequence[Sequence[int]]) -> None:
    """Draw the row's name, and below it a cell for each member, with the number of its group."""
    corners: dict[int, tuple[float, float]] = {}
    for number, line in enumerate(lines):
        corners |= {rank: (column, top + _LINE_IN * number) for column, rank in enumerate(line)}
    boxes, colors, high, name = [], [], _LINE_IN * (1 - _GAP), _row_text(row)
    canvas.write(ax, 0, top - _NAME_IN / 2, name)
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": SMALLEST_PT}
    for number, group in enumerate(row):
        color = TO_ITSELF if group.default else SERIES[number % len(SERIES)]
        for rank in group.members:
            x, y = corners[rank]
            boxes.append((x, x + 1, y, y + high))
            colors.append(color)
            if len(row) > 1:
                canvas.write(ax, x + 0.5, y + high / 2, str(number), color=ink_on(color), **style)
    edge = FAINT if row[0].default else "white"
    style = {"facecolors": colors, "edgecolors": edge, "linewidths": 0.8}
    canvas.draw_boxes(ax, boxes, gid=f"groups {name}", **style)


def _steps(group: Group) -> tuple[int, ...]:
    """Return how far each member is from the one before it."""
    return tuple(after - before for before, after in pairwise(group.members))


def _kind(group: Group) -> tuple[bool, str, int, int]:
    """Return whether it is the default group, its name and size, how far members are apart or 0."""
    steps = {*_steps(group)}
    return group.default, group.dimension, len(group.members), steps.pop() if len(steps) == 1 else 0


def _row_text(row: GroupRow) -> str:
    default, dimension, size, step = _kind(row[0])
    if default:
        return f"default group: {plain(dimension)}".removesuffix(": ")
    name = f"{plain(dimension)}: " if dimension else ""
    count = count_text(len(row), "group")
    apart = "" if not step else ", side by side" if step == 1 else f", {step} apart"
    return f"{name}{count} of {size}{apart}"


def _sentence(trace: Trace, group: Group) -> str:
    names = ", ".join(plain(trace.label(rank)) for rank in group.members)
    return f"Group {group.name} ({group.backend}): {names}."


@canvas.for_cells
def topology(trace: Trace, *, group: str | None = None, ax: Axes | None = None) -> Axes:
    """Draw the links of NCCL's rings, from each rank to the next; without a whole ring, all links.

    The wider an arrow, the more channels. Of more than 64 ranks only the links between hosts are drawn.
    """
    wiring = analysis.topology(trace, group=group)
    if wiring is None or not wiring.edges:
        return canvas.draw_message_instead(ax, "No log of NCCL's tells how these ranks are wired.")
    if len(wiring.hosts) > MOST_HOSTS:
        advice = "are too many for a map: analysis.topology has their rings"
        return canvas.draw_message_instead(ax, f"{len(wiring.hosts)} hosts {advice}.")
    links = _links_drawn(wiring)
    width, hosts = canvas.points_wide(ax, left_in=0.15), len(wiring.hosts)
    columns = min(hosts, max(1, int(width // 150)), math.ceil(math.sqrt(hosts * 2)))
    rows = math.ceil(hosts / columns)
    wide = (width - _APART_PT * (columns - 1)) / columns
    high = min(wide, _HIGHEST_PT, 2 * _APART_PT + _APART_PT * max(map(len, wiring.hosts)))
    wanted = rows * high + (rows - 1) * _APART_PT
    ax = ax or canvas.new_axes(height_in=wanted / 72, left_in=0.15)
    height = points(ax, 1.0, along="y")
    high *= height / wanted
    names = wiring.labels
    sentences = [
        f"{names[link.src]} to {names[link.dst]}: {link.vias[0]}, {count_text(link.channels, 'channel')}."
        for link in links[:200]
    ]
    canvas.describe(ax, *wiring.sentences, *sentences)
    ax.set(xlim=(-1, width + 1), ylim=(height + 1, -1), xticks=[], yticks=[])
    ax.set_axis_off()
    middles: dict[int, Point] = {}
    for number, host in enumerate(wiring.hosts):
        row, column = divmod(number, columns)
        corner = column * (wide + _APART_PT), row * (high + _APART_PT)
        middles |= _draw_host(ax, wiring, host, corner, (wide, high))
    _draw_links(ax, links, middles)
    title, key, notes = _topology_title(wiring), _links_legend(links), _links_notes(wiring, links)
    return canvas.frame(ax, title=title, legend=key, notes=notes, below_in=0.08)


def _links_drawn(wiring: Topology) -> list[LinkSum]:
    """Return the links of whole rings, or all if the log has none; of many ranks sums between hosts."""
    links = [link for link in wiring.edges if link.use == "ring"] if wiring.rings else []
    links = links or list(wiring.edges)
    host_of = wiring.host_of
    if len(host_of) <= MOST_RANKS:
        return links
    sums: dict[tuple[int, int, str, str], list[LinkSum]] = defaultdict(list)
    for link in links:
        src, dst = host_of[link.src], host_of.get(link.dst)
        if dst is not None and src != dst:
            first_ranks = wiring.hosts[src][0], wiring.hosts[dst][0]
            sums[*first_ranks, link.kind, link.use].append(link)
    return [LinkSum(*ends, sum(link.channels for link in parts), parts[0].vias, ()) for ends, parts in sums.items()]


def _topology_title(wiring: Topology) -> str:
    """Return "16 ranks on 2 hosts: 4 rings in 2 orders"."""
    hosts = count_text(len(wiring.hosts), "host")
    ranks = count_text(len(wiring.group.members), "rank")
    rings = sum(len(ring.channels) for ring in wiring.rings)
    if not rings:
        return f"{ranks} on {hosts}: links, but no whole ring in the log"
    orders = f" in {count_text(len(wiring.rings), 'order')}" if len(wiring.rings) > 1 else ""
    return f"{ranks} on {hosts}: {count_text(rings, 'ring')}{orders}"


def _draw_host(ax: Axes, wiring: Topology, host: str, corner: Point, size: Point) -> dict[int, Point]:
    """Draw a box with the host's ranks, of very many ranks their number; return the ranks' middles."""
    (x, y), (wide, high), ranks = corner, size, wiring.hosts[host]
    box: dict[str, Any] = {"facecolor": LANE, "edgecolor": FAINT, "linewidth": 0.8}
    ax.add_patch(Rectangle(corner, wide, high, gid=f"host {host}", **box))
    canvas.write(ax, x + 6, y + _NAME_PT / 2, plain(host, most=max(8, int(wide / 6))))
    middle = x + wide / 2, y + _NAME_PT + (high - _NAME_PT) / 2
    if len(wiring.host_of) > MOST_RANKS:
        canvas.write(ax, *middle, count_text(len(ranks), "rank"), ha="center", zorder=4)
        return dict.fromkeys(ranks, middle)
    # On an ellipse inside of the box, clockwise from the top.
    across, up = wide / 2 - 2.2 * _NODE_PT, (high - _NAME_PT) / 2 - 1.5 * _NODE_PT
    if len(ranks) == 1:
        across = up = 0.0
    middles: dict[int, Point] = {}
    for rank, (right, above) in zip(ranks, on_circle(len(ranks)), strict=True):
        middles[rank] = middle[0] + across * right, middle[1] - up * above
        node: dict[str, Any] = {"facecolor": "white", "edgecolor": INK, "linewidth": 0.8}
        ax.add_patch(Circle(middles[rank], _NODE_PT, zorder=3, **node))
        name = wiring.labels.short(rank)
        canvas.write(ax, *middles[rank], name, ha="center", zorder=4)
    return middles


def _draw_links(ax: Axes, links: Sequence[LinkSum], middles: Mapping[int, Point]) -> None:
    most = max((link.channels for link in links), default=1)
    style: dict[str, Any] = {"joinstyle": "round", "connectionstyle": "arc3,rad=0.12", "zorder": 2}
    style |= {"shrinkA": _NODE_PT + 1, "shrinkB": _NODE_PT + 1, "how": "observed"}
    for link in links:
        if link.dst not in middles:
            continue
        width = 0.7 + 1.8 * link.channels / most
        style |= {"linewidth": width, "mutation_scale": 7 + 1.5 * width}
        style |= {"color": COLORS.get(link.kind, FAINT)}
        gid = f"link {link.src} to {link.dst} {link.kind}"
        draw_arrow(ax, middles[link.src], middles[link.dst], gid=gid, **style)


def _links_legend(links: Sequence[LinkSum]) -> list[Artist]:
    handles: list[Artist] = []
    for kind in dict.fromkeys(link.kind for link in links):
        cards = {card for link in links for card in link.cards if link.kind == kind}
        count = f", {count_text(len(cards), 'card')} of each host" if cards else ""
        label, color = KINDS.get(kind, plain(kind)) + count, COLORS.get(kind, FAINT)
        handles.append(Line2D([], [], color=color, linewidth=1.6, label=label))
    return handles


def _links_notes(wiring: Topology, links: Sequence[LinkSum]) -> list[str]:
    notes = []
    if len(wiring.host_of) > MOST_RANKS:
        notes.append("Only links between hosts are drawn, all ranks of a host together.")
    if len({link.channels for link in links}) > 1:
        notes.append("The wider an arrow, the more channels use it.")
    unseen = sorted(set(wiring.group.members) - set(wiring.host_of))
    if unseen:
        notes.append(f"Not in the log: {wiring.labels.together(unseen)}.")
    others = sorted({choice.algorithm for choice in wiring.choices} - {"RING"})
    if wiring.rings and others:
        those = "those did not go round these rings"
        notes.append(f"For some calls NCCL chose {', '.join(others)}: {those}.")
    return notes
