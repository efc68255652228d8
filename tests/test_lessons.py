"""The data and models that lessons share."""

import subprocess
import sys
from hashlib import sha256
from importlib.resources import files

import torch

from dlearn.lessons import digits


def test_the_digits_are_those_of_scikit_learn_and_each_is_on_one_rank():
    data = files("dlearn.lessons").joinpath("data/digits.csv.gz").read_bytes()
    # Of sklearn/datasets/data/digits.csv.gz in the wheel of scikit-learn 1.9.1.
    assert sha256(data).hexdigest() == "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22"
    images, labels = digits.load()
    assert (images.shape, images.dtype, labels.dtype) == ((1797, 1, 8, 8), torch.float32, torch.int64)
    assert (images * 16).sum() == 561_718  # all the ink: the sum over scikit-learn's load_digits().data
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    shards = [digits.shard(rank, 3)[0] for rank in range(3)]
    together = torch.cat(shards).flatten(1).sum(1).sort().values
    assert torch.equal(together, images[:1500].flatten(1).sum(1).sort().values)
    held_images, held_labels = digits.held_out()
    assert torch.equal(held_images, images[1500:])
    assert torch.equal(held_labels, labels[1500:])


def test_the_command_line_the_demo_and_reading_a_trace_leave_torch_to_the_ranks():
    code = """
import sys
sys.modules["torch"] = sys.modules["matplotlib"] = sys.modules["pandas"] = None
import dlearn
dlearn.Trace, dlearn.Cluster, dlearn.messages, dlearn.explain, dlearn.analysis, dlearn.Event, dlearn.Message
from dlearn.cli import parser
from dlearn.lessons import demo
parser()
"""
    subprocess.run([sys.executable, "-c", code], check=True)
