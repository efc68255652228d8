"""The README's gallery: every picture of it is made here, from jobs that really run. `make notebooks` runs it.

python -m dlearn.lessons.gallery --out docs/pictures
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.axes import Axes

from dlearn import draw, play
from dlearn.analysis import explain, iteration, scaling
from dlearn.cluster import Cluster
from dlearn.lessons import demo, split


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the gallery's jobs, and draw them.")
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="files of the same name are replaced")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name in make(folder):
        print(f"{folder / name}", flush=True)


def make(folder: Path) -> Iterator[str]:
    """Make all pictures; yield the name of each file when it is written."""
    for pictures in (of_ddp, of_a_server, of_the_batch, of_a_ring):
        for name, picture in pictures():
            picture(folder / name)
            yield name


Pictures = Iterator[tuple[str, Callable[[Path], None]]]


def of_ddp() -> Pictures:
    """Draw a few steps of a small ConvNet on three ranks."""
    trace = Cluster(3).run(demo.train).trace
    step = trace.within(explain(trace).part)
    yield "timeline.svg", partial(draw.save, draw.timeline(step))
    yield "traffic_graph.svg", _small(draw.traffic_graph, step)
    yield "buckets.svg", _small(draw.buckets, trace)
    yield "steps.svg", _small(draw.steps, trace)


def of_a_server() -> Pictures:
    """Draw the same net on a parameter server, with two trainers."""
    cluster = Cluster(["ps", "trainer1", "trainer2"], rpc=True, graph=True)
    trace = cluster.run({"trainer1": partial(demo.serve, 0), "trainer2": partial(demo.serve, 1)}).trace
    last = trace.within(trace.spans[-1]) if trace.spans else trace
    yield "sequence.svg", _small(draw.sequence, last)
    yield "autograd.svg", _small(draw.autograd, trace)
    yield "traffic.svg", _small(draw.traffic, last)
    assert iteration(trace).steps, "an iteration was recorded"


def of_the_batch() -> Pictures:
    """Draw a model cut in two over RPC, with three sizes of the batch."""
    with Cluster(["stage0", "stage1"], rpc=True) as cluster:
        found = {B: cluster.run({"stage0": split.model_parallel}, split.Size(B=B)).trace for B in (1, 8, 32)}
    yield "scaling.svg", _small(draw.scaling, scaling(found))


def of_a_ring() -> Pictures:
    """Draw an all-reduce by gloo: of four ranks as it moves, of 64 at six moments."""
    ring = play.player(Cluster(4).run(_reduce).trace)
    yield "ring.gif", ring.to_gif
    yield "ring-dark.gif", partial(ring.to_gif, dark=True)
    yield "film.svg", partial(draw.save, draw.film(Cluster(64).run(_reduce, 16_384).trace))


def _small(drawing: Callable[[Any], Axes], shown: object) -> Callable[[Path], None]:
    """Draw for the README's table, which has two columns."""
    with draw.small():
        return partial(draw.save, drawing(shown))


def _reduce(numbers: int = 1000) -> None:
    dist.all_reduce(torch.ones(numbers))


if __name__ == "__main__":
    main()
