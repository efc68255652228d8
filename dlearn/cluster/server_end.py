"""What a fork server of ranks imports: when it ends, so does everything below it.

It ends with the notebook, and the system then kills its ranks (`descendants.end_with_fork_server`), maybe before one
of them has ended its own children. What ranks leave comes to the server, and is ended here.
"""

import atexit
import os
import warnings

from dlearn.cluster import descendants

descendants.adopt()
# multiprocessing's server sees off what it has not forked, too, and is surprised.
warnings.filterwarnings("ignore", message="forkserver: waitpid returned unexpected pid")


def end() -> None:
    """The server has nothing else to tidy up. (triton, which torch 2.15 brings, would list there what it leaks.)"""
    descendants.end_children(os.getpid())
    os._exit(0)


atexit.register(end)
