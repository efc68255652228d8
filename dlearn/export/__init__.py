"""A trace as text in other tools' formats: every function takes a Trace. The caller chooses the file."""

from dlearn.export.html import html
from dlearn.export.mermaid import mermaid
from dlearn.export.perfetto import perfetto
from dlearn.export.shiviz import shiviz
from dlearn.export.slides import slides

__all__ = ["html", "mermaid", "perfetto", "shiviz", "slides"]
