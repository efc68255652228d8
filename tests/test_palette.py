"""The palette, worked out: what people with any colour vision tell apart, and what can be read on what."""

import math
from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from dlearn.draw import palette
from dlearn.draw.breakdown_bars import _STYLES
from dlearn.draw.palette import FAINT, INK, LANE, MISSING, SERIES, STRIP, contrast, ink_on
from dlearn.lessons.byte_bars import _LOOKS as BYTE_BARS
from dlearn.lessons.cost_chart import _LOOKS as COSTS

LOOKS = [*palette._LOOKS.values(), palette._OTHER]

APART = 10
"""In CIEDE2000, where about 1 is just noticed by who looks at two patches that touch. These stand inches apart, one in
the legend, and may be small: ten times that. With a hatch in between, a third of it must do."""

# Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency (2009),
# severity 1.0; for linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
# Of sRGB (IEC 61966-2-1), white is D65.
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]]
)


def seen(color, vision):
    """CIELAB of what is seen."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = TO_XYZ @ np.clip(VISIONS[vision] @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    x, y, z = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def difference(one, other):
    """CIEDE2000 of two CIELAB colours (Sharma, Wu, Dalal: The CIEDE2000 Color-Difference Formula, 2005)."""
    (l1, a1, b1), (l2, a2, b2) = one, other
    chroma = (math.hypot(a1, b1) + math.hypot(a2, b2)) / 2
    longer = 1.5 - 0.5 * math.sqrt(chroma**7 / (chroma**7 + 25**7))
    a1, a2 = a1 * longer, a2 * longer
    c1, c2 = math.hypot(a1, b1), math.hypot(a2, b2)
    h1, h2 = math.degrees(math.atan2(b1, a1)) % 360, math.degrees(math.atan2(b2, a2)) % 360
    turn = (h2 - h1 + 180) % 360 - 180 if c1 * c2 else 0.0
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    hue = (h1 + turn / 2) % 360 if c1 * c2 else h1 + h2
    weight = sum(
        part * math.cos(math.radians(times * hue + shift))
        for part, times, shift in ((1, 0, 0), (-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.20, 4, -63))
    )
    of_l = (l2 - l1) / (1 + 0.015 * (lightness - 50) ** 2 / math.sqrt(20 + (lightness - 50) ** 2))
    of_c = (c2 - c1) / (1 + 0.045 * chroma)
    of_h = 2 * math.sqrt(c1 * c2) * math.sin(math.radians(turn / 2)) / (1 + 0.015 * chroma * weight)
    twist = math.radians(60 * math.exp(-(((hue - 275) / 25) ** 2)))
    blue = -2 * math.sqrt(chroma**7 / (chroma**7 + 25**7)) * math.sin(twist)
    return math.sqrt(of_l**2 + of_c**2 + of_h**2 + blue * of_c * of_h)


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 3.1571, -77.2803), (50, 0, -82.7485), 2.8615),
        ((50, 0, 0), (50, -1, 2), 2.3669),
        ((60.2574, -34.0099, 36.2677), (60.4626, -34.1751, 39.4387), 1.2644),
    ],
)
def test_the_difference_is_that_of_the_paper(one, other, told):
    """Of its table 1."""
    assert difference(one, other) == pytest.approx(told, abs=5e-5)


def closest(colors):
    """The least difference between any two."""
    return min(difference(seen(one, v), seen(other, v)) for one, other in combinations(colors, 2) for v in VISIONS)


def test_looks_with_the_same_hatch_are_told_apart_with_any_colour_vision():
    """12.2, the least, is between an all-reduce and a send, seen with protanopia."""
    hatches = {look.hatch for look in LOOKS}
    assert len(hatches) >= 9
    together = [[look.color for look in LOOKS if look.hatch == hatch] for hatch in hatches]
    least = min(closest(colors) for colors in together if len(colors) > 1)
    assert least >= APART
    assert least == pytest.approx(12.2, abs=0.05)


def test_even_without_their_hatch_no_two_looks_are_the_same():
    """5.5, the least, is between an all-gather and a gradient by RPC, seen with protanopia."""
    least = closest([look.color for look in LOOKS])
    assert least >= APART / 3
    assert least == pytest.approx(5.5, abs=0.05)


def test_lines_of_one_chart_are_told_apart_and_seen_on_white():
    """12.2 again, the least; and 3.06 : 1, which is what the rose has."""
    for colors in (SERIES, [look.color for look in COSTS.values()]):
        assert closest(colors) >= APART
        assert min(contrast(color, "white") for color in colors) >= 3
    assert closest([look.color for look in BYTE_BARS]) >= APART


def test_text_can_be_read_on_every_fill():
    fills = [look.color for look in LOOKS] + [style.color for style in _STYLES.values()]
    assert min(contrast(ink_on(fill), fill) for fill in fills) >= 4.5
    papers = ["white", LANE, STRIP, *(look.pale for look in LOOKS)]
    assert min(contrast(INK, paper) for paper in papers) >= 4.5
    for ink in (INK, FAINT, MISSING):
        assert contrast(ink, "white") >= 4.5
        assert contrast(ink, LANE) >= 4.5


def test_lines_can_be_seen_on_the_pale_colours_of_what_waits():
    assert min(contrast(look.line, look.pale) for look in LOOKS) >= 3
    assert palette.look("all_reduce").line == to_rgb(palette.look("all_reduce").color), "dark enough as it is"
