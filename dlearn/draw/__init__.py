"""A trace as a picture: every function takes a Trace and returns matplotlib Axes. Nothing here counts or prints."""

from dlearn.draw.autograd_bands import autograd
from dlearn.draw.breakdown_bars import breakdown
from dlearn.draw.bucket_rows import buckets
from dlearn.draw.reconcile_pairs import reconcile
from dlearn.draw.save import save
from dlearn.draw.scaling_lines import scaling
from dlearn.draw.sequence import sequence
from dlearn.draw.timeline import timeline
from dlearn.draw.traffic_graph import traffic_graph
from dlearn.draw.traffic_matrix import traffic

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
