"""From a trace to answers: every function takes a Trace and returns a frozen value. Nothing here draws or prints."""

from dlearn.analysis.hangs import Hang, hangs
from dlearn.analysis.joining import messages, operations
from dlearn.analysis.traffic import Traffic, traffic
from dlearn.analysis.words import Explanation, explain

__all__ = ["Explanation", "Hang", "Traffic", "explain", "hangs", "messages", "operations", "traffic"]
