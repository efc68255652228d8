"""The messages of a trace as text, line by line: a table to read, CSV, and JSON, all with the same fields."""

import csv
import io
import json
from collections.abc import Iterator
from itertools import chain

from dlearn.join.tables.message_table import Message, Messages

FIELDS = ("from", "to", "payload_bytes", "op", "what", "how", "confirmed", "sent_ns", "received_ns")
"""Of CSV and JSON. Times are on the trace's clock; empty, or null, where they, or the size, are not known."""


def text_lines(found: Messages) -> Iterator[str]:
    """Yield a line a message, in the order of sending; then how many they are, and what is not explained."""
    # The rows are made twice: there may be a million.
    widths = [*map(len, found.head)]
    for row in found.table_rows(found):
        widths = [max(width, len(cell)) for width, cell in zip(widths, row, strict=True)]
    for src, dst, size, sent, *texts, what in chain([found.head], found.table_rows(found)):
        cells = [src.ljust(widths[0]), dst.ljust(widths[1]), size.rjust(widths[2]), sent.rjust(widths[3])]
        cells += [text.ljust(width) for text, width in zip(texts, widths[4:-1], strict=True)]
        yield "  ".join([*cells, what]).rstrip()
    yield ""
    finding, *reasons = found.sentences()
    yield finding
    yield from (f"  {reason}" for reason in reasons)
    yield "sent: from the first of these messages on; -: not observed"
    if any(message.how == "derived" for message in found):
        yield "derived: times share out the operation's transfer and are no measurement"


def csv_lines(found: Messages) -> Iterator[str]:
    """Yield a head, then a line a message."""
    for values in chain([FIELDS], (_values(found, message) for message in found)):
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(values)
        yield line.getvalue()


def json_lines(found: Messages) -> Iterator[str]:
    """Yield the lines of one array, an object a message."""
    yield "["
    last = len(found) - 1
    for index, message in enumerate(found):
        record = dict(zip(FIELDS, _values(found, message), strict=True))
        yield json.dumps(record) + ("," if index < last else "")
    yield "]"


def _values(found: Messages, message: Message) -> tuple[str | int | None, ...]:
    src, dst = found.labels[message.src], found.labels[message.dst]
    size, times = message.payload_bytes, (message.sent_ns, message.received_ns)
    return src, dst, size, message.op, message.what, message.how, message.confirmed, *times
