"""Pictures as files: the same picture gives the same bytes, so that a changed file means a changed picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlearn.errors import DlearnError

# What each format would write of the moment or the version it was made with.
_METADATA: dict[str, dict[str, Any]] = {
    ".svg": {"Date": None, "Creator": None},
    ".png": {"Software": None},
    ".pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
ENDINGS = tuple(_METADATA)
_SAME_BYTES: Any = {"svg.hashsalt": "dlearn", "svg.fonttype": "none", "pdf.fonttype": 42}


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
    with matplotlib.rc_context(_SAME_BYTES):
        figure.savefig(path, format=ending[1:], metadata=_METADATA[ending], bbox_inches="tight", dpi=120)
