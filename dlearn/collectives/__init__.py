"""Collectives made of glass: each step is a message that a recording shows.

`ring`, `halving_doubling`, `tree` and `star` have `all_reduce(tensor)` and what else fits them (`reduce_scatter`,
`all_gather`, `broadcast`, `reduce`), over the default process group or `group`. Ring and star are also backends of
torch: `Cluster(4, backend="dlearn_ring")`, or `init_process_group("dlearn_ring")` after this import.
"""

from dlearn.collectives import halving_doubling, ring, star, tree
from dlearn.collectives.backend import register

__all__ = ["halving_doubling", "ring", "star", "tree"]

register()
