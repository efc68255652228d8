"""A trace as a walk: its messages and what ranks do by themselves, step by step, and what each rank holds after each.

Everything that a player or an animation shows is here, in words and numbers; nothing here draws.
"""

from dlearn.analysis.replay.steps import Change, StatePanel, Step, Walkthrough
from dlearn.analysis.replay.walkthrough import is_control, walkthrough

__all__ = ["Change", "StatePanel", "Step", "Walkthrough", "is_control", "walkthrough"]
