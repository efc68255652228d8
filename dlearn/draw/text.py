"""Text in pictures: its sizes, its width, and how it is made to fit."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache, partial

from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.textpath import TextToPath

TEXT_PT = 9.0
TITLE_PT = 11.5
SMALLEST_PT = 8.0
"""Smaller text cannot be read from a projector, nor at half width."""
MOST_CHARACTERS = 40
_NUMBER_AND_UNIT = re.compile(r"(\d) (?=(?:[kMGT]?B|[mµ]?s)\b)")
_ROUNDED = 1.025
"""How much wider a line may become on a screen, where each letter begins at a whole pixel."""


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
def text_width(text: str, *, size: float, bold: bool = False) -> float:
    """Return the width in points."""
    font = FontProperties(size=size, weight="bold" if bold else "normal")
    width: float = TextToPath().get_text_width_height_descent(text, font, ismath=False)[0]
    return width


def wrap(text: str, width: float, *, size: float, bold: bool = False) -> list[str]:
    """Break text into lines of at most `width` points; a number stays with its unit."""
    lines = [""]
    for word in _NUMBER_AND_UNIT.sub("\\1\u00a0", text).split(" "):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and text_width(longer, size=size, bold=bold) * _ROUNDED > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def cut(text: str, width: float, *, size: float, bold: bool = False) -> str:
    """Cut text to what `width` points hold."""
    if text_width(text, size=size, bold=bold) <= width:
        return text
    shorter = [f"{text[:count]}…" for count in range(len(text))]
    too_many = bisect_right(shorter, width, key=partial(text_width, size=size, bold=bold))
    return text[: max(0, too_many - 1)].rstrip() + "…"


def cut_names(names: Sequence[str], width: float) -> list[str]:
    """Cut each name to `width` points so that those that differ differ still: at the end, or in the middle.

    Where neither tells them apart they are numbered.
    """
    whole = [plain(name, most=200) for name in names]
    for way in (partial(cut, size=TEXT_PT), _cut_middle):
        shown = [way(name, width) for name in whole]
        if len({*shown}) == len({*names}):
            return shown
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [cut(f"{numbers[name]}: {name}", width, size=TEXT_PT) for name in names]


def _cut_middle(text: str, width: float) -> str:
    if text_width(text, size=TEXT_PT) <= width:
        return text
    head, tail = (cut(part, width / 2, size=TEXT_PT) for part in (text, text[::-1]))
    return head[:-1] + tail[::-1]
