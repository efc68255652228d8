"""The map of process groups, by its cells: which rank is in which group."""

from contextlib import nullcontext

import matplotlib.pyplot as plt
import pytest
import torch.distributed as dist
from text_boxes import faults
from traces import Job

from dlearn import Cluster, draw
from dlearn.draw.maps.group_map import groups_of, rows_of


def parallel(folder, *, data, tensor, pipeline):
    """Ranks as Megatron numbers them: tensor parallel neighbours, then data parallel, then the stages."""
    ranks = data * tensor * pipeline
    job = Job(folder, ranks=ranks)
    rank = [[[t + tensor * (d + data * p) for t in range(tensor)] for d in range(data)] for p in range(pipeline)]
    made = [rank[p][d] for p in range(pipeline) for d in range(data)]
    made += [[rank[p][d][t] for d in range(data)] for p in range(pipeline) for t in range(tensor)]
    made += [[rank[p][d][t] for p in range(pipeline)] for d in range(data) for t in range(tensor)]
    for number, members in enumerate(made):
        job.group(f"{number}", members)
    return job.load()


def title(ax):
    return " ".join(ax.get_title(loc="left").split())


def members(ax):
    """By row: the ranks that have a cell of each group, in the order of the groups."""
    found = {}
    for cells in ax.collections:
        columns = [int(path.vertices[:, 0].min()) for path in cells.get_paths()]
        found[cells.get_gid()] = columns
    return found


def test_three_ways_of_parallel_work_are_three_kinds(tmp_path):
    ax = draw.groups(parallel(tmp_path, data=2, tensor=2, pipeline=2))
    assert title(ax) == "8 ranks in 3 kinds of groups: 4 of 2, 4 of 2, 4 of 2"
    assert members(ax) == {
        "groups default group": [0, 1, 2, 3, 4, 5, 6, 7],
        "groups 4 groups of 2, side by side": [0, 1, 2, 3, 4, 5, 6, 7],
        "groups 4 groups of 2, 2 apart": [0, 2, 1, 3, 4, 6, 5, 7],
        "groups 4 groups of 2, 4 apart": [0, 4, 1, 5, 2, 6, 3, 7],
    }
    numbers = [text.get_text() for text in ax.texts if text.get_text().isdigit()]
    assert numbers[:8] == ["0", "0", "1", "1", "2", "2", "3", "3"]


@pytest.mark.parametrize(("data", "tensor", "pipeline"), [(1, 3, 1), (2, 4, 2), (2, 8, 4)])
def test_every_group_has_its_members_and_no_rank_twice_in_a_row(tmp_path, data, tensor, pipeline):
    trace = parallel(tmp_path, data=data, tensor=tensor, pipeline=pipeline)
    found = groups_of(trace)
    rows = rows_of(found)
    count = data * tensor * pipeline
    assert sorted(map(repr, found)) == sorted(repr(group) for row in rows for group in row.groups)
    for row in rows:
        ranks = [rank for group in row.groups for rank in group.members]
        assert len({*ranks}) == len(ranks)
    for small in (False, True):
        with draw.small() if small else nullcontext():
            ax = draw.groups(trace)
        assert faults(ax.figure) == []
        assert len(ax.get_xticklabels()) <= 24
        assert numbered(ax, rows, count) == {
            (row.text, rank): str(number)
            for row in rows
            if len(row.groups) > 1
            for number, group in enumerate(row.groups)
            for rank in group.members
        }
        plt.close(ax.figure)


def numbered(ax, rows, ranks):
    """By row and rank the number that stands in its cell: cells go on in the lines below, from left to right."""
    length = round(ax.get_xlim()[1])
    cells = [text for text in ax.texts if text.get_text().isdigit()]
    lines = sorted({text.get_position()[1] for text in cells})
    names = [row.text for row in rows if len(row.groups) > 1 for _ in range(0, ranks, length)]
    found = {}
    for text in cells:
        x, y = text.get_position()
        at = lines.index(y)
        assert at < len(names)
        found[names[at], length * (at % -(-ranks // length)) + int(x)] = text.get_text()
    return found


def test_groups_that_share_a_rank_stand_in_two_rows(tmp_path):
    job = Job(tmp_path, ranks=3)
    job.group("left", [0, 1])
    job.group("right", [1, 2])
    ax = draw.groups(job.load())
    assert title(ax) == "3 ranks in 1 kind of groups: 2 of 2"
    assert len(ax.collections) == 3


def test_of_the_default_group_alone_the_title_says_so(tmp_path):
    assert title(draw.groups(Job(tmp_path, ranks=3).load())) == "3 ranks in one group"


def test_the_group_inside_a_glass_box_backend_is_not_the_programs(tmp_path):
    job = Job(tmp_path, ranks=2)
    job.group("inner", [0, 1], within="world")
    assert [group.name for group in groups_of(job.load())] == ["world"]


def _two_pairs():
    for pair in ([0, 2], [1, 3]):
        dist.new_group(pair)


def test_a_real_job_with_new_groups():
    ax = draw.groups(Cluster(4).run(_two_pairs).trace)
    assert title(ax) == "4 ranks in 1 kind of groups: 2 of 2"
    assert members(ax)["groups 2 groups of 2, 2 apart"] == [0, 2, 1, 3]
