"""What a fork server of ranks imports: when it ends, so does everything below it.

The system then kills its ranks, maybe before they have ended their own children: these come here.
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
