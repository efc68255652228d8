"""RPC that fails: one clear sentence, the trace so far, and nobody left behind."""

import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from hanging import end_when, said
from installed_torch import own_words

from dlearn import Cluster, Trace, explain, messages
from dlearn.errors import RankError
from dlearn.trace.event import RpcWindow
from dlearn.trace.rpc.agent_log import log_path


class Unpicklable(Exception):
    def __init__(self):
        super().__init__("no")

    def __reduce__(self):
        raise TypeError("this cannot be pickled")


def die():
    os._exit(3)


def sleep_long():
    print("asleep", flush=True)
    time.sleep(1000)


def raise_unpicklable():
    raise Unpicklable


def return_unpicklable():
    return Unpicklable()


def divide(x):
    return 1 // x


def shape_of(x):
    return tuple(x.shape)


def call(function, *args):
    return rpc.rpc_sync("ps", function, args)


def run(*args, timeout=60, **options):
    return Cluster(["ps", "trainer"], rpc=True).run({"trainer": call}, *args, timeout=timeout, **options)


def failed(*args):
    with pytest.raises(RankError) as caught:
        run(*args)
    return caught.value


def calls_of(trace):
    return [
        each.what for each in messages(trace) if each.how == "observed" and "_to_" not in each.what and each.src == 1
    ]


def test_a_worker_that_dies_in_a_call_is_named_and_the_call_is_kept():
    error = failed(die)
    assert error.what.startswith("ps died: it exited with code 3")
    assert calls_of(error.run.trace) == ["die()"]


def test_a_call_that_never_returns_tells_who_waits_for_whom_in_what():
    cluster = Cluster(["ps", "trainer"], rpc=True)
    error = end_when(said("asleep", "ps"), cluster, {"trainer": call}, sleep_long).error
    assert "trainer waits for ps in rpc_sync sleep_long() (tests/test_rpc_faults.py:" in error.what
    assert "ps is inside sleep_long" in error.what


def test_an_exception_of_the_callee_is_told_without_its_walls():
    assert failed(divide, 0).what.startswith(
        "trainer failed first: ZeroDivisionError('integer division or modulo by zero'), raised on ps in a call by RPC"
    )
    trace = failed(divide, 0).run.trace
    assert any(each.what == "ZeroDivisionError, raised by divide" for each in messages(trace))
    (told,) = [sentence for sentence in explain(trace).sentences if "divide()" in sentence]
    assert "; it raised ZeroDivisionError; trainer→ps: " in told
    assert told.endswith(" B (observed).")


@pytest.mark.parametrize("function", [raise_unpicklable, return_unpicklable])
def test_what_cannot_be_pickled_is_a_clear_error(function):
    error = failed(function)
    assert len(error.what) < 400
    assert calls_of(error.run.trace) == [f"{function.__name__}()"]


def test_a_device_that_rpc_refuses():
    error = failed(shape_of, torch.empty(3, device="meta"))
    assert "TensorPipe RPC backend only supports CPU tensors by default" in error.what


def test_a_parameter_loses_its_gradient_and_the_record_says_so():
    done = run(shape_of, torch.nn.Parameter(torch.ones(3)))
    (sent,) = calls_of(done.trace)
    assert sent.endswith("(Parameter[3] arrives as a plain tensor, without its gradient)")


def test_sparse_and_empty_tensors_are_counted():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse invariant checks")  # torch 2.11 warns those who ask for them, too.
        sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0], (10,), check_invariants=True)
    for tensor, size in ((sparse, 2 * 8 + 2 * 4), (torch.empty(0, 4), 0)):
        done = run(shape_of, tensor)
        assert done.results["trainer"] == tuple(tensor.shape)
        (message,) = [each for each in messages(done.trace) if each.what.startswith("shape_of")]
        assert sum(each.payload_bytes for each in message.tensors) == size


def test_a_log_that_cannot_be_read_is_said_and_calls_are_kept():
    done = run(divide, 1)
    for process in done.trace.processes:
        path = log_path(process.path)
        path.write_bytes(path.read_bytes().replace(b"is sending request", b"dispatches request"))
    trace = Trace.load(done.folder / "trace")
    assert not trace.rpc.complete
    assert "RPC: " in str(explain(trace))
    assert "incomplete: " in str(explain(trace))
    assert "do not stand in the agents' logs" in str(explain(trace))
    assert calls_of(trace) == calls_of(done.trace)


