"""A trace to step through: every function takes a Trace and returns a value that a notebook shows, with no server."""

from dlearn.play.player import Player, player
from dlearn.play.strip import Strip, strip

__all__ = ["Player", "Strip", "player", "strip"]
__dir__ = __all__.copy
