"""Link: how fast, how far, how sure; from words such as "1 Gbit/s, 100 us, loss 1 %", and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from functools import partial
from reprlib import Repr
from typing import Any

from dlearn.errors import SetupError

RATES = {"bit/s": 1, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9, "B/s": 8, "kB/s": 8e3, "MB/s": 8e6, "GB/s": 8e9}
TIMES = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
SIZES = {"B": 1, "kB": 1e3, "MB": 1e6, "KiB": 1024, "MiB": 1024**2}
SHARES = {"%": 0.01}
UNITS: Mapping[str, Mapping[str, float]] = {
    "rate": RATES, "latency": TIMES, "jitter": TIMES, "loss": SHARES, "queue": SIZES
}  # fmt: skip
RANGES = {"rate": (1e3, 1e11), "latency": (0, 10), "jitter": (0, 10), "loss": (0, 0.9), "queue": (2e3, 1e9)}
EXAMPLE = '"100 Mbit/s, 2 ms", and after that "jitter 1 ms", "loss 1 %", "queue 64 kB"'
_WORD = re.compile(
    r"(?:(rate|latency|jitter|loss|queue)\s+)?(\d{1,40}(?:\.\d{1,40})?(?:e[+-]?\d{1,3})?)\s*([A-Za-zµ/%]+)"
)
_quote = Repr()
_quote.maxstring = _quote.maxother = 80


@dataclass(frozen=True)
class Link:
    """The properties of a path between ranks. Each is a number, or words with a unit.

    `rate` in bit/s (None: no limit), `latency` in seconds one way, `jitter` at most so many seconds more,
    `loss` as the share of packets, `queue` in bytes: what finds it full is lost.
    """

    rate: float | None = None
    latency: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    queue: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            given = getattr(self, field.name)
            if given is not None or field.default is not None:
                object.__setattr__(self, field.name, _number(field.name, given))

    @classmethod
    def of(cls, given: Link | str) -> Link:
        """Return a link as it is, or the one that the words describe."""
        return given if isinstance(given, Link) else cls().changed(given)

    def changed(self, words: str) -> Link:
        return replace(self, **parse(words))

    def __str__(self) -> str:
        parts = ["no limit of rate" if self.rate is None else rate_text(self.rate), time_text(self.latency)]
        if self.jitter:
            parts.append(f"jitter {time_text(self.jitter)}")
        if self.loss:
            parts.append(f"loss {self.loss * 100:.12g} %")
        if self.queue is not None:
            parts.append(f"queue {size_text(self.queue)}")
        return ", ".join(parts)


def parse(words: str) -> dict[str, float]:
    """Parse "100 Mbit/s, 2 ms, loss 1 %". SetupError, in one sentence, for other words."""
    if not isinstance(words, str):
        raise SetupError(f"a network is told in words such as {EXAMPLE}, or is a Network; not {_quote.repr(words)}.")
    properties: dict[str, float] = {}
    for part in map(str.strip, words.split(",")):
        match = _WORD.fullmatch(part)
        if match is None:
            raise SetupError(f"{_quote.repr(part)} tells nothing of a network; write it like {EXAMPLE}.")
        name, number, unit = match.groups()
        name = name or next((known for known in ("rate", "latency") if unit in UNITS[known]), None)
        if name is None:
            raise SetupError(f"what of the network is {_quote.repr(part)}? Write it like {EXAMPLE}.")
        if name in properties:
            raise SetupError(f"{_quote.repr(words)} tells the {name} twice.")
        properties[name] = _number(name, f"{number} {unit}")
    return properties


def _number(name: str, given: Any) -> float:
    """Return a number, or words, in bit/s, seconds, bytes, or as a share of 1. SetupError if out of range."""
    if isinstance(given, str):
        match, units = _WORD.fullmatch(given.strip()), UNITS[name]
        if match is None or match[1] not in (None, name) or match[3] not in units:
            what = f"{_quote.repr(given)} is no {name} of a link"
            raise SetupError(f"{what}; its units are {', '.join(units)}.")
        # By decimals: "100 us" is 0.0001, and not nearly.
        given = float(Decimal(match[2]) * Decimal(str(units[match[3]])))
    low, high = RANGES[name]
    is_number = isinstance(given, int | float) and not isinstance(given, bool)
    if not is_number or not low <= given <= high:
        text = _texts[name]
        raise SetupError(f"the {name} of a link is {text(low)} to {text(high)}, not {text(given)}.")
    return float(given)


def _text(number: Any, units: dict[str, float]) -> str:
    """Return a text such as "100 Mbit/s", in the largest unit that leaves 1 or more."""
    if not isinstance(number, int | float) or abs(number) > 1e300:
        return _quote.repr(number)
    unit = next((name for name in reversed(units) if number >= units[name]), next(iter(units)))
    return f"{number / units[unit]:.12g} {unit}"


rate_text = partial(_text, units={"bit/s": 1, "kbit/s": 1e3, "Mbit/s": 1e6, "Gbit/s": 1e9})
time_text = partial(_text, units={"us": 1e-6, "ms": 1e-3, "s": 1})
size_text = partial(_text, units={"B": 1, "kB": 1e3, "MB": 1e6})
share_text = partial(_text, units={"%": 0.01})
_texts = {"rate": rate_text, "latency": time_text, "jitter": time_text, "loss": share_text, "queue": size_text}
