"""Exercises with layers that are split: in shards, and by blocks of a sequence; the stages of a pipeline."""

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dlearn.course.criteria import AVERAGING, assert_one_device, fresh, only_sends, sends
from dlearn.course.exercise import Attempt, Exercise, ResultError, numbers, submit

# Layers in shards -----------------------------------------------------------------------------------------------------

LAYERS, ROWS, MOST_HELD = 3, 5, 2


def _width(seed: int) -> int:
    """Return the width of a layer; 2, 3 and 4 divide it."""
    return 12 * (2 + seed % 3)


def _weights(seed: int, layer: int) -> torch.Tensor:
    """Return the weights of one layer, flat: [width²]."""
    return numbers(_width(seed) ** 2, seed, layer, 7) - 0.5


def _images(seed: int, rank: int) -> torch.Tensor:
    return numbers(ROWS * _width(seed), seed, rank, 8).view(ROWS, -1)


class Layer:
    """`tanh(x @ weights.T)` and its gradients; counts the whole weights and gradients that are held at each call."""

    def __init__(self) -> None:
        self.most_held = 0

    def forward(self, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self._count(weights)
        return (x @ weights.view(x.shape[1], -1).T).tanh()

    def backward(
        self, weights: torch.Tensor, x: torch.Tensor, y: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of x, and of the weights, flat."""
        self._count(weights)
        inside = gradient * (1 - y.square())
        return inside @ weights.view(x.shape[1], -1), (inside.T @ x).flatten()

    def _count(self, weights: torch.Tensor) -> None:
        size = weights.numel() * weights.element_size()
        storages = [each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor]
        held = {storage.data_ptr() for storage in storages if storage.nbytes() == size}
        self.most_held = max(self.most_held, len(held))


def drive_fsdp(step: Callable[..., Any], seed: int) -> tuple[Any, int]:
    rank, n = dist.get_rank(), dist.get_world_size()
    shards = [_weights(seed, layer).chunk(n)[rank].clone() for layer in range(LAYERS)]
    layer = Layer()
    gradients = submit(step, shards, _images(seed, rank), layer.forward, layer.backward)
    return gradients, layer.most_held


def _fsdp_bytes(tried: Attempt) -> float:
    return 3 * LAYERS * (tried.ranks - 1) / tried.ranks * _width(tried.seed) ** 2 * 8


def _held(tried: Attempt) -> None:
    for rank, (_, most) in sorted(tried.results.items()):
        if most > MOST_HELD:
            held = f"{most} tensors of the size of a whole layer"
            raise ResultError(f"rank {rank} holds {held} at once; {MOST_HELD} are enough")


def _fsdp_equal(tried: Attempt) -> None:
    width = _width(tried.seed)
    weights = [_weights(tried.seed, layer).view(width, width).requires_grad_() for layer in range(LAYERS)]
    losses = []
    for rank in range(tried.ranks):
        y = _images(tried.seed, rank)
        for each in weights:
            y = (y @ each.T).tanh()
        losses.append(y.square().sum() / 2)
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]
    for rank, (gradients, _) in sorted(tried.results.items()):
        if not isinstance(gradients, list | tuple) or len(gradients) != LAYERS:
            raise ResultError(f"rank {rank} returns no list of {LAYERS} gradients")
        for found, whole in zip(gradients, weights, strict=True):
            assert whole.grad is not None
            assert_one_device({rank: found}, whole.grad.flatten().chunk(tried.ranks)[rank], ranks=tried.ranks)


_IN_SHARDS = {"traffic": sends(_fsdp_bytes, op=AVERAGING), "held": _held, "result": _fsdp_equal}
FSDP = Exercise("fsdp_by_hand", drive_fsdp, _IN_SHARDS)

# Attention over blocks of a sequence ----------------------------------------------------------------------------------

HEAD = 16


def _block(seed: int) -> int:
    """Return the positions of the sequence on each rank."""
    return 20 + seed % 10


def _qkv(seed: int, rank: int) -> list[torch.Tensor]:
    """Return queries, keys and values, scaled so that the largest scores of blocks differ."""
    size = _block(seed)
    return [(numbers(size * HEAD, seed, rank, part) * (rank + 1) - 0.5).view(size, HEAD) for part in range(3)]


def drive_attention(attention: Callable[..., torch.Tensor], seed: int) -> Any:
    return submit(attention, *_qkv(seed, dist.get_rank()))


def _attention_equal(tried: Attempt) -> None:
    every = [_qkv(tried.seed, rank) for rank in range(tried.ranks)]
    keys, values = (torch.cat([each[part] for each in every]) for part in (1, 2))
    for rank, found in sorted(tried.results.items()):
        query = every[rank][0]
        of_blocks = torch.stack([_attend(query, *each[1:]) for each in every])
        known = {"root": _attend(query * HEAD**0.5, keys, values), "each_block": of_blocks.mean(0)}
        mistakes = {name: {rank: wrong}.__getitem__ for name, wrong in known.items()}
        assert_one_device({rank: found}, _attend(query, keys, values), mistakes=mistakes)


def _attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.softmax(queries @ keys.T / HEAD**0.5, dim=1) @ values


_blocks = sends(lambda tried: (tried.ranks - 1) * 2 * _block(tried.seed) * HEAD * 8)
_ATTENTION = {"traffic": _blocks, "sends": only_sends, "fresh": fresh}
ATTENTION = Exercise("ring_attention", drive_attention, {**_ATTENTION, "result": _attention_equal})

# The stages of a pipeline, in 1F1B order ------------------------------------------------------------------------------

MICRO_BATCHES = 6


def _y_length(seed: int) -> int:
    return 600 + seed % 200


def _stage_weight(seed: int, stage: int) -> torch.Tensor:
    return numbers(_y_length(seed), seed, stage, 5) + 0.5


def _input(seed: int, number: int) -> torch.Tensor:
    return numbers(_y_length(seed), seed, number, 6)


class LoggedStage:
    """`tanh(x * weight)`; the last stage's loss is half the sum of squares. Notes the order of its works."""

    def __init__(self, rank: int, stages: int, seed: int) -> None:
        self.first, self.last, self.seed = rank == 0, rank == stages - 1, seed
        self.weight = _stage_weight(seed, rank).requires_grad_()
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.most_kept = 0

    def forward(self, number: int, x: torch.Tensor | None) -> torch.Tensor:
        given = _input(self.seed, number) if self.first or x is None else x
        leaf = given.clone().requires_grad_()
        y = (leaf * self.weight).tanh()
        self.kept[number] = leaf, y
        self.most_kept = max(self.most_kept, len(self.kept))
        return y.detach()

    def backward(self, number: int, gradient: torch.Tensor | None) -> torch.Tensor:
        leaf, y = self.kept.pop(number)
        y.backward(y.detach() if self.last or gradient is None else gradient)  # type: ignore[no-untyped-call]
        assert leaf.grad is not None
        return leaf.grad


def drive_stages(pipeline: Callable[..., None], seed: int) -> tuple[torch.Tensor | None, int]:
    rank, n = dist.get_rank(), dist.get_world_size()
    stage = LoggedStage(rank, n, seed)
    submit(pipeline, stage.forward, stage.backward, _y_length(seed), MICRO_BATCHES)
    return stage.weight.grad, stage.most_kept


def _stage_bytes(tried: Attempt) -> dict[int, float]:
    once = MICRO_BATCHES * _y_length(tried.seed) * 8
    ends = (0, tried.ranks - 1)
    return {rank: once if rank in ends else 2 * once for rank in range(tried.ranks)}


def _kept(tried: Attempt) -> None:
    for rank, (_, most) in sorted(tried.results.items()):
        wanted = min(tried.ranks - rank, MICRO_BATCHES)
        if most != wanted:
            kept = f"up to {most} micro-batches between forward and backward"
            raise ResultError(f"stage {rank} of {tried.ranks} keeps {kept}, and 1F1B keeps {wanted}")


def _stage_equal(tried: Attempt) -> None:
    weights = [_stage_weight(tried.seed, stage).requires_grad_() for stage in range(tried.ranks)]
    for number in range(MICRO_BATCHES):
        y = _input(tried.seed, number)
        for weight in weights:
            y = (y * weight).tanh()
        (y.square().sum() / 2).backward()  # type: ignore[no-untyped-call]
    for rank, (found, _) in sorted(tried.results.items()):
        gradient = weights[rank].grad
        assert gradient is not None
        assert_one_device({rank: found}, gradient)


_IN_STAGES = {"traffic": sends(_stage_bytes, pattern=None), "kept": _kept, "result": _stage_equal}
ONE_F_ONE_B = Exercise("one_f_one_b", drive_stages, _IN_STAGES)
