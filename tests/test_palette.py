"""The palette, worked out: what people with any colour vision tell apart, and what can be read on what, day and night.

What Chromium shows of every drawing, light and dark: test_browser.py.
"""

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_hex, to_rgb

from dlearn.draw import palette
from dlearn.draw.palette import FAINT, GROUNDS, INK, LANE, MISSING, NIGHT, SERIES, at_night, contrast, ink_on

OPS = ["all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"]
LOOKS = [palette.look(op) for op in [*OPS, "barrier", "send", "rpc_sync", "BACKWARD_AUTOGRAD_REQ", "unheard_of"]]

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
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def closest(colors):
    """The least distance between any two, for any eye; 2 is just noticed on patches that touch."""
    return min(np.linalg.norm(seen(one, v) - seen(other, v)) for one, other in combinations(colors, 2) for v in VISIONS)


def test_looks_are_told_apart_with_any_colour_vision_and_in_grey():
    assert len({look.family for look in LOOKS}) == len(LOOKS)
    assert palette.look("all_gather") == palette.look("all_gather_single_coalesced")
    assert closest([*(look.color for look in LOOKS), MISSING]) >= 11
    common = ["all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "rpc_sync"]
    assert closest([palette.look(op).color for op in common]) >= 15
    assert min(closest([palette.WHOLE, part]) for part in (*(look.color for look in LOOKS), *SERIES)) >= 15
    for one, other in combinations(LOOKS, 2):
        lightness = seen(one.color, "normal")[0] - seen(other.color, "normal")[0]
        assert abs(lightness) > 2, (one.family, other.family)
    assert closest(SERIES) >= 15
    assert min(contrast(color, "white") for color in SERIES) >= 3


def night_of(fill):
    return at_night(to_hex(fill), least=3)


@pytest.mark.parametrize("is_night", [False, True])
def test_ink_can_be_read_and_lines_be_seen_on_every_fill(is_night):
    papers = [LANE, *GROUNDS.values(), *(look.color for look in LOOKS), *(to_hex(look.pale) for look in LOOKS)]
    for paper in papers:
        ink = ink_on(paper)
        if is_night and ink not in palette.ON_COLOR:
            ink = at_night(ink, least=4.5)
        assert contrast(ink, night_of(paper) if is_night else paper) >= 4.5, paper
    for ink in (INK, FAINT, MISSING):
        assert contrast(*((at_night(ink, least=4.5), NIGHT) if is_night else (ink, "white"))) >= 4.5
    for look in LOOKS:
        line, pale = to_hex(look.line), to_hex(look.pale)
        lit = (at_night(line, least=palette.LINE_AT_NIGHT), night_of(pale)) if is_night else (line, pale)
        assert contrast(*lit) >= 2.99, look.family
