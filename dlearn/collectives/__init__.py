"""Collectives made of glass: each step is a message that a recording shows.

`ring`, `halving_doubling`, `tree` and `star` have `all_reduce(tensor)`, the ring also `reduce_scatter` and
`all_gather`, the tree `broadcast` and `reduce`, over the default process group or `group`. The ring is a backend, too:
`Cluster(4, backend="dlearn_ring")`, or `init_process_group("dlearn_ring")` after this import. So is MPI, over mpi4py:
`init_process_group("mpi4py", init_method="mpi4py://")` under mpiexec, or `Cluster(4, backend="mpi")`.
"""

from dlearn.collectives import backend, halving_doubling, ring, star, tree

__all__ = ["halving_doubling", "ring", "star", "tree"]

backend.register()
