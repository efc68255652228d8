"""All exercises, by the name that `lessons.check` takes."""

from dlearn.course.diagnosis import FIVE_HANGS
from dlearn.course.exercise import Exercise
from dlearn.course.exercises import ACCUMULATION, DDP, RING, SERVER, SHARDED, TREE
from dlearn.course.expert_dispatch import EXPERTS
from dlearn.course.fsdp_by_hand import FSDP
from dlearn.course.resharding import CHECKPOINT
from dlearn.course.ring_attention import ATTENTION
from dlearn.course.stage_order import ONE_F_ONE_B
from dlearn.course.tensor_parallel import COLUMN_ROW
from dlearn.course.token_ring import TOKEN
from dlearn.course.top_k import TOP_K
from dlearn.course.two_machines import HIERARCHICAL

ALL = (
    *(TOKEN, RING, TREE, HIERARCHICAL, DDP, ACCUMULATION, SERVER, TOP_K),
    *(SHARDED, FSDP, COLUMN_ROW, EXPERTS, ATTENTION, ONE_F_ONE_B, CHECKPOINT, FIVE_HANGS),
)
EXERCISES: dict[str, Exercise] = {each.id: each for each in ALL}
