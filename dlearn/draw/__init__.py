"""A trace as a picture: every function takes a Trace and returns matplotlib Axes. Nothing here counts or prints."""

from dlearn.draw.autograd import autograd
from dlearn.draw.breakdown import breakdown
from dlearn.draw.buckets import buckets
from dlearn.draw.reconcile import reconcile
from dlearn.draw.save import save
from dlearn.draw.scaling import scaling
from dlearn.draw.sequence import sequence
from dlearn.draw.timeline import timeline
from dlearn.draw.traffic import traffic
from dlearn.draw.traffic_graph import traffic_graph

__all__ = [
    "autograd",
    "breakdown",
    "buckets",
    "reconcile",
    "save",
    "scaling",
    "sequence",
    "timeline",
    "traffic",
    "traffic_graph",
]
