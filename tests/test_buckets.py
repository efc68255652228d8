"""Which all-reduce carries which bucket of DDP."""

from traces import Job, tensor

from dlearn.analysis import operations
from dlearn.join.buckets import UNKNOWN, USED_MAP


def reduce(job, size, *, dtype="uint8", launcher="reducer", backward=0, **facts):
    job.collective(
        "all_reduce",
        inputs=(tensor(size, dtype=dtype),),
        launcher=launcher,
        backward=backward,
        phase="backward",
        **facts,
    )


def two_buckets(job, *, model=0, names="ab"):
    """Bucket 0 holds 100 B, bucket 1 holds 40 B."""
    first, second = names
    job.bucket(0, 0, {f"{first}.weight": 60, f"{first}.bias": 40}, count=2, model=model)
    job.bucket(0, 1, {f"{second}.weight": 40}, count=2, model=model)


def ready(job, *parameters, model=0, backward=0):
    for parameter in parameters:
        job.gradient(0, parameter, model=model, backward=backward)


def told(job):
    return [operation.what for operation in operations(job.load())]


def test_buckets_go_in_the_order_of_their_index_once_per_pass(tmp_path):
    job = Job(tmp_path, ranks=1)
    two_buckets(job)
    for backward in range(2):
        ready(job, "a.weight", "a.bias", backward=backward)
        reduce(job, 100, backward=backward)
        ready(job, "b.weight", backward=backward)
        reduce(job, 40, backward=backward)
    first = ["gradient of bucket 0: a.weight, a.bias", "gradient of bucket 1: b.weight"]
    assert told(job) == first * 2


def test_rebuilt_buckets_replace_the_first(tmp_path):
    job = Job(tmp_path, ranks=1)
    two_buckets(job)
    job.bucket(0, 0, {"b.weight": 40, "a.bias": 40})
    ready(job, "b.weight", "a.bias")
    reduce(job, 80)
    assert told(job) == ["gradient of bucket 0: b.weight, a.bias"]


def test_a_size_that_does_not_fit_is_unknown(tmp_path):
    job = Job(tmp_path, ranks=1)
    two_buckets(job)
    ready(job, "a.weight", "a.bias")
    reduce(job, 99)
    assert told(job) == [UNKNOWN]


def test_two_models_are_told_apart_by_what_is_ready(tmp_path):
    job = Job(tmp_path, ranks=1)
    two_buckets(job, model=0, names="ab")
    two_buckets(job, model=1, names="cd")
    ready(job, "c.weight", "c.bias", model=1)
    reduce(job, 100)
    assert told(job) == ["gradient of bucket 0: c.weight, c.bias"]


def test_two_models_that_are_both_ready_cannot_be_told_apart(tmp_path):
    job = Job(tmp_path, ranks=1)
    two_buckets(job, model=0, names="ab")
    two_buckets(job, model=1, names="cd")
    ready(job, "a.weight", "a.bias", model=0)
    ready(job, "c.weight", "c.bias", model=1)
    reduce(job, 100)
    assert told(job) == [UNKNOWN]


def test_a_bucket_whose_other_gradients_never_come_goes_all_the_same(tmp_path):
    """find_unused_parameters: a.bias took no part in this pass. Then the reducer sends its map of used parameters."""
    job = Job(tmp_path, ranks=1)
    two_buckets(job)
    ready(job, "a.weight")
    reduce(job, 100)
    ready(job, "b.weight")
    reduce(job, 40)
    reduce(job, 12, dtype="int32")
    assert told(job) == ["gradient of bucket 0: a.weight, a.bias", "gradient of bucket 1: b.weight", USED_MAP]


def test_a_bucket_that_no_rank_has_used_may_be_skipped(tmp_path):
    """With skip_all_reduce_unused_params; the used ones that cannot be mistaken for it keep their names."""
    job = Job(tmp_path, ranks=1)
    for index, (name, size) in enumerate({"a": 100, "dropped": 40, "c": 60, "d": 40}.items()):
        job.bucket(0, index, {name: size}, count=4, may_be_skipped=True)
    ready(job, "a", "c", "d")
    for size in (100, 60, 40):
        reduce(job, size)
    assert told(job) == ["gradient of bucket 0: a", "gradient of bucket 2: c", "gradient of bucket 3: d"]


def test_a_bucket_as_large_as_one_that_may_have_been_skipped_is_unknown(tmp_path):
    """Another rank may have used the dropped one: then it is that, and it goes first."""
    job = Job(tmp_path, ranks=1)
    for index, name in enumerate(("dropped", "b")):
        job.bucket(0, index, {name: 40}, count=2, may_be_skipped=True)
    ready(job, "b")
    reduce(job, 40)
    assert told(job) == [UNKNOWN]


def test_below_a_communication_hook_its_argument_says_the_bucket(tmp_path):
    job = Job(tmp_path, ranks=1)
    two_buckets(job)
    ready(job, "b.weight")
    reduce(job, 20, dtype="float16", launcher="comm hook", bucket_index=1)
    reduce(job, 20, dtype="float16", launcher="comm hook", bucket_index=5)
    assert told(job) == ["gradient of bucket 1: b.weight", UNKNOWN]


def test_on_a_thread_of_gloo_only_elimination_can_tell(tmp_path):
    one, two = Job(tmp_path / "one", ranks=1), Job(tmp_path / "two", ranks=1)
    one.bucket(0, 0, {"a.weight": 60})
    two_buckets(two)
    for job in (one, two):
        reduce(job, 60, launcher="", backward=None, thread="Dummy-1")
    reduce(two, 20, launcher="comm hook", bucket_index=1, backward=None, thread="Dummy-1")
    assert told(one) == ["gradient of bucket 0: a.weight"]
    assert told(two) == [UNKNOWN, "gradient of bucket 1: b.weight"], "or the hook itself, that keeps its number"


def test_the_user_s_own_calls_carry_no_bucket(tmp_path):
    job = Job(tmp_path, ranks=1)
    two_buckets(job)
    reduce(job, 100, launcher="")
    job.collective("all_reduce", size=100)
    assert told(job) == ["uint8[100]", "uint8[100]"]


def test_each_rank_s_buckets_are_its_own(tmp_path):
    """Rank 1's file knows no buckets: rank 0's answer stands for the operation."""
    job = Job(tmp_path, ranks=2)
    two_buckets(job)
    ready(job, "a.weight", "a.bias")
    reduce(job, 100)
    assert told(job) == ["gradient of bucket 0: a.weight, a.bias"]
