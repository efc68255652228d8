"""Exercise `accumulation`: three right loops, and wrong ones with what the grade says of them."""

from contextlib import nullcontext

import torch
from hand_made_ddp import averaged


@torch.no_grad()
def step(ddp, rate):
    for parameter in ddp.parameters():
        parameter -= rate * parameter.grad
        parameter.grad = None


def group_by_group(ddp, batches, loss, every, rate):
    for begin in range(0, len(batches), every):
        group = batches[begin : begin + every]
        for batch in group[:-1]:
            with ddp.no_sync():
                (loss(ddp, batch) / len(group)).backward()
        (loss(ddp, group[-1]) / len(group)).backward()
        step(ddp, rate)


def one_loop(ddp, batches, loss, every, rate):
    whole = len(batches) // every * every
    for number, batch in enumerate(batches, start=1):
        last = number % every == 0 or number == len(batches)
        size = every if number <= whole else len(batches) - whole
        with nullcontext() if last else ddp.no_sync():
            loss(ddp, batch).div(size).backward()
        if last:
            step(ddp, rate)


def each_parameter_by_hand(ddp, batches, loss, every, rate):
    """Without DDP's forward: a call for each parameter, whose chunks do not come out even."""
    for begin in range(0, len(batches), every):
        group = batches[begin : begin + every]
        for batch in group:
            (loss(ddp.module, batch) / len(group)).backward()
        for parameter in ddp.parameters():
            parameter.grad = averaged(parameter.grad)
        step(ddp, rate)


def around_the_backward_only(ddp, batches, loss, every, rate, quiet=True):
    for begin in range(0, len(batches), every):
        group = batches[begin : begin + every]
        for number, batch in enumerate(group, start=1):
            found = loss(ddp, batch) / len(group)
            with ddp.no_sync() if quiet and number < len(group) else nullcontext():
                found.backward()
        step(ddp, rate)


def without_no_sync(*given):
    around_the_backward_only(*given, quiet=False)


def forgets_the_last(ddp, batches, loss, every, rate):
    group_by_group(ddp, batches[: len(batches) // every * every], loss, every, rate)


def does_not_divide(ddp, batches, loss, every, rate):
    for begin in range(0, len(batches), every):
        group = batches[begin : begin + every]
        n = len(group)
        group_by_group(ddp, group, lambda *given, n=n: n * loss(*given), every, rate)


def divides_the_last_by_every(ddp, batches, loss, every, rate):
    whole = len(batches) // every * every
    group_by_group(ddp, batches[:whole], loss, every, rate)
    group_by_group(ddp, batches[whole:], loss, every, rate / every)


def never_synchronises(ddp, batches, loss, every, rate):
    with ddp.no_sync():
        group_by_group(ddp, batches, loss, every, rate)


RIGHT = (group_by_group, one_loop, each_parameter_by_hand)
WRONG = (
    (around_the_backward_only, "each rank sends 9,120 B instead of 5,472 B"),
    (without_no_sync, "each rank sends 9,120 B instead of 5,472 B"),
    (forgets_the_last, "each rank sends 3,648 B instead of 5,472 B"),
    (does_not_divide, "away from what one device computes", "The step is too long"),
    (divides_the_last_by_every, "away from what one device computes", "All groups are right but the last"),
    (never_synchronises, "no rank has sent anything"),
)
