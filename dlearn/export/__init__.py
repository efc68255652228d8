"""A trace in other tools' formats: every function takes a Trace and returns what stands in the file, as text but for
a GIF. The caller chooses the file."""

from dlearn.export.mermaid import mermaid
from dlearn.export.pages import gif, html
from dlearn.export.perfetto import perfetto

__all__ = ["gif", "html", "mermaid", "perfetto"]
__dir__ = __all__.copy
