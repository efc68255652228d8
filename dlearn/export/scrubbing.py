"""A trace without names, to be sent to others: hosts, paths and names become "host-1", "file-2:14".

What stays is listed here: words of dlearn, torch, MPI and NCCL; and numbers. All else is replaced,
everywhere by the same.
"""

import builtins
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from dlearn.errors import TraceError
from dlearn.events import readers
from dlearn.events.printable import printable
from dlearn.shown import count_text

KEPT = {
    "kind", "op", "dtype", "device", "by", "ended_by", "phase", "launcher", "built", "flavour", "backend", "torch",
    "dlearn", "source", "reason", "refusal", "via", "use", "algorithm", "protocol", "optimizers", "way", "asked",
}  # fmt: skip
"""Fields whose words are not the user's."""
KINDS = {"host": "host", "site": "file", "path": "file", "local": "address", "remote": "address", "clock": "clock",
         "reference": "clock", "job": "job", "group": "group",
         "dimensions": "dimension"}  # fmt: skip
"""What stands for the words of a field; for those of all others "name-1"."""
_PLAIN = re.compile(r"(step|epoch|iteration)?[ _]?\d*|default|world|MPI_COMM_WORLD|nccl \d+|\d+:\d+")
"""Names that tell nothing; by some of them steps are found."""
_PLACE = re.compile(r"(.*?)(:\d+)?", re.DOTALL)
_ERRORS = {name for name, value in vars(builtins).items() if isinstance(value, type)} | {"Cancelled", "returned"}


def scrub(paths: Sequence[Path], folder: Path) -> str:
    """Write the trace there, without names, into this empty folder; says what was replaced. TraceError where it cannot
    be read."""
    with readers.room() as room:
        if readers.is_own(paths):
            found = [path for each in paths for path in (sorted(each.glob("*.jsonl")) if each.is_dir() else [each])]
        else:
            readers.translate(paths, Path(room))
            found = sorted(Path(room).glob("*.jsonl"))
        names = _Names()
        made: list[Path] = []
        try:
            for path in found:
                lines = [_line(line, names, path) for line in path.read_bytes().splitlines()]
                made.append(folder / f"process-{len(made)}.jsonl")
                made[-1].write_bytes(b"".join(line + b"\n" for line in lines))
        except (OSError, TraceError) as error:
            for each in made:  # Half of a trace is none.
                each.unlink(missing_ok=True)
            if isinstance(error, TraceError):
                raise
            raise TraceError(printable(f"{error.filename}: {error.strerror}")) from None
    return names.told()


class _Names:
    """What each word has become."""

    def __init__(self) -> None:
        self._new: dict[tuple[str, str], str] = {}
        self._count: Counter[str] = Counter()

    def of(self, field: str, text: str) -> str:
        if not text or field in KEPT or text in _ERRORS or _PLAIN.fullmatch(text):
            return text
        kind = KINDS.get(field, "name")
        place = _PLACE.fullmatch(text) if kind == "file" else None
        word, line = (place[1], place[2] or "") if place else (text, "")
        if (kind, word) not in self._new:
            self._count[kind] += 1
            self._new[kind, word] = f"{kind}-{self._count[kind]}"
        return self._new[kind, word] + line

    def told(self) -> str:
        """Say "Replaced: 2 hosts, 3 files, 17 names"."""
        return f"Replaced: {', '.join(count_text(many, kind) for kind, many in self._count.items()) or 'nothing'}"


def _line(line: bytes, names: _Names, path: Path) -> bytes:
    try:
        value = msgspec.json.decode(line)
    except (ValueError, RecursionError):
        raise TraceError(printable(f"{path.name}: a damaged line: what is in it is not known.")) from None
    if isinstance(value, dict) and value.get("kind") == "source":
        return line  # The columns of a recorder: its own words.
    # The name of a group is what its calls are said to be in.
    of_group = isinstance(value, dict) and value.get("kind") == "group"
    return msgspec.json.encode(_without(value, "group" if of_group else "", names))


def _without(value: Any, field: str, names: _Names) -> Any:
    match value:
        case str():
            return names.of(field, value)
        case list():
            return [_without(each, field, names) for each in value]
        case dict():
            own = "group" if field == "group" else ""
            fields = {key: own if own and key in ("name", "within") else key for key in value}
            return {key: _without(each, fields[key], names) for key, each in value.items()}
        case _:
            return value
