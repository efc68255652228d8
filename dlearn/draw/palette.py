"""One look per operation, the same in every picture, one line per way of knowing, and text that fits.

Many colours are those of Okabe and Ito (Color Universal Design, 2008); people with any colour vision can tell any two
looks apart (tests/test_palette.py). The alphabet of all pictures, with its reasons: docs/pictures.md.
"""

import re
from bisect import bisect_right
from collections.abc import Sequence
from colorsys import hls_to_rgb, rgb_to_hls
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from matplotlib.colors import to_hex, to_rgb
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.textpath import TextToPath

from dlearn.events.source import in_use
from dlearn.join.ends import family_of_op
from dlearn.join.tables.operation_table import Operation

TEXT_PT = 9.0
TITLE_PT = 11.5
SMALLEST_PT = 8.0  # Smaller text cannot be read from a projector, nor at half width.
MOST_CHARACTERS = 40
_NUMBER_AND_UNIT = re.compile(r"(\d) (?=(?:[kMGT]?B|[mµ]?s)\b)")
_ROUNDED = 1.025  # A line may become so much wider on a screen: letters begin at whole pixels.
INK = "#222222"
FAINT = "#707070"
LANE = "#f4f4f4"
WORK = "#7a9a3a"  # The late part of a backward pass, in a pipeline that splits it.
WORKS = FORWARD, BACKWARD = "#e2ebcf", "#bdd096"  # Computing, and spans of one kind and the next.
OPTIMIZER = "#dcd6b0"
GROUNDS = {"forward": FORWARD, "backward": BACKWARD, "optimizer": OPTIMIZER}  # Behind bars.
WHOLE = "#FFD447"  # A piece that has the whole result; before, it has its operation's hue.
MISSING = "#d00000"
GRID = "#e6e6e6"
CHOSEN, HELD = "#dbe9ff", "#b7d3f5"  # The current step of a walk, and what ranks hold in it.
TO_ITSELF = "#d9d9d9"
COUNTED = "#9a9a9a"
BYTE_SHADES = ("#eaf3fa", "#56B4E9", "#0072B2", "#003a5c")
LIGHT = {"ink": INK, "paper": "#fff", "faint": FAINT, "missing": MISSING, "mark": CHOSEN, "fill": HELD}
DARK = {
    "ink": GRID, "paper": "#161616", "faint": "#a0a0a0", "missing": "#ffa0a0", "mark": "#27406b", "fill": "#2f5487",
}  # fmt: skip
"""The player's colours on light and dark pages."""
NIGHT = "#111111"  # The paper of a drawing on a dark page: that of JupyterLab's dark theme.
LINE_AT_NIGHT = 5.5  # Contrast of edges and hatches with NIGHT: seen (3 : 1) on the pale fill, too.
_TWENTIETHS = [part / 20 for part in range(21)]
_AT_NIGHT = {INK: DARK["ink"], "#000000": DARK["ink"], FAINT: DARK["faint"], MISSING: DARK["missing"]}
WAITING_HATCH = "////"
SERIES = ("#0072B2", "#C07000", "#009E73", "#CC79A7", "#004D40", "#332288")
"""Lines and bars that are no ops, in this order: each can be seen as a thin line on white, and told from the others."""


@dataclass(frozen=True)
class Look:
    """`family` is what the legend calls it: one look stands for the single and the coalesced form of an op too."""

    family: str
    color: str

    @property
    def pale(self) -> tuple[float, float, float]:
        """Return the same colour, mostly white, for waiting."""
        red, green, blue = to_rgb(self.color)
        return (0.75 + red / 4, 0.75 + green / 4, 0.75 + blue / 4)

    @property
    def line(self) -> tuple[float, float, float]:
        """Return the same colour for lines on the pale one, dark enough to be seen there (3 : 1, WCAG 2.2)."""
        red, green, blue = to_rgb(self.color)
        shades = ((red * part / 20, green * part / 20, blue * part / 20) for part in range(20, -1, -1))
        return next(shade for shade in shades if contrast(shade, self.pale) >= 3)

    @property
    def ink(self) -> str:
        return ink_on(self.color)


_LOOKS = {
    each.family: each
    for each in (
        Look("all_reduce", "#0072B2"),
        Look("broadcast", "#E69F00"),
        Look("all_gather", "#4BA9E0"),
        Look("reduce_scatter", "#009E73"),
        Look("send, recv", "#CC79A7"),
        Look("all_to_all", "#9550DE"),
        Look("reduce", "#00302B"),
        Look("gather", "#6c3f2d"),
        Look("scatter", "#B0975E"),
        Look("barrier", "#5f5f6b"),
        Look("call by RPC", "#332288"),
        Look("gradient by RPC", "#C9ADDA"),
        Look("RPC's own", "#E0E0E0"),
    )
}
_OTHER = Look("other", "#C6C6C6")

Color = str | tuple[float, float, float]
Line = Literal["solid"] | tuple[float, tuple[int, ...]]
LINES: dict[str, Line] = {
    "observed": "solid", "derived": (0, (4, 2)), "inferred": (0, (1, 2)), "missing": (0, (5, 2, 1, 2)),
}  # fmt: skip


def look(op: str) -> Look:
    """Return the look of an op in torch's spelling: "all_gather_single_coalesced" looks like "all_gather"."""
    name = family_of_op(op)
    if op in ("rpc_sync", "rpc_async", "remote"):
        return _LOOKS["call by RPC"]
    for kind in (kind for source in in_use.values() for kind in source.kinds if kind.color):
        if op.split(" ")[0] == kind.label:
            return Look(kind.label, kind.color)
    if op.isupper():  # As torch calls its message types.
        return _LOOKS["gradient by RPC" if op == "BACKWARD_AUTOGRAD_REQ" else "RPC's own"]
    return _LOOKS.get("send, recv" if name in ("send", "recv") else name, _OTHER)


