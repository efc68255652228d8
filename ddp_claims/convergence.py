"""What the two rows on training share: the seeds, the loss that a run ends with, and when two losses count as equal.

Training the same model from another seed ends with another loss. That spread is no difference between methods, so it is
the yardstick here: a change *keeps* the loss if from every seed it ends closer to the unchanged run of that seed than
the unchanged runs of the seeds are to each other.
"""

from collections.abc import Sequence
from functools import cache
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from dlearn.lessons import digits

SEEDS = (0, 1, 2)
"""Of the parameters, and of the order of the images."""


@torch.no_grad()
def training_loss(model: nn.Module) -> float:
    """Return the cross entropy over all 1,500 training images of all ranks."""
    images, labels = _loaded()
    return float(cross_entropy(model(images), labels))


@cache
def _loaded() -> tuple[Tensor, Tensor]:
    images, labels = digits.load()
    return images[: digits.TRAINING_IMAGES], labels[: digits.TRAINING_IMAGES]


def spread(losses: Sequence[float]) -> float:
    """Return the difference between the best and the worst seed."""
    return max(losses) - min(losses)


def differences(changed: Sequence[float], unchanged: Sequence[float]) -> list[float]:
    """Return how much higher each seed ends than without the change."""
    return [a - b for a, b in zip(changed, unchanged, strict=True)]


def keeps(changed: Sequence[float], unchanged: Sequence[float]) -> bool:
    """Return True if no seed ends higher than without the change by the seeds' own spread."""
    return max(differences(changed, unchanged)) < spread(unchanged)


def hurts(changed: Sequence[float], unchanged: Sequence[float]) -> bool:
    """Return True if every seed ends higher than without the change, by more than the spread."""
    return min(differences(changed, unchanged)) > spread(unchanged)


def seeds_text(values: Sequence[float]) -> str:
    """Return "0.124 (seeds 0.122 to 0.133)": the median and the range."""
    return f"{median(values):.3f} (seeds {min(values):.3f} to {max(values):.3f})"
