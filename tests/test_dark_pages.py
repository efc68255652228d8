"""Every drawing on a dark page: what the palette says of it, and what Chromium shows."""

import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from pictures import drawings
from test_group_map import parallel
from test_palette import LOOKS
from test_step_times import named, trained

from dlearn import draw
from dlearn.draw import palette
from dlearn.draw.palette import at_night, contrast, ink_on, shade_at_night
from dlearn.draw.save import html_of

with suppress(pytest.skip.Exception):  # Without playwright only the tests that click are skipped.
    from test_browser import browser, opened  # noqa: F401

needs_browser = pytest.mark.skipif("opened" not in globals(), reason="nobody can look without playwright")


@pytest.fixture(scope="module")
def every(tmp_path_factory):
    return drawings(tmp_path_factory.mktemp("all"))


def test_text_and_shapes_are_seen_on_dark_paper():
    for color in (palette.INK, "#000000", palette.FAINT, palette.MISSING, *palette.SERIES):
        assert contrast(at_night(color, least=4.5), palette.NIGHT) >= 4.5
        assert contrast(at_night(color, least=3), palette.NIGHT) >= 3


def test_no_words_call_darker_what_is_brighter_on_a_dark_page():
    home = Path(draw.__file__).parent.parent
    for path in [*home.glob("draw/**/*.py"), *home.glob("play/*.py"), *home.glob("play/*.js")]:
        told = re.sub(r'"""(?s:.*?)"""|//.*', "", path.read_text())
        assert not re.findall(r"\b(?:darker|lighter|paler|brighter)\b", told), path.name


def test_ink_can_be_read_on_what_lies_under_it_by_night_too():
    fills = [look.color for look in LOOKS] + [to_hex(look.pale) for look in LOOKS]
    fills += [palette.LANE, palette.STRIP, *palette.WORKS, palette.FORWARD, palette.BACKWARD, palette.OPTIMIZER]
    for fill in fills:
        ink = ink_on(fill)
        ink = ink if ink in palette.ON_COLOR else at_night(ink, least=4.5)
        assert contrast(ink, at_night(fill.lower(), least=3)) >= 4.5, fill


def test_edges_and_hatches_are_seen_on_what_they_lie_on_by_night_too():
    for look in [*LOOKS, *(palette.Look("", color) for color in palette.SERIES)]:
        line = at_night(to_hex(look.line), least=palette.LINE_AT_NIGHT)
        assert contrast(line, at_night(to_hex(look.pale), least=3)) >= 2.99, look
    for fill in (palette.FORWARD, palette.BACKWARD, palette.OPTIMIZER):
        assert contrast(at_night(palette.FAINT, least=3), at_night(fill.lower(), least=3)) >= 3, fill


def test_borders_of_cells_are_seen_on_them_by_day_and_by_night(tmp_path):
    rows = draw.groups(parallel(tmp_path, data=2, tensor=8, pipeline=4)).collections
    cells = {(to_hex(row.get_edgecolor()[0]), to_hex(fill)) for row in rows for fill in row.get_facecolor()}
    assert len(cells) == 1 + len(palette.SERIES)
    for border, fill in cells:
        assert contrast(border, fill) >= 3, fill
        line = at_night(border, least=palette.LINE_AT_NIGHT)
        assert contrast(line, at_night(fill, least=3)) >= 3, fill


def test_more_bytes_are_brighter_by_night_and_as_well_told_apart():
    by_day = [palette._luminance(color) for color in palette.BYTE_SHADES]
    by_night = [palette._luminance(shade_at_night(color.lower())) for color in palette.BYTE_SHADES]
    assert all(one > other for one, other in pairwise(by_day))
    assert all(one < other for one, other in pairwise(by_night))
    for color in palette.BYTE_SHADES:
        ink = palette.black_or_white(color, palette.ON_SHADE)
        assert contrast(shade_at_night(ink), shade_at_night(color.lower())) >= 4.5


