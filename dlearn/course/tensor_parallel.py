"""Exercises with two linear layers that are cut by columns and by rows, of whole tokens and of a part of them."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import layer_norm

from dlearn.course.criteria import Mistakes, assert_one_device, averages
from dlearn.course.exercise import SPAN, Attempt, Exercise, KnownTraffic, ResultError, numbers
from dlearn.join.message_evidence import messages
from dlearn.recorder import span

TOKENS, WIDTH, HIDDEN = 12, 20, 36  # 2, 3 and 4 divide TOKENS and HIDDEN.
NAMES = ("output", "gradient of x", "gradient of columns", "gradient of rows", "gradient of bias")
_BYTES = averages(times=2, items=TOKENS * WIDTH)


def _whole(seed: int) -> list[torch.Tensor]:
    """Return tokens, two weights and bias, of the shapes in `shapes`; the bias has [WIDTH]."""
    shapes = (TOKENS, WIDTH), (HIDDEN, WIDTH), (WIDTH, HIDDEN), (1, WIDTH)
    drawn = [numbers(a * b, seed, number).view(a, b) - 0.5 for number, (a, b) in enumerate(shapes)]
    return [*drawn[:3], drawn[3][0]]


def _cut(whole: list[torch.Tensor], *, rank: int, n: int) -> list[torch.Tensor]:
    """Return this rank's rows of the first weight and columns of the second, with all others whole."""
    x, first, second, *rest = whole
    return [x, first.chunk(n)[rank].clone(), second.chunk(n, dim=1)[rank].clone(), *rest]


def _layers(
    x: torch.Tensor, first: torch.Tensor, second: torch.Tensor, bias: torch.Tensor | float = 0.0
) -> torch.Tensor:  # fmt: skip
    return torch.relu(x @ first.T) @ second.T + bias


def _differentiate(layers: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """Return the output, and the gradients of the tensors in `arguments` where the loss is the sum of squares."""
    leaves = [each.requires_grad_() for each in arguments if isinstance(each, torch.Tensor)]
    with span(SPAN):
        y = layers(*arguments)
        if not isinstance(y, torch.Tensor):
            return (y,)
        y.square().sum().backward()  # type: ignore[no-untyped-call]
    none = torch.empty(0)
    return y.detach(), *(none if each.grad is None else each.grad for each in leaves)


def _assert_equal(
    rank: int, n: int, found: tuple[Any, ...], whole: list[torch.Tensor], mistakes: Mistakes
) -> None:  # fmt: skip
    """Raise ResultError unless `found` are the output and gradients in `whole`; `mistakes` are those of the output."""
    for tensor, of_one, name in zip(found, whole, NAMES, strict=False):
        known, called = mistakes if name == NAMES[0] else {}, f"the {name} of one device"
        assert_one_device({rank: tensor}, of_one, ranks=n, called=called, mistakes=known)


# All tokens on all ranks ----------------------------------------------------------------------------------------------


def drive_column_row(layers: Callable[..., Any], seed: int) -> tuple[Any, ...]:
    return _differentiate(layers, *_cut(_whole(seed), rank=dist.get_rank(), n=dist.get_world_size()))


def _column_row_equal(tried: Attempt) -> None:
    whole, n = _whole(tried.seed), tried.ranks
    y, *gradients = _differentiate(_layers, *whole)
    for rank, found in sorted(tried.results.items()):
        parts = [y, *_cut(gradients, rank=rank, n=n)]
        bias = {"bias": lambda rank: y + (n - 1) * whole[-1].detach()}
        _assert_equal(rank, n, found, parts, bias)


COLUMN_ROW = Exercise("column_row", drive_column_row, {"traffic": _BYTES, "result": _column_row_equal})

# A part of the tokens on each rank ------------------------------------------------------------------------------------


class Norm:
    """A layer norm without weights, which notes of how many tokens at most."""

    most = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, len(x))
        return layer_norm(x, x.shape[-1:])


def drive_sequence(layers: Callable[..., Any], seed: int) -> tuple[int, tuple[Any, ...]]:
    rank, n, norm = dist.get_rank(), dist.get_world_size(), Norm()
    x, columns, rows, _ = _cut(_whole(seed), rank=rank, n=n)
    results = _differentiate(layers, x.chunk(n)[rank].clone(), norm, columns, rows)
    return norm.most, results


def _only_halves(tried: Attempt) -> None:
    for each in messages(tried.trace):
        if not each.op.startswith(("all_gather", "reduce_scatter")):
            pair = f"rank {each.src} sends data to rank {each.dst}"
            raise KnownTraffic(f"{pair} in {each.op}: no all-gather and no reduce-scatter")


def _own_tokens(tried: Attempt) -> None:
    own = TOKENS // tried.ranks
    for rank, (most, _) in sorted(tried.results.items()):
        if most != own:
            raise ResultError(f"rank {rank} gives `norm` {most} tokens at once, and has {own} of its own")


def _sequence_equal(tried: Attempt) -> None:
    n = tried.ranks
    x, first, second, _ = _whole(tried.seed)
    y, *gradients = _differentiate(lambda x, norm, *weights: _layers(norm(x), *weights), x, Norm(), first, second)
    for rank, (_, found) in sorted(tried.results.items()):
        of_x, *of_weights = _cut(gradients, rank=rank, n=n)
        parts = [y.chunk(n)[rank], of_x.chunk(n)[rank], *of_weights]
        order = {"order": lambda rank: y.chunk(n)[rank - 1]}
        _assert_equal(rank, n, found, parts, order)


_IN_PARTS = {"halves": _only_halves, "traffic": _BYTES, "tokens": _own_tokens, "result": _sequence_equal}
SEQUENCE = Exercise("sequence_parallel", drive_sequence, _IN_PARTS)
