"""mpi4py: classes that stand in the place of its own while a recording is on."""
