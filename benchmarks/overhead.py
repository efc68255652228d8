"""What watching costs: a tiny operation, and a real DDP step, bare and under each of three observers.

    python benchmarks/overhead.py [--rounds 10]

The observers are `dlearn.record` with its files, torch.profiler (CPU) and torch's CommDebugMode. They take turns in one
run, in short blocks, because the speed of a machine changes from second to second: each block is compared with the
bare block of its own round. Shown are medians over the rounds, with the middle half of them. What an observer does
when it ends counts as its cost, too, shared out over the calls: the profiler gathers then what it has collected, and
writes it to a file. Starting one is shown apart, in milliseconds.
"""

import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import options, seconds_of, today
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import dlearn
from dlearn import Cluster

OPS = 400
BLOCK_SECONDS = 0.4
"""How long a block of DDP steps takes, about."""
LAYERS = 8
STEPS = ((16, 4), (128, 16), (256, 192))
"""Width and batch of the models whose steps are timed: 2 or 3, about 5 and about 50 ms on two cores."""

Call = Callable[[], object]


@dataclass(frozen=True)
class Block:
    """One observer's block, in microseconds: its start, each call, its end shared out over the calls.

    `processor` is what one call takes of all the process's threads together, on average, with its share of the end.
    """

    start: float
    calls: list[float]
    end: float
    processor: float

    @property
    def call(self) -> float:
        return statistics.median(self.calls)

    @property
    def whole(self) -> float:
        return self.call + self.end


Found = dict[str, list[Block]]
"""Observer -> one block for each round."""


# The observers --------------------------------------------------------------------------------------------------------


@contextmanager
def profiled(file: Path) -> Iterator[None]:
    profiler = profile(activities=[ProfilerActivity.CPU])
    with silenced():
        profiler.start()
    yield
    with silenced():
        profiler.stop()
    profiler.export_chrome_trace(str(file))


@contextmanager
def silenced() -> Iterator[None]:
    """The profiler's C++ tells on stderr of every start and stop, whatever its log level is."""
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


OBSERVERS: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "bare": lambda file: nullcontext(),
    "dlearn.record": dlearn.record,
    "torch.profiler": profiled,
    "CommDebugMode": lambda file: CommDebugMode(),
}


# Measuring, in each rank ----------------------------------------------------------------------------------------------


def take_turns(
    what: str, call: Call, *, calls: int, rounds: int, folder: str, debugged_call: Callable[[], Call] | None = None
) -> Found:
    """Every observer in every round, another one first each time.

    Where CommDebugMode has to be inside the call, `debugged_call` makes one for each of its blocks.
    """
    found: Found = {name: [] for name in OBSERVERS}
    names = list(OBSERVERS)
    for round_ in range(-1, rounds):
        if dist.get_rank() == 0 and round_ % 5 == 0:
            print(f"{what}: {round_} of {rounds} rounds", file=sys.stderr, flush=True)
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            file = Path(folder, f"{what}, {round_}, {name}, rank {dist.get_rank()}")
            if name == "CommDebugMode" and debugged_call is not None:
                block = measure(nullcontext(), debugged_call(), min(calls, 10))
            else:
                block = measure(OBSERVERS[name](file), call, calls)
            if round_ >= 0:  # The one before warms up.
                found[name].append(block)
    return found


def measure(observer: AbstractContextManager[object], call: Call, calls: int) -> Block:
    warm_up = 2 + calls // 20 * 2  # An even number: a send and its recv.
    taken = []
    dist.barrier()
    entered = time.perf_counter()
    with observer:
        started = time.perf_counter()
        for _ in range(warm_up):
            call()
        worked = time.process_time()
        last = time.perf_counter()
        for _ in range(calls):
            call()
            before, last = last, time.perf_counter()
            taken.append((last - before) * 1e6)
        worked = time.process_time() - worked
        ending = time.process_time()
    end = (time.perf_counter() - last) / (calls + warm_up)
    processor = worked / calls + (time.process_time() - ending) / (calls + warm_up)
    return Block((started - entered) * 1e6, taken, end * 1e6, processor * 1e6)


def all_reduce(rounds: int, folder: str) -> Found:
    tensor = torch.ones(2)
    what = f"all_reduce over {dist.get_world_size()}"
    return take_turns(what, lambda: dist.all_reduce(tensor), calls=OPS, rounds=rounds, folder=folder)


def ping_pong(rounds: int, folder: str) -> Found:
    """To the other rank and back; each send is a call, and so is each recv."""
    tensor = torch.ones(2)
    rank = dist.get_rank()
    turn = itertools.cycle((dist.send, dist.recv) if rank == 0 else (dist.recv, dist.send))
    return take_turns("send and recv", lambda: next(turn)(tensor, 1 - rank), calls=OPS, rounds=rounds, folder=folder)


