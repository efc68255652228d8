"""A trace as a picture: every function takes a Trace and returns matplotlib Axes. Nothing here counts or prints."""

from dlearn.draw.autograd_bands import autograd
from dlearn.draw.breakdown_bars import breakdown
from dlearn.draw.bucket_rows import buckets
from dlearn.draw.canvas import small
from dlearn.draw.maps.group_map import groups
from dlearn.draw.maps.topology_map import topology
from dlearn.draw.memory_areas import memory
from dlearn.draw.save import save
from dlearn.draw.scaling_lines import scaling
from dlearn.draw.sequence import sequence
from dlearn.draw.step_strip import steps
from dlearn.draw.timeline import timeline
from dlearn.draw.traffic_graph import traffic_graph
from dlearn.draw.traffic_matrix import traffic

__all__ = [
    "autograd", "breakdown", "buckets", "groups", "memory", "save", "scaling", "sequence",
    "small", "steps", "timeline", "topology", "traffic", "traffic_graph",
]  # fmt: skip
__dir__ = __all__.copy
