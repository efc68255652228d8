"""Pictures as files: the same bytes for the same picture, with its finding in words."""

import base64
import hashlib
import html
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dlearn.draw.palette import LINE_AT_NIGHT, ON_COLOR, ON_SHADE, at_night, plain, shade_at_night
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
_PATH, _HUNDREDTHS = re.compile(r'<path [^>]*?d="[^"]*"'), re.compile(r"(\.\d\d)\d+")
_COLOR = re.compile(r"(?:fill|stroke)(?:: |=\")(#[0-9a-f]{6})")
_WIDEST = 1.25  # How much larger than on paper a notebook with room for it shows a drawing.
_THEMES = "".join(
    f"body[data-jp-theme-light={light}] .dlearn-drawing{{color-scheme:{scheme}}}"
    for light, scheme in (("true", "light"), ("false", "dark"))
)
_NARROW_PX = 560  # Cells up to so wide show what is laid out for a column.
_FITS = "".join(
    f".dlearn-cell .dlearn-{name}{{display:{shown}!important}}"
    for name, shown in (("wide", "none"), ("narrow", "block"))
)
_MOST = 20_000  # Characters of a description.


class Drawing(Figure):
    """A figure that a notebook shows as SVG, in its theme's colours and as wide as its cell."""

    framed = False  # Whether it has grown by the title, legend and notes of its only axes.
    narrow: Callable[[], Axes] | None = None  # Draws the same for a column, which is titled:
    titled = ""

    def _repr_html_(self) -> str | None:
        return html_of(self)


def save(picture: Axes | Figure, path: str | os.PathLike[str]) -> None:
    """Write the figure as .svg, .png or .pdf, as its ending says; byte-identical for one matplotlib version.

    Text stays text: an svg can be searched, and its reader's font may be another than this machine's.
    """
    ending = Path(path).suffix.lower()
    if ending not in _METADATA:
        what = f"not as {ending or 'a file without ending'}"
        raise DlearnError(f"{Path(path).name!r}: a picture is saved as .svg, .png or .pdf, {what}")
    Path(path).write_bytes(svg_of(picture).encode() if ending == ".svg" else _content(figure_of(picture), ending))


def figure_of(picture: Axes | Figure) -> Figure:
    figure = picture if isinstance(picture, Figure) else picture.get_figure(root=True)
    if figure is None:
        raise DlearnError("these axes belong to no figure any more: draw them again, then save.")
    return figure


def svg_of(picture: Axes | Figure) -> str:
    """Return the figure as SVG; one of ours is dark where its reader's page is."""
    figure = figure_of(picture)
    # A hundredth of a point is enough: of the 160 kB of a picture with hatches a third goes.
    short = _PATH.sub(lambda path: _HUNDREDTHS.sub(r"\1", path[0]), _content(figure, ".svg").decode())
    svg = _described(short, finding_of(figure), description_of(figure))
    return svg.replace("</style>", f"{_night(svg)}</style>", 1) if isinstance(figure, Drawing) else svg


def _content(figure: Figure, ending: str) -> bytes:
    metadata = dict(_METADATA[ending])
    if ending in _DESCRIPTION:
        texts = {"Title": finding_of(figure), _DESCRIPTION[ending]: description_of(figure)}
        metadata |= {key: text for key, text in texts.items() if text}
    file = io.BytesIO()
    with matplotlib.rc_context(_SAME_BYTES):
        figure.savefig(file, format=ending[1:], metadata=metadata, bbox_inches="tight", dpi=120)
    return file.getvalue()


def _night(svg: str) -> str:
    """Return a rule for each colour of the svg, which holds where the page around it is dark."""
    # The ground is painted: a light page in a dark system would else show light text on white.
    rules, is_scale = [f"text{{fill:{at_night('#000000', least=4.5)}}}"], 'id="cells"' in svg
    cells = ':is(#cells,[id^="key of cells"])'  # What explains a scale is turned over with it.
    for color in sorted(set(_COLOR.findall(svg))):
        text, shape, shade = at_night(color, least=4.5), at_night(color, least=3), shade_at_night(color)
        if color not in ON_COLOR:
            rules.append(f'text[style*="fill: {color}"]{{fill:{shade if color in ON_SHADE else text}!important}}')
        for part in ("fill", "stroke"):
            if is_scale:
                rules.append(f'{cells}>[style*="{part}: {color}"]{{{part}:{shade}!important}}')
            if color != ON_COLOR[0]:
                seen = shape if part == "fill" else at_night(color, least=LINE_AT_NIGHT)
                rules.append(f':not(text,{cells}>*)[style*="{part}: {color}"]{{{part}:{seen}!important}}')
        rules.append(f'[fill="{color}"]{{fill:{shape}}}')
    return f"@media(prefers-color-scheme:dark){{{''.join(rules)}}}"


def html_of(figure: Figure) -> str:
    """Return the figure as an image; a `Drawing` that was not changed, as its cell has room."""
    style, narrow = f"<style>{_THEMES}", getattr(figure, "narrow", None)
    if narrow is None or finding_of(figure) != figure.titled:  # type: ignore[attr-defined]
        return f"{style}</style>{_image(figure)}"
    with closed_after():
        other = _image(figure_of(narrow()), "narrow", "none")
    fits = f".dlearn-cell{{container-type:inline-size}}@container(max-width:{_NARROW_PX}px){{{_FITS}}}"
    return f'{style}{fits}</style><div class="dlearn-cell">{_image(figure)}{other}</div>'


def _image(figure: Figure, layout: str = "wide", display: str = "block") -> str:
    """Return an image whose ids clash with no other, and which pages without inline SVG show too."""
    svg = svg_of(figure)
    width_pt = float(svg.split('width="', 1)[1].split("pt", 1)[0])
    text = html.escape(f"{finding_of(figure)}. {description_of(figure)}")
    # All drawings of a notebook have the same scale, also those that fill only a part of their figure.
    share = min(100, width_pt / figure.get_figwidth() / 0.72)
    width = f"width:{share:.0f}%;max-width:{_WIDEST * width_pt / 0.75:.0f}px"
    shown = f'class="dlearn-drawing dlearn-{layout}" alt="{text}" style="display:{display};{width}"'
    data = base64.b64encode(svg.encode()).decode()
    return f'<img {shown} src="data:image/svg+xml;base64,{data}">'


@contextmanager
def closed_after() -> Iterator[None]:
    """Close the figures that are made in this context, so that a notebook shows none of them once more."""
    before = plt.get_fignums()
    try:
        yield
    finally:
        for number in set(plt.get_fignums()).difference(before):
            plt.close(number)


def finding_of(figure: Figure) -> str:
    """Return the titles of the figure and of its axes, on one line."""
    titles = [figure.get_suptitle(), *(ax.get_title(loc) for ax in figure.axes for loc in ("left", "center", "right"))]
    return plain("; ".join(" ".join(title.split()) for title in titles if title), most=_MOST)


def description_of(figure: Figure) -> str:
    """Return what `canvas.describe` said of each of its axes."""
    return plain(" ".join(str(ax.get_label()) for ax in figure.axes if ax.get_label()), most=_MOST)


def _described(svg: str, title: str, description: str) -> str:
    """Return the svg as one image with a name and a description for screen readers (W3C, SVG-AAM)."""
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