def test_only_our_own_figures_change_and_only_as_svg(every, tmp_path):
    figure, _ = plt.subplots(figsize=(2, 2))
    draw.save(figure, tmp_path / "own.svg")
    assert "@media" not in (tmp_path / "own.svg").read_text()
    assert figure._repr_html_() is None
    ours = every["traffic"].figure
    draw.save(ours, tmp_path / "ours.svg")
    assert "@media(prefers-color-scheme:dark)" in (tmp_path / "ours.svg").read_text()
    assert ours._repr_html_() == html_of(ours), "a notebook asks for it"
    for ending in ("png", "pdf"):
        draw.save(ours, tmp_path / f"ours.{ending}")
        kind, ours.__class__ = ours.__class__, Figure
        draw.save(ours, tmp_path / f"plain.{ending}")
        ours.__class__ = kind
        assert (tmp_path / f"ours.{ending}").read_bytes() == (tmp_path / f"plain.{ending}").read_bytes()


def test_a_hostile_name_stays_in_the_text_of_the_image(tmp_path):
    ax = drawings(tmp_path, name='"><script>alert(1)</script>')["traffic"]
    assert "<script" not in html_of(ax.figure)


SEEN = """() => [...document.querySelectorAll("text")].map(text => {
    const box = text.getBoundingClientRect();
    const at = [(box.left + box.right) / 2, (box.top + box.bottom) / 2];
    const under = document.elementsFromPoint(...at).filter(each => each.tagName == "path");
    const paint = under.map(each => getComputedStyle(each)).find(each => /^rgb/.test(each.fill));
    return [text.textContent, getComputedStyle(text).fill, paint ? paint.fill : ""];
})"""


def rgb(css):
    return tuple(int(part) / 255 for part in re.findall(r"\d+", css)[:3])


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read_in_the_page_of_its_reader(browser, every, tmp_path, scheme):
    for name, ax in every.items():
        draw.save(ax, tmp_path / f"{name}.svg")
        with opened(browser, (tmp_path / f"{name}.svg").as_uri()) as page:
            page.set_viewport_size({"width": 1300, "height": 2000})
            page.emulate_media(color_scheme=scheme)
            seen = [each for each in page.evaluate(SEEN) if each[2]]
        assert len(seen) > 3, name
        faint = [each for each in seen if contrast(rgb(each[1]), rgb(each[2])) < 4.5]
        assert faint == [], name


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("light", [True, False])
def test_a_drawing_takes_theme_and_width_of_its_cell_and_shares_no_id(browser, every, tmp_path, light):
    """The theme is JupyterLab's, also where the reader's system asks for the other one."""
    shown = html_of(every["timeline"].figure) + html_of(every["sequence"].figure)
    page_file = tmp_path / "page.html"
    page_file.write_text(f'<!doctype html><body data-jp-theme-light="{str(light).lower()}">{shown}</body>')
    with opened(browser, page_file.as_uri()) as page:
        page.emulate_media(color_scheme="dark" if light else "light")
        page.set_viewport_size({"width": 800, "height": 900})
        images = page.locator("img").all()
        assert len(images) == 2
        assert page.locator("[id]").count() == 0
        for image in images:
            box = image.bounding_box()
            assert 770 <= box["width"] <= 800
            image.screenshot(path=tmp_path / "seen.png")
            red, green, blue = plt.imread(tmp_path / "seen.png")[2, 2, :3]
            assert (red, green, blue) == pytest.approx((1, 1, 1) if light else (17 / 255,) * 3, abs=0.01)
            assert image.get_attribute("alt").count(".") >= 2


FILLS = """id => [...document.querySelectorAll(`[id^="${id}"] > [style]`)].map(each => getComputedStyle(each).fill)"""


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_key_has_the_shade_of_the_cells_that_it_explains(browser, tmp_path, scheme):
    """In one of eight steps rank 0 waits as long as all others take; a step was never finished."""
    waits = draw.steps(trained(tmp_path / "a", late_ms=1000))
    never = draw.steps(named(tmp_path / "b", [5, 10, 20], never=[(1, 2)]))
    for name, ax in {"waits": waits, "never": never}.items():
        draw.save(ax, tmp_path / f"{name}.svg")
        with opened(browser, (tmp_path / f"{name}.svg").as_uri()) as page:
            page.emulate_media(color_scheme=scheme)
            key, cells = page.evaluate(FILLS, "key of cells"), page.evaluate(FILLS, "cells")
        assert key[2] in cells, "the longest"
        assert set(key[3:]) <= set(cells), "never finished"
        lights = [contrast(rgb(each), (1, 1, 1)) for each in key[:3]]
        assert lights == sorted(lights, reverse=scheme == "dark"), "the more, the further from the page"
        assert len({*key}) == len(key) == 3 + (name == "never")
