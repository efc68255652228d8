"""Strings that strangers wrote, as they may stand in a sentence."""

from typing import Any


def printable(text: str) -> str:
    """Return the text on one line: what cannot be printed, as control characters, is escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable_all(value: Any) -> Any:
    """Return what JSON holds with every string printable."""
    match value:
        case str():
            return printable(value)
        case list():
            return [printable_all(each) for each in value]
        case dict():
            return {printable(key): printable_all(each) for key, each in value.items()}
        case _:
            return value


def is_plain(data: bytes) -> bool:
    """Return whether every string in these lines of JSON is printable, and nothing is escaped."""
    if b"\\" in data:
        return False
    if data.isascii():
        return b"\x7f" not in data  # Any other control character is damage to a JSON string.
    try:
        return data.decode().replace("\n", "").isprintable()
    except UnicodeDecodeError:
        return False
