"""Exercise `save_and_load`: three right pairs of functions, and wrong ones with what the grade says of them."""

import torch
import torch.distributed as dist


def save(mine, write):
    write(f"part-{dist.get_rank()}", mine)


def load(rank, readers, length, writers, read):
    """Of each file the piece that lies in this rank's part."""
    begin, end, size = rank * length // readers, (rank + 1) * length // readers, length // writers
    pieces = []
    for writer in range(begin // size, (end - 1) // size + 1):
        first, last = max(begin, writer * size), min(end, (writer + 1) * size)
        pieces.append(read(f"part-{writer}", first - writer * size, last - writer * size))
    return torch.cat(pieces)


def save_halves(mine, write):
    """Two files a rank."""
    for half, tensor in enumerate(mine.chunk(2)):
        write(f"{2 * dist.get_rank() + half}", tensor)


def load_halves(rank, readers, length, writers, read):
    return load(rank, readers, length, 2 * writers, lambda name, *ends: read(name.removeprefix("part-"), *ends))


def load_twelfths(rank, readers, length, writers, read):
    """Every part, for two, three or four ranks, is made of whole twelfths."""
    size, pieces = length // 12, []
    for piece in range(rank * 12 // readers, (rank + 1) * 12 // readers):
        writer, place = divmod(piece, 12 // writers)
        pieces.append(read(f"part-{writer}", place * size, (place + 1) * size))
    return torch.cat(pieces)


def save_on_rank_0(mine, write):
    n = dist.get_world_size()
    whole = torch.empty(n * len(mine), dtype=mine.dtype)
    dist.all_gather_single(whole, mine)
    if dist.get_rank() == 0:
        write("whole", whole)


def load_from_one(rank, readers, length, writers, read):
    return read("whole", rank * length // readers, (rank + 1) * length // readers)


def load_all_and_cut(rank, readers, length, writers, read):
    whole = torch.cat([read(f"part-{writer}", 0, length // writers) for writer in range(writers)])
    return whole.chunk(readers)[rank]


def load_whole_files(rank, readers, length, writers, read):
    """Right on two ranks; of three, two read a file that they need half of."""
    begin, end, size = rank * length // readers, (rank + 1) * length // readers, length // writers
    files = range(begin // size, (end - 1) // size + 1)
    whole = torch.cat([read(f"part-{writer}", 0, size) for writer in files])
    return whole[begin - files[0] * size : end - files[0] * size]


def load_one_file(rank, readers, length, writers, read):
    return read(f"part-{rank}", 0, length // writers)


def load_backwards(rank, readers, length, writers, read):
    """Ranks counted from the other end."""
    return load(readers - rank - 1, readers, length, writers, read)


RIGHT = ((save, load), (save_halves, load_halves), (save, load_twelfths))
WRONG = (
    ((save_on_rank_0, load_from_one), "28,800 B are sent between ranks"),
    ((save, load_all_and_cut), "rank 0 of 2 reads 9,600 B of the files, and its part has 4,800 B"),
    ((save, load_whole_files), "rank 0 of 3 reads 4,800 B of the files, and its part has 3,200 B"),
    ((save, load_one_file), "and not a tensor of shape (600,)", "another one than the task names"),
    ((save, load_backwards), "away from what one device computes"),
)
