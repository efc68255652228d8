"""A trace as a picture: every function takes a Trace and returns matplotlib Axes. Nothing here counts or prints."""

from dlearn.draw.autograd import autograd
from dlearn.draw.breakdown import breakdown
from dlearn.draw.buckets import buckets
from dlearn.draw.costs import costs
from dlearn.draw.save import save
from dlearn.draw.scaling import scaling
from dlearn.draw.sequence import sequence
from dlearn.draw.timeline import timeline
from dlearn.draw.traffic import traffic

__all__ = ["autograd", "breakdown", "buckets", "costs", "save", "scaling", "sequence", "timeline", "traffic"]
