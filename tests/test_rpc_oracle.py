"""Our record of every RPC message, against what the C++ agent itself says that it sent; on a busy machine, too.

The agent is a subclass of torch's that takes notes, compiled once: oracle/log_agent.cpp.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections import Counter, defaultdict, namedtuple
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.rpc as rpc
from rpc_programs import PROGRAMS

from dlearn import Cluster, messages

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(600)]

BUSY_LOOPS = 4
RUNS = [(program, busy) for program in PROGRAMS for busy in (False, True)]

SOURCE = Path(__file__).parent / "oracle" / "log_agent.cpp"
NAME = "dlearn_log_agent"
FLAGS = ["-O0", "-DUSE_C10D", "-DUSE_RPC", "-DUSE_TENSORPIPE", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED"]

FLAGS_OF = {"REQUEST": 0x100, "RESPONSE": 0x200}
"""These bits of a message's type."""

Sent = namedtuple("Sent", "src id kind request payload_bytes tensor_bytes")
"""One message that left the agent of worker `src`. A reply has the number of its request."""


@cache
def build() -> str:
    """The file of the compiled agent, in a folder of this torch. Skips where it cannot be built."""
    if shutil.which("g++") is None or not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("the C++ oracle needs g++ and Python's headers (Debian: python3-dev)")
    from torch.utils import cpp_extension

    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "dlearn", torch.__version__)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lock").unlink(missing_ok=True)  # Torch's own: a builder that was killed has left it.
    os.environ.setdefault("MAX_JOBS", "2")
    # Where nothing is activated, ninja stands beside this Python.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return cpp_extension.load(NAME, [str(SOURCE)], extra_cflags=FLAGS, build_directory=str(folder)).__file__


def types() -> dict[int, str]:
    """Number of a message type -> its name, as torch's own header says."""
    header = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "rpc" / "message.h"
    entry = re.compile(r"(\w+)\s*=\s*(0x[0-9a-f]+)\s*\|\s*MessageTypeFlags::(REQUEST|RESPONSE)_TYPE")
    return {int(number, 16) | FLAGS_OF[way]: name for name, number, way in entry.findall(header.read_text())}


def noted_by_the_agent(library, program, store):
    """Run a program with the agent that takes notes; every message that this worker's agent has sent."""
    warnings.simplefilter("ignore")
    spec = importlib.util.spec_from_file_location(NAME, library)
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    rpc.TensorPipeAgent = agent.LogAgent
    rank, names, kinds = int(os.environ["RANK"]), PROGRAMS[program].names, types()
    options = rpc.TensorPipeRpcBackendOptions(num_worker_threads=8, init_method=f"file://{store}")
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)
    PROGRAMS[program].functions.get(names[rank], int)()
    rpc.shutdown()
    return [
        Sent(rank, number, kinds[kind], bool(kind & FLAGS_OF["REQUEST"]), payload_bytes, tensor_bytes)
        for _, kind, number, payload_bytes, _, tensor_bytes, _ in agent.sent()
    ]


@cache
def run(program, busy):
    """The trace, and every message that the agents noted; `busy` where the machine has more to do than it can."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS * busy)]
    store = Path(tempfile.gettempdir(), f"rpc-{os.getpid()}-{program}-{busy}")
    try:
        cluster = Cluster(PROGRAMS[program].names, init=False)
        done = cluster.run(noted_by_the_agent, build(), program, store, timeout=200)
    finally:
        store.unlink(missing_ok=True)
        for loop in loops:
            loop.kill()
            loop.wait()
    return done.trace, [each for noted in done.results.values() for each in noted]


@pytest.mark.parametrize(("program", "busy"), RUNS)
def test_no_request_is_missing_and_none_invented(program, busy):
    trace, noted = run(program, busy)
    theirs = Counter((each.src, each.id) for each in noted if each.request)
    ours = Counter((each.src, each.request.id) for each in trace.rpc.exchanges)
    assert ours == theirs
    assert trace.rpc.complete
    if program != "failures":  # There some replies come too late to be taken.
        for each in (exchange.request for exchange in trace.rpc.exchanges):
            assert None not in (each.sending_ns, each.received_ns, each.replying_ns, each.answered_ns)
    if program == "training":
        assert [len(messages(trace.within(f"step {step}"))) for step in range(10)] == [28] * 10
    unknown = sum(each.known_by == "unknown" for each in trace.rpc.exchanges)
    assert unknown == 0 or PROGRAMS[program].crowded
    assert trace.rpc.explained == trace.rpc.logged - unknown
    assert len(trace.rpc.problems) == (unknown > 0)


def wrong_kinds(trace, noted):
    """Requests that we took for another kind. Torch has two kinds for fetching a value; no caller can tell which."""
    theirs = {
        (each.src, each.id): each.kind.replace("SCRIPT_RREF_FETCH", "RREF_FETCH").replace("PYTHON_RREF", "RREF")
        for each in noted
        if each.request
    }
    return [
        f"{theirs[each.src, each.request.id]} taken for {each.kind} ({each.known_by})"
        for each in trace.rpc.exchanges
        if theirs[each.src, each.request.id] != each.kind
    ]


def test_99_percent_of_kinds_are_right():
    """Of most programs; where references come and go at the same moment, 95 %."""
    wrong, requests = defaultdict(list), Counter()
    for program, busy in RUNS:
        trace, noted = run(program, busy)
        wrong[PROGRAMS[program].crowded] += wrong_kinds(trace, noted)
        requests[PROGRAMS[program].crowded] += trace.rpc.logged
    assert len(wrong[False]) <= 0.01 * requests[False], wrong[False]
    assert len(wrong[True]) <= 0.05 * requests[True], wrong[True]


def test_payloads_are_known_to_the_byte():
    """Within 4 bytes, as numbers in it grow with the program, but for wrong kinds; of what C++ packed the tensors."""
    known, unknown, off = 0, [], []
    for trace, noted in (run(*each) for each in RUNS):
        theirs = defaultdict(list)
        for each in noted:
            theirs[each.src, each.id, each.request].append(each)
        for message in messages(trace):
            if message.payload_bytes is None and message.operation.exchange.call is None:
                unknown.append(f"{message.op} {message.what}")
                continue
            if message.op == "EXCEPTION":
                continue  # They leave the agent by another way than the one where it takes notes.
            known += message.packed_bytes is not None
            # Of replies with this number it sends one to each worker that has asked as often.
            same = theirs[message.src, message.operation.exchange.request.id, message.step == 0]
            if not any(fits(message, each) for each in same):
                off.append(f"{message.op} {message.what}: {message.packed_bytes}, not {same}")
    assert known > 1600
    assert len(off) <= 0.03 * known, off
    assert len(unknown) <= 0.03 * known, unknown


def fits(message, noted):
    tensors = sum(tensor.logical_bytes for tensor in message.tensors)
    sparse = any(tensor.sparse for tensor in message.tensors)
    difference = noted.payload_bytes - (message.packed_bytes or 0) - message.observer_bytes
    return (message.packed_bytes is None or 0 <= difference <= 4) and (noted.tensor_bytes == tensors or sparse)
