"""A picture inside a page: SVG as text, whose ids are its own even where several pictures stand in one page."""

from __future__ import annotations

import re
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from dlearn.draw.save import save

_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]*)\)")


def inline_svg(picture: Axes, *, prefix: str) -> str:
    """The figure as an <svg> element, as wide as the page lets it be; the figure itself is closed.

    Every id begins with `prefix`. Matplotlib's style sheet, which would hold for the whole page, is left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "picture.svg"
        save(picture, path)
        root = ET.fromstring(path.read_bytes())
    figure = picture.get_figure(root=True)
    if figure is not None:
        plt.close(figure)
    used: Counter[str] = Counter()
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}style", f"{{{_SVG}}}metadata"):
                parent.remove(child)
        for name, value in parent.attrib.items():
            parent.set(name, _own(name, value, prefix))
        if "id" in parent.attrib:  # Marks of ours name what something is, and several things may be the same.
            used[parent.attrib["id"]] += 1
            if used[parent.attrib["id"]] > 1:
                parent.attrib["id"] += f"-{used[parent.attrib['id']]}"
    for name in ("width", "height"):
        root.attrib.pop(name, None)
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _LINK)
    return ET.tostring(root, encoding="unicode")


def _own(name: str, value: str, prefix: str) -> str:
    """An attribute's value with the ids in it made this picture's own."""
    if name == "id" or (name in ("href", f"{{{_LINK}}}href") and value.startswith("#")):
        return f"#{prefix}{value[1:]}" if value.startswith("#") else f"{prefix}{value}"
    return _REFERENCE.sub(rf"url(#{prefix}\1)", value)
