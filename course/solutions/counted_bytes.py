"""Exercise `plan_bytes`: three right answers, and wrong ones with what the grade says of them."""


def all_reduced(n, size):
    """What one of n ranks sends in a ring all-reduce of so many bytes."""
    return 2 * (n - 1) * size // n


def by_place(shape, dp, tp, pp, rank):
    stage = rank // (dp * tp)
    layers = shape.layers // pp
    weights = 2 * shape.width * shape.hidden * layers * shape.number_bytes // tp
    activations = shape.batch // dp * shape.sequence * shape.width * shape.number_bytes
    boundaries = (stage > 0) + (stage < pp - 1)
    return {
        "dp": all_reduced(dp, weights),
        "tp": 2 * layers * all_reduced(tp, activations),
        "pp": boundaries * activations,
    }


def share_of_all(shape, dp, tp, pp, rank):
    """From what all ranks together send; a pipeline's two ends send half as much as the stages between."""
    ranks, numbers = dp * tp * pp, shape.number_bytes
    tokens = shape.batch * shape.sequence
    model = shape.layers * 2 * shape.width * shape.hidden
    stage, last = rank // (dp * tp), pp - 1
    sends = {(True, True): 0, (True, False): 1, (False, True): 1, (False, False): 2}
    return {
        "dp": 2 * (dp - 1) * model * numbers / ranks,
        "tp": 4 * (tp - 1) * shape.layers * tokens * shape.width * numbers / ranks,
        "pp": sends[stage == 0, stage == last] * tokens * shape.width * numbers / dp,
    }


def by_micro_batch(shape, dp, tp, pp, rank, micro_batches=2):
    """One micro-batch after the other, as the program sends them."""
    stage = rank // tp // dp
    one = shape.batch // dp // micro_batches * shape.sequence * shape.width * shape.number_bytes
    sent = {"dp": 0, "tp": 0, "pp": 0}
    for _ in range(micro_batches):
        for phase in ("forward", "backward"):
            sent["tp"] += shape.layers // pp * all_reduced(tp, one)
            if stage != (pp - 1 if phase == "forward" else 0):
                sent["pp"] += one
    for _ in range(shape.layers // pp):
        for _ in ("columns", "rows"):
            sent["dp"] += all_reduced(dp, shape.width * shape.hidden // tp * shape.number_bytes)
    return sent


def but(**changes):
    """Return a submission that is right but for some dimensions."""

    def wrong(shape, dp, tp, pp, rank):
        right = by_place(shape, dp, tp, pp, rank)
        return right | {name: change(shape, dp, tp, pp, right[name]) for name, change in changes.items()}

    return wrong


def no_number(shape, dp, tp, pp, rank):
    return sum(by_place(shape, dp, tp, pp, rank).values())


whole_model = but(dp=lambda shape, dp, tp, pp, right: right * tp * pp)
forward_only = but(tp=lambda shape, dp, tp, pp, right: right // 2)
every_layer = but(tp=lambda shape, dp, tp, pp, right: right * pp)
whole_batch = but(tp=lambda shape, dp, tp, pp, right: right * dp)
part_of_activations = but(pp=lambda shape, dp, tp, pp, right: right // tp)
no_value = but(pp=lambda shape, dp, tp, pp, right: None)
in_numbers = but(dp=lambda shape, dp, tp, pp, right: right // shape.number_bytes)


def ends_as_the_middle(shape, dp, tp, pp, rank):
    right = by_place(shape, dp, tp, pp, rank)
    activations = shape.batch // dp * shape.sequence * shape.width * shape.number_bytes
    return right | {"pp": 2 * activations if pp > 1 else 0}


RIGHT = (by_place, share_of_all, by_micro_batch)
WRONG = (
    (no_number, "is no dict with the keys dp, tp and pp"),
    (no_value, "has a value that is no number"),
    (in_numbers, "dp 2, tp 1, pp 1: rank 0 sends"),
    (forward_only, "dp 1, tp 2, pp 1: rank 0 sends"),
    (ends_as_the_middle, "dp 1, tp 1, pp 3: rank 0 sends"),
    (whole_model, "dp 2, tp 2, pp 1: rank 0 sends"),
    (whole_batch, "dp 2, tp 2, pp 1: rank 0 sends"),
    (every_layer, "dp 1, tp 2, pp 2: rank 0 sends"),
    (part_of_activations, "dp 1, tp 2, pp 2: rank 0 sends"),
)
