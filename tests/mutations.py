"""For each question a change that makes its claim false: then a cell that answers it has to fail.

A mutation replaces a text in the first code cell of the lesson that has it. The lessons' cells that answer a question
are tagged with its id. What cannot be mutated so is named below, with the reason.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutation(NamedTuple):
    id: str
    old: str
    new: str


MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "quickstart": (Mutation("Q11", "Cluster(3)", "Cluster(2)"),),
    "send_and_receive": (
        Mutation("MP1", "    dist.send(mine, dst=other)\n", "    dist.isend(mine, dst=other)\n"),
        Mutation("DM1", "run(compare, -1, SIZES)", "run(compare, +1, SIZES)"),
    ),
    "ddp_step_by_step": (
        Mutation("DD15", "lr=0.1", "lr=0.05"),
        Mutation("DD14", "torch.manual_seed(dist.get_rank())", "torch.manual_seed(0)"),
        Mutation("DD3", '{"bucket_cap_mb": 0}', '{"bucket_cap_mb": 25}'),
        Mutation("Q6", "bucket_cap_mb=models.SMALL_BUCKETS", "bucket_cap_mb=25"),
    ),
    "ddp_overlap": (
        Mutation(
            "DD2",
            "return self.layers(x)",
            "for layer in reversed(self.layers):\n            x = layer(x)\n        return x",
        ),
        Mutation("DD4", "= early(0), early(4)", "= early(4), early(4)"),
    ),
    "gradient_accumulation": (
        Mutation("DD6", "nullcontext() if last else model.no_sync()", "nullcontext()"),
        Mutation("Q5", 'model.no_sync() if "forward" in inside', 'model.no_sync() if "backward" in inside'),
    ),
}

UNTRIED: dict[str, tuple[Mutation, ...]] = {
    "collectives": (
        Mutation("MP2", "dist.all_gather_single(whole, part)", "dist.all_reduce(whole)"),
        Mutation("Q8", "dist.reduce_scatter_single(part, whole)", "ring.reduce_scatter(part, whole)"),
    ),
    "ddp_hooks": (
        Mutation("DD15", "optimizer.step()", "optimizer.step()\n            dist.all_reduce(loss.detach())"),
        Mutation(
            "DD18",
            'parameter.register_hook(note("tensor", name))\n'
            '        parameter.register_post_accumulate_grad_hook(note("after accumulation", name))',
            'parameter.register_hook(note("after accumulation", name))\n'
            '        parameter.register_post_accumulate_grad_hook(note("tensor", name))',
        ),
        Mutation("DD16", "(WithNorm(), **options)", "(WithNorm(), forward_sync_buffers=False)"),
        Mutation("Q3", '{"find_unused_parameters": True, "make": WithSpare}', "{}"),
        Mutation("Q7", "gradient_as_bucket_view=view", "gradient_as_bucket_view=False"),
    ),
    "sum_or_average": (
        Mutation("SA1", "kept = Cluster(2).run(epoch, BATCH)", "kept = Cluster(2).run(epoch, BATCH // 2)"),
        Mutation("SA2", "run(epoch, 2 * BATCH)", "run(epoch, BATCH)"),
        Mutation("SA3", "dist.reduce(summed, dst=0)", "dist.reduce(summed, dst=0, op=dist.ReduceOp.MAX)"),
        Mutation("SA4", 'if combine == "sum":', 'if combine != "sum":'),
        Mutation("SA5", "run(epoch, BATCH, 2 * small)", "run(epoch, BATCH, small)"),
        Mutation("SA6", "torch.optim.Adam(p, lr=0.01)", "torch.optim.SGD(p, lr=0.01)"),
        Mutation("SA7", "dist.all_reduce(torch.zeros(P_ELEMENTS))", "dist.broadcast(torch.zeros(P_ELEMENTS), src=0)"),
    ),
    "hogwild": (Mutation("PS6", 'if len(board["waiting"]) == TRAINERS:', 'if board["waiting"]:'),),
    "model_parallel": (
        Mutation(
            "DM4",
            "y = remote_conv.remote().forward(torch.ones(B, 3, 16, 16)).to_here()",
            "h = remote_conv.remote().forward(torch.ones(B, 3, 16, 16))\n        y = h.to_here() + h.to_here()",
        ),
        Mutation("DM5", "x = torch.ones(B, 3, 16, 16", "x = torch.ones(8, 3, 16, 16"),
        Mutation("DM7", '"sum": torch.sum', '"sum": lambda y: y.square().sum()'),
        Mutation("DM8", "size = split.Size(C=8, H=16, W=16)", "size = split.Size(C=8, H=8, W=16)"),
    ),
    "distributed_autograd": (
        Mutation("PS2", "forward(x).sum()", "forward(x.clone().requires_grad_()).sum()"),
        Mutation(
            "DM6",
            "forward(x).to_here()\n    return (out * 2).sum() + (out * 3).sum()",
            "forward(x)\n    return (out.to_here() * 2).sum() + (out.to_here() * 3).sum()",
        ),
        Mutation("Q10", '("Parameter", own, own)', '("Parameter", own, own * 1)'),
    ),
    "embedding_server": (
        Mutation("PS4", "return self.bag(indices, offsets)", "return torch.cat([self.bag(indices, offsets)] * 2)"),
    ),
    "compression": (
        Mutation("DD12", '"fp16": lambda: (None, fp16_compress_hook)', '"fp16": lambda: None'),
        Mutation("DM3", 'if what == "ZeRO":', 'if what != "SGD":'),
    ),
    "mpi_messages": (
        Mutation("MP1", "[1_000, 1_000_000]", "[1_000_000, 1_000_000]"),
        Mutation("MP2", "comm.Bcast(block)", "comm.Bcast(block, root=1)"),
        Mutation("MP7", 'over_mpi = Cluster(3, backend="mpi")', "over_mpi = Cluster(3)"),
        Mutation("Q13", "bytearray(1000 * comm.rank)", "bytearray(2000 * comm.rank)"),
    ),
    "synchronous_or_asynchronous": (
        Mutation("MP3", "run(sgd.all_reduced, STEPS, SLOW_MS)", "run(sgd.local, STEPS, 5, SLOW_MS)"),
        Mutation(
            "MP4",
            "cluster.run(sgd.asynchronous, GRADIENTS, SLOW_MS)",
            "cluster.run(partial(sgd.gathered, STEPS, slow_ms=SLOW_MS))",
        ),
        Mutation("MP5", "cluster.run(sgd.gathered, STEPS, sgd.BareList)", "cluster.run(sgd.gathered, STEPS)"),
    ),
    "mpi_sgd": (Mutation("MP6", "(handshake.interleaved)", "(handshake.interleaved, handshake.from_one)"),),
    "sharding": (
        Mutation("Q8", 'reshard_after_forward=how == "FSDP"', "reshard_after_forward=False"),
        Mutation("Q15", "dist.all_reduce(gradient)\n        return gradient", "return gradient"),
    ),
    "pipeline": (Mutation("Q14", "cluster.run(train, Schedule1F1B, m)", "cluster.run(train, ScheduleGPipe, m)"),),
}
"""Written, their cells tagged, and not yet seen to fail: a lesson moves up once its mutations have been run."""

_PAPER = "a claim of the paper: ddp_claims runs it for minutes, and its verdicts are tried in tests/test_ddp_paper*.py"
_LATER = "its lesson is not tagged yet"
WITHOUT: dict[str, str] = {
    **dict.fromkeys(("DD1", "DD7", "DD8", "DD9", "DD10", "DD11", "DD13", "DD17"), _PAPER),
    **dict.fromkeys(("PS1", "PS3", "PS5", "PS7", "Q9", "Q12"), f"parameter_server: {_LATER}"),
    **dict.fromkeys(("DD5", "Q4"), f"museum_of_hangs: {_LATER}"),
    **dict.fromkeys(("Q1", "Q2"), f"trees_and_rings: {_LATER}"),
    "DM2": f"ring_all_reduce: {_LATER}",
}
"""Questions without a mutation, and why."""
