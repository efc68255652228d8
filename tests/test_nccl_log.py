"""NCCL's own log: whole rings and no others, who talks over what, and the messages inside NCCL's collectives."""

import gzip
import json
import random
import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matplotlib.patches import FancyArrowPatch
from test_flight_recorder import dump_of
from traces import Job

from dlearn import Trace, analysis, draw, explain, messages, operations
from dlearn.cli import main
from dlearn.errors import TraceError
from dlearn.trace.readers.nccl_log import Log
from dlearn.trace.wiring import Choice

REAL = Path(str(files("dlearn.lessons"))) / "data" / "dumps" / "nccl-2.9.9-16gpus.log.gz"
BY_SUBSYSTEM = Path(__file__).parent / "samples" / "nccl-2.30-lines-by-subsystem.log.gz"
GIB = 1 << 30


def real_lines():
    return gzip.decompress(REAL.read_bytes()).decode().splitlines()


def topology_of(tmp_path, lines, name="nccl.log"):
    (tmp_path / name).write_text("\n".join(lines))
    return analysis.topology(Trace.load(tmp_path))


def orders(found):
    return {channel: ring.order for ring in found.rings for channel in ring.channels}


def in_one_line_each():
    """The rings as rank 0 writes them, where they have room in a line."""
    found = (re.search(r"Channel (\d\d)/08 :([ \d]+)$", line) for line in real_lines())
    return {int(each[1]): tuple(map(int, each[2].split())) for each in found if each}


# The real log of 16 GPUs on 2 hosts -----------------------------------------------------------------------------------


def test_the_real_log_has_8_rings_of_4_orders_which_cross_the_hosts_by_4_pairs():
    found = analysis.topology(Trace.load(REAL))
    assert orders(found) == in_one_line_each()
    assert [len(ring.channels) for ring in found.rings] == [2, 2, 2, 2]
    assert [len(ranks) for ranks in found.hosts.values()] == [8, 8]
    crossing = {pair for ring in found.rings for pair in found.crossings(ring)}
    assert {pair for pair in crossing if pair[0] < 8} == {(1, 8), (3, 10), (5, 12), (7, 14)}
    assert {len(found.crossings(ring)) for ring in found.rings} == {2}  # Once each way.


def test_links_trees_and_cards_are_those_of_the_real_log():
    trace = Trace.load(REAL)
    found = analysis.topology(trace)
    kinds = {kind: sum(edge.channels for edge in found.edges if edge.kind == kind) for kind in ("P2P", "NET")}
    assert kinds == {"P2P": 256, "NET": 32}  # Of 64 lines: each link over the network is told by both of its ends.
    assert {card for edge in found.edges for card in edge.cards} == {"0", "1", "2", "3"}
    assert sum(len(process.wired["nccl 0"].places) for process in trace.processes) == 128
    pairs = {(edge.src, edge.dst) for edge in found.edges if edge.use == "ring"}
    for ring in found.rings:
        assert set(pairwise((*ring.order, ring.order[0]))) <= pairs
    told = " ".join(explain(trace).sentences)
    assert "8 rings of the 16 ranks of group nccl 0 on 2 hosts, in 4 different orders" in told
    assert "256 P2P/IPC, 32 NET/AWS Libfabric (cards 0, 1, 2, 3)" in told
    assert "it has no times" in told
    assert "408 of 529 lines understood" in told


