"""What a large trace costs to read: bytes, seconds and peak memory for 10^3 to 10^6 messages over 4 and 64 ranks.

    python benchmarks/scale.py [--kinds send job rpc] [--ranks 4 64] [--smallest 1000] [--largest 1000000]
                               [--rounds 5] [--folder /tmp]

Three kinds of traces, written line by line through the library's own Writer. "send": every message is a send and a
recv, each with its start and its end in a file, four lines a message. "job": the spans, gradients and all-reduces of a
training job, whose messages are derived from gloo's ring; an all-reduce makes 4 n (n-1) of them on n ranks, so the
smallest sizes are one step. "rpc": calls, each two messages. Beside them `json.load` of a Chrome trace (Perfetto's
JSON) that shows as many messages: one complete event and a flow's begin and end for each.

Every measurement is a process of its own, dlearn and json alternating; shown are medians, and the spread where it was
repeated (5 times at most; above 10^4 messages 3 times, at 10^6 not). Seconds are those of the processor, user and
system: each process has one thread at work, and what else the machine does disturbs them less. "join" is events ->
operations -> messages. The pictures are drawn after it, as in a notebook; importing matplotlib is not counted, a first
small picture (fonts) neither. The traces need up to 2 GB at a time.
"""

import json
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import msgspec
from measuring import median_text, options, today

from dlearn.events import event as seen
from dlearn.events.writer import Writer

