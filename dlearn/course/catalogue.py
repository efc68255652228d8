"""All exercises, by the name that `lessons.check` takes."""

from dlearn.course.by_sends import HIERARCHICAL, RING, TOKEN, TREE
from dlearn.course.diagnosis import FIVE_HANGS
from dlearn.course.exercise import Exercise
from dlearn.course.resharding import CHECKPOINT
from dlearn.course.split_layers import ATTENTION, COLUMN_ROW, EXPERTS, FSDP, ONE_F_ONE_B
from dlearn.course.training_loops import ACCUMULATION, DDP, SERVER, SHARDED, TOP_K

ALL = (
    *(TOKEN, RING, TREE, HIERARCHICAL, DDP, ACCUMULATION, SERVER, TOP_K),
    *(SHARDED, FSDP, COLUMN_ROW, EXPERTS, ATTENTION, ONE_F_ONE_B, CHECKPOINT, FIVE_HANGS),
)
EXERCISES: dict[str, Exercise] = {each.id: each for each in ALL}