def ddp(width: int, batch: int, rounds: int, folder: str) -> Found:
    step = ddp_step(width, batch)
    for _ in range(3):
        step()
    calls = torch.tensor(BLOCK_SECONDS / min(seconds_of(step) for _ in range(10))).clamp(4, 200)
    dist.broadcast(calls, 0)  # All ranks make as many.

    def debugged_step() -> Call:
        """CommDebugMode follows one forward pass, and leaves hooks on the model for good: a new one, few steps."""
        own_step = ddp_step(width, batch)

        def call() -> None:
            with CommDebugMode():
                own_step()

        return call

    what = f"DDP, width {width}, batch {batch}"
    return take_turns(what, step, calls=round(calls.item()), rounds=rounds, folder=folder, debugged_call=debugged_step)


def ddp_step(width: int, batch: int) -> Callable[[], None]:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.randn(batch, width, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


# What is told ---------------------------------------------------------------------------------------------------------


def tell_calls(what: str, found: Found) -> None:
    """What each observer adds to one call."""
    bare = found.pop("bare")
    print(
        f"\n{what}: {middle([block.call for block in bare], '{:.0f}')} us bare, the fastest tenth {fastest(bare):.0f}"
    )
    for name, blocks in found.items():
        pairs = list(zip(blocks, bare, strict=True))
        added = [block.whole - plain.whole for block, plain in pairs]
        times = statistics.median(block.whole / plain.whole for block, plain in pairs)
        processor = statistics.median(block.processor - plain.processor for block, plain in pairs)
        print(
            f"  {name:<15} adds {middle(added, '{:.0f}')} us to each: {times:.1f} times as long."
            f" {median_of(blocks, 'end'):.1f} us of it at its end."
            f" The fastest tenth: {fastest(blocks) - fastest(bare):+.0f} us; processor time: {processor:+.0f} us."
            f" Starts in {median_of(blocks, 'start') / 1000:.1f} ms."
        )


def tell_steps(what: str, found: Found) -> None:
    """By how much each observer makes a step longer."""
    bare = found.pop("bare")
    print(f"\n{what}: {middle([block.call / 1000 for block in bare], '{:.1f}')} ms bare")
    for name, blocks in found.items():
        pairs = list(zip(blocks, bare, strict=True))
        longer = [100 * (block.whole / plain.whole - 1) for block, plain in pairs]
        added = statistics.median((block.whole - plain.whole) / 1000 for block, plain in pairs)
        at_end = statistics.median(100 * block.end / plain.whole for block, plain in pairs)
        processor = [100 * (block.processor / plain.processor - 1) for block, plain in pairs]
        print(
            f"  {name:<15} makes it longer by {middle(longer, '{:.1f}')} %, that is {added:.2f} ms;"
            f" {at_end:.1f} % at its end. Processor time {middle(processor, '{:+.1f}')} %."
        )


def fastest(blocks: list[Block]) -> float:
    """The time within which the fastest tenth of all calls was done: what other programs disturb only adds."""
    return statistics.quantiles([call for block in blocks for call in block.calls], n=10)[0]


def median_of(blocks: list[Block], part: str) -> float:
    return statistics.median(getattr(block, part) for block in blocks)


def middle(numbers: list[float], form: str) -> str:
    """The median, and between which two numbers the middle half lies."""
    low, half, high = statistics.quantiles(numbers, n=4)
    return f"{form.format(half)} ({form.format(low)} to {form.format(high)})"


def main() -> None:
    rounds = options(__doc__, rounds=10).rounds
    print(f"{today()}, torch {torch.__version__}. Median of {rounds} rounds (middle half).")
    with tempfile.TemporaryDirectory() as folder:
        alone = Cluster(1, record=False).run(all_reduce, rounds, folder, timeout=300)
        tell_calls("all_reduce of 8 B on one rank", alone.results[0])
        tell_bytes(Path(folder))
        with Cluster(2, record=False) as two:
            tell_calls("all_reduce of 8 B over two ranks", two.run(all_reduce, rounds, folder, timeout=300).results[0])
            tell_calls("send or recv of 8 B, to and fro", two.run(ping_pong, rounds, folder, timeout=300).results[0])
            for width, batch in STEPS:
                found = two.run(ddp, width, batch, rounds, folder, timeout=300).results[0]
                tell_steps(f"DDP step on two ranks: {LAYERS} layers of {width}, batch {batch}", found)


def tell_bytes(folder: Path) -> None:
    """How long dlearn's file is for each call; the last line says how many lines it has, two for a call."""
    (file, *_) = folder.glob("*dlearn.record*/*.jsonl")
    lines = file.read_bytes().splitlines()
    print(f"  dlearn's file: {2 * statistics.mean(map(len, lines)):.0f} B for each")


if __name__ == "__main__":
    main()
