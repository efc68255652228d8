"""What the library answers of a trace, as JSON, frozen beside recorded traces: a new inside is compared with it.

    python tests/frozen_answers.py                       the differences between the frozen answers and today's
    python tests/frozen_answers.py write [NAME ...]      freeze today's answers
    python tests/frozen_answers.py add NAME FOLDER ...   freeze the traces in these folders, under this name

`frozen/NAME.zip` holds the files of one or more traces, in a folder each, and `answers.json`, an entry for each folder.
Those of `by_hand.zip` are the rare ones, that no program makes when it is asked: their folders say what is odd in them.
"""

import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlearn import DlearnError, Message, Operation, Trace, analysis, explain, messages, operations, play

HERE = Path(__file__).parent / "frozen"
ANSWERS = "answers.json"
DIFFERENCES_SHOWN = 40

WORDS: dict[str, Callable[[Trace], object]] = {
    "explain": explain,
    "explain rank 0": lambda trace: explain(trace.where(rank=0)),
    "explain last span": lambda trace: explain(trace.within(trace.spans[-1])) if trace.spans else "",
    "player": play.player,
}
BYTES = (analysis.traffic, analysis.predicted_traffic, analysis.measured_traffic)
TIMES = (analysis.overlap, analysis.breakdown, analysis.bucket_times, analysis.step_times)
BOTH = (analysis.bandwidths, analysis.iteration, analysis.reconcile)
WORDS |= {each.__name__: each for each in (*BYTES, *TIMES, *BOTH)}

Answers = dict[str, Any]


def answers_of(trace: Trace) -> Answers:
    """All that is frozen of a trace. Times are nanoseconds since its first event."""
    begin = trace.events[0].start_ns if trace.events else 0
    asked = operations(trace)
    number = {id(operation): place for place, operation in enumerate(asked)}
    sent = messages(trace)
    return {
        "labels": {str(rank): label for rank, label in trace.labels.items()},
        "problems": list(trace.problems),
        "events": len(trace.events),
        "operations": _table(_operation(each, begin) for each in asked),
        "messages": _table(_message(each, begin, number) for each in sent),
        "unexplained": [[number.get(id(operation)), reason] for operation, reason in sent.unexplained],
        "hangs": [[number[id(each.operation)], *each.waiting] for each in analysis.hangs(trace)],
        "mismatches": [[number[id(each.operation)], each.why] for each in analysis.mismatches(trace)],
        "residues": [_residue(part) for part in analysis.reconcile(trace).parts],
        "critical paths": [[list(leg) for leg in step.path] for step in analysis.overlap(trace).steps],
        "held": _held(play.player(trace).walk),
        **{name: _told(answer, trace) for name, answer in WORDS.items()},
    }


def _told(answer: Callable[[Trace], object], trace: Trace) -> list[str]:
    try:
        return str(answer(trace)).splitlines()
    except DlearnError as refusal:  # "This trace has no buckets" is an answer, too.
        return [type(refusal).__name__, *str(refusal).splitlines()]


def _residue(part: Any) -> list[object]:
    return [part.what, part.note, [[pair.src, pair.dst, pair.residue_bytes, pair.why] for pair in part.pairs]]


def _held(walk: Any) -> dict[str, list[list[object]]]:
    """What each rank holds at the end, in each place of each board."""
    panels = {panel.title: walk.held(panel, len(walk.steps)) for panel in walk.panels}
    return {title: [[*key, held[key].text] for key in sorted(held)] for title, held in panels.items()}


OPERATION = ("op", "seq", "problem", "what", "sender", "receiver", "payload_bytes")
MESSAGE = (
    *("src", "dst", "op", "what", "payload_bytes", "how", "offset_bytes", "whole_bytes"),
    *("step", "confirmed", "control", "packed_bytes", "observer_bytes"),
)


def _operation(operation: Operation, begin: int) -> Answers:
    exchange = operation.exchange
    return {name: getattr(operation, name) for name in OPERATION} | {
        "group": operation.group.name,
        "backend": operation.group.backend,
        "members": list(operation.group.members),
        "ranks": list(operation.ranks),
        "start_ns": [end.start_ns - begin for end in operation.ends],
        "end_ns": [_since(begin, end.end_ns) for end in operation.ends],
        "missing": list(operation.missing),
        "bucket": operation.bucket.index if operation.bucket is not None else None,
        "steps": len(operation.steps),
        "known_by": exchange.known_by if exchange is not None else "",
    }


