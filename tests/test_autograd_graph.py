"""The distributed autograd graph on real workers: eight ways to go over three of them, in eight contexts of one run."""

from collections import Counter
from itertools import combinations

import networkx as nx
import pytest
import rpc_jobs
from pictures import words
from text_boxes import faults

from dlearn import Cluster, Trace, analysis, draw, messages
from dlearn.events.event import AutogradNode

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
    return Cluster(WORKERS, rpc=True, graph=True).run({"w0": rpc_jobs.eight_cases}, timeout=60)


def crossings_of(graph):
    """From which worker to which, with how many bytes."""
    edges = [(src, dst, edge) for src, dst, edge in graph.edges(data=True) if edge["kind"] == "wire"]
    return Counter((graph.nodes[src]["rank"], graph.nodes[dst]["rank"], edge["bytes"]) for src, dst, edge in edges)


@pytest.mark.parametrize(("context", "nodes", "crossings"), CASES)
def test_the_pieces_of_all_workers_make_one_graph_that_ran_in_its_order_with_a_message_for_each_crossing(
    run, context, nodes, crossings
):
    graph = analysis.autograd_graph(run.trace, context)
    assert graph.graph["problems"] == ()
    assert Counter(worker for _, worker in graph.nodes(data="worker")) == nodes
    assert crossings_of(graph).total() == crossings
    assert nx.number_weakly_connected_components(graph) == 1
    assert nx.is_directed_acyclic_graph(graph)
    for name, node in graph.nodes(data=True):
        assert node["timed_by"] in ("hook", "log", "next"), name
        assert node["timed_by"] == "hook" or node["name"].endswith("SendRpcBackward")
        assert node["start_ns"] <= node["end_ns"]
    for src, dst, kind in graph.edges(data="kind"):
        over = "start_ns" if kind == "wire" else "end_ns"  # A recv ends when its message has been handed over.
        assert graph.nodes[src][over] <= graph.nodes[dst]["start_ns"]
    # On either side of a call: C++ adds the recv functions of a callee after Python has unpacked what it was sent.
    sent = [each for each in messages(run.trace) if each.op == "BACKWARD_AUTOGRAD_REQ"]
    mine = [each for each in sent if each.operation.exchange.context == context]
    carried = Counter((each.src, each.dst, sum(one.payload_bytes for one in each.tensors)) for each in mine)
    assert carried == crossings_of(graph)
    assert {each.known_by for each in mine} == {"window"}


def test_gradients_have_their_shape_and_parameters_their_names(run):
    graph = analysis.autograd_graph(run.trace, 6)
    wires = [edge for *_, edge in graph.edges(data=True) if edge["kind"] == "wire"]
    assert [(wire["bytes"], wire["shape"]) for wire in wires] == [(160, (5, 8)), (160, (5, 8))]  # 5 * 8 * 4
    tanh = [name for name, node in graph.nodes(data=True) if node["name"] == "TanhBackward0"]
    assert [graph.in_degree(name) for name in tanh] == [2]  # Fetched twice, computed once.
    nodes = analysis.autograd_graph(run.trace, 2).nodes(data=True)
    named = Counter((node["worker"], node["parameter"]) for _, node in nodes if node["parameter"])
    layers = (("w0", ""), ("w1", "lin."), ("w2", "lin."))
    assert named == {(worker, f"{of}{end}"): 1 for worker, of in layers for end in ("weight", "bias")}


def test_nothing_is_changed_and_no_message_added(run):
    without = Cluster(WORKERS, rpc=True).run({"w0": rpc_jobs.eight_cases}, timeout=60)
    assert run.results["w0"] == without.results["w0"]
    assert run.trace.rpc.logged == without.trace.rpc.logged
    assert not without.trace.of(AutogradNode)
    assert run.trace.problems == ()


def test_a_piece_that_nobody_recorded_is_named(run):
    events = tuple(each for each in run.trace.events if not (isinstance(each, AutogradNode) and each.rank == 2))
    graph = analysis.autograd_graph(Trace(run.trace.path, run.trace.processes, events), 2)
    assert graph.graph["problems"] == (
        "the piece of w2 behind a recv of w1 is missing",
        "the piece of the worker that a send of w1 went to is missing",
    )
    assert crossings_of(graph).total() == 2


@pytest.mark.parametrize(("context", "nodes", "crossings"), CASES)
def test_every_node_and_every_crossing_is_drawn_and_nothing_overlaps(run, context, nodes, crossings):
    ax = draw.autograd(run.trace, context=context)
    with draw.small():
        narrow = draw.autograd(run.trace, context=context)
    for each in (ax, narrow):
        assert faults(each.figure) == []
        assert sum(str(patch.get_gid()).startswith("wire") for patch in each.patches) == crossings
    boxes = [patch.get_window_extent() for patch in ax.patches if patch.get_gid() == "node"]
    assert len(boxes) == sum(nodes.values())
    assert not [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    if len(nodes) == 3:  # No room for the nodes in a narrow column.
        assert f"({', '.join(f'{worker} {count}' for worker, count in nodes.items())})" in words(narrow)
