"""A film shows at each moment what each rank holds of each piece, of a collective that is known in full."""

import numpy as np
from pictures import recorded_job, title, words
from text_boxes import faults
from traces import Job

from dlearn import draw
from dlearn.draw.palette import WHOLE


def gold(ax):
    """For each moment how many cells of each rank's row are the result."""
    rgb = [int(WHOLE[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [np.isclose(image.get_array()[..., :3], rgb).all(axis=2).sum(axis=1).tolist() for image in ax.images]


def test_halfway_through_a_ring_of_64_each_piece_is_whole_on_one_rank(tmp_path):
    """128 pieces: two of each rank's chunk; 2 x 63 rounds for each half, so 16,128 messages."""
    job = Job(tmp_path, ranks=64)
    job.collective("all_reduce", size=64_000, end_ns=1_000_000)
    ax = draw.film(job.load())
    assert title(ax) == "One all-reduce of 64 ranks in 16,128 messages: halfway each piece is whole on one rank"
    rows = [[2], [2 + 63], [128]]  # From the half to 3/4 are 63 rounds, and each brings a rank one piece.
    assert gold(ax) == [[0] * 64] * 3 + [row * 64 for row in rows]
    assert {"reduce-scatter", "all-gather"} <= {*words(ax).split()}
    assert faults(ax.figure) == []


def test_gold_is_what_has_arrived(tmp_path):
    moments = {
        "broadcast": [[1, 0, 0, 0], [1, 1, 0, 0], [1] * 4],
        "reduce": [[0] * 4, [0] * 4, [0] * 4, [2] * 4, [8, 2, 2, 2]],
        "gather": [[1, 0, 0, 0], [4, 0, 0, 0]],
        "scatter": [[1, 0, 0, 0], [1] * 4],
        "all_to_all_single": [[1] * 4, [4] * 4],
        "all_gather_single": [[2] * 4, [3] * 4, [4] * 4, [6] * 4, [7] * 4, [8] * 4],
    }
    trace = recorded_job("collectives", tmp_path)
    assert {op: gold(draw.film(trace.where(op=op))) for op in moments} == moments
    assert "No collective sent data here." in words(draw.film(trace.where(op="barrier")))
