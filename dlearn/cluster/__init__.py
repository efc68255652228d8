"""Start real ranks on this machine, run a function on them, bring back results, output, errors and the trace."""

from dlearn.cluster.cluster import Cluster
from dlearn.cluster.run import Run

__all__ = ["Cluster", "Run"]
