"""Collectives made of glass: each step is a message that a recording shows.

Each has `all_reduce(tensor)`, the ring also `reduce_scatter` and `all_gather`, the tree `broadcast` and
`reduce`. The ring is a backend, too: `Cluster(4, backend="dlearn_ring")`, or `init_process_group("dlearn_ring")`.
So is MPI: `Cluster(4, backend="mpi")`, or under mpiexec ("mpi4py", init_method="mpi4py://").
"""

from dlearn.collectives import backend, halving_doubling, ring, star, tree

__all__ = ["halving_doubling", "ring", "star", "tree"]
__dir__ = __all__.copy

backend.register()
