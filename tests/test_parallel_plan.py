"""`analysis.plan`: hand-worked bytes of each formula; recorded steps are equal to the byte, and right."""

from itertools import product

import pytest
import torch

from dlearn import Cluster, analysis
from dlearn.analysis import Machine, ModelShape, PlanComparison, plan, plan_times
from dlearn.course import parallel_step
from dlearn.errors import DlearnError, TraceError

SHAPE = ModelShape(layers=4, width=8, hidden=16, batch=8, sequence=2)  # A matrix has 8 * 16 * 4 = 512 B.
EXPERTS = ModelShape(layers=4, width=8, hidden=16, batch=8, sequence=4, experts=4)


@pytest.mark.parametrize(
    ("shape", "ways", "by_dimension"),
    [
        (SHAPE, {}, {}),
        (SHAPE, {"dp": 4}, {"dp": 2 * 3 * 8 * 512}),  # 8 matrices, 2 (n-1) S in all
        (SHAPE, {"dp": 4, "sharded": True}, {"dp": 3 * 3 * 8 * 512}),  # gathered twice, scattered once
        (SHAPE, {"dp": 4, "sharded": True, "micro_batches": 2}, {"dp": (2 * 2 + 1) * 3 * 8 * 512}),
        (SHAPE, {"dp": 4, "sharded": True, "backend": "gloo"}, {"dp": (2 + 2) * 3 * 8 * 512}),
        (SHAPE, {"tp": 2}, {"tp": 2 * 1 * 8 * 512}),  # 16 tokens of 8 * 4 B; 4 layers, forward and backward
        (SHAPE, {"tp": 2, "sequence_parallel": True}, {"tp": 2 * 1 * 8 * 512}),
        (SHAPE, {"tp": 2, "sequence_parallel": True, "backend": "gloo"}, {"tp": 3 * 1 * 8 * 512}),
        (SHAPE, {"pp": 4, "micro_batches": 8}, {"pp": 2 * 3 * 512}),
        (SHAPE, {"pp": 2, "tp": 2}, {"pp": 2 * 2 * 512, "tp": 2 * 8 * 512}),  # each tp rank sends a copy
        (SHAPE, {"pp": 2, "tp": 2, "sequence_parallel": True}, {"pp": 2 * 512, "tp": 2 * 8 * 512}),
        # 8 tokens of 32 B a rank; half of them leave; there and back, twice, in 2 layers. 4 dense matrices.
        (EXPERTS, {"ep": 4}, {"ep": 4 * 192 * 8 + 2 * 3 * 4 * 512}),
        (EXPERTS, {"dp": 2, "ep": 2}, {"dp_ep": 2 * 3 * 4 * 512, "ep": 4 * 128 * 8, "dp": 2 * 2 * 4 * 1024}),
    ],
)
def test_each_dimension_sends_what_its_formula_says(shape, ways, by_dimension):
    planned = plan(shape, **ways)
    assert planned.bytes_by_dimension == by_dimension
    assert sum(planned.bytes_by_rank.values()) == planned.total_bytes == sum(by_dimension.values())
    assert all(row.formula in str(planned) and row.source in str(planned) for row in planned.rows)


def test_ends_of_a_pipeline_send_half_and_uneven_chunks_are_gloos():
    assert plan(SHAPE, pp=4).bytes_by_rank == {0: 512, 1: 1024, 2: 1024, 3: 512}
    odd = ModelShape(layers=1, width=1, hidden=3, batch=2)  # 12 B in two chunks of 8 and 4 B
    assert plan(odd, dp=2).sends(0) == {"dp": 2 * (2 * 12 - 8 - 4)}


