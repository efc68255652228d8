"""Exercises around a training loop: DDP, accumulation, a server, a sharded optimizer, a hook, and a checkpoint."""

import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlearn.analysis import traffic
from dlearn.analysis.checks.grading import units
from dlearn.course.criteria import AVERAGING, Mistakes, assert_one_device, averages, fresh, only_sends, sends
from dlearn.course.exercise import ITEMS, SPAN, Attempt, Exercise, ResultError, left_in, numbers, submit
from dlearn.errors import TrafficError
from dlearn.recorder import span

STEPS, RATE, MOMENTUM = 3, 0.1, 0.9

# DDP by hand ----------------------------------------------------------------------------------------------------------

MODEL = (5, 12, 12)  # Inputs, hidden units, outputs: 228 numbers, and 2, 3 and 4 divide that.
MODEL_ITEMS = (5 + 1) * 12 + (12 + 1) * 12
BATCH = 4


def _model(*seed: int) -> nn.Module:
    inputs, hidden, outputs = MODEL
    model = nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    nn.utils.vector_to_parameters(numbers(MODEL_ITEMS, *seed) - 0.5, model.parameters())
    return model


def _batches(seed: int, rank: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    inputs, _, outputs = MODEL
    return [(_rows(inputs, seed, rank, step, 1), _rows(outputs, seed, rank, step, 2)) for step in range(count)]


def _rows(width: int, *seed: int) -> torch.Tensor:
    return numbers(BATCH * width, *seed).view(BATCH, width)


def _flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the mean squared error of one batch: students get it as `loss`."""
    outputs: torch.Tensor = model(batch[0])
    return (outputs - batch[1]).square().mean()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer for which averaging parameters differs from averaging gradients."""
    return torch.optim.Adam(model.parameters(), lr=RATE, eps=0.1)


def _one_device(
    tried: Attempt, groups: Iterable[range],
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], *, zero_grad: bool = True,
    factor: Callable[[range], float] = lambda group: 1.0,
) -> torch.Tensor:  # fmt: skip
    """Return rank 0's parameters after one step for each group of micro-batches of all ranks.

    A mistake keeps old gradients, or multiplies each loss by a factor.
    """
    model = _model(tried.seed, 0)
    optimizer = optimizer_of(model)
    data = [_batches(tried.seed, rank, MICRO_BATCHES) for rank in range(tried.ranks)]
    for group in groups:
        losses = [loss_of(model, mine[step]) for mine in data for step in group]
        if zero_grad:
            optimizer.zero_grad()
        loss = torch.stack(losses).mean() * factor(group)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return _flat(model)


def _each_by_itself(tried: Attempt) -> torch.Tensor:
    """Return the parameters where each rank takes its own step and parameters are averaged."""
    models = [_model(tried.seed, 0) for _ in range(tried.ranks)]
    optimizers = [_adam(model) for model in models]
    for step in range(STEPS):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, _batches(tried.seed, rank, STEPS)[step]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        mean = torch.stack([_flat(model) for model in models]).mean(0)
        for model in models:
            nn.utils.vector_to_parameters(mean.clone(), model.parameters())
    return mean


def drive_ddp(train: Callable[..., None], seed: int) -> torch.Tensor:
    rank = dist.get_rank()
    model = _model(seed, rank)  # another one on each rank
    submit(train, model, _batches(seed, rank, STEPS), loss_of, _adam(model))
    return _flat(model)


def _ddp_equal(tried: Attempt) -> None:
    _same_everywhere(tried)
    steps = [range(step, step + 1) for step in range(STEPS)]
    n = tried.ranks
    mistakes: Mistakes = {
        "zero_grad": lambda rank: _one_device(tried, steps, _adam, zero_grad=False),
        "averages_parameters": lambda rank: _each_by_itself(tried),
        "too_large": lambda rank: _one_device(tried, steps, _adam, factor=lambda group: n),
        "too_small": lambda rank: _one_device(tried, steps, _adam, factor=lambda group: 1 / n),
    }
    assert_one_device(tried.results, _one_device(tried, steps, _adam), mistakes=mistakes)


