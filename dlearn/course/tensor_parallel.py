"""The exercise `column_row`: two linear layers, cut by columns and by rows."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from dlearn.analysis import assert_traffic
from dlearn.course.attempt import Attempt, assert_one_device, numbers, submitted
from dlearn.course.exercise import Exercise
from dlearn.course.exercises import AVERAGING, ring_bytes

BATCH, WIDTH, HIDDEN = 6, 20, 24
"""2, 3 and 4 divide the hidden units, and the 120 activations at the cut."""


def _whole(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The input, [BATCH, WIDTH], and the weights of both layers, [HIDDEN, WIDTH] and [WIDTH, HIDDEN]."""
    x, first, second = (numbers(count, seed, count) - 0.5 for count in (BATCH * WIDTH, HIDDEN * WIDTH, WIDTH * HIDDEN))
    return x.view(BATCH, WIDTH), first.view(HIDDEN, WIDTH), second.flip(0).view(WIDTH, HIDDEN)


def drive_column_row(layers: Callable[..., torch.Tensor], seed: int) -> tuple[torch.Tensor, ...]:
    rank, n = dist.get_rank(), dist.get_world_size()
    x, first, second = _whole(seed)
    columns, rows = first.chunk(n)[rank].clone(), second.chunk(n, dim=1)[rank].clone()
    for tensor in (x, columns, rows):
        tensor.requires_grad_()
    with submitted():
        y = layers(x, columns, rows)
        y.square().sum().backward()  # type: ignore[no-untyped-call]
    none = torch.empty(0)
    return y.detach(), *(none if each.grad is None else each.grad for each in (x, columns, rows))


def _traffic(tried: Attempt) -> None:
    wanted = 2 * ring_bytes(tried.ranks, BATCH * WIDTH)
    assert_traffic(tried.trace, op=AVERAGING, bytes_per_rank=wanted, pattern="ring")


def _equal(tried: Attempt) -> None:
    leaves = [each.clone().requires_grad_() for each in _whole(tried.seed)]
    x, first, second = leaves
    y = torch.relu(x @ first.T) @ second.T
    y.square().sum().backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad for each in leaves if each.grad is not None]
    for rank, (output, of_x, of_columns, of_rows) in sorted(tried.results.items()):
        assert_one_device({rank: output}, y.detach())
        assert_one_device({rank: of_x}, gradients[0])
        assert_one_device({rank: of_columns}, gradients[1].chunk(tried.ranks)[rank])
        assert_one_device({rank: of_rows}, gradients[2].chunk(tried.ranks, dim=1)[rank])


COLUMN_ROW = Exercise("column_row", drive_column_row, {"traffic": _traffic, "result": _equal})
