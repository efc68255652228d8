"""A held job: its calls wait at the gate, and go on in the order that is asked for. Real ranks."""

import gc
import os
import signal
import threading
import time
from concurrent import futures

import pytest
import torch
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
from torch.nn.parallel import DistributedDataParallel
from waiting import all_end, comes_true

from dlearn import Cluster
from dlearn.errors import DlearnError, RankError, SetupError


def sum_and_send():
    me, tensor = dist.get_rank(), torch.ones(4)
    dist.all_reduce(tensor)
    if me == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    return os.getpid()


def both_send_first():
    me, tensor = dist.get_rank(), torch.ones(4)
    dist.send(tensor, 1 - me)
    dist.recv(tensor, 1 - me)


def train():
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(dist.get_rank())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
    return [parameter.detach().numpy().tobytes() for parameter in model.parameters()]


LAYER = torch.nn.Linear(4, 1, bias=False)


def forward_on_server(x):
    return LAYER(x)


def read_layer():
    return LAYER.weight.detach().numpy().tobytes()


def step_on_server(context):
    gradient = dist_autograd.get_gradients(context)[LAYER.weight]
    with torch.no_grad():
        LAYER.weight -= 0.1 * gradient


def set_layer():
    with torch.no_grad():
        LAYER.weight.fill_(0.5)


def train_over_rpc():
    rpc.rpc_sync("server", set_layer)
    for step in range(3):
        with dist_autograd.context() as context:
            out = rpc.rpc_sync("server", forward_on_server, args=(torch.arange(4.0) + step,))
            dist_autograd.backward(context, [out.sum()])
            rpc.rpc_sync("server", step_on_server, args=(context,))
    return rpc.rpc_sync("server", read_layer)


def reduce_a_hundred():
    tensor = torch.arange(1000.0).sin() * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return tensor.numpy().tobytes()


WEIGHT = [10]


def read_weight():
    return WEIGHT[0]


def write_weight(value):
    WEIGHT[0] = value


def add_one():
    """Read, then write: two workers lose an update if both read first."""
    seen = rpc.rpc_sync("server", read_weight)
    rpc.rpc_sync("server", write_weight, args=(seen + 1,))


def test_calls_wait_and_are_let_through_one_by_one():
    run = Cluster(2, hold=True).run(sum_and_send)
    assert {(call.rank, call.op, call.bytes) for call in run.waiting} == {(0, "all_reduce", 16), (1, "all_reduce", 16)}
    assert "test_live.py:" in run.waiting[0].site
    assert "all_reduce" in repr(run.waiting)
    assert "2 calls wait" in str(run)
    first = run.step()
    (left,) = run.waiting
    assert left.rank != first.rank
    run.release(left.rank)
    run.release(0)
    assert run.waiting[0].op == "recv"
    assert run.ranks[1].startswith("waits at the gate: recv from 0 (")
    assert run.ranks[0].startswith("in send #1 (")
    assert run.ranks[1] in str(run)
    assert [(each.rank, each.op) for each in run.schedule][2:] == [(0, "send")]
    run.free().join(60)
    assert sorted(run.results) == [0, 1]
    assert "held before all_reduce" in {getattr(event, "name", "") for event in run.trace.events}
    assert all_end(run.results.values())


OPENED = threading.Event()


def wait_until_opened():
    OPENED.wait(60)


def open_up():
    OPENED.set()


def test_a_rank_that_waits_for_an_answer_does_not_compute():
    def wait():
        rpc.rpc_sync("server", wait_until_opened)

    def end_it():
        rpc.rpc_sync("server", open_up)

    run = Cluster(["server", "a", "b"], rpc=True, hold=True).run({"a": wait, "b": end_it})
    assert {call.rank for call in run.waiting} == {"a", "b"}
    run.release("a")
    assert comes_true(lambda: run.ranks["a"] != "computes"), "on its way into the call"
    assert run.ranks["a"].startswith("waits for server in rpc_sync wait_until_opened() (tests/test_live.py:")
    assert run.ranks["b"].startswith("waits at the gate")
    run.free().join(60)
    assert set(run.ranks.values()) == {"has ended"}


def test_a_deadlock_is_named_while_nobody_has_timed_out():
    run = Cluster(2, hold=True).run(both_send_first)
    run.release(0)
    run.release(1)
    hang = run.hang
    assert hang.startswith("rank 0 and rank 1 wait for each other: rank 0 in send #1 (")
    assert run.waiting == ()
    assert run.hang == hang
    with pytest.raises(DlearnError, match=r"has not ended after 0.1 s; .*rank 0"):
        run.join(0.1)
    run.end()
    with pytest.raises(RankError):
        run.join()


def sleep_between_calls():
    tensor, receives = torch.ones(4), dist.get_rank() == 0
    dist.all_reduce(tensor)
    if receives:
        work = dist.irecv(tensor, 1)
    time.sleep(1)  # Rank 0 has a receive under way, and is not inside of it.
    dist.barrier()
    if receives:
        work.wait()
    else:
        dist.send(tensor, 0)


def test_a_rank_that_computes_is_waited_for():
    run = Cluster(2, hold=True).run(sleep_between_calls)
    ops = []
    while run.waiting:
        ops.append(run.step().op)
    assert sorted(ops) == ["all_reduce"] * 2 + ["barrier"] * 2 + ["recv", "send"]
    assert run.join(60).error is None


