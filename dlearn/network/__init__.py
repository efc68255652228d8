"""A network of a chosen speed between the ranks of a cluster, made by a switch in user space, without root."""

from dlearn.network.link import Link
from dlearn.network.plan import Network

__all__ = ["Link", "Network"]
__dir__ = __all__.copy
