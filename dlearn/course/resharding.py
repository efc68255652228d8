"""The exercise `save_and_load`: a checkpoint that n ranks write, and another number of ranks reads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlearn.analysis import traffic
from dlearn.course.attempt import Attempt, ResultError, numbers, submitted
from dlearn.course.criteria import assert_one_device
from dlearn.course.exercise import Exercise
from dlearn.errors import TrafficError

READERS = (2, 3)
"""How many ranks load what four have saved. For three, a part begins in the middle of a file."""

ITEM_BYTES = 8


def _length(seed: int) -> int:
    """Return the number of items; 2, 3 and 4 divide it."""
    return 1_200 + 12 * (seed % 50)


class Files:
    """`write(name, tensor)` and `read(name, begin, end)` of float64; counts the bytes that are read."""

    def __init__(self, folder: str) -> None:
        self.folder, self.read_bytes = Path(folder), 0

    def write(self, name: str, tensor: torch.Tensor) -> None:
        self._path(name).write_bytes(tensor.detach().contiguous().numpy().tobytes())

    def read(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return numbers `begin` to `end` of what was written under this name."""
        with self._path(name).open("rb") as file:
            file.seek(begin * ITEM_BYTES)
            part = file.read((end - begin) * ITEM_BYTES)
        self.read_bytes += len(part)
        return torch.frombuffer(bytearray(part), dtype=torch.float64) if part else torch.empty(0).double()

    def _path(self, name: str) -> Path:
        return self.folder / f"{Path(str(name)).name}.bytes"


def drive_checkpoint(
    functions: tuple[Callable[..., None], Callable[..., Any]], seed: int
) -> dict[int, tuple[Any, int]]:
    """Return, for each number of readers, what this rank loads and the bytes that it read."""
    save, load = functions
    rank, n, length = dist.get_rank(), dist.get_world_size(), _length(seed)
    with shared_folder() as folder:
        with submitted():
            save(numbers(length, seed).chunk(n)[rank].clone(), Files(folder).write)
        dist.barrier()
        found = {}
        for readers in READERS:
            files = Files(folder)
            if rank < readers:
                with submitted():
                    loaded = load(rank, readers, length, n, files.read)
                found[readers] = loaded, files.read_bytes
        dist.barrier()
    return found


@contextmanager
def shared_folder() -> Iterator[str]:
    """Yield a temporary folder that rank 0 makes, and removes at the end."""
    names: list[str] = [""]
    with tempfile.TemporaryDirectory() as own:
        if dist.get_rank() == 0:
            names = [own]
        dist.broadcast_object_list(names, src=0)
        yield names[0]


def _nothing_sent(tried: Attempt) -> None:
    sent = traffic(tried.trace)
    if sent.total_bytes:
        raise TrafficError(f"{sent.total_bytes:,} B are sent between ranks, and a file is read without\n\n{sent}")


def _read(tried: Attempt) -> None:
    for rank, found in sorted(tried.results.items()):
        for readers, (_, size) in found.items():
            wanted = _length(tried.seed) // readers * ITEM_BYTES
            if size > wanted:
                raise ResultError(
                    f"rank {rank} of {readers} reads {size:,} B of the files, and its part has {wanted:,} B"
                )


def _equal(tried: Attempt) -> None:
    whole = numbers(_length(tried.seed), tried.seed)
    for rank, found in sorted(tried.results.items()):
        for readers, (loaded, _) in found.items():
            assert_one_device({rank: loaded}, whole.chunk(readers)[rank], tolerance=0)


_CRITERIA = {"traffic": _nothing_sent, "read": _read, "result": _equal}
CHECKPOINT = Exercise("save_and_load", drive_checkpoint, _CRITERIA, ranks=(4,))
