"""A trace as a picture: every function takes a Trace and returns matplotlib Axes. Nothing here counts or prints."""

from dlearn.draw.autograd_bands import autograd
from dlearn.draw.canvas import small
from dlearn.draw.film import film
from dlearn.draw.job_maps import groups, topology
from dlearn.draw.memory_areas import memory
from dlearn.draw.pipeline_lanes import pipeline
from dlearn.draw.save import save
from dlearn.draw.scaling_lines import scaling
from dlearn.draw.sequence import sequence
from dlearn.draw.step_rows import breakdown, buckets
from dlearn.draw.step_strip import steps
from dlearn.draw.timeline import timeline
from dlearn.draw.traffic_graph import traffic_graph
from dlearn.draw.traffic_matrix import traffic

__all__ = [
    "autograd", "breakdown", "buckets", "film", "groups", "memory", "pipeline", "save", "scaling",
    "sequence", "small", "steps", "timeline", "topology", "traffic", "traffic_graph",
]  # fmt: skip
__dir__ = __all__.copy
