"""From a trace to answers: every function takes a Trace and returns a frozen value. Nothing here draws or prints.

`assert_...` returns nothing, or raises a TrafficError that shows what is wrong: for exercises and for tests.
"""

from dlearn.analysis.bandwidth import Bandwidth, Bandwidths, bandwidth, bandwidths
from dlearn.analysis.breakdown import Breakdown, breakdown
from dlearn.analysis.bucket_times import BucketTimes, bucket_times
from dlearn.analysis.comparing import Comparison, compare
from dlearn.analysis.confirming import messages
from dlearn.analysis.freshness import assert_fresh, assert_reduces
from dlearn.analysis.grading import assert_traffic
from dlearn.analysis.graph import autograd_graph
from dlearn.analysis.hangs import Hang, hangs
from dlearn.analysis.iteration import Iteration, iteration, iterations
from dlearn.analysis.joining import operations
from dlearn.analysis.mismatches import Mismatch, mismatches
from dlearn.analysis.overlap import Overlap, overlap
from dlearn.analysis.reconcile import Reconciliation, reconcile
from dlearn.analysis.scaling import Scaling, scaling
from dlearn.analysis.traffic import Traffic, WireTraffic, measured_traffic, predicted_traffic, traffic
from dlearn.analysis.words import Explanation, explain

__all__ = [
    "Bandwidth",
    "Bandwidths",
    "Breakdown",
    "BucketTimes",
    "Comparison",
    "Explanation",
    "Hang",
    "Iteration",
    "Mismatch",
    "Overlap",
    "Reconciliation",
    "Scaling",
    "Traffic",
    "WireTraffic",
    "assert_fresh",
    "assert_reduces",
    "assert_traffic",
    "autograd_graph",
    "bandwidth",
    "bandwidths",
    "breakdown",
    "bucket_times",
    "compare",
    "explain",
    "hangs",
    "iteration",
    "iterations",
    "measured_traffic",
    "messages",
    "mismatches",
    "operations",
    "overlap",
    "predicted_traffic",
    "reconcile",
    "scaling",
    "traffic",
]
