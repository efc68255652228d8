"""README.md and the tour behind it as a reader types them: their fenced blocks, in their order."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
TOUR = (ROOT / "docs" / "tour.md").read_text()


class Block(NamedTuple):
    """`language` is "python", "sh", or "" for what the block before it prints."""

    section: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    found, section = [], ""
    for heading, language, text in re.findall(r"^## ([^\n]+)$|^```(\w*)\n(.*?)^```$", page, flags=re.M | re.S):
        if heading:
            section = heading
        else:
            found.append(Block(section, language, text))
    return found