def _same_everywhere(tried: Attempt) -> None:
    for rank, found in sorted(tried.results.items()):
        if not torch.equal(found, tried.results[0]):
            apart = (found - tried.results[0]).abs().max().item()
            left = f"ranks 0 and {rank} are left with different parameters"
            raise ResultError(f"{left}, up to {apart:.3g} apart", "different")


def _few_calls(tried: Attempt) -> None:
    (unit,) = units(tried.trace, AVERAGING)
    calls, most = len(unit.operations), 2 * STEPS  # a reduce-scatter and an all-gather are two
    if calls > most:
        average = f"average the gradients of {STEPS} steps"
        raise TrafficError(f"{calls} collective calls {average}; at most {most} are needed")


def _by_hand(tried: Attempt) -> None:
    if tried.trace.where(kind="bucket").events:
        raise TrafficError("torch's own DistributedDataParallel averages the gradients, in buckets")


_STEPS = {"by_hand": _by_hand, "traffic": averages(STEPS, MODEL_ITEMS)}
_STEPS |= {"calls": _few_calls, "result": _ddp_equal}
DDP = Exercise("ddp_by_hand", drive_ddp, _STEPS)

# Gradient accumulation ------------------------------------------------------------------------------------------------

MICRO_BATCHES, EVERY = 5, 2
GROUPS = (range(2), range(2, 4), range(4, 5))  # Of micro-batches: a step after each.


def drive_accumulation(train: Callable[..., None], seed: int) -> torch.Tensor:
    model = _model(seed, 0)
    batches = _batches(seed, dist.get_rank(), MICRO_BATCHES)
    submit(train, DistributedDataParallel(model), batches, loss_of, EVERY, RATE)
    return _flat(model)


def _accumulation_equal(tried: Attempt) -> None:
    _same_everywhere(tried)
    sgd = partial(torch.optim.SGD, lr=RATE)
    train = partial(_one_device, tried, GROUPS, lambda model: sgd(model.parameters()))
    mistakes: Mistakes = {
        "zero_grad": lambda rank: train(zero_grad=False),
        "undivided": lambda rank: train(factor=len),
        "last_group": lambda rank: train(factor=lambda group: len(group) / EVERY),
    }
    assert_one_device(tried.results, train(), mistakes=mistakes)


_IN_GROUPS = {"traffic": averages(len(GROUPS), MODEL_ITEMS), "result": _accumulation_equal}
ACCUMULATION = Exercise("accumulation", drive_accumulation, _IN_GROUPS)

# A parameter server ---------------------------------------------------------------------------------------------------


def _gradient_of(seed: int, worker: int) -> Callable[[torch.Tensor, int], torch.Tensor]:
    target = numbers(ITEMS, seed, worker, 3)
    return lambda parameters, step: (parameters - target) * (1 + target * step)


def drive_server(train: Callable[..., None], seed: int) -> torch.Tensor:
    rank = dist.get_rank()
    parameters = numbers(ITEMS, seed, 0) if rank == 0 else torch.zeros(ITEMS, dtype=torch.float64)
    return left_in(parameters, train, _gradient_of(seed, rank), STEPS, RATE)


def _server_bytes(tried: Attempt) -> dict[int, float]:
    size = STEPS * ITEMS * 8
    return {rank: size if rank else (tried.ranks - 1) * size for rank in range(tried.ranks)}


def _trained(seed: int, workers: range, momentum: float = 0.0, factor: float = 1.0) -> torch.Tensor:
    """Return the parameters after the steps of one device with the data of these workers.

    A mistake multiplies each gradient by a factor.
    """
    parameters, velocity = numbers(ITEMS, seed, 0), torch.zeros(ITEMS, dtype=torch.float64)
    for step in range(STEPS):
        gradients = [_gradient_of(seed, worker)(parameters, step) for worker in workers]
        velocity = momentum * velocity + torch.stack(gradients).mean(0) * factor
        parameters = parameters - RATE * velocity
    return parameters


def _server_equal(tried: Attempt) -> None:
    workers = range(1, tried.ranks)
    mistakes: Mistakes = {
        "in_place": lambda rank: numbers(ITEMS, tried.seed, 0),
        "too_large": lambda rank: _trained(tried.seed, workers, factor=len(workers)),
    }
    assert_one_device({0: tried.results[0]}, _trained(tried.seed, workers), mistakes=mistakes)