def test_a_request_of_an_unknown_kind_is_counted_and_said():
    """A call that Python's side never told of, as one in C++ may be."""
    done = run(divide, 1)
    (caller,) = [each.path for each in done.trace.processes if each.label == "trainer"]
    lines = [line for line in caller.read_text().splitlines() if '"function":"divide"' not in line]
    caller.write_text("\n".join(lines))
    trace = Trace.load(done.folder / "trace")
    assert trace.rpc.complete
    assert trace.rpc.explained == trace.rpc.logged - 1
    sentence = f"of 1 of {trace.rpc.logged} requests over RPC the kind is unknown"
    assert trace.rpc.problems == (sentence,)
    assert sentence in str(explain(trace))
    # Not above: the ranks load this file, and some have few seconds for all they do.
    from matplotlib import pyplot as plt
    from matplotlib.text import Text

    from dlearn import draw

    for draw_it in (draw.timeline, draw.sequence):
        assert any(sentence in text.get_text() for text in draw_it(trace).figure.findobj(Text))
        plt.close("all")


def test_rpc_listens_on_loopback_only():
    def listening():
        return [each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.status == psutil.CONN_LISTEN]

    done = Cluster(["ps", "trainer"], rpc=True).run(listening, timeout=60)
    for addresses in done.results.values():
        assert addresses
        assert set(addresses) <= {"127.0.0.1", "::1"}


SCRIPT = """
import os, sys
import torch, torch.distributed.rpc as rpc
import dlearn

def double(x):
    return 2 * x

rank = int(os.environ["RANK"])
with dlearn.record("trace"):
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    if rank == 1:
        print("mine, from Python", file=sys.stderr)
        os.write(2, b"[V no log line, without an end")
        rpc.rpc_sync("worker0", double, (torch.ones(4),))
        os.write(2, b", and here it is\\n")
        os.system("echo from a child >&2")
    rpc.shutdown()
print("after the recording", file=sys.stderr)
"""


@pytest.mark.slow
def test_a_script_of_the_users_own_is_recorded_and_keeps_its_stderr(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "PYTHONWARNINGS": "ignore"}
    here = {**os.environ, **shared, "PYTHONPATH": str(Path(__file__).parent.parent)}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT], cwd=tmp_path, env={**here, "RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    told = [job.communicate(timeout=60)[1].decode() for job in jobs]
    assert told[0] == "after the recording\n"
    assert told[1].splitlines() == [
        "mine, from Python",
        "[V no log line, without an end, and here it is",
        "from a child",
        "after the recording",
    ]
    trace = Trace.load(tmp_path / "trace")
    assert trace.rpc.complete
    assert trace.rpc.explained == trace.rpc.logged == 5
    assert "RPC's own transports on one host go past the sockets" in str(explain(trace))
    assert [trace.label(rank) for rank in trace.ranks] == ["worker0", "worker1"]


def wrong_arguments() -> list[str]:
    told = []
    with dist_autograd.context() as context:
        for arguments in (("no number", []), (context, torch.ones(2).sum()), (context, [1]), (context,)):
            try:
                dist_autograd.backward(*arguments)
            except TypeError as error:
                told.append(str(error))
        dist_autograd.backward(contextId=context, roots=[torch.ones(2, requires_grad=True).sum()])
    return told


def test_arguments_that_torch_refuses_are_torchs_to_tell():
    job = Cluster(["ps", "trainer"], rpc=True).run({"trainer": wrong_arguments}, timeout=60)
    assert len(job.results["trainer"]) == 4
    assert all(told.startswith("backward(): incompatible function arguments") for told in job.results["trainer"])
    assert own_words(job.output["trainer"]) == ""
    assert job.trace.problems == ()
    windows = [event for event in job.trace.events if isinstance(event, RpcWindow) and event.op == "backward"]
    assert [window.error for window in windows] == [""]
