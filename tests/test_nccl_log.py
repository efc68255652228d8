"""NCCL's own log: whole rings and no others, who talks over what, and the messages inside NCCL's collectives."""

import gzip
import json
import re
from itertools import pairwise

import pytest
from matplotlib.patches import FancyArrowPatch
from test_flight_recorder import SAMPLES, dump_of

from dlearn import Trace, analysis, draw, explain, messages
from dlearn.cli import main

REAL = SAMPLES / "nccl-2.9.9-16gpus.log.gz"


def load(tmp_path, lines):
    (tmp_path / "nccl.log").write_text("\n".join(lines))
    return Trace.load(tmp_path / "nccl.log")


def orders(found):
    return {channel: ring.order for ring in found.rings for channel in ring.channels}


def test_rings_links_and_cards_are_those_of_the_real_log():
    trace = Trace.load(REAL)
    found = analysis.topology(trace)
    # Rank 0 writes its rings in a line each, where they have room.
    log = gzip.decompress(REAL.read_bytes()).decode()
    told = re.findall(r"Channel (\d\d)/08 :([ \d]+)$", log, re.M)
    assert orders(found) == {int(channel): tuple(map(int, ring.split())) for channel, ring in told}
    assert [len(ranks) for ranks in found.hosts.values()] == [8, 8]
    crossing = {pair for ring in found.rings for pair in found.crossings(ring)}
    ends = {(1, 8), (3, 10), (5, 12), (7, 14), (9, 0), (11, 2), (13, 4), (15, 6)}
    assert crossing == ends
    pairs = {(edge.src, edge.dst) for edge in found.edges if edge.use == "ring"}
    for ring in found.rings:
        assert set(pairwise((*ring.order, ring.order[0]))) <= pairs
    told = " ".join(explain(trace).sentences)
    assert "8 rings of the 16 ranks of group nccl 0 on 2 hosts, in 4 different orders" in told
    # Of 64 lines over the network: each link there is told by both of its ends.
    assert "256 P2P/IPC, 32 NET/AWS Libfabric (cards 0, 1, 2, 3)" in told
    assert "408 of 529 lines understood" in told
    ax = draw.topology(trace)
    drawn = [patch.get_gid() for patch in ax.patches if isinstance(patch, FancyArrowPatch)]
    assert {gid for gid in drawn if "NET" in gid} == {f"link {src} to {dst} NET" for src, dst in ends}
    assert ax.get_title(loc="left") == "16 ranks on 2 hosts: 8 rings in 4 orders"


def made_log(rings, *, told=("ring", "link"), calls=(), switch=False):
    """Of NCCL since 2.22, with a commId: `rings` are those of the channels. `told`: as lines of a ring, as links.

    `calls` are those of rank 0's TUNING and everybody's COLL, as (op, count, algorithm).
    """
    size, lines = len(rings[0]), []
    for rank in range(size):
        own = f"host-0:{100 + rank}:1 [{rank}] NCCL INFO "
        comm = f"comm 0xaa{rank} rank {rank} nranks {size} cudaDev {rank} nvmlDev {rank} busId 10 commId 0x77"
        lines.append(f"{own}[Rank {rank}] ncclCommInitRankConfig {comm} - Init START")
        lines += [f"{own}NVLS Created Multicast group 0x1 nranks {size} size 1 on rank 0"] * switch
        connected = []
        for channel, ring in enumerate(rings):
            at = list(ring).index(rank)
            after, before = ring[(at + 1) % size], ring[at - 1]
            if "ring" in told:
                lines.append(f"{own}Ring {channel:02} : {before} -> {rank} -> {after}")
            if "link" in told:
                connected.append(f"Channel {channel:02}/0 : {rank}[{rank}] -> {after}[0] [send] via P2P/CUMEM")
        if connected:
            connected.append("Connected all rings, use ring PXN 0 GDR 1")
        lines += [own + text for text in connected]
        lines.append(f"{own}{len(rings)} coll channels, 0 collnet channels, 0 nvls channels, 8 p2p channels")
        lines.append(f"{own}ncclCommInitRankConfig {comm} - Init COMPLETE")
        for number, (op, count, algorithm) in enumerate(calls):
            call = f"{op}: opCount {number:x} sendbuff 0x1 recvbuff 0x2 count {count} datatype 7 op 0 root 0"
            lines.append(f"{own}{call} comm 0xaa{rank} [nranks={size}] stream 0x3")
            if algorithm and rank == 0:
                channels = f"channel{{Lo..Hi}}={{0..{len(rings) - 1}}}"
                lines.append(f"{own}{op}: {4 * count} Bytes -> Algo {algorithm} proto SIMPLE {channels}")
    return lines


