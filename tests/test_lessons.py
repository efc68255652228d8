"""The data and models that lessons share."""

import subprocess
import sys
from hashlib import sha256
from importlib.resources import files

import torch
from torch.nn.functional import cross_entropy

from dlearn.lessons import digits, models


def test_the_digits_are_those_of_scikit_learn():
    data = files("dlearn.lessons").joinpath("data/digits.csv.gz").read_bytes()
    # Of sklearn/datasets/data/digits.csv.gz in the wheel of scikit-learn 1.9.1.
    assert sha256(data).hexdigest() == "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"


def test_1797_images_of_8x8_pixels_with_their_labels():
    images, labels = digits.load()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
    assert (images * 16).sum() == 561_718  # all the ink: the sum over scikit-learn's load_digits().data
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_first_image_is_a_zero():
    images, labels = digits.load()
    assert labels[0] == 0
    assert (images[0, 0] * 16).int().tolist()[:2] == [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0]]


def test_every_training_image_is_on_exactly_one_rank():
    images, _ = digits.load()
    shards = [digits.shard(rank, 3)[0] for rank in range(3)]
    assert [len(shard) for shard in shards] == [500, 500, 500]
    together = torch.cat(shards).flatten(1).sum(1).sort().values
    assert torch.equal(together, images[:1500].flatten(1).sum(1).sort().values)


def test_held_out_images_and_labels_belong_together():
    images, labels = digits.held_out()
    assert len(images) == len(labels) == 297
    everything, names = digits.load()
    assert torch.equal(images[0], everything[1500])
    assert labels[-1] == names[-1]


def test_conv_net_is_as_large_as_its_docstring_says():
    model = models.ConvNet()
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    # Convolution: out · in · 3 · 3. Linear: out · in + out.
    assert sizes == {
        "conv1.weight": 108,
        "conv2.weight": 2592,
        "fc1.weight": 24_576,
        "fc1.bias": 64,
        "fc2.weight": 640,
        "fc2.bias": 10,
    }
    assert sum(sizes.values()) == 27_990
    linear = sizes["fc1.weight"] + sizes["fc1.bias"] + sizes["fc2.weight"] + sizes["fc2.bias"]
    # Three ranks cut an all-reduce into 6 segments.
    assert [bucket % 6 for bucket in (linear, 2592, 108)] == [0, 0, 0]
    assert all(name in models.ConvNet.__doc__ for name in ("27,990", f"{linear * 4:,} B", "10,368 B", "432 B"))


def test_conv_net_learns():
    torch.manual_seed(0)
    model = models.ConvNet()
    images, labels = digits.shard(0, 15)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_the_command_line_and_the_demo_leave_torch_to_the_ranks():
    blocked = "import sys; sys.modules['torch'] = None; import dlearn.lessons.demo, dlearn.cli; dlearn.cli.parser()"
    subprocess.run([sys.executable, "-c", blocked], check=True)
