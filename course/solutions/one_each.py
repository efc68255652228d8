"""Exercise `one_f_one_b`: two right orders, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist


def schedule(m, ahead):
    """F and B works of a stage that does `ahead` forward works before its first backward one."""
    works = [("F", i) for i in range(ahead)]
    for i in range(m):
        works += [("F", i + ahead)] if i + ahead < m else []
        works += [("B", i)]
    return works


def run(works, forward, backward, length, send=dist.isend):
    """With isend no send waits: each is begun at once, and all are waited for in the end."""
    rank, n = dist.get_rank(), dist.get_world_size()
    sending = []
    for kind, i in works:
        source, target = (rank - 1, rank + 1) if kind == "F" else (rank + 1, rank - 1)
        came = torch.empty(length, dtype=torch.float64) if 0 <= source < n else None
        if came is not None:
            dist.recv(came, source)
        result = (forward if kind == "F" else backward)(i, came)
        if 0 <= target < n:
            sending.append((send(result, target), result))
    for work, _ in sending:
        if work is not None:
            work.wait()


def one_f_one_b(forward, backward, length, micro_batches, more=0, send=dist.isend):
    ahead = dist.get_world_size() - dist.get_rank() - 1 + more
    run(schedule(micro_batches, min(ahead, micro_batches)), forward, backward, length, send)


def both_at_once(forward, backward, length, micro_batches):
    """In the steady state one call sends y and receives a gradient, as Megatron's stages do."""
    rank, n = dist.get_rank(), dist.get_world_size()
    warm = min(n - rank - 1, micro_batches)

    def exchange(give, peer, take):
        came = torch.empty(length, dtype=torch.float64) if take else None
        if not 0 <= peer < n:
            return None
        sending = dist.isend(give, peer) if give is not None else None
        if take:
            dist.recv(came, peer)
        if sending:
            sending.wait()
        return came

    ahead = exchange(None, rank - 1, True)
    for i in range(warm):
        exchange(forward(i, ahead), rank + 1, False)
        ahead = exchange(None, rank - 1, True)
    for i in range(micro_batches):
        more = i + warm < micro_batches
        y = forward(i + warm, ahead) if more else None
        gradient = backward(i, exchange(y, rank + 1, True))
        ahead = exchange(gradient, rank - 1, i + warm + 1 < micro_batches)


def gpipe(forward, backward, length, micro_batches):
    run(schedule(micro_batches, micro_batches), forward, backward, length)


def one_at_a_time(forward, backward, length, micro_batches):
    run(schedule(micro_batches, 0), forward, backward, length)


def one_too_many(*given):
    one_f_one_b(*given, more=1)


def two_sends_meet(*given):
    """The right order with sends that wait: y one way and a gradient the other meet on the way."""
    one_f_one_b(*given, send=dist.send)


def forgets_the_gradient(forward, backward, length, micro_batches):
    """Sends the outputs only; each stage takes ones as its gradient."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for i in range(micro_batches):
        came = torch.empty(length, dtype=torch.float64) if rank else None
        if rank:
            dist.recv(came, rank - 1)
        y = forward(i, came)
        if rank + 1 < n:
            dist.send(y, rank + 1)
        backward(i, torch.ones_like(y))


def numbers_in_another_order(forward, backward, length, micro_batches):
    """Each gradient arrives with its numbers moved by one."""

    def moved(i, gradient):
        return backward(i, None if gradient is None else gradient.roll(1))

    one_f_one_b(forward, moved, length, micro_batches)


RIGHT = (one_f_one_b, both_at_once)
WRONG = (
    (gpipe, "stage 0 of 2 keeps up to 6 micro-batches between forward and backward, and 1F1B keeps 2"),
    (one_at_a_time, "stage 0 of 2 keeps up to 1 micro-batches"),
    (one_too_many, "stage 0 of 2 keeps up to 3 micro-batches"),
    (two_sends_meet, "rank 0 and rank 1 wait for each other"),
    (forgets_the_gradient, "instead of"),
    (numbers_in_another_order, "away from what one device computes"),
)