@pytest.mark.parametrize(
    ("shape", "ways", "says"),
    [
        (SHAPE, {"dp": 3}, "the batch, 8, cannot be divided by 3 (dp · ep · micro_batches)"),
        (SHAPE, {"pp": 3}, "layers, 4, cannot be divided by 3 (pp)"),
        (EXPERTS, {"pp": 4}, "layers, 4, cannot be divided by 8 (2 · pp: every second one"),
        (SHAPE, {"tp": 3}, "hidden, 16, cannot be divided by 3 (tp)"),
        (SHAPE, {"tp": 16, "micro_batches": 8, "sequence_parallel": True}, "the tokens of a micro-batch, 2,"),
        (SHAPE, {"ep": 2}, "the model has no experts"),
        (EXPERTS, {"ep": 8}, "experts, 4, cannot be divided by 8 (ep)"),
        (EXPERTS, {"tp": 2, "sequence_parallel": True}, "choose one of them"),
        (SHAPE, {"dp": 0}, "dp is 0: it has to be at least 1"),
        (SHAPE, {"backend": "nccl"}, "not 'nccl'"),
        (ModelShape(layers=2, width=-8, hidden=8, batch=8), {}, "width is -8: it has to be at least 1"),
    ],
)
def test_what_cannot_be_divided_is_said_in_one_sentence(shape, ways, says):
    with pytest.raises(DlearnError) as caught:
        plan(shape, **ways)
    assert says in str(caught.value)


def test_a_prediction_hides_gradients_but_no_sums_of_activations():
    # Forward 4 layers * 256 weights * 2 FLOPs * 4 tokens a rank = 8192, backward twice as many: 24,576 FLOPs.
    machine = Machine(flops_per_s=24_576, bytes_per_s={"dp": 6_144, "tp": 1_024})
    alone = plan_times(plan(SHAPE, dp=4), machine)
    assert (alone.compute_s, alone.bubble) == (1, 0)
    # A rank sends 3/2 * 4096 B = 1 s. Backward takes 2/3 s, 3/4 of it behind the first layer sent: 1/2 s are hidden.
    assert alone.exposed_s == alone.rows[0].exposed_s == 0.5
    assert alone.step_s == 1.5
    assert "67% of it computing, 33% waiting for messages, 0% bubble" in str(alone)
    # A gather takes 1/2 s. Forward 3/4 of 1/3 s hide half of it. Backward 3/4 of 2/3 s hide all but its first layer,
    # and what is left of them, 1/8 s, hides as much of the reduce-scatter.
    shards = plan_times(plan(SHAPE, dp=4, sharded=True), machine)
    assert [each.exposed_s for each in shards.rows] == pytest.approx([1 / 4, 1 / 8, 3 / 8])
    # 2 dense layers send 4 * 3/2 * 512 B: the one that ends the pass is half of them, and nothing hides it.
    fast = Machine(flops_per_s=1, bytes_per_s=3_072)
    assert plan_times(plan(EXPERTS, ep=4), fast).rows[0].exposed_s == 1 / 2
    both = plan_times(plan(SHAPE, tp=2), machine)
    assert [each.send_s for each in both.rows] == [each.exposed_s for each in both.rows] == [2, 2]
    stages = plan_times(plan(SHAPE, pp=2, micro_batches=2), Machine(flops_per_s=24_576, bytes_per_s=1e9))
    assert stages.bubble == 1 / 3
    assert stages.step_s == pytest.approx(stages.compute_s * 3 / 2)
    alone = plan_times(plan(SHAPE, pp=2), Machine(flops_per_s=24_576, bytes_per_s=512))
    assert [each.exposed_s for each in alone.rows] == [1, 1]  # no other micro-batch is there to hide 512 B
    with pytest.raises(DlearnError, match="have to be more than 0"):
        Machine(flops_per_s=1, bytes_per_s={"dp": 0})
    with pytest.raises(DlearnError, match="no bytes_per_s for pp, only for dp, tp"):
        plan_times(plan(SHAPE, pp=2), machine)


# On real ranks ----------------------------------------------------------------------------------------------


def one_device(shape):
    """Gradients of all layers on one device, by autograd. The loss is the sum of y²."""
    layers = [[each.requires_grad_() for each in parallel_step.weights(shape, n)] for n in range(shape.layers)]
    x = parallel_step.inputs(shape).reshape(-1, shape.width)
    for columns, rows in layers:
        owner = torch.arange(len(x)) % len(columns)
        hidden = (x[:, None] @ columns[owner].mT).relu()
        x = (hidden @ rows[owner].mT)[:, 0]
    x.square().sum().backward()
    return [[each.grad for each in pair] for pair in layers]


