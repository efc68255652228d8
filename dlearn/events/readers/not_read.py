"""Formats that are known and not read yet: a refusal says which of them a file is."""

from __future__ import annotations

import re
from pathlib import Path

from dlearn.events.readers.execution_trace import READ, schema
from dlearn.events.readers.rank_lines import Lines, refused

LOOKED_AT = 4096
"""Bytes of a file."""
INSPECTOR = b'"inspector_output_format_version"'
KNOWN = {
    # A length, then the version, or an attribute (mlcommons/chakra, schema/protobuf/et_def.proto).
    rb"[\x03-\x7f](\n[\x05-\x0f]\d+\.\d+\.\d+|\x12.\n\x06schema)": "a Chakra execution trace (.et)",
    rb"\s*(<\?xml[^>]*>\s*)?<system version=": "NCCL's topology (XML)",
    rb"\s*(<\?xml[^>]*>\s*)?<graphs version=": "NCCL's graphs (XML)",
    rb"\s*\{.*" + INSPECTOR: "a record of NCCL's Inspector (JSON lines)",
}


class NotRead:
    """The files of a job in such formats."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def take(self, path: Path, data: bytes) -> bool:
        """Return whether this is one of them."""
        head, of_schema = data[:LOOKED_AT], schema(data)
        names = [name for known, name in KNOWN.items() if re.match(known, head, re.DOTALL)]
        if of_schema not in (None, READ):
            names.append(f"a PyTorch execution trace of schema {of_schema}")
        self._found += [f"{path}: it is {name}" for name in names]
        return bool(names)

    def ranks(self) -> list[Lines]:
        """Raise TraceError if there is one: it is asked last."""
        if self._found:
            where = "(what is read: docs/from-your-cluster.md)"
            raise refused(f"{self._found[0]}, a format that is not read yet {where}.")
        return []
