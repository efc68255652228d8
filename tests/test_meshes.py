"""The names of a mesh's dimensions, from DeviceMesh to words, tables and pictures."""

import pytest
import torch
from pictures import title, words
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from traces import Job

from dlearn import DlearnError, draw, explain, operations
from dlearn.analysis import traffic


def meshes():
    tp = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    init_device_mesh("cpu", (2, 1), mesh_dim_names=("all", "one"))
    for mesh in tp, DeviceMesh.from_group(torch.distributed.new_group([0, 1]), "cpu", mesh_dim_names=("dp",)):
        torch.distributed.all_reduce(torch.ones(2), group=mesh.get_group())


def test_every_mesh_names_its_groups_also_those_that_it_did_not_make(recorded):
    trace = recorded(meshes, backend="dlearn_ring")
    assert [one.group.dimensions for one in operations(trace)] == [("tp", "all"), ("dp",)]
    assert "(float32[2]) over dp (ranks 0 and 1)" in str(explain(trace))


def test_words_tables_and_pictures_name_the_dimension(tmp_path):
    job = Job(tmp_path, ranks=4)
    for name, *ranks in ("replicate", 0, 2), ("replicate", 1, 3), ("shard", 0, 1), ("shard", 2, 3):
        job.group(f"{name} {ranks}", ranks, dimensions=(name,))
        job.collective("all_reduce", group=f"{name} {ranks}", start_ns={ranks[0]: 1, ranks[1]: 5}, size=8)
    trace = job.load()
    assert "shard: rank 2, rank 3" in str(operations(trace))
    assert {*traffic(trace.where(dimension="shard")).payload_bytes} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    with pytest.raises(DlearnError, match="this trace has: replicate, shard"):
        trace.where(dimension="tp")
    assert title(draw.groups(trace)) == "A mesh of 2 replicate × 2 shard over 4 ranks"
    assert "shard: 2 groups of 2, side by side" in words(draw.groups(trace))
    assert "all_reduce 8 B over shard" in words(draw.sequence(trace))
    assert " in all_reduce #1 over " in words(draw.timeline(trace))
    assert "all_reduce over replicate and shard" in words(draw.timeline(trace))
