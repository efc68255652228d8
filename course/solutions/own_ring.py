"""Exercise `ring`: right answers in two styles, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist


def swap(chunk, like, step):
    """Send `chunk` to the neighbour at distance `step`, and return what comes from the other side."""
    rank, n = dist.get_rank(), dist.get_world_size()
    came = torch.empty_like(like)
    sending = dist.isend(chunk, (rank + step) % n)
    dist.recv(came, (rank - step) % n)
    sending.wait()
    return came


def reduce_scatter(chunks, way=1):
    """`way` is 1 to the right, -1 to the left."""
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        get = chunks[(rank - way * (step + 1)) % n]
        get += swap(chunks[(rank - way * step) % n], get, way)


def all_gather(chunks, way=1):
    rank, n = dist.get_rank(), dist.get_world_size()
    for step in range(n - 1):
        get = chunks[(rank - way * step) % n]
        get.copy_(swap(chunks[(rank - way * (step - 1)) % n], get, way))


def to_the_right(tensor):
    chunks = tensor.chunk(dist.get_world_size())
    reduce_scatter(chunks)
    all_gather(chunks)


def to_the_left_and_filled_up(tensor):
    """Equal chunks of another length: the tensor is made longer first, as for a length that n does not divide."""
    n = dist.get_world_size()
    longer = torch.cat([tensor, tensor.new_zeros(-len(tensor) % n)])
    chunks = longer.chunk(n)
    reduce_scatter(chunks, way=-1)
    all_gather(chunks, way=-1)
    tensor.copy_(longer[: len(tensor)])


def whole_tensors(tensor):
    """Right in its sum, at n/2 times the price."""
    passing = tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        passing = swap(passing, tensor, 1)
        tensor += passing


def around(tensor, chosen, adds=True):
    """As many steps as in a ring, each with the chunk that is `chosen`."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.chunk(n)
    for step in range(2 * (n - 1)):
        get = chunks[(rank - step - 1) % n]
        came = swap(chosen(chunks, step), get, 1)
        get.copy_(get + came if adds else came)


def zeros(tensor):
    around(tensor, lambda chunks, step: torch.zeros_like(chunks[0]))


def always_its_own_chunk(tensor):
    around(tensor, lambda chunks, step: chunks[dist.get_rank()])


def never_adds(tensor):
    around(tensor, lambda chunks, step: chunks[(dist.get_rank() - step) % len(chunks)], adds=False)


def gathers_one_too_late(tensor):
    """Off by one in the second half: right on two ranks only."""
    rank, n = dist.get_rank(), dist.get_world_size()
    chunks = tensor.chunk(n)
    reduce_scatter(chunks)
    for step in range(n - 1):
        get = chunks[(rank + step) % n]
        get.copy_(swap(chunks[(rank + 1 + step) % n], get, 1))


def in_a_copy(tensor):
    mine = tensor.clone()
    to_the_right(mine)
    return mine


def in_float32(tensor):
    mine = tensor.float()
    to_the_right(mine)
    tensor.copy_(mine)


def half_way(tensor):
    reduce_scatter(tensor.chunk(dist.get_world_size()))


def leaves_it_to_torch(tensor):
    dist.all_reduce(tensor)


def all_receive_first(tensor):
    rank, n = dist.get_rank(), dist.get_world_size()
    came = torch.empty_like(tensor)
    dist.recv(came, (rank - 1) % n)
    dist.send(tensor, (rank + 1) % n)


RIGHT = (to_the_right, to_the_left_and_filled_up)
WRONG = (
    (whole_tensors, "each rank sends 19,200 B instead of 12,800 B"),
    (zeros, "of zeros"),
    (always_its_own_chunk, "stale data"),
    (never_adds, "stale data"),
    (gathers_one_too_late, "stale data"),
    (in_a_copy, "away from the sum of all tensors", "where do you write?"),
    (in_float32, "each rank sends 4,800 B instead of 9,600 B", "Of which dtype"),
    (half_way, "rank", "After how many steps has a chunk met every rank"),
    (leaves_it_to_torch, "there is no send", "move a tensor from one rank to one other"),
    (all_receive_first, "rank 0 and rank 1 wait for each other"),
)
