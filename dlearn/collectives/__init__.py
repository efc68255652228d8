"""Collectives in readable Python: each step is a message that a recording shows.

Every algorithm has `all_reduce(tensor)`. The ring has `reduce_scatter` and `all_gather` as well, the
tree `broadcast` and `reduce`. The ring is also a backend of torch: `Cluster(4, backend="dlearn_ring")`,
or `init_process_group("dlearn_ring")` after `import dlearn.collectives`.
"""

import dlearn.backends  # noqa: F401  (it registers the ring with torch)
from dlearn.collectives import halving_doubling, ring, star, tree

__all__ = ["halving_doubling", "ring", "star", "tree"]
__dir__ = __all__.copy
