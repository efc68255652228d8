"""Models that are small enough to read, for images of 8x8 pixels."""

import torch
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


class MLP(nn.Module):
    """Three linear layers, 64 → `width` → `width` → 10; by default 26,122 parameters, 104,488 B.

    With a large `width` it is the model whose gradients are heavy and whose computing is light.
    """

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, width)  # 64·width + width parameters
        self.fc2 = nn.Linear(width, width)  # width² + width
        self.fc3 = nn.Linear(width, 10)  # 10·width + 10

    def forward(self, images: Tensor) -> Tensor:
        x = functional.relu(self.fc1(images.flatten(1)))  # [B, width]
        logits: Tensor = self.fc3(functional.relu(self.fc2(x)))  # [B, 10]
        return logits


class Transformer(nn.Module):
    """Reads an image row by row: 8 tokens of 8 pixels, two encoder layers of width 32 with 4 heads. No dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.places = nn.Parameter(torch.zeros(8, 32))
        layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images.squeeze(1)) + self.places  # [B, 8, 32]
        logits: Tensor = self.head(self.encoder(tokens).mean(dim=1))  # [B, 10]
        return logits
