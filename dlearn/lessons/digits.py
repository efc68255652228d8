"""1,797 handwritten digits, 8x8 pixels, that travel with dlearn (source and licence: data/README.md).

The first 1,500 images are for training, the last 297 are held out.
"""

import gzip
from importlib.resources import files

import numpy as np
import torch
from torch import Tensor

TRAINING_IMAGES = 1500
"""A number that 2, 3, 4, 5 and 6 ranks share evenly, so that no rank runs out of batches before the others."""

BRIGHTEST = 16


def load() -> tuple[Tensor, Tensor]:
    """Load all images, float32 [1797, 1, 8, 8] from 0 to 1, and their labels, int64 [1797]."""
    text = gzip.decompress(files("dlearn.lessons").joinpath("data/digits.csv.gz").read_bytes()).decode()
    table = torch.from_numpy(np.loadtxt(text.splitlines(), delimiter=",", dtype=np.uint8))
    images = table[:, :64].float().reshape(-1, 1, 8, 8) / BRIGHTEST
    return images, table[:, 64].long()


def shard(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return the training images of one rank, shuffled always in the same way; none is on two."""
    images, labels = load()
    order = torch.randperm(TRAINING_IMAGES, generator=torch.Generator().manual_seed(0))
    mine = order[rank::world_size]
    return images[mine], labels[mine]


def held_out() -> tuple[Tensor, Tensor]:
    """Return the 297 images that no rank trains on."""
    images, labels = load()
    return images[TRAINING_IMAGES:], labels[TRAINING_IMAGES:]
