"""A trace to step through: every function takes a Trace and returns a value that a notebook shows, with no server."""

from dlearn.play.explore import Explorer, explore
from dlearn.play.player import Player, player

__all__ = ["Explorer", "Player", "explore", "player"]
