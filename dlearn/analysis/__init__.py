"""From a trace to answers: every function takes a Trace and returns a frozen value. Nothing here draws or prints."""

from dlearn.analysis.confirming import messages
from dlearn.analysis.hangs import Hang, hangs
from dlearn.analysis.joining import operations
from dlearn.analysis.reconcile import Reconciliation, reconcile
from dlearn.analysis.traffic import Traffic, traffic
from dlearn.analysis.words import Explanation, explain

__all__ = [
    "Explanation",
    "Hang",
    "Reconciliation",
    "Traffic",
    "explain",
    "hangs",
    "messages",
    "operations",
    "reconcile",
    "traffic",
]
