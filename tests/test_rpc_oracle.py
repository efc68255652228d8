"""Our record of every RPC message, against what the C++ agent itself says that it sent."""

import functools
import os
from collections import Counter, defaultdict

import pytest
import rpc_oracle
from rpc_programs import PROGRAMS

from dlearn import Cluster
from dlearn.analysis import operations
from dlearn.join.unrolling import messages_of

pytestmark = pytest.mark.slow  # It builds an agent of its own in C++.

CROWDED = {"threads", "references", "autograd"}
"""References are taken in and dropped at the same moment, or while a context ends: then one looks like the other."""


def noted_by_the_agent(library, program):
    """Run a program with the agent that takes notes; its notes."""
    from dlearn.cluster.rpc_worker import worker

    rank, names = int(os.environ["RANK"]), PROGRAMS[program].names
    agent = rpc_oracle.install(library)
    function = PROGRAMS[program].functions.get(names[rank])
    with worker(names[rank], rank, len(names)):
        if function is not None:
            function()
    return rpc_oracle.sent(agent, rank)


def run_both(program):
    """The trace, and every message that the agents noted."""
    cluster = Cluster(PROGRAMS[program].names)
    run = cluster.run(noted_by_the_agent, str(rpc_oracle.build()), program, timeout=100, check=False)
    assert run.error is None, f"{run.error}\nWithout a reply:\n{without_reply(run.trace)}"
    return run.trace, [each for noted in run.results.values() for each in noted]


def without_reply(trace):
    """The requests that were under way when a program failed: a line for each, with how far it came."""
    return "\n".join(
        f"{each.src} -> {each.dst} {each.kind} {each.request}"
        for each in trace.rpc.exchanges
        if each.reply_received_ns is None
    )


@functools.cache
def run_once(program):
    """The same run for all tests of this file; one program that fails is no failure of the others."""
    return run_both(program)


def wrong_kinds(trace, noted):
    """Requests that we took for another kind. Torch has two kinds for fetching a value; no caller can tell which."""
    theirs = {
        (each.src, each.id): each.kind.replace("SCRIPT_RREF_FETCH", "RREF_FETCH").replace("PYTHON_RREF", "RREF")
        for each in noted
        if each.request
    }
    logged = [each for each in trace.rpc.exchanges if each.request is not None]
    assert len(logged) == len(trace.rpc.exchanges)
    return [
        f"{theirs[each.src, each.request.id]} taken for {each.kind} ({each.known_by})"
        for each in logged
        if theirs[each.src, each.request.id] != each.kind
    ]


@pytest.mark.parametrize("program", PROGRAMS)
def test_no_request_is_missing_and_none_invented(program):
    trace, noted = run_once(program)
    theirs = Counter((each.src, each.id) for each in noted if each.request)
    ours = Counter((each.src, each.request.id) for each in trace.rpc.exchanges if each.request is not None)
    assert ours == theirs
    assert trace.rpc.complete


def test_payloads_are_known_to_the_byte():
    """Within 4 bytes where we claim to know the size, as numbers in it grow with the program; but for wrong kinds."""
    known, unknown, off = 0, [], []
    for trace, noted in map(run_once, PROGRAMS):
        theirs = defaultdict(list)
        for each in noted:
            theirs[each.src, each.id, each.request].append(each)
        for message in (each for operation in operations(trace) for each in messages_of(operation)):
            if message.packed_bytes is None:
                unknown.append(f"{message.op} {message.what}")
                continue
            if message.op == "EXCEPTION":
                continue  # They leave the agent by another way than the one where it takes notes.
            known += 1
            # Of replies with this number it sends one to each worker that has asked as often.
            same = theirs[message.src, message.operation.exchange.request.id, message.step == 0]
            if not any(fits(message, each) for each in same):
                seen = [(each.payload_bytes, each.tensor_bytes) for each in same]
                ours = message.packed_bytes + message.observer_bytes
                off.append(f"{message.op} {message.what}: {ours}, not {seen}")
    assert known > 1900
    assert len(off) <= 0.03 * known, off
    assert len(unknown) <= 0.03 * known, unknown


def fits(message, noted):
    difference = noted.payload_bytes - message.packed_bytes - message.observer_bytes
    sparse = any(tensor.sparse for tensor in message.tensors)
    tensors = sum(tensor.logical_bytes for tensor in message.tensors)
    return 0 <= difference <= 4 and (noted.tensor_bytes == tensors or sparse)


@pytest.mark.timeout(600)
def test_99_percent_of_kinds_are_right():
    """Over seven programs, three runs each; and over the three that make it hard."""
    wrong, requests = Counter(), Counter()
    for program in PROGRAMS:
        for again in (run_once, run_both, run_both):
            trace, noted = again(program)
            wrong[program in CROWDED] += len(wrong_kinds(trace, noted))
            requests[program in CROWDED] += trace.rpc.logged
    print({"crowded" if each else "others": f"{wrong[each]} of {requests[each]:,} wrong" for each in requests})
    assert wrong[False] <= 0.01 * requests[False]
    assert wrong[True] <= 0.05 * requests[True]
