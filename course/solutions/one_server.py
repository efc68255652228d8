"""Exercise `parameter_server`: two right servers, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist


def one_after_the_other(parameters, gradient_of, steps, rate):
    n = dist.get_world_size()
    for step in range(steps):
        if dist.get_rank():
            dist.recv(parameters, 0)
            dist.send(gradient_of(parameters, step), 0)
            continue
        for worker in range(1, n):
            dist.send(parameters, worker)
        total, came = torch.zeros_like(parameters), torch.empty_like(parameters)
        for worker in range(1, n):
            dist.recv(came, worker)
            total += came
        parameters -= rate * total / (n - 1)


def all_at_once(parameters, gradient_of, steps, rate):
    workers = range(1, dist.get_world_size())
    for step in range(steps):
        if dist.get_rank():
            dist.recv(parameters, 0)
            dist.send(gradient_of(parameters, step), 0)
            continue
        given = [dist.isend(parameters, worker) for worker in workers]
        came = [torch.empty_like(parameters) for _ in workers]
        coming = [dist.irecv(each, worker) for each, worker in zip(came, workers, strict=True)]
        for work in (*given, *coming):
            work.wait()
        parameters -= rate * torch.stack(came).mean(0)


def takes_the_sum(parameters, gradient_of, steps, rate):
    one_after_the_other(parameters, gradient_of, steps, rate * (dist.get_world_size() - 1))


def never_steps(parameters, gradient_of, steps, rate):
    one_after_the_other(parameters, gradient_of, steps, 0 * rate)


def step_after_each_gradient(parameters, gradient_of, steps, rate):
    """Each gradient is applied when it comes, with the whole rate."""
    n = dist.get_world_size()
    for step in range(steps):
        for worker in range(1, n):
            if dist.get_rank() == 0:
                dist.send(parameters, worker)
                came = torch.empty_like(parameters)
                dist.recv(came, worker)
                parameters -= rate / (n - 1) * came
            elif dist.get_rank() == worker:
                dist.recv(parameters, 0)
                dist.send(gradient_of(parameters, step), 0)


def asks_twice(parameters, gradient_of, steps, rate):
    """Sends the parameters again after the step, so that the workers have them at the end, too."""
    one_after_the_other(parameters, gradient_of, steps, rate)
    if dist.get_rank():
        dist.recv(parameters, 0)
        return
    for worker in range(1, dist.get_world_size()):
        dist.send(parameters, worker)


def without_a_server(parameters, gradient_of, steps, rate):
    rank, n = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.recv(parameters, rank - 1)
    if rank + 1 < n:
        dist.send(parameters, rank + 1)


RIGHT = (one_after_the_other, all_at_once)
WRONG = (
    (takes_the_sum, "away from what one device computes", "Is the sum or the mean"),
    (never_steps, "stale data"),
    (step_after_each_gradient, "away from what one device computes"),
    (asks_twice, "rank 0 sends 76,800 B instead of 57,600 B"),
    (without_a_server, "in a star"),
)
