"""The distributed autograd graph on real workers: eight ways to go over three of them, in eight contexts of one run."""

from collections import Counter
from itertools import combinations

import matplotlib.pyplot as plt
import networkx as nx
import pytest
import rpc_graph_jobs
from matplotlib.text import Text
from test_player import after, in_browser
from text_boxes import faults
from traces import Job, tensor

from dlearn import Cluster, Trace, analysis, draw, messages
from dlearn.analysis.rpc.networkx_graph import condense
from dlearn.join.autograd_graph import join_graph
from dlearn.play import player
from dlearn.trace.event import AutogradNode, AutogradRun

WORKERS = ["w0", "w1", "w2"]

# Nodes on each worker, and crossings: as a capture by observer RPCs found them; a C++ agent counted the same crossings.
CASES = [
    pytest.param(0, {"w0": 2, "w1": 6}, 1, id="input needs no gradient"),
    pytest.param(1, {"w0": 4, "w1": 7}, 2, id="input needs a gradient"),
    pytest.param(2, {"w0": 7, "w1": 9, "w2": 7}, 4, id="nested calls"),
    pytest.param(3, {"w0": 9, "w1": 7, "w2": 7}, 4, id="piped by the driver"),
    pytest.param(4, {"w0": 7, "w1": 7, "w2": 7}, 3, id="handed on"),
    pytest.param(5, {"w0": 6, "w1": 6}, 1, id="used twice"),
    pytest.param(6, {"w0": 7, "w1": 7}, 2, id="fetched twice"),
    pytest.param(7, {"w0": 11, "w1": 7, "w2": 7}, 4, id="sent twice"),
]


@pytest.fixture(scope="module")
def run():
    return Cluster(WORKERS, rpc=True, graph=True).run({"w0": rpc_graph_jobs.eight_cases}, timeout=60)


@pytest.mark.parametrize(("context", "nodes", "crossings"), CASES)
def test_the_pieces_of_all_workers_make_one_graph(run, context, nodes, crossings):
    graph = analysis.autograd_graph(run.trace, context)
    assert graph.graph["problems"] == ()
    assert Counter(worker for _, worker in graph.nodes(data="worker")) == nodes
    assert [kind for *_, kind in graph.edges(data="kind")].count("wire") == crossings
    assert nx.number_weakly_connected_components(graph) == 1
    assert nx.is_directed_acyclic_graph(graph)


@pytest.mark.parametrize(("context", "nodes", "crossings"), CASES)
def test_every_node_is_seen_to_run_after_those_that_lead_to_it(run, context, nodes, crossings):
    graph = analysis.autograd_graph(run.trace, context)
    for name, node in graph.nodes(data=True):
        assert node["timed_by"] in ("hook", "log", "next"), name
        assert node["timed_by"] == "hook" or node["name"].endswith("SendRpcBackward")
        assert node["start_ns"] <= node["end_ns"]
    for src, dst, kind in graph.edges(data="kind"):
        over = "start_ns" if kind == "wire" else "end_ns"  # A recv ends when its message has been handed over.
        assert graph.nodes[src][over] <= graph.nodes[dst]["start_ns"]


@pytest.mark.parametrize(("context", "nodes", "crossings"), CASES)
def test_each_crossing_is_one_message_with_its_gradient(run, context, nodes, crossings):
    """On either side of a call: C++ adds the recv functions of a callee after Python has unpacked what it was sent."""
    crossed = Counter(
        (wire.src.rank, wire.dst.rank, wire.payload_bytes) for wire in join_graph(run.trace, context).wires
    )
    sent = [each for each in messages(run.trace) if each.op == "BACKWARD_AUTOGRAD_REQ"]
    mine = [each for each in sent if each.operation.exchange.context == context]
    assert Counter((each.src, each.dst, sum(one.payload_bytes for one in each.tensors)) for each in mine) == crossed
    assert {each.known_by for each in mine} == {"window"}


def test_crossings_carry_the_gradients_of_what_was_sent(run):
    graph = analysis.autograd_graph(run.trace, 6)
    wires = [edge for *_, edge in graph.edges(data=True) if edge["kind"] == "wire"]
    assert [(wire["bytes"], wire["shape"]) for wire in wires] == [(160, (5, 8)), (160, (5, 8))]  # 5 * 8 * 4
    tanh = [name for name, node in graph.nodes(data=True) if node["name"] == "TanhBackward0"]
    assert [graph.in_degree(name) for name in tanh] == [2]  # Fetched twice, computed once.


def test_parameters_have_their_names(run):
    graph = analysis.autograd_graph(run.trace, 2)
    named = Counter((node["worker"], node["parameter"]) for _, node in graph.nodes(data=True) if node["parameter"])
    assert named == {(w, f"{m}{p}"): 1 for w, m in (("w0", ""), ("w1", "lin."), ("w2", "lin.")) for p in
                     ("weight", "bias")}  # fmt: skip


def test_the_last_context_is_meant(run):
    assert join_graph(run.trace).context == 7
    assert join_graph(run.trace).nodes == join_graph(run.trace, 7).nodes


def test_the_picture_says_that_there_are_more_contexts(run):
    for context, told in ((None, True), (7, False)):
        ax = draw.autograd(run.trace, context=context)
        words = " ".join(text.get_text() for text in ax.figure.findobj(Text))
        assert ("The last of 8 contexts that have a graph." in words) == told
        plt.close(ax.figure)