@pytest.mark.parametrize("behind", ["", " ..."])
def test_a_cut_line_is_no_ring_nor_is_one_that_does_not_close(tmp_path, behind):
    """NCCL up to 2.22 stops after 20 ranks, and says nothing; later it stops at 127 characters, with "..."."""
    first, *others = made_log([range(64)], told=())
    cut = f"host-0:100:1 [0] NCCL INFO Channel 00/01 : {' '.join(map(str, range(20)))}{behind}"
    assert analysis.topology(load(tmp_path, [first, cut, *others])).rings == ()
    links = made_log([range(4)], told=("link",))
    assert orders(analysis.topology(load(tmp_path, links))) == {0: (0, 1, 2, 3)}
    assert not analysis.topology(load(tmp_path, [line.replace("3[3] -> 0[0]", "3[3] -> 1[0]") for line in links])).rings


@pytest.mark.parametrize(
    ("op", "each"),
    [
        ("AllReduce", [1500] * 4),  # 2 * 3/4 * 1000
        ("AllGather", [3000] * 4),  # Each rank passes on all blocks but one.
        ("ReduceScatter", [3000] * 4),
        ("Broadcast", [1000, 1000, 1000, 0]),  # Rank 0 is the root, and 3 the last of this ring.
        ("Reduce", [0, 1000, 1000, 1000]),
    ],
)
def test_each_message_of_a_ring_that_was_chosen_goes_to_the_next_and_is_derived(tmp_path, op, each):
    trace = load(tmp_path, made_log([[0, 1, 2, 3]], calls=[(op, 250, "RING")]))
    assert [analysis.traffic(trace).bytes_from(rank=rank) for rank in range(4)] == each
    for message in messages(trace):
        assert (message.dst, message.how) == ((message.src + 1) % 4, "derived")
        assert message.received_ns is None


@pytest.mark.parametrize(
    ("algorithm", "switch", "known", "why"),
    [
        ("TREE", False, {}, "NCCL chose TREE for it, and no ring"),
        ("0", False, {}, "NCCL chose TREE for it, and no ring"),
        ("", False, {"inferred"}, "messages of its collectives are inferred"),
        ("", True, {}, "NCCL may have let a switch add up (NVLS)"),
    ],
)
def test_where_no_ring_was_chosen_for_sure_its_messages_are_inferred_or_none(tmp_path, algorithm, switch, known, why):
    trace = load(tmp_path, made_log([[0, 1, 2, 3]], calls=[("AllReduce", 1000, algorithm)], switch=switch))
    assert {message.how for message in messages(trace)} == set(known)
    assert why in " ".join(explain(trace).sentences)


def test_beside_dumps_their_calls_get_the_rings_of_the_log(tmp_path, capsys):
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    for rank in range(4):
        dump = dump_of(input_sizes=[[1000]], retired=True, collective_seq_id=1, state="completed")
        dump["pg_config"]["0"]["ranks"] = "[0, 1, 2, 3]"
        (dumps / f"dump_{rank}").write_text(json.dumps(dump))
    lines = made_log([[0, 2, 1, 3]])
    ring = {(0, 2), (2, 1), (1, 3), (3, 0)}
    load(dumps, lines)
    assert {(message.src, message.dst) for message in messages(Trace.load(dumps))} == ring
    assert main(["import", str(dumps), "-o", str(tmp_path / "made")]) == 0
    assert list(map(str, messages(Trace.load(tmp_path / "made")))) == list(map(str, messages(Trace.load(dumps))))
