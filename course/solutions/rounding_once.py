"""Exercise `bfloat16_sum`: three right answers, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist


def by_all_to_all(tensor):
    n = dist.get_world_size()
    pieces = tensor.bfloat16()
    came = torch.empty_like(pieces)
    dist.all_to_all_single(came, pieces)
    own = came.view(n, -1).float().sum(0).bfloat16()
    dist.all_gather_single(pieces, own)
    tensor.copy_(pieces)


def by_lists(tensor):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = list(tensor.bfloat16().chunk(n))
    own = torch.stack(exchanged(pieces)).float().sum(0)
    sums = [torch.empty_like(pieces[rank]) for _ in range(n)]
    dist.all_gather(sums, own.bfloat16())
    tensor.copy_(torch.cat(sums))


def by_sends(tensor):
    """Each piece to its rank, which adds them up and sends the rounded sum to all."""
    n = dist.get_world_size()
    pieces = tensor.bfloat16().chunk(n)
    total = sum(piece.double() for piece in exchanged(pieces))
    sums = exchanged([total.bfloat16()] * n)
    tensor.copy_(torch.cat(sums))


def exchanged(pieces):
    """Piece r goes to rank r; what each rank has sent to this one, in the order of ranks."""
    n, rank = dist.get_world_size(), dist.get_rank()
    came = [piece.clone() for piece in pieces]
    for step in range(1, n):
        dst, src = (rank + step) % n, (rank - step) % n
        sending = dist.isend(pieces[dst].contiguous(), dst)
        came[src] = torch.empty_like(pieces[rank])
        dist.recv(came[src], src)
        sending.wait()
    return came


def whole_width(tensor):
    dist.all_reduce(tensor)


def rounded_each_time(tensor):
    half = tensor.bfloat16()
    dist.all_reduce(half)
    tensor.copy_(half)


def everything_to_all(tensor):
    whole = [torch.empty_like(tensor, dtype=torch.bfloat16) for _ in range(dist.get_world_size())]
    dist.all_gather(whole, tensor.bfloat16())
    tensor.copy_(torch.stack(whole).float().sum(0).bfloat16())


def own_piece_is_not_rounded(tensor):
    n, rank = dist.get_world_size(), dist.get_rank()
    pieces = tensor.bfloat16().chunk(n)
    own = sum(piece.float() for piece in exchanged(pieces))
    sums = [piece.float() for piece in exchanged([own.bfloat16()] * n)]
    sums[rank] = own
    tensor.copy_(torch.cat(sums))


def sums_in_bfloat16(tensor):
    n = dist.get_world_size()
    own, *others = exchanged(tensor.bfloat16().chunk(n))
    for other in others:
        own += other
    tensor.copy_(torch.cat(exchanged([own] * n)))


def not_in_place(tensor):
    copy = tensor.clone()
    by_all_to_all(copy)
    return copy


RIGHT = (by_all_to_all, by_lists, by_sends)
WRONG = (
    (whole_width, "rank 0 sends 4,800 B, and not 2,400 B"),
    (rounded_each_time, "away from the sum of what was sent, and one rounding moves it 0.39%"),
    (everything_to_all, "rank 0 sends 4,800 B, and not 3,200 B"),
    (own_piece_is_not_rounded, "rank 1 has other numbers than rank 0"),
    (sums_in_bfloat16, "away from the sum of what was sent, and one rounding moves it"),
    (not_in_place, "rank 0 has what it began with", "where do you write"),
)
