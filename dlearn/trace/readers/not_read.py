"""Formats that are known and not read yet: told by what is in a file, so that its refusal can say what it is."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from dlearn.trace.event import Header, Line
from dlearn.trace.readers.execution_trace import READ, schema

LOOKED_AT = 4096
"""Bytes of a file."""
# A length, then the version, or an attribute of that name (mlcommons/chakra, schema/protobuf/et_def.proto).
CHAKRA = re.compile(rb"[\x03-\x7f](\n[\x05-\x0f]\d+\.\d+\.\d+|\x12.\n\x06schema)", re.DOTALL)
XML = re.compile(rb"(<\?xml[^>]*>\s*)?<(?P<root>system|graphs) version=")
INSPECTOR = b'"inspector_output_format_version"'


def known_as(data: bytes) -> str:
    """What a file is that no reader takes; "" where that is not known."""
    head = data[:LOOKED_AT].lstrip()
    if CHAKRA.match(data):
        return "a Chakra execution trace (.et)"
    if found := XML.match(head):
        return "NCCL's topology (XML)" if found["root"] == b"system" else "NCCL's graphs (XML)"
    if head.startswith(b"{") and INSPECTOR in head:
        return "a record of NCCL's Inspector (JSON lines)"
    if (told := schema(data)) is not None and told != READ:
        return f"a PyTorch execution trace of schema {told}"
    return ""


class NotRead:
    """The files of a job in such formats, counted."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()

    def take(self, path: Path, data: bytes) -> bool:
        """Whether this is one of them."""
        known = known_as(data)
        self.found[known] += bool(known)
        return bool(known)

    def ranks(self) -> list[tuple[Header, list[Line]]]:
        """Nothing is read."""
        return []

    def told(self) -> str:
        """ "it is a Chakra execution trace (.et), a format that is not read yet"."""
        names = [name for name, many in self.found.items() if many]
        return f"it is {' and '.join(names)}, a format that is not read yet" if names else ""