_SERVED = {"traffic": sends(_server_bytes, pattern="star"), "sends": only_sends}
_SERVED |= {"fresh": fresh, "result": _server_equal}
SERVER = Exercise("parameter_server", drive_server, _SERVED, ranks=(3, 4))

# A sharded optimizer --------------------------------------------------------------------------------------------------


def drive_sharded(train: Callable[..., Any], seed: int) -> tuple[torch.Tensor, int]:
    parameters = numbers(ITEMS, seed, 0)
    gradient_of = _gradient_of(seed, dist.get_rank())
    state = submit(train, parameters, gradient_of, STEPS, RATE, MOMENTUM)
    kept = state.numel() * state.element_size() if isinstance(state, torch.Tensor) else -1
    return parameters, kept


def _sharded_state(tried: Attempt) -> None:
    share = ITEMS // tried.ranks * 8
    for rank, (_, kept) in sorted(tried.results.items()):
        if kept < 0:
            none = f"rank {rank} returns no tensor: return the momentum that it keeps"
            raise ResultError(none, "no_tensor")
        if kept != share:
            raise ResultError(f"rank {rank} keeps {kept:,} B of momentum instead of {share:,} B, 1/{tried.ranks} of it")


def _sharded_equal(tried: Attempt) -> None:
    found = {rank: parameters for rank, (parameters, _) in tried.results.items()}
    train = partial(_trained, tried.seed, range(tried.ranks), MOMENTUM)
    mistakes: Mistakes = {
        "in_place": lambda rank: numbers(ITEMS, tried.seed, 0),
        "too_large": lambda rank: train(factor=tried.ranks),
        "dampened": lambda rank: train(factor=1 - MOMENTUM),
    }
    assert_one_device(found, train(), mistakes=mistakes)


_IN_SHARDS = {"traffic": averages(STEPS, ITEMS), "state": _sharded_state, "result": _sharded_equal}
SHARDED = Exercise("sharded_optimizer", drive_sharded, _IN_SHARDS)

# A communication hook that sends the largest numbers only -------------------------------------------------------------

WEIGHTS, K, HOOK_STEPS = 240, 60, 8


def _gradient(seed: int, rank: int) -> torch.Tensor:
    """Return numbers of both signs, none too small to be sent in HOOK_STEPS steps."""
    signs = torch.where(numbers(WEIGHTS, seed, rank, 1) < 0.5, -1.0, 1.0)
    return signs * (numbers(WEIGHTS, seed, rank) + 0.5)


def drive_top_k(hook: Callable[..., Any], seed: int) -> torch.Tensor:
    gradient = _gradient(seed, dist.get_rank())
    # The gradient of a linear layer with one output is its input, the same in each step.
    model = DistributedDataParallel(nn.Linear(WEIGHTS, 1, bias=False, dtype=torch.float64))
    model.register_comm_hook({"k": K}, hook)
    applied = torch.zeros(WEIGHTS, dtype=torch.float64)
    with span(SPAN):
        for _ in range(HOOK_STEPS):
            model.zero_grad()
            model(gradient).backward()
            applied += model.module.weight.grad[0]
    return applied


def _hook_bytes(tried: Attempt) -> None:
    most = HOOK_STEPS * (tried.ranks - 1) * K * (8 + 8)
    sent = traffic(tried.trace)
    for rank in range(tried.ranks):
        if sent.bytes_from(rank=rank) > most + 64:  # DDP's own, when it builds its bucket anew
            size = f"{sent.bytes_from(rank=rank):,} B in {HOOK_STEPS} steps, more than {most:,} B"
            numbers_of = f"{K} numbers and their places, to each other rank"
            raise TrafficError(f"rank {rank} sends {size}: {numbers_of}\n\n{sent}")