def difference(shape, sharded=False, **ways):
    """Take a step; return the largest difference of a gradient to one device's, as a part of the largest."""
    found = parallel_step.train(shape, sharded=sharded, **ways)
    rank = parallel_step.MeshPlace(**{name: ways.get(name, 1) for name in ("pp", "dp", "ep", "tp")})
    whole, apart = one_device(shape), 0.0
    for number, pair in zip(rank.part(range(shape.layers), "pp"), found, strict=True):
        layer = parallel_step.CutLayer(shape, number, rank, sharded, False)
        for gradient, expected in zip(pair, parallel_step.cut(whole[number], rank, layer.routed), strict=True):
            own = layer.shard(expected) if sharded else expected
            apart = max(apart, float((gradient - own).abs().max() / own.abs().max()))
    return apart


def assert_exact(cluster, shape, backend, **ways):
    run = cluster.run(difference, shape, **ways)
    compared = plan(shape, **ways, backend=backend).compare(run.trace.within("step"))
    assert compared.exact, (ways, str(compared))
    assert max(run.results.values()) < 1e-5, ways
    return run.trace


def test_a_recorded_step_is_the_plan_to_the_byte_and_another_one_is_not():
    trace = assert_exact(Cluster(4, backend="dlearn_ring"), SHAPE, "dlearn_ring", tp=2, pp=2, micro_batches=2).within(
        "step"
    )
    other = plan(SHAPE, tp=2, pp=2, sequence_parallel=True).compare(trace)
    assert {key: size for key, size in other.residues.items() if size} == {("pp", rank): 256 for rank in range(4)}
    assert "rank 0 sends 256 B more than planned over pp" in str(other)
    swapped = PlanComparison(planned={("dp", 0): 8, ("dp", 1): 4}, recorded={("dp", 0): 4, ("dp", 1): 8})
    assert str(swapped).splitlines()[-1].split() == ["dp", "12", "12", "-4"]
    with pytest.raises(TraceError, match="the plan is for 8 ranks, the trace has 4"):
        plan(SHAPE, dp=8).compare(trace)
    assert [row["residue_bytes"] for row in analysis.plan(SHAPE, tp=4).compare(trace).records()][:1] == [512]


OPTIONS = ({}, {"sharded": True, "micro_batches": 2}, {"sequence_parallel": True}, {"sharded": True})


def meshes(ranks):
    """Every mesh of so many ranks with two options or, on 8 ranks, with one; models that can be divided."""
    sizes = [size for size in (1, 2, 4, 8) if size <= ranks]
    fitting = [each for each in product(sizes, repeat=4) if each[0] * each[1] * each[2] * each[3] == ranks]
    for number, (pp, dp, ep, tp) in enumerate(fitting):
        for more in range(1 if ranks == 8 else 4):
            options = OPTIONS[(number + more) % 4]
            if ep > 1:
                options = {key: value for key, value in options.items() if key != "sequence_parallel"}
            layers = {8: 16 if ep > 1 else 8}.get(pp, 8 if ep > 1 else 4)
            experts = max(4, ep) if ep > 1 else 0
            shape = ModelShape(
                layers=layers, width=6, hidden=16, batch=32, sequence=8 if experts else 2, experts=experts
            )
            yield shape, {"pp": pp, "dp": dp, "ep": ep, "tp": tp} | options


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("ranks", "backend"), [(2, "dlearn_ring"), (2, "gloo"), (4, "dlearn_ring"), (4, "gloo"), (8, "dlearn_ring")]
)
def test_every_mesh_that_fits_is_exact_and_right(ranks, backend):
    cluster = None
    for number, (shape, ways) in enumerate(meshes(ranks)):
        if number % 10 == 0:  # Ranks keep the threads of each mesh that they have had.
            cluster = Cluster(ranks, backend=backend)
        assert_exact(cluster, shape, backend, **ways)