@in_browser
def test_no_worker_s_name_is_hidden_behind_a_node_in_the_player(run, tmp_path):
    script = """
        find("[data-view=graph]").click();
        click("end");
        const places = (selector) => all(selector).map((each) => each.getBBox());
        const [names, nodes] = [places("text.worker"), places(".node rect")];
        const meet = (a, b) => a.y < b.y + b.height - 2 && b.y < a.y + a.height - 2;
        say(names.length, nodes.length > 10, names.filter((name) => nodes.some((node) => meet(name, node))).length);
    """
    assert after(player(run.trace).to_html(), tmp_path, script) == [[3, True, 0]]


def test_nothing_is_changed_and_no_message_added(run):
    without = Cluster(WORKERS, rpc=True).run({"w0": rpc_graph_jobs.eight_cases}, timeout=60)
    assert run.results["w0"] == without.results["w0"]
    assert run.trace.rpc.logged == without.trace.rpc.logged
    assert not any(isinstance(event, AutogradNode) for event in without.trace.events)
    assert run.trace.problems == ()


def test_a_piece_that_nobody_recorded_is_named(run):
    events = tuple(each for each in run.trace.events if not (isinstance(each, AutogradNode) and each.rank == 2))
    graph = join_graph(Trace(run.trace.path, run.trace.processes, events), 2)
    assert graph.problems == (
        "the piece of w2 behind a recv of w1 is missing",
        "the piece of the worker that a send of w1 went to is missing",
    )
    assert len(graph.wires) == 2


def test_a_trace_without_a_graph():
    empty = Trace(".", (), ())
    assert join_graph(empty).nodes == ()
    assert "record it with graph=True" in draw.autograd(empty).texts[0].get_text()
    plt.close("all")


# The picture ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("context", "nodes", "crossings"), CASES)
def test_nothing_overlaps_in_the_picture(run, context, nodes, crossings):
    ax = draw.autograd(run.trace, context=context)
    ax.figure.canvas.draw()
    boxes = [patch.get_window_extent() for patch in ax.patches if patch.get_gid() == "node"]
    labels = [text.get_window_extent() for text in ax.texts if text.get_gid() == "wire label"]
    wires = [patch for patch in ax.patches if (patch.get_gid() or "").startswith("wire")]
    assert len(boxes) == sum(nodes.values())
    assert len(wires) == len(labels) == crossings
    assert not [pair for pair in combinations([*boxes, *labels], 2) if pair[0].overlaps(pair[1])]
    for wire in wires:
        way = wire.get_window_extent()
        assert not [each for each in (*boxes, *labels) if way.overlaps(each.padded(-3))]  # It touches its own ends.
    plt.close(ax.figure)


def arrows(ax):
    """From which column to which each gradient goes, from the top."""
    wires = [patch for patch in ax.patches if (patch.get_gid() or "").startswith("wire")]
    return [tuple(round(x) for x, _ in patch._posA_posB) for patch in wires]


@pytest.mark.parametrize(("context", "nodes", "crossings"), CASES)
def test_in_a_narrow_column_every_crossing_is_drawn(run, context, nodes, crossings):
    with draw.small():
        ax = draw.autograd(run.trace, context=context)
    assert faults(ax.figure) == []
    assert len(arrows(ax)) == crossings
    if len(nodes) == 3:  # No room for the nodes.
        assert arrows(ax) == [(wire.src.rank, wire.dst.rank) for wire in join_graph(run.trace, context).wires]
        words = " ".join(text.get_text() for text in ax.figure.findobj(Text))
        held = ", ".join(f"{worker} {count}" for worker, count in nodes.items())
        assert f"({held})" in " ".join(words.split())
    plt.close(ax.figure)


def chain(folder, ranks):
    """A gradient that goes from each worker to the next."""
    job = Job(folder, ranks=ranks)
    for rank in range(ranks):
        if rank:
            node = {"name": "SendRpcBackward", "next": (1,) if rank < ranks - 1 else ()}
            job.event(AutogradNode, rank, context=1, node=0, shapes=((8,),), message=rank, **node)
        if rank < ranks - 1:
            number = min(rank, 1)
            node = {"name": "RecvRpcBackward", "shapes": ((8,),), "message": rank + 1}
            job.event(AutogradNode, rank, context=1, node=number, **node)
            sent = {"start_ns": 10 * rank, "end_ns": 10 * rank + 5, "tensors": (tensor(32),)}
            job.event(AutogradRun, rank, context=1, node=number, **sent)
    return job.load()


def test_crossings_of_16_workers_fit_in_a_narrow_column_and_those_of_64_are_said_to_be_too_many(tmp_path):
    for ranks in (16, 64):
        (tmp_path / str(ranks)).mkdir()
    with draw.small():
        ax = draw.autograd(chain(tmp_path / "16", 16))
        many = draw.autograd(chain(tmp_path / "64", 64))
    assert faults(ax.figure) == []
    assert arrows(ax) == [(rank, rank + 1) for rank in range(15)]
    assert "126 nodes is too large to draw" in many.texts[0].get_text()
    plt.close("all")


def test_the_title_states_the_finding(run):
    ax = draw.autograd(run.trace, context=6)
    assert ax.get_title(loc="left") == "The backward pass crosses twice: 160\xa0B each"
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["w0", "w1"]
    plt.close(ax.figure)


def test_a_large_graph_is_condensed_to_fewer_boxes(run):
    whole = join_graph(run.trace, 2)
    small = condense(whole)
    # w0: Sum, recv; send, Addmm (+3).  w1: send, recv; send, Tanh (+4), recv.  w2: send, Tanh (+4), recv.
    assert [node.short for node in small.nodes].count("send") == 4
    assert len(small.nodes) == 12
    assert sorted(node.short for node in small.nodes if "+" in node.short) == ["Addmm (+3)", "Tanh (+4)", "Tanh (+4)"]
    assert len(small.wires) == 4