def test_a_rank_that_still_imports_is_waited_for(tmp_path, monkeypatch):
    (tmp_path / "slow_to_import.py").write_text(
        "import time\nimport torch.distributed as dist\ntime.sleep(1)\ndef meet():\n    dist.barrier()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    from slow_to_import import meet

    run = Cluster(2, hold=True).run(meet)
    assert set(run.ranks.values()) == {"starting"}
    ops = []
    while call := run.step():
        ops.append(call.op)
    assert ops == ["barrier", "barrier"]
    run.join(60)


@pytest.mark.parametrize("order", ["in turn", "rank 1 last"])
@pytest.mark.slow
def test_what_is_held_is_bit_equal(order):
    free = Cluster(2).run(train).results
    run = Cluster(2, hold=True).run(train)
    if order == "in turn":
        while run.step():
            pass
    while waiting := run.waiting:
        run.release(min(call.rank for call in waiting))
    assert run.join(60).results == free


@pytest.mark.slow
def test_a_held_ring_is_bit_equal():
    free = Cluster(3, backend="dlearn_ring").run(reduce_a_hundred).results
    run = Cluster(3, backend="dlearn_ring", hold=True).run(reduce_a_hundred)
    ops = []
    while call := run.step():
        ops.append(call.op)
    assert run.join(60).results == free
    assert {"send", "recv"} <= set(ops)
    assert len(ops) >= 3 * 2 * 4  # Each rank sends and receives in 2 (n - 1) steps.


@pytest.mark.slow
def test_a_lost_update_happens_on_demand_and_again():
    def job(hold):
        return Cluster(["server", "a", "b"], rpc=True, hold=hold).run(then_tell)

    def then_tell():
        if dist.get_rank():
            add_one()
        dist.barrier()
        return rpc.rpc_sync("server", read_weight)

    for order, left in (("abab", 11), ("aabb", 12)):
        run = job(True)
        for name in order:
            run.release(name)
            while name not in {call.rank for call in run.waiting}:
                pass  # Its answer has come when its next call waits.
        schedule = run.schedule
        assert run.free().join(60).results["server"] == left
        assert job(schedule).join(60).results["server"] == left


@pytest.mark.slow
def test_a_held_parameter_server_is_bit_equal():
    names = ["server", "trainer"]
    free = Cluster(names, rpc=True).run({"trainer": train_over_rpc}).results
    run = Cluster(names, rpc=True, hold=True).run({"trainer": train_over_rpc})
    for _ in range(3 * 2 + 2):
        run.release("trainer")
    run.free().join(60)
    assert len(free["trainer"]) == 16
    assert run.results == free
    assert [each.op for each in run.schedule][-1] == "rpc read_layer"


def test_a_condition_holds_what_it_says():
    run = Cluster(2, hold=lambda call: call.op == "send").run(sum_and_send)
    (call,) = run.waiting
    assert (call.rank, call.op, call.to) == (0, "send", 1)
    run.free().join(60)
    assert run.error is None


def test_run_until_stops_before_it():
    run = Cluster(2, hold=True).run(sum_and_send)
    call = run.run_until(op="send")
    assert (call.rank, call.op) == (0, "send")
    assert call in run.waiting
    assert run.run_until(op="gather") is None
    run.join(60)


def test_a_schedule_of_another_program_is_refused():
    run = Cluster(2, hold=True).run(sum_and_send)
    run.step()
    schedule = run.schedule
    run.end()
    with pytest.raises(DlearnError, match="the schedule has all_reduce as call 1 of rank"):
        Cluster(2, hold=schedule).run(both_send_first).join(60)


def test_a_held_rank_that_is_killed_is_told_as_ever():
    run = Cluster(2, hold=lambda call: call.op == "barrier").run(barrier_after_pid)
    while len(run.waiting) < 2:
        pass
    os.kill(int(next((run.folder / "trace").glob("*.jsonl")).stem.rsplit("-", 1)[1]), signal.SIGKILL)
    with pytest.raises(RankError, match="SIGKILL"):
        run.join(60)


def barrier_after_pid():
    dist.barrier()


def test_a_run_that_is_forgotten_ends_its_ranks():
    cluster = Cluster(2, hold=True)
    run = cluster.run(sum_and_send)
    assert len(run.waiting) == 2
    pids = [int(path.stem.rsplit("-", 1)[1]) for path in (run.folder / "trace").glob("*.jsonl")]
    thread = run._job.thread
    del run, cluster
    gc.collect()
    thread.join(30)
    assert len(pids) == 2
    assert all_end(pids)


def test_what_cannot_be_held_is_refused():
    with pytest.raises(SetupError, match="hold= is for recorded ranks"):
        Cluster(2, hold=True, record=False)


def group_timeouts():
    pair = dist.new_group([0, 1])
    return [str(group._get_backend(torch.device("cpu")).options._timeout) for group in (dist.group.WORLD, pair)]


def test_groups_of_a_held_job_wait_for_days():
    run = Cluster(2, hold=True).run(group_timeouts).free().join(60)
    assert run.results[0] == ["20 days, 0:00:00"] * 2


def a_thousand_sends():
    """Each on a thread of its own, so that all wait at the same time."""
    me, tensors = dist.get_rank(), torch.zeros(1000, 1)
    if me == 0:
        tensors += torch.arange(1000.0)[:, None]
    post = dist.isend if me == 0 else dist.irecv
    with futures.ThreadPoolExecutor(1000) as pool:
        works = list(pool.map(lambda tag: post(tensors[tag], 1 - me, tag=tag), range(1000)))
    for work in works:
        work.wait()
    return tensors.sum().item()


@pytest.mark.slow
def test_two_thousand_waiting_calls():
    run = Cluster(2, hold=True).run(a_thousand_sends)
    assert comes_true(lambda: len(run.waiting) == 2000)
    run.release(0, count=500)
    assert len(run.waiting) == 1500
    assert run.free().join(60).results == {0: 499500.0, 1: 499500.0}
