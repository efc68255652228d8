"""Models that are small enough to read, for images of 8x8 pixels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class ConvNet(nn.Module):
    """Two convolutions and two linear layers: 27,990 parameters, 111,960 bytes of gradients.

    Under DDP with `bucket_cap_mb=SMALL_BUCKETS` they travel in three buckets, from the last layer to the first:
    fc2 and fc1 (101,160 B), conv2 (10,368 B), conv1 (432 B). Three ranks can cut each of them evenly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, kernel_size=3, padding=1, bias=False)  # 12·1·3·3 = 108 parameters
        self.conv2 = nn.Conv2d(12, 24, kernel_size=3, padding=1, bias=False)  # 24·12·3·3 = 2,592
        self.fc1 = nn.Linear(24 * 4 * 4, 64)  # 64·384 + 64 = 24,640
        self.fc2 = nn.Linear(64, 10)  # 10·64 + 10 = 650

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.conv1(images))  # [B, 12, 8, 8]
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)  # [B, 24, 4, 4]
        x = functional.relu(self.fc1(x.flatten(1)))  # [B, 64]
        logits: Tensor = self.fc2(x)  # [B, 10]
        return logits


SMALL_BUCKETS = 0.009
"""In MB of 2^20 bytes, for DDP's `bucket_cap_mb`. Its default, 25, would put all of ConvNet into one bucket."""
