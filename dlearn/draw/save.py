"""Pictures as files: the same picture gives the same bytes, so that a changed file means a changed picture.

Each carries its finding and its description, for readers who do not see it and for programs that search.
"""

from __future__ import annotations

import hashlib
import html
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlearn.draw.canvas import plain
from dlearn.errors import DlearnError

# What each format would write of the moment or the version it was made with.
_METADATA: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
ENDINGS = tuple(_METADATA)
_DESCRIPTION = {".png": "Description", ".pdf": "Subject"}
_SAME_BYTES: Any = {"svg.hashsalt": "dlearn", "svg.fonttype": "none", "pdf.fonttype": 42}
_MOST = 20_000
"""Characters of a description."""


def save(picture: Axes | Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure as .svg, .png or .pdf, as its ending says; byte-identical for one matplotlib version.

    Text stays text: an svg can be searched, and its reader's font may be another than this machine's.
    """
    ending = Path(path).suffix.lower()
    if ending not in _METADATA:
        raise DlearnError(
            f"{Path(path).name!r}: a picture is saved as .svg, .png or .pdf, not as {ending or 'a file without ending'}"
        )
    figure = picture if isinstance(picture, Figure) else picture.get_figure(root=True)
    if figure is None:
        raise DlearnError("these axes belong to no figure any more: draw them again, then save.")
    title, description = finding_of(figure), description_of(figure)
    metadata = dict(_METADATA[ending])
    if ending in _DESCRIPTION:
        metadata |= {key: text for key, text in (("Title", title), (_DESCRIPTION[ending], description)) if text}
    file = io.BytesIO()
    with matplotlib.rc_context(_SAME_BYTES):
        figure.savefig(file, format=ending[1:], metadata=metadata, bbox_inches="tight", dpi=120)
    content = file.getvalue()
    Path(path).write_bytes(content if ending in _DESCRIPTION else _told(content.decode(), title, description).encode())


def png_of(draw: Callable[[], Axes]) -> tuple[str, bytes]:
    """The finding and the PNG of the picture that `draw` makes, for a page to show; no figure stays open."""
    before = plt.get_fignums()
    try:
        figure = draw().get_figure(root=True)
        assert figure is not None
        file = io.BytesIO()
        # Every drawing fits its figure: looking once more for what sticks out would cost a third of the time.
        figure.savefig(file, format="png", dpi=110)
        return finding_of(figure), file.getvalue()
    finally:
        for number in set(plt.get_fignums()).difference(before):
            plt.close(number)


def finding_of(figure: Figure) -> str:
    """The titles of the figure and of its axes, on one line."""
    titles = [figure.get_suptitle(), *(ax.get_title(loc) for ax in figure.axes for loc in ("left", "center", "right"))]
    return plain("; ".join(" ".join(title.split()) for title in titles if title), most=_MOST)


def description_of(figure: Figure) -> str:
    """What `canvas.describe` was told of each of its axes."""
    return plain(" ".join(str(ax.get_label()) for ax in figure.axes if ax.get_label()), most=_MOST)


def _told(svg: str, title: str, description: str) -> str:
    """The svg as one image with a name and a description, as a screen reader reads it (W3C, SVG-AAM)."""
    # Several svgs may stand in one page: ids that differ where the texts do.
    key = hashlib.sha256(f"{title}\n{description}".encode()).hexdigest()[:12]
    parts = [("labelledby", "title", title), ("describedby", "desc", description)]
    names = "".join(f' aria-{how}="{tag}-{key}"' for how, tag, text in parts if text)
    texts = "".join(
        f'\n <{tag} id="{tag}-{key}">{html.escape(text, quote=False)}</{tag}>' for _, tag, text in parts if text
    )
    start = svg.index("<svg ")
    end = svg.index(">", start)
    return f'{svg[:end]} role="img"{names}>{texts}{svg[end + 1 :]}'
