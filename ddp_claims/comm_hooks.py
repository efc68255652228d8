"""The round-robin hook. DDP checks its annotations, so that these must not be postponed."""

from collections.abc import Callable, Sequence
from itertools import cycle

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket, ProcessGroup
from torch.futures import Future


def round_robin(groups: Sequence[ProcessGroup]) -> Callable[[object, GradBucket], Future[Tensor]]:
    """Dispatch the buckets to several process groups in turn, as torch's own round-robin groups did, now removed.

    All groups have all ranks. Every rank must call with the same buckets in the same order, which DDP sees to.
    """
    turns = cycle(groups)

    def hook(_: object, bucket: GradBucket) -> Future[Tensor]:
        group = next(turns)
        work = dist.all_reduce(bucket.buffer().div_(group.size()), group=group, async_op=True)
        assert work is not None
        future: Future[list[Tensor]] = work.get_future()
        return future.then(lambda done: done.value()[0])

    return hook
