"""All exercises, by the name that `lessons.check` takes."""

from dlearn.course.exercise import Exercise
from dlearn.course.exercises import ACCUMULATION, DDP, RING, SERVER, SHARDED, TREE
from dlearn.course.tensor_parallel import COLUMN_ROW
from dlearn.course.top_k import TOP_K
from dlearn.course.two_machines import HIERARCHICAL

EXERCISES: dict[str, Exercise] = {
    each.id: each for each in (RING, TREE, HIERARCHICAL, DDP, ACCUMULATION, SERVER, TOP_K, SHARDED, COLUMN_ROW)
}