def _message(message: Message, begin: int, number: dict[int, int]) -> Answers:
    return {name: getattr(message, name) for name in MESSAGE} | {
        "operation": number.get(id(message.operation)),
        "sent_ns": _since(begin, message.sent_ns),
        "received_ns": _since(begin, message.received_ns),
    }


def _since(begin: int, at_ns: int | None) -> int | None:
    return None if at_ns is None else at_ns - begin


def _table(rows: Iterable[Answers]) -> dict[str, list[Any]]:
    """A list for each column: a third of the size of rows, and differences are named by column."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return columns


def names() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.zip"))


def differences(name: str, today: Mapping[str, Trace]) -> Iterator[str]:
    """Where the answers about these traces are not the frozen ones, a line each."""
    with zipfile.ZipFile(HERE / f"{name}.zip") as archive:
        frozen = json.loads(archive.read(ANSWERS))
    for folder in sorted({*frozen, *today}):
        answers = _as_json(today[folder], folder) if folder in today else None
        yield from _different(frozen.get(folder), answers, f"{name}/{folder}")


def _as_json(trace: Trace, folder: str) -> Any:
    """The answers as JSON has them: a tuple is a list, a number that is a key is text. And not where this folder is."""
    text = json.dumps(answers_of(trace))
    return json.loads(re.sub(rf"/[^\s\"]*/{re.escape(folder)}\b", folder, text))


def traces(name: str, folder: Path) -> dict[str, Trace]:
    """The traces of an archive, which is unpacked into this folder."""
    with zipfile.ZipFile(HERE / f"{name}.zip") as archive:
        archive.extractall(folder)
    return {path.name: Trace.load(path) for path in sorted(folder.iterdir()) if path.is_dir()}


def _different(frozen: Any, today: Any, place: str) -> Iterator[str]:
    if isinstance(frozen, dict) and isinstance(today, dict):
        for key in sorted({*frozen, *today}):
            yield from _different(frozen.get(key), today.get(key), f"{place}/{key}")
    elif isinstance(frozen, list) and isinstance(today, list) and len(frozen) == len(today):
        for index, (was, now) in enumerate(zip(frozen, today, strict=True)):
            yield from _different(was, now, f"{place}[{index}]")
    elif frozen != today:
        yield f"{place}: was {_short(frozen)}, is {_short(today)}"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} items"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def write(name: str) -> None:
    path = HERE / f"{name}.zip"
    with tempfile.TemporaryDirectory() as folder:
        answers = {each: _as_json(trace, each) for each, trace in traces(name, Path(folder)).items()}
    _save(path, {**_files(path), ANSWERS: json.dumps(answers).encode()})


def add(name: str, folders: Sequence[Path]) -> None:
    """Each under the name of its folder, beside those that are in the archive."""
    path = HERE / f"{name}.zip"
    files = _files(path) if path.exists() else {}
    for folder in folders:
        files |= {f"{folder.name}/{each.name}": each.read_bytes() for each in sorted(folder.iterdir())}
    _save(path, files)
    write(name)


def _files(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {each: archive.read(each) for each in archive.namelist() if each != ANSWERS}


def _save(path: Path, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        for name in sorted(files):
            # With the same date each time: the archive changes only with what is in it.
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_LZMA
            archive.writestr(entry, files[name])


def main(command: str = "compare", *arguments: str) -> int:
    if command == "add":
        add(arguments[0], [Path(folder) for folder in arguments[1:]])
        return 0
    chosen = arguments or names()
    if command == "write":
        for name in chosen:
            write(name)
        return 0
    found: list[str] = []
    for name in chosen:
        with tempfile.TemporaryDirectory() as folder:
            found += differences(name, traces(name, Path(folder)))
    for line in found[:DIFFERENCES_SHOWN]:
        print(line)
    print(f"{len(found):,} differences in {len(chosen)} archives")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