BUCKETS = (262_144, 1_048_576, 524_288)
"""Bytes of the three buckets of the job's model; small enough that each of 4 ranks' chunks is two segments."""
GRADIENTS = 4
"""In each bucket."""
MESSAGE_BYTES = 4096
TENSORS = (seen.TensorInfo((MESSAGE_BYTES // 4,), "float32", "cpu", MESSAGE_BYTES, MESSAGE_BYTES),)
ROUNDS_IN_A_SPAN = 100
COLUMNS = ("load", "join", "traffic", "png", "svg")

Figures = dict[str, float]


# Writing: deterministic traces ----------------------------------------------------------------------------------------


def write(kind: str, ranks: int, count: int, folder: Path) -> int:
    """Write a trace of about `count` messages, and the Chrome trace that shows as many; return their number."""
    in_a_round = {"send": ranks, "rpc": 2 * ranks, "job": len(BUCKETS) * 4 * ranks * (ranks - 1)}[kind]
    rounds = max(1, count // in_a_round)
    script = {"send": sends, "job": steps, "rpc": calls}[kind]
    members = tuple(range(ranks))
    for rank in members:
        writer = Writer(folder / "trace" / f"host-{1000 + rank}.jsonl", max_bytes=1 << 34)
        facts: Any = {"host": "host", "pid": 1000 + rank, "rank": rank, "world_size": ranks, "start_ns": 0}
        writer.write(seen.Header(format=seen.FORMAT, job="scale", torch="2.13.0", dlearn="0.1.0", **facts))
        writer.write(seen.GroupFact(name="0", backend="gloo", rank=rank, size=ranks, ranks=members, default=True))
        for line in script(rank, ranks, rounds):
            append(writer, line)
        writer.write(seen.Footer(at_ns=10**15, lines=writer.lines))
        writer.close()
    write_chrome(folder / "chrome.json", ranks, rounds * in_a_round)
    return rounds * in_a_round


def append(writer: Writer, line: seen.Line) -> None:
    """As a recording does it."""
    if isinstance(line, seen.End):
        assert line.at_ns is not None
        writer.end(line.event, at_ns=line.at_ns, by=line.by, error=line.error)
    elif isinstance(line, seen.Event):
        writer.event(type(line), msgspec.structs.asdict(line))
    else:
        writer.write(line)


def sends(rank: int, ranks: int, rounds: int) -> Iterator[seen.Line]:
    """In each round every rank sends to the next and receives from the one before, both at the same time."""
    number = span = 0
    for turn in range(rounds):
        at = 1_000_000_000_000 + turn * 10_000 + rank * 100
        if turn % ROUNDS_IN_A_SPAN == 0:
            if turn:
                yield seen.End(event=span, by="return", at_ns=at - 50)
            span, number = number, number + 1
            yield seen.Span(number=span, start_ns=at - 40, name=f"part {turn // ROUNDS_IN_A_SPAN}")
        for offset, op, peer in ((0, "send", (rank + 1) % ranks), (1, "recv", (rank - 1) % ranks)):
            facts: Any = {"parent": span, "site": "ring.py:14", "group": "0", "tag": 0, "seq": 2 * turn + offset + 1}
            facts |= {"number": number + offset, "start_ns": at + 1000 * offset}
            yield seen.PointToPoint(op=op, peer=peer, tensors=TENSORS, **facts)
        for offset in (1, 0):
            yield seen.End(event=number + offset, by="wait", at_ns=at + 6000 - 1000 * offset)
        number += 2
    yield seen.End(event=span, by="return", at_ns=at + 7000)


def steps(rank: int, ranks: int, rounds: int) -> Iterator[seen.Line]:
    """A step is a span in which gradients come and each bucket's all-reduce is made as soon as it has them."""
    number = 0
    for i, size in enumerate(BUCKETS):
        names = tuple(f"layer{i}.{j}.weight" for j in range(GRADIENTS))
        facts: Any = {"model": 0, "index": i, "count": len(BUCKETS), "bytes": size, "parameters": names}
        yield seen.Bucket(number=number, start_ns=1_000_000_000_000, built="rebuilt", **facts)
        number += 1
    for step in range(rounds):
        at = 1_000_000_000_000 + step * 10_000_000 + rank * 1000
        span, number = number, number + 1
        yield seen.Span(number=span, start_ns=at, name=f"step {step}")
        for i, size in enumerate(BUCKETS):
            at += 1_000_000
            facts = {"parent": span, "phase": "backward", "backward": step}
            for j in range(GRADIENTS):
                name, part = f"layer{i}.{j}.weight", size // GRADIENTS
                yield seen.Gradient(number=number, start_ns=at + j * 1000, model=0, parameter=name, bytes=part, **facts)
                number += 1
            tensors = (seen.TensorInfo((size // 4,), "float32", "cpu", size, size),)
            facts |= {"site": "train.py:31", "group": "0", "seq": step * len(BUCKETS) + i + 1, "launcher": "reducer"}
            yield seen.Collective(number=number, start_ns=at + 10_000, op="all_reduce", inputs=tensors, **facts)
            yield seen.End(event=number, by="callback", at_ns=at + 900_000)
            number += 1
        yield seen.End(event=span, by="return", at_ns=at + 2_000_000)


def calls(rank: int, ranks: int, rounds: int) -> Iterator[seen.Line]:
    """In each round every rank calls the next by RPC, and runs and answers a call of the one before."""
    yield seen.Worker(name=f"worker{rank}", id=rank, wall_ns=0, log="a benchmark has none")
    packed: Any = {"tensors": TENSORS, "pickled_bytes": 300, "observer_bytes": 25}
    called: Any = {"op": "rpc_sync", "flavour": "python", "to": (rank + 1) % ranks, "site": "ring.py:14", **packed}
    for turn in range(rounds):
        at, number = 1_000_000_000_000 + turn * 10_000 + rank * 100, 3 * turn
        facts: Any = {"function": "work", "call": turn, "context": turn // ROUNDS_IN_A_SPAN}
        yield seen.RpcCall(number=number, start_ns=at, handed_ns=at + 500, **called, **facts)
        caller, run = (rank - 1) % ranks, number + 1
        yield seen.RpcRun(number=run, caller=caller, start_ns=at + 2000, arrived_ns=at + 1500, **facts)
        reply: Any = {"start_ns": at + 4000, "returned_ns": at + 3500, "caller": caller, "call": turn}
        yield seen.RpcReply(number=number + 2, run=run, **reply, **packed)
        yield seen.End(event=number, by="reply", at_ns=at + 6000)


def write_chrome(path: Path, ranks: int, count: int) -> None:
    """What Perfetto opens: microseconds, the bytes in `args`, the arrow as a flow from sender to receiver."""
    with path.open("w") as file:
        file.write('{"traceEvents":[\n')
        for i in range(count):
            src, dst, at = i % ranks, (i + 1) % ranks, i * 2.5
            common = f'"name":"send","cat":"message","id":{i}'
            file.write(
                f'{{"name":"send","cat":"message","ph":"X","pid":{src},"tid":0,"ts":{at},"dur":5.0,'
                f'"args":{{"bytes":{MESSAGE_BYTES},"to":{dst}}}}},\n'
                f'{{{common},"ph":"s","pid":{src},"tid":0,"ts":{at}}},\n'
                f'{{{common},"ph":"f","bp":"e","pid":{dst},"tid":0,"ts":{at + 5}}}{"," if i < count - 1 else ""}\n'
            )
        file.write("]}\n")


# Measuring: each in a process of its own ------------------------------------------------------------------------------


def read_dlearn(folder: Path, messages_written: int) -> Figures:
    from dlearn import Trace, analysis

    took: Figures = {}
    trace: Trace = timed(took, "load", lambda: Trace.load(folder / "trace"))
    took["MB load"] = peak_mb()
    found = timed(took, "join", lambda: (analysis.operations(trace), analysis.messages(trace)))[1]
    took["MB join"] = peak_mb()
    sent = timed(took, "traffic", lambda: analysis.traffic(trace))
    assert trace.problems == ()
    assert len(found) == sum(sent.message_count.values()) == messages_written, len(found)
    assert found.columns.payload_bytes.sum() == sent.total_bytes
    del found

    from dlearn import draw

    draw.save(draw.timeline(Trace(folder, trace.processes, ())), folder / "empty.png")
    for ending in ("png", "svg"):
        path = folder / f"timeline.{ending}"
        timed(took, ending, lambda path=path: draw.save(draw.timeline(trace), path))
    took["MB draw"] = peak_mb()
    return took


def read_chrome(folder: Path, messages_written: int) -> Figures:
    took: Figures = {}
    with (folder / "chrome.json").open() as file:
        found = timed(took, "json", lambda: json.load(file))
    assert len(found["traceEvents"]) == 3 * messages_written
    took["MB json"] = peak_mb()
    return took


def timed(took: Figures, what: str, work: Callable[[], Any]) -> Any:
    start = time.process_time()
    answer = work()
    took[what] = time.process_time() - start
    return answer


def peak_mb() -> float:
    """Of this process so far. (It begins with its parent's, which therefore stays small.)"""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e6 / 1024)


# Running and reporting ------------------------------------------------------------------------------------------------


def case(kind: str, ranks: int, count: int, rounds: int, folder: Path) -> None:
    """Write one trace, read it `rounds` times in turn with its Chrome trace, print what it took."""
    messages_written = in_a_fresh_process(write, kind, ranks, count, folder)
    runs: list[Figures] = []
    for _ in range(rounds):
        found: Figures = {}
        for read in (read_dlearn, read_chrome):
            found |= in_a_fresh_process(read, folder, messages_written)
        runs.append(found)
    took = {name: [run[name] for run in runs] for name in runs[0]}
    size = sum(path.stat().st_size for path in (folder / "trace").iterdir())
    chrome_size = (folder / "chrome.json").stat().st_size
    middle = {name: statistics.median(values) for name, values in took.items()}
    cells = [median_text(took[name]) if rounds > 1 else f"{middle[name]:.2f}" for name in COLUMNS]
    per_message = (middle["load"] + middle["join"]) / messages_written * 1e6
    memory = "/".join(f"{middle[f'MB {name}']:,.0f}" for name in ("load", "join", "draw"))
    print(
        f"{kind:<5}{ranks:>3}{messages_written:>11,}{size / 1e6:>8.1f}",
        *(f"{cell:>17}" for cell in cells),
        f"{per_message:>8.2f}{memory:>19}",
        f" | {chrome_size / 1e6:>6.1f}{middle['json']:>7.2f}{middle['MB json']:>7,.0f}",
        f" | {size / chrome_size:>5.2f}{middle['load'] / middle['json']:>6.2f}"
        f"{middle['MB load'] / middle['MB json']:>6.2f}",
        flush=True,
    )


def in_a_fresh_process(work: Callable[..., Any], *given: object) -> Any:
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(work, given)


def main() -> None:
    kinds, folder = ["send", "job", "rpc"], tempfile.gettempdir()
    asked = options(__doc__, kinds=kinds, ranks=[4, 64], smallest=1_000, largest=1_000_000, rounds=5, folder=folder)
    os.environ["MPLBACKEND"] = "agg"
    print(f"{today()}; processor seconds, MB, microseconds per message for load + join")
    print(
        f"{'kind':<5}{'n':>3}{'messages':>11}{'MB':>8}", *(f"{name:>17}" for name in COLUMNS),
        f"{'us/msg':>8}{'peak MB l/j/d':>19}  | {'json':>6}{'load':>7}{'peak':>7}  | ratio MB, load, peak",
    )  # fmt: skip
    for kind in asked.kinds:
        for ranks in asked.ranks:
            count = asked.smallest
            while count <= asked.largest:
                rounds = min(asked.rounds, 5 if count <= 10_000 else 3 if count <= 100_000 else 1)
                with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
                    case(kind, ranks, count, rounds, Path(folder))
                count *= 10


if __name__ == "__main__":
    main()