def test_bytes_between_the_hosts_are_those_that_the_table_of_the_same_log_needs():
    found = analysis.topology(Trace.load(REAL))
    sent = found.sent("all_reduce", GIB)
    there = found.between_hosts(sent)
    assert set(there.values()) == {2 * 15 * GIB // 16}  # Each ring goes once each way, with 2 (n-1)/n of its share.
    row = next(line.split() for line in real_lines() if re.search(r"stdout>: +1073741824 ", line))
    time_us, bus_gb_s = float(row[-8]), float(row[-6])
    assert 2 * 15 * GIB // 16 / time_us / 1000 == pytest.approx(bus_gb_s, abs=0.01)


def test_the_map_has_a_box_for_each_host_and_an_arrow_for_each_link_of_a_ring():
    ax = draw.topology(Trace.load(REAL))
    arrows = [patch for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
    over_the_network = {patch.get_gid() for patch in arrows if "NET" in patch.get_gid()}
    ends = ((1, 8), (3, 10), (5, 12), (7, 14), (9, 0), (11, 2), (13, 4), (15, 6))
    assert over_the_network == {f"link {src} to {dst} NET" for src, dst in ends}
    assert [patch.get_gid() for patch in ax.patches if str(patch.get_gid()).startswith("host")] == [
        "host nccl-tests-efa-16-worker-0", "host nccl-tests-efa-16-worker-1"
    ]  # fmt: skip
    assert ax.get_title(loc="left") == "16 ranks on 2 hosts: 8 rings in 4 orders"


# Which lines are enough, and which are not ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left_out", "edges"), [(r"Channel \d\d/08 :|Trees", True), (" via ", False)]
)  # fmt: skip
def test_rings_follow_from_connections_alone_or_from_their_own_lines(tmp_path, left_out, edges):
    found = topology_of(tmp_path, [line for line in real_lines() if not re.search(left_out, line)])
    assert orders(found) == in_one_line_each()
    assert bool(found.edges) == edges


def test_without_the_lines_of_one_rank_no_ring_is_drawn(tmp_path):
    lines = [line for line in real_lines() if not re.search(r"Channel \d\d/08 :|worker-0:32:", line)]
    (tmp_path / "nccl.log").write_text("\n".join(lines))
    trace = Trace.load(tmp_path)
    found = analysis.topology(trace)
    assert found.rings == ()
    assert found.sent("all_reduce", GIB) == {}
    assert any("15 of 16 processes left a file" in problem for problem in trace.problems)
    ax = draw.topology(trace)
    assert ax.get_title(loc="left") == "16 ranks on 2 hosts: links, but no whole ring in the log"
    assert "Not in the log: rank 5." in ax.get_label()


@pytest.mark.parametrize("order", [range(20), [*range(30), *range(20)], [0, 1, 1, *range(3, 64)]])
def test_a_cut_line_is_no_ring(tmp_path, order):
    """NCCL up to 2.22 stops after 20 ranks, and says nothing; later it stops at 127 characters, with "..."."""
    log = made_log([range(64)], told=())
    ring = " ".join(map(str, order))
    for text in (f"Channel 00/01 : {ring}", f"Channel 00/01 : {ring} ..."):
        found = topology_of(tmp_path, [*log[:1], f"host-0:100:1 [0] NCCL INFO {text}", *log[1:]])
        assert found.rings == ()


def test_two_lines_that_contradict_each_other_make_no_ring(tmp_path):
    log = made_log([range(4)], told=("ring",))
    assert topology_of(tmp_path, log).rings
    wrong = "host-0:100:1 [0] NCCL INFO Channel 00/01 : 0 2 1 3"
    assert topology_of(tmp_path, [*log[:1], wrong, *log[1:]]).rings == ()


def test_lines_of_several_ranks_may_be_mixed_run_together_or_in_a_file_each(tmp_path):
    by_rank = {}
    for line in real_lines():
        head = re.match(r"\[1,(\d+)\]<stdout>:", line)
        by_rank.setdefault(head[1] if head else "", []).append(line)
    for rank, lines in by_rank.items():
        (tmp_path / f"nccl.{rank}.log").write_text("\n".join(lines))
    assert orders(analysis.topology(Trace.load(tmp_path))) == in_one_line_each()
    mixed, rng = [], random.Random(7)
    left = [lines[::-1] for lines in by_rank.values()]
    while left := [lines for lines in left if lines]:
        mixed.append(rng.choice(left).pop())
    # Every fifth line has lost its end, and the next, without mpirun's word, stands right behind it.
    plain = [line.partition("<stdout>:")[2] or line for line in mixed]
    text = "".join(line + ("" if at % 5 == 4 else "\n") for at, line in enumerate(plain))
    one = tmp_path / "one"
    one.mkdir()
    assert orders(topology_of(one, [text])) == in_one_line_each()


def test_the_lines_of_each_subsystem_are_understood(tmp_path):
    """Their authors have masked all addresses, so of which communicator they are nobody can tell."""
    log = Log()
    assert log.take(BY_SUBSYSTEM, gzip.decompress(BY_SUBSYSTEM.read_bytes()))
    found = {(device.host, link.via) for device, link in ((p.device, link) for p in log.open for link in p.links)}
    assert {via for _, via in found} == {"SHM/direct/direct", "NET/Socket/0", "P2P/CUMEM"}
    assert log.unknown_calls == 2
    assert log.unknown_choices == 3
    assert len(log.switched) == 1
    assert any(piece.after == {0: {1}, 1: {1}} for piece in log.open)
    with pytest.raises(TraceError, match=r"none of its 7\d lines tells of which communicator it is"):
        Trace.load(BY_SUBSYSTEM)


# Made logs ------------------------------------------------------------------------------------------------------------


def made_log(rings, *, per_host=4, told=("ring", "link"), calls=(), switch=False, later=False):
    """Of NCCL since 2.22, with a commId: `rings` are those of the channels. `told`: as lines of a ring, as links.

    `calls` are those of rank 0's TUNING and everybody's COLL, as (op, count, algorithm). `later`: what is connected at
    the first use, as another thread tells.
    """
    size, lines = len(rings[0]), []
    for rank in range(size):
        host, pid, dev = rank // per_host, 100 + rank, rank % per_host
        own, other = (f"host-{host}:{pid}:{thread} [{dev}] NCCL INFO " for thread in (1, 2))
        comm = f"comm 0xaa{rank} rank {rank} nranks {size} cudaDev {dev} nvmlDev {dev} busId 10 commId 0x77"
        lines.append(f"{own}[Rank {rank}] ncclCommInitRankConfig {comm} - Init START")
        lines += [f"{own}NVLS Created Multicast group 0x1 nranks {size} size 1 on rank 0"] * switch
        connected = []
        for channel, ring in enumerate(rings):
            at = list(ring).index(rank)
            after, before = ring[(at + 1) % size], ring[at - 1]
            if "ring" in told:
                lines.append(f"{own}Ring {channel:02} : {before} -> {rank} -> {after}")
            via = "P2P/CUMEM" if after // per_host == host else f"NET/IB/{channel}/GDRDMA"
            if "link" in told:
                connected.append(f"Channel {channel:02}/0 : {rank}[{dev}] -> {after}[0] [send] via {via}")
        if connected:
            connected.append("Connected all rings, use ring PXN 0 GDR 1")
        lines += [own + text for text in connected if not later]
        lines.append(f"{own}{len(rings)} coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels")
        lines.append(f"{own}ncclCommInitRankConfig {comm} - Init COMPLETE")
        lines += [other + text for text in connected if later]
        for number, (op, count, algorithm) in enumerate(calls):
            call = f"{op}: opCount {number:x} sendbuff 0x1 recvbuff 0x2 count {count} datatype 7 op 0 root 0"
            lines.append(f"{own}{call} comm 0xaa{rank} [nranks={size}] stream 0x3")
            if algorithm and rank == 0:
                channels = f"channel{{Lo..Hi}}={{0..{len(rings) - 1}}}"
                lines.append(f"{own}{op}: {4 * count} Bytes -> Algo {algorithm} proto SIMPLE {channels}")
    return lines


def load(tmp_path, lines):
    (tmp_path / "nccl.log").write_text("\n".join(lines))
    return Trace.load(tmp_path / "nccl.log")


def test_messages_of_a_ring_that_was_chosen_are_derived_and_each_goes_to_the_next_of_its_ring(tmp_path):
    rings = [[0, 1, 2, 3], [0, 3, 2, 1]]
    trace = load(tmp_path, made_log(rings, calls=[("AllReduce", 1000, "RING")]))
    (one,) = operations(trace)
    assert (one.op, one.group.members, one.missing) == ("all_reduce", (0, 1, 2, 3), ())
    sent = messages(trace)
    assert len(sent) == 2 * 2 * 3 * 4  # Two rings, two times around less one step, four ranks.
    assert {message.how for message in sent} == {"derived"}
    pairs = {(message.src, message.dst) for message in sent}
    assert pairs == {pair for ring in rings for pair in pairwise((*ring, ring[0]))}
    traffic = analysis.traffic(trace)
    assert [traffic.bytes_from(rank=rank) for rank in range(4)] == [6000] * 4  # 2 * 3/4 * 4000.
    assert all(message.received_ns is None for message in sent)


@pytest.mark.parametrize(
    ("op", "count", "each"),
    [
        ("AllGather", 250, 3 * 1000),  # Each rank passes on all blocks but one.
        ("ReduceScatter", 250, 3 * 1000),
        ("Broadcast", 250, [1000, 1000, 1000, 0]),  # Rank 0 is the root, and 3 the last of this ring.
        ("Reduce", 250, [0, 1000, 1000, 1000]),
    ],
)
def test_every_collective_that_goes_round_a_ring_sends_what_it_must(tmp_path, op, count, each):
    trace = load(tmp_path, made_log([[0, 1, 2, 3]], calls=[(op, count, "RING")]))
    traffic = analysis.traffic(trace)
    sent = [traffic.bytes_from(rank=rank) for rank in range(4)]
    assert sent == (each if isinstance(each, list) else [each] * 4)
    assert traffic.by_how.keys() == {"derived"}


def test_a_reduce_scatter_ends_with_each_part_at_its_rank_and_an_all_gather_begins_there(tmp_path):
    for op, ends in (("ReduceScatter", True), ("AllGather", False)):
        trace = load(tmp_path, made_log([[0, 2, 1, 3]], calls=[(op, 250, "RING")]))
        sent = [message for message in messages(trace) if message.step == (2 if ends else 0)]
        assert {(message.offset_bytes // 1000, message.dst if ends else message.src) for message in sent} == {
            (rank, rank) for rank in range(4)
        }


@pytest.mark.parametrize("algorithm", ["TREE", "NVLS", "NVLS_TREE", "COLLNET_DIRECT", "PAT", "0"])
def test_where_something_else_ran_there_are_no_messages_of_a_ring(tmp_path, algorithm):
    trace = load(tmp_path, made_log([[0, 1, 2, 3]], calls=[("AllReduce", 1000, algorithm)]))
    assert not messages(trace)
    named = "TREE" if algorithm == "0" else algorithm
    assert f"NCCL chose {named} for it, and no ring" in " ".join(explain(trace).sentences)


def test_where_the_log_does_not_say_what_ran_messages_are_inferred_and_after_nvls_there_are_none(tmp_path):
    calls = [("AllReduce", 1000, ""), ("Broadcast", 1000, "")]
    trace = load(tmp_path, made_log([[0, 1, 2, 3]], calls=calls))
    assert {(message.operation.op, message.how) for message in messages(trace)} == {
        ("all_reduce", "inferred"),
        ("broadcast", "derived"),  # For it NCCL has nothing but rings.
    }
    told = " ".join(explain(trace).sentences)
    assert "messages of its collectives are inferred, those of its rings, if it chose these" in told
    trace = load(tmp_path, made_log([[0, 1, 2, 3]], calls=calls, switch=True))
    assert {message.operation.op for message in messages(trace)} == {"broadcast"}
    assert "NCCL may have let a switch add up (NVLS)" in " ".join(explain(trace).sentences)


def test_messages_go_by_the_channels_that_were_chosen(tmp_path):
    lines = made_log([[0, 1, 2, 3], [0, 3, 2, 1]], calls=[("AllReduce", 1000, "RING")])
    lines = [line.replace("{0..1}", "{1..1}") for line in lines]
    sent = messages(load(tmp_path, lines))
    assert {(message.src, message.dst) for message in sent} == {(0, 3), (3, 2), (2, 1), (1, 0)}


def test_sends_meet_their_receives(tmp_path):
    lines = made_log([[0, 1]])
    for rank, op in ((0, "Send"), (1, "Recv")):
        call = f"{op}: opCount 0 sendbuff 0x1 recvbuff 0x2 count 5 datatype 7 op 0 root {1 - rank} comm 0xaa{rank}"
        lines.append(f"host-0:{100 + rank}:1 [{rank}] NCCL INFO {call} [nranks=2] stream 0x3")
    (message,) = messages(load(tmp_path, lines))
    assert (message.src, message.dst, message.payload_bytes, message.how) == (0, 1, 20, "observed")


def test_what_is_connected_at_the_first_use_is_assigned_where_only_one_communicator_can_be_meant(tmp_path):
    rings = [[0, 2, 1, 3], [0, 3, 1, 2]]
    found = topology_of(tmp_path, made_log(rings, told=("link",), later=True))
    assert orders(found) == dict(enumerate(map(tuple, rings)))


def test_of_two_communicators_with_the_same_ranks_nothing_is_assigned(tmp_path):
    lines = made_log([[0, 2, 1, 3]], told=("link",), later=True)
    twice = [line.replace("0x77", "0x78").replace("0xaa", "0xbb") for line in lines if "Init" in line]
    first = [line for line in lines if "Init" in line]
    trace = load(tmp_path, [*first, *twice, *(line for line in lines if "Init" not in line)])
    assert all(each.rings == () for each in analysis.topologies(trace))
    assert "not assigned: 4 connections of no known communicator" in trace.problems[-1]


def test_a_smaller_communicator_is_told_from_the_larger_by_whose_ring_closes(tmp_path):
    world = made_log([[0, 4, 1, 5, 2, 6, 3, 7]], told=("link",), later=True, per_host=8)
    pair = [
        line.replace("0x77", "0x78").replace("0xaa", "0xbb") for line in made_log([[0, 1]], told=("link",), later=True)
    ]
    found = {len(each.group.members): each for each in analysis.topologies(load(tmp_path, world + pair))}
    assert orders(found[8]) == {0: (0, 4, 1, 5, 2, 6, 3, 7)}
    assert orders(found[2]) == {0: (0, 1)}


# Beside other files ---------------------------------------------------------------------------------------------------


def test_beside_flight_recorder_dumps_the_calls_there_get_the_rings_of_the_log(tmp_path):
    for rank in range(4):
        facts = {"retired": True, "collective_seq_id": 1, "state": "completed"}
        dump = dump_of(input_sizes=[[1000]], **facts)
        dump["pg_config"]["0"]["ranks"] = "[0, 1, 2, 3]"
        (tmp_path / f"dump_{rank}").write_text(json.dumps(dump))
    (tmp_path / "nccl.log").write_text("\n".join(made_log([[0, 2, 1, 3]])))
    trace = Trace.load(tmp_path)
    assert {(message.src, message.dst) for message in messages(trace)} == {(0, 2), (2, 1), (1, 3), (3, 0)}
    assert any("NCCL's log beside: 1 ring in 1 group, whose members are the same" in each for each in trace.problems)
    assert main(["import", str(tmp_path), "-o", str(tmp_path / "trace")]) == 0
    again = Trace.load(tmp_path / "trace")
    assert [str(message) for message in messages(again)] == [str(message) for message in messages(trace)]


def test_beside_a_trace_of_ours_too_but_not_of_a_job_on_other_hosts(tmp_path):
    job = Job(tmp_path / "trace", ranks=4, backend="nccl")
    job.collective("all_reduce", size=4000)
    trace = job.load()
    assert not messages(trace)
    log = tmp_path / "nccl.log"
    log.write_text("\n".join(made_log([[0, 2, 1, 3]])).replace("host-0", "host.cluster"))
    both = Trace.load(trace.path, log)
    assert {(message.src, message.dst) for message in messages(both)} == {(0, 2), (2, 1), (1, 3), (3, 0)}
    assert {message.how for message in messages(both)} == {"inferred"}
    log.write_text("\n".join(made_log([[0, 2, 1, 3]])))
    assert not messages(Trace.load(trace.path, log))
    log.write_text("nothing")
    with pytest.raises(TraceError, match="beside a trace of ours, only NCCL's log is read"):
        Trace.load(trace.path, log)


# Bad input ------------------------------------------------------------------------------------------------------------


def answer(folder):
    try:
        trace = Trace.load(folder)
        plt.close(draw.topology(trace).figure)
        return "\n".join(explain(trace).sentences)
    except TraceError as error:
        return str(error)


WHOLE = "\n".join(made_log([[0, 1, 2, 3], [0, 2, 3, 1]], calls=[("AllReduce", 1000, "RING"), ("Send", 5, "")]))


@given(
    start=st.integers(0, len(WHOLE)),
    end=st.integers(0, len(WHOLE)),
    changed=st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.characters(codec="utf-8")), max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_a_damaged_log_is_read_or_refused_in_a_sentence(tmp_path_factory, start, end, changed):
    text = list(WHOLE)
    for place, character in changed:
        text[place] = character
    folder = tmp_path_factory.mktemp("log")
    (folder / "nccl.log").write_text("".join(text)[min(start, end) : max(start, end)])
    assert answer(folder).replace("\n", "").isprintable()


NUMBERS = sorted({found.span() for found in re.finditer(r"\d+", WHOLE)})


@given(at=st.sampled_from(NUMBERS), value=st.integers(0, 10**20) | st.sampled_from([2**31, 2**63, 99_999, 4, 5]))
@example(at=re.search(r"datatype (\d+)", WHOLE).span(1), value="9" * 5000)
@settings(max_examples=60, deadline=None)
def test_any_number_anywhere_is_read_or_refused_in_a_sentence(tmp_path_factory, at, value):
    folder = tmp_path_factory.mktemp("log")
    (folder / "nccl.log").write_text(WHOLE[: at[0]] + str(value) + WHOLE[at[1] :])
    assert answer(folder).replace("\n", "").isprintable()


def test_a_rank_that_claims_a_huge_communicator_costs_no_memory(tmp_path):
    line = "h:1:1 [0] NCCL INFO comm 0x{0} rank {0} nranks 99999 cudaDev {0} busId 1 - Init COMPLETE\n"
    text = "".join(line.format(rank) for rank in range(500))
    (tmp_path / "nccl.log").write_text(text)
    with pytest.raises(TraceError, match="a communicator of 99,999 ranks is more than can be read"):
        Trace.load(tmp_path)


def test_a_long_line_without_an_end_is_passed_over(tmp_path):
    (tmp_path / "nccl.log").write_text("x" * 5_000_000 + " NCCL INFO " + "0[0] -> " * 100_000)
    with pytest.raises(TraceError, match="NCCL's log"):
        Trace.load(tmp_path)


def test_choices_of_older_logs_are_numbers_and_count_all_ranks_together(tmp_path):
    lines = made_log([[0, 1, 2, 3]])
    lines.append("host-0:100:1 [0] NCCL INFO AllGather: 4000 Bytes -> Algo 1 proto 2 time 36.5")
    assert analysis.topology(load(tmp_path, lines)).choices == (Choice("all_gather_single", 1000, "RING", "SIMPLE"),)
