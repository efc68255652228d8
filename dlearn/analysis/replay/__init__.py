"""A trace as a walk of steps, with what each rank holds after each step; nothing here draws."""

from dlearn.analysis.replay.steps import Change, StatePanel, Step, Walkthrough
from dlearn.analysis.replay.walkthrough import walkthrough

__all__ = ["Change", "StatePanel", "Step", "Walkthrough", "walkthrough"]