def look_of(operation: Operation) -> Look:
    """Return the look of an operation: of an all-reduce that carries a bucket of DDP the bucket's."""
    bucket = operation.bucket
    if bucket is None:
        return look(operation.op)
    return Look(f"bucket {bucket.index}", SERIES[bucket.index % len(SERIES)])


def line_color(how: str) -> str:
    return MISSING if how == "missing" else INK


ON_COLOR = ("#010101", "#ffffff")
"""Ink on strong colours, which stay as they are on a dark page: no pure black, which tells it from all other ink."""

ON_SHADE = ("#020202", "#fdfdfd")  # Ink on shades of a scale: on a dark page each is the other.


def ink_on(color: Color) -> str:
    """Return the colour of text with the highest contrast; on a pale one INK, for a dark page turns both."""
    return INK if _is_pale(color) else black_or_white(color)


def black_or_white(color: Color, inks: tuple[str, str] = ON_COLOR) -> str:
    """Return the ink with the higher contrast on a colour that a dark page does not turn dark."""
    return max(inks, key=lambda ink: contrast(ink, color))


def at_night(color: str, *, least: float) -> str:
    """Return `color` ("#rrggbb") for a dark page: a pale one is dark there, any other has `least` contrast."""
    if color in _AT_NIGHT:
        return _AT_NIGHT[color]
    if _is_pale(color):
        hue, lightness, saturation = rgb_to_hls(*to_rgb(color))
        # Text in DARK["ink"] has 4.5 : 1 on the lightest of these.
        return to_hex(hls_to_rgb(hue, min(0.3, 0.067 + 0.75 * (1 - lightness)), saturation))
    red, green, blue = to_rgb(color)
    shades = ((red + (1 - red) * part, green + (1 - green) * part, blue + (1 - blue) * part) for part in _TWENTIETHS)
    return next(to_hex(shade) for shade in shades if contrast(shade, NIGHT) >= least)


def shade_at_night(color: str) -> str:
    """Return the shade of a scale for a dark page, where more is brighter, with the contrast that `color` has."""
    if color in ON_SHADE:
        return ON_SHADE[1 - ON_SHADE.index(color)]
    wanted = 1.05 * 0.05 / (_luminance(color) + 0.05) - 0.05
    hue, _, saturation = rgb_to_hls(*to_rgb(color))
    shades = [hls_to_rgb(hue, percent / 100, saturation) for percent in range(101)]
    return to_hex(min(shades, key=lambda shade: abs(_luminance(shade) - wanted)))


def _is_pale(color: Color) -> bool:
    return min(to_rgb(color)) >= 0.7 or color in GROUNDS.values()


def contrast(one: Color, other: Color) -> float:
    """Return 1 to 21, as in WCAG 2.2, which asks for 4.5 of text and 3 of lines."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: Color) -> float:
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def plain(text: str, *, most: int = MOST_CHARACTERS) -> str:
    """Put any text on one line: what cannot be shown is spelled out, what is too long is cut in its middle."""
    ends = text if len(text) <= 4 * most else text[: 2 * most] + text[-2 * most :]
    shown = "".join(each if _can_show(each) else ascii(each)[1:-1] for each in ends)
    return shown if len(shown) <= most else f"{shown[: most - most // 2 - 1]}…{shown[-(most // 2) :]}"


@lru_cache(maxsize=4096)
def _can_show(character: str) -> bool:
    font = get_font(findfont(FontProperties()))
    return character.isprintable() and font.get_char_index(ord(character)) != 0


@lru_cache(maxsize=4096)
def text_width(text: str, *, size: float = TEXT_PT, bold: bool = False) -> float:
    """Return the width in points."""
    font = FontProperties(size=size, weight="bold" if bold else "normal")
    width: float = TextToPath().get_text_width_height_descent(text, font, ismath=False)[0]
    return width


def wrap(text: str, width: float, *, size: float = TEXT_PT, bold: bool = False) -> list[str]:
    """Break text into lines of at most `width` points; a number stays with its unit."""
    lines = [""]
    for word in _NUMBER_AND_UNIT.sub("\\1\u00a0", text).split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size=size, bold=bold) * _ROUNDED > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def cut(text: str, width: float, *, size: float = TEXT_PT, bold: bool = False) -> str:
    """Cut text to what `width` points hold."""
    if text_width(text, size=size, bold=bold) <= width:
        return text
    shorter = [f"{text[:count]}…" for count in range(len(text))]
    too_many = bisect_right(shorter, width, key=partial(text_width, size=size, bold=bold))
    return text[: max(0, too_many - 1)].rstrip() + "…"


def cut_names(names: Sequence[str], width: float) -> list[str]:
    """Cut names to `width` points so that they differ: at the end, in the middle, or numbered."""
    whole = [plain(name, most=200) for name in names]
    for way in (cut, _cut_middle):
        shown = [way(name, width) for name in whole]
        if len({*shown}) == len({*names}):
            return shown
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [cut(f"{numbers[name]}: {name}", width) for name in names]


def _cut_middle(text: str, width: float) -> str:
    if text_width(text) <= width:
        return text
    head, tail = (cut(part, width / 2) for part in (text, text[::-1]))
    return head[:-1] + tail[::-1]
