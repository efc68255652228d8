"""What the library answers of a trace, as JSON, frozen beside recorded traces: a new inside is compared with it.

    python tests/frozen_answers.py                       the differences between the frozen answers and today's
    python tests/frozen_answers.py write [NAME ...]      freeze today's answers
    python tests/frozen_answers.py add NAME FOLDER ...   freeze the traces in these folders, under this name

`frozen/NAME.zip` holds the files of one or more traces, in a folder each, and `answers.json`, an entry for each folder.
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dlearn import Trace, analysis, explain, messages, operations
from dlearn.errors import DlearnError
from dlearn.trace.message import Message, Operation

HERE = Path(__file__).parent / "frozen"
ANSWERS = "answers.json"
DIFFERENCES_SHOWN = 40

WORDS: dict[str, Callable[[Trace], object]] = {
    "explain": explain,
    "traffic": analysis.traffic,
    "reconcile": analysis.reconcile,
    "iteration": analysis.iteration,
    "overlap": analysis.overlap,
    "breakdown": analysis.breakdown,
    "bucket_times": analysis.bucket_times,
    "bandwidths": analysis.bandwidths,
}

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
        **{name: _told(answer, trace) for name, answer in WORDS.items()},
    }


def _told(answer: Callable[[Trace], object], trace: Trace) -> list[str]:
    try:
        return str(answer(trace)).splitlines()
    except DlearnError as refusal:  # "This trace has no buckets" is an answer, too.
        return [type(refusal).__name__, *str(refusal).splitlines()]


def _operation(operation: Operation, begin: int) -> Answers:
    exchange = operation.exchange
    return {
        "op": operation.op,
        "group": operation.group.name,
        "backend": operation.group.backend,
        "members": list(operation.group.members),
        "seq": operation.seq,
        "ranks": list(operation.ranks),
        "start_ns": [end.start_ns - begin for end in operation.ends],
        "end_ns": [_since(begin, end.end_ns) for end in operation.ends],
        "missing": list(operation.missing),
        "problem": operation.problem,
        "bucket": operation.bucket.index if operation.bucket is not None else None,
        "what": operation.what,
        "sender": operation.sender,
        "receiver": operation.receiver,
        "payload_bytes": operation.payload_bytes,
        "steps": len(operation.steps),
        "known_by": exchange.known_by if exchange is not None else "",
    }


def _message(message: Message, begin: int, number: dict[int, int]) -> Answers:
    return {
        "src": message.src,
        "dst": message.dst,
        "op": message.op,
        "what": message.what,
        "payload_bytes": message.payload_bytes,
        "how": message.how,
        "operation": number.get(id(message.operation)),
        "sent_ns": _since(begin, message.sent_ns),
        "received_ns": _since(begin, message.received_ns),
        "offset_bytes": message.offset_bytes,
        "whole_bytes": message.whole_bytes,
        "step": message.step,
        "confirmed": message.confirmed,
        "control": message.control,
        "packed_bytes": message.packed_bytes,
        "observer_bytes": message.observer_bytes,
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


def differences(name: str) -> Iterator[str]:
    """Where today's answers are not the frozen ones, a line each."""
    frozen, today = _frozen(name), _today(name)
    for folder in frozen:
        yield from _different(frozen[folder], today[folder], f"{name}/{folder}")


def _frozen(name: str) -> dict[str, Answers]:
    with zipfile.ZipFile(HERE / f"{name}.zip") as archive:
        answers: dict[str, Answers] = json.loads(archive.read(ANSWERS))
    return answers


def _today(name: str) -> dict[str, Answers]:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(HERE / f"{name}.zip") as archive:
        archive.extractall(folder)
        traces = sorted(path for path in Path(folder).iterdir() if path.is_dir())
        # Through JSON, as the frozen ones have gone.
        return {path.name: json.loads(json.dumps(answers_of(Trace.load(path)))) for path in traces}


def _different(frozen: Any, today: Any, place: str) -> Iterator[str]:
    if isinstance(frozen, dict) and isinstance(today, dict):
        for key in sorted({*frozen, *today}):
            yield from _different(frozen.get(key), today.get(key), f"{place}.{key}")
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
    answers = _today(name)
    path = HERE / f"{name}.zip"
    with zipfile.ZipFile(path) as archive:
        files = {each: archive.read(each) for each in archive.namelist() if each != ANSWERS}
    _save(path, {**files, ANSWERS: json.dumps(answers).encode()})


def add(name: str, folders: Sequence[Path]) -> None:
    files = {}
    for number, folder in enumerate(folders):
        for path in sorted(folder.iterdir()):
            files[f"{number:02}/{path.name}"] = path.read_bytes()
    HERE.mkdir(exist_ok=True)
    _save(HERE / f"{name}.zip", files)
    write(name)


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
    found = [line for name in chosen for line in differences(name)]
    for line in found[:DIFFERENCES_SHOWN]:
        print(line)
    print(f"{len(found):,} differences in {len(chosen)} archives")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