def _all_sent(tried: Attempt) -> None:
    by_sign = _applied(tried, lambda waiting: waiting)
    for rank, applied in sorted(tried.results.items()):
        if applied.shape == by_sign.shape and torch.allclose(applied, by_sign):
            raise ResultError(f"rank {rank} applies the largest numbers, and not the largest by their size", "signed")
        never = int((applied == 0).sum())
        if never:
            raise ResultError(f"rank {rank}: {never} of {WEIGHTS} gradients were applied in none of {HOOK_STEPS} steps")


def _applied(tried: Attempt, size_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Average each rank's largest sums of what it has not sent yet, over the ranks."""
    applied = torch.zeros(WEIGHTS, dtype=torch.float64)
    for rank in range(tried.ranks):
        waiting = torch.zeros_like(applied)
        for _ in range(HOOK_STEPS):
            waiting += _gradient(tried.seed, rank)
            chosen = size_of(waiting).topk(K).indices
            applied[chosen] += waiting[chosen] / tried.ranks
            waiting[chosen] = 0
    return applied


_LARGEST = {"traffic": _hook_bytes, "all_sent": _all_sent}
_LARGEST["result"] = lambda tried: assert_one_device(tried.results, _applied(tried, torch.abs))
TOP_K = Exercise("top_k_hook", drive_top_k, _LARGEST)

# A checkpoint that n ranks write, and another number of ranks reads ---------------------------------------------------

READERS = (2, 3)  # Ranks that load what four saved. Of three, a part begins inside a file.

ITEM_BYTES = 8


def _length(seed: int) -> int:
    """Return the number of items; 2, 3 and 4 divide it."""
    return 1_200 + 12 * (seed % 50)


class Files:
    """`write(name, tensor)` and `read(name, begin, end)` of float64; counts the bytes that are read."""

    def __init__(self, folder: str) -> None:
        self.folder, self.read_bytes = Path(folder), 0

    def write(self, name: str, tensor: torch.Tensor) -> None:
        tensor.detach().numpy().tofile(self._path(name))

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return numbers `begin` to `end` of what was written under this name."""
        part = np.fromfile(self._path(name), np.float64, end - begin, offset=begin * ITEM_BYTES)
        self.read_bytes += part.nbytes
        return torch.from_numpy(part)

    def _path(self, name: str) -> Path:
        return self.folder / f"{Path(str(name)).name}.bytes"


def drive_checkpoint(
    functions: tuple[Callable[..., None], Callable[..., Any]], seed: int
) -> dict[int, tuple[Any, int]]:
    """Return, for each number of readers, what this rank loads and the bytes that it read."""
    save, load = functions
    rank, n, length = dist.get_rank(), dist.get_world_size(), _length(seed)
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders, src=0)  # All ranks use rank 0's, until the last barrier.
        folder = folders[0]
        submit(save, numbers(length, seed).chunk(n)[rank].clone(), Files(folder).write)
        dist.barrier()
        found = {}
        for readers in READERS:
            files = Files(folder)
            if rank < readers:
                loaded = submit(load, rank, readers, length, n, files.read)
                found[readers] = loaded, files.read_bytes
        dist.barrier()
    return found


def _nothing_sent(tried: Attempt) -> None:
    sent = traffic(tried.trace)
    if sent.total_bytes:
        raise TrafficError(f"{sent.total_bytes:,} B are sent between ranks, and a file is read without\n\n{sent}")


def _read(tried: Attempt) -> None:
    for rank, found in sorted(tried.results.items()):
        for readers, (_, size) in found.items():
            wanted = _length(tried.seed) // readers * ITEM_BYTES
            if size > wanted:
                reads = f"rank {rank} of {readers} reads {size:,} B of the files"
                raise ResultError(f"{reads}, and its part has {wanted:,} B")


def _loaded_equal(tried: Attempt) -> None:
    whole = numbers(_length(tried.seed), tried.seed)
    for rank, found in sorted(tried.results.items()):
        for readers, (loaded, _) in found.items():
            assert_one_device({rank: loaded}, whole.chunk(readers)[rank], tolerance=0)


_CHECKPOINT = {"traffic": _nothing_sent, "read": _read, "result": _loaded_equal}
CHECKPOINT = Exercise("save_and_load", drive_checkpoint, _CHECKPOINT, ranks=(4,), silent=True)
