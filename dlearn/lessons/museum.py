"""The museum: what each exhibit of `lessons.hangs` is, what dlearn says of it and when, and what bare torch says.

Every exhibit is diagnosed three times by the same code: while it hangs, in the run's error, and from the files alone.
"""

import contextlib
import inspect
import io
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations, product
from typing import Any, Literal, NamedTuple

from dlearn.cluster import Cluster
from dlearn.cluster.run import Run
from dlearn.diagnosis.hang_detection import hangs
from dlearn.diagnosis.meetings import meetings
from dlearn.diagnosis.post_mortem import story
from dlearn.events.site import file_label
from dlearn.lessons import hangs as halls
from dlearn.shown import Table
from dlearn.trace import Trace

HANG_AFTER = 1.0  # Seconds of silence before the sentence is printed.
TORCH_SECONDS = 1.0  # The timeout of bare torch's process group; its default is half an hour.
_MOST_TEXT = 280  # Characters of one rank's last line.
_ROWS_SHOWN = 3  # Of the table; the others are folded.
_LIVE = re.compile(r"nothing has happened for \d+ s: (.*)\.$", re.MULTILINE)


@dataclass(frozen=True)
class Exhibit:
    """A job, and the diagnosis to expect of it: a sentence, or one of several where a race decides.

    In it <code> stands for the line that holds that code, * for anything within a clause, ** for the clauses behind.
    """

    job: Callable[[], object]
    what: str
    diagnosis: str | tuple[str, ...]
    ends: Literal["hangs", "dies", "wrong"] = "hangs"
    ranks: int = 2
    rpc: bool = False

    @property
    def name(self) -> str:
        return self.job.__name__

    @property
    def source(self) -> str:
        return inspect.getsource(self.job)

    def expects(self, sentence: str) -> bool:
        """Return True if this is an expected sentence, with the lines of the job."""
        for expected in [self.diagnosis] if isinstance(self.diagnosis, str) else self.diagnosis:
            text = re.escape(re.sub(r"<([^>]+)>", lambda found: self.site(found[1]), expected))
            if re.fullmatch(text.replace(r"\*\*", ".*").replace(r"\*", "[^;()]*"), sentence):
                return True
        return False

    def site(self, code: str) -> str:
        """Return where this code is, as a trace says it: "lessons/hangs.py:59"."""
        lines, first = inspect.getsourcelines(self.job)
        index = next(i for i, line in enumerate(lines) if code in line)
        return f"{file_label(inspect.getfile(self.job), {}, os.getcwd())}:{first + index}"


_MAKERS = tuple(
    f"in a communication hook for bucket {bucket}{thread}"
    for bucket in (0, 1)
    for thread in ("", ", on thread Dummy-*")
)
_CALLS = ("all_reduce #* (<.backward()>)", "all_reduce #* (bucket *: *; <.backward()>)")
"""Of two buckets, and of one."""
_OUT_OF_ORDER = tuple(
    f"{who} in {call}; the ranks called it with different sizes: * B on rank 0, * B on rank 1;"
    f" rank 0 called it {first}, rank 1 {second}**"
    for call in _CALLS
    for who in ("rank 0 waits", "rank 1 waits", "rank 0 and rank 1 wait")
    for first, second in permutations(_MAKERS, 2)
)
"""PowerSGD: what one rank sends for one bucket meets what the other rank sends for the other."""
_NO_THREAD_LEFT = tuple(
    f"rank 0 and rank 1 wait in {call}; all ranks called it, and it does not end;"
    f" rank 0 called it {first}, rank 1 {second}**"
    for call, first, second in product(_CALLS, _MAKERS, _MAKERS)
    if "thread" in first + second
)
"""PowerSGD: a callback holds one of gloo's two threads until its all-reduce is done, which needs one of them.
One run of 300 had begun the next all-reduce, too, which waited behind it."""

EXHIBITS = (
    Exhibit(
        halls.unused_parameter, "in its third step, rank 1 leaves a layer out",
        "rank 0 waits for rank 1 in all_reduce #11 (bucket 1: b.bias, b.weight; <loss.backward()>); rank 1 never"
        " produced the gradients of b.bias, b.weight in backward pass 3, it has returned from its function; behind it"
        " waits all_reduce #12",
    ),
    Exhibit(
        halls.uneven_batches, "rank 0 has one batch more",
        "rank 0 waits for rank 1 in all_reduce #10 (bucket 0: c.bias, c.weight; <loss.backward()>); rank 1 never began"
        " backward pass 3, it has returned from its function; behind it wait all_reduce #11 and all_reduce #12",
    ),
    Exhibit(
        halls.module_called, "the model is called without DDP",
        "3 steps of optimizer 0 (SGD) used gradients that no rank reduced: DDP's forward was never called"
        " (`ddp.module(...)`, <model.module(inputs)>)",
        ends="wrong",
    ),
    Exhibit(
        halls.one_rank_ahead, "rank 1 leaves one backward pass out, and goes on",
        "rank 0 waits for rank 1 in all_reduce #9 (bucket 0: bias, weight; <loss.backward()>); rank 1 never began"
        " backward pass 4, it has returned from its function; from all_reduce #7 on, rank 1 was 1 forward pass ahead:"
        " it skipped backward after forward pass 2 (<loss = model>); 2 all-reduces before this one mixed different"
        " passes",
    ),
    Exhibit(
        halls.skipped_all_reduce, "a collective inside `if rank == 0`",
        "rank 0 waits for rank 1 in all_reduce #2 (<dist.all_reduce(loss)  # in>); rank 1 never called it,"
        " it has returned from its function",
    ),
    Exhibit(
        halls.all_reduce_against_broadcast, "one rank broadcasts, the other all-reduces",
        "rank 0 and rank 1 wait in broadcast #1 (<dist.broadcast>); the ranks called different operations: broadcast,"
        " all_reduce; rank 0 called broadcast at <dist.broadcast>, rank 1 all_reduce at <dist.all_reduce>",
    ),
    Exhibit(
        halls.swapped_of_equal_shape, "two all-reduces in another order",
        "Observed: rank 0 called all_reduce #1 at <dist.all_reduce(loss)  # first>, rank 1 at"
        " <dist.all_reduce(accuracy)  # first>; if these were not to meet, its result is wrong",
        ends="wrong",
    ),
    Exhibit(
        halls.swapped_of_different_shape, "the same, and one is larger",
        "rank 0 and rank 1 wait in all_reduce #1 (<dist.all_reduce(loss)  # first>); the ranks called it with different"
        " sizes: 4 B on rank 0, 4,096 B on rank 1; rank 0 called all_reduce at <dist.all_reduce(loss)  # first>,"
        " rank 1 at <dist.all_reduce(gradient)  # first>",
        ends="dies",
    ),
    Exhibit(
        halls.different_dtype, "float32 on one rank, int32 on the other",
        "Observed: all_reduce #1 went through, and the ranks called it with different dtypes: float32 on rank 0,"
        " int32 on rank 1: its results mean nothing",
        ends="wrong",
    ),
    Exhibit(
        halls.double_all_reduce, "the gradients are summed twice",
        "Observed: all_reduce #2 (<# a library>): rank 0, rank 1 and rank 2 gave the same data, as if these had been"
        " summed before; then they are now 3 times too large",
        ends="wrong",
        ranks=3,
    ),
    Exhibit(
        halls.recv_without_send, "a recv without a send",
        "rank 1 waits for rank 0 in recv #1 (<dist.recv>); rank 0 never sent it, it has returned from its function",
    ),
    Exhibit(
        halls.send_send_cycle, "each rank sends first",
        "rank 0, rank 1 and rank 2 wait in a circle: rank 0 for rank 1 in send #1 (<dist.send>), rank 1 for rank 2 in"
        " send #1 (<dist.send>), rank 2 for rank 0 in send #1 (<dist.send>)",
        ranks=3,
    ),
    Exhibit(
        halls.other_tags, "sender and receiver use different tags",
        "rank 0 and rank 1 wait for each other: rank 0 in send #1 (<dist.send>), rank 1 in recv #1 (<dist.recv>);"
        " rank 0 sends with tag 1, rank 1 waits for tag 2",
    ),
    Exhibit(
        halls.two_threads, "a thread saves the weights while the training goes on",
        "Observed: rank 0 called all_reduce #1 at <dist.all_reduce(loss)>, rank 1 at <dist.all_reduce(weights)>; rank 0"
        " called it on the program's own thread, rank 1 on thread Thread-1 (save); if these were not to meet, its"
        " result is wrong",
        ends="wrong",
    ),
    Exhibit(
        halls.group_of_one_rank, "one rank alone calls `new_group`",
        "rank 0 waits in new_group (<dist.new_group>) for rank 1, which has returned from its function",
    ),
    Exhibit(
        halls.wrong_group, "one rank leaves out `group=`",
        "rank 0 waits for rank 1 in all_reduce #1 of the group of rank 0 and rank 1 (<group=pair>); rank 1 never called"
        " it, it is in all_reduce #1 of the default group (<dist.all_reduce(number)>)",
        ranks=3,
    ),
    Exhibit(
        halls.dead_rank, "a rank is killed",
        "rank 0 waits for rank 1 in all_reduce #2 (<dist.all_reduce(number)  # the>); rank 1 never called it,"
        " it was killed by SIGKILL",
        ends="dies",
    ),
    Exhibit(
        halls.rank_asleep, "a rank does something else",
        "rank 0 waits for rank 1 in all_reduce #1 (<dist.all_reduce>); rank 1 never called it, it is at <time.sleep>",
    ),
    Exhibit(
        halls.powersgd_with_two_buckets, "a communication hook on gloo's threads",
        (*_OUT_OF_ORDER, *_NO_THREAD_LEFT),
    ),
    Exhibit(
        halls.rpc_cycle, "calls that call back, deeper than there are threads",
        "worker0 waits for worker1 in rpc_sync ping_pong() (*); worker1 has it and has not begun: 8 of its threads are"
        " taken (8 x ping_pong), and each waits for a call that it made itself",
        rpc=True,
    ),
)  # fmt: skip


def exhibit(name: str) -> Exhibit:
    return next(each for each in EXHIBITS if each.name == name)


# What dlearn says -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Visit:
    """`live` was printed while it hung, `error` is the run's, `files` what the trace files alone tell.

    `hung`: it stood still until it was ended. (Of what races for it, some runs die instead.)
    `seconds` from the call that could not end to the sentence: until it was printed, or, of a job that died, until the
    run had ended. None where nothing stood still.
    """

    exhibit: Exhibit
    run: Run
    live: tuple[str, ...]
    error: str
    files: tuple[str, ...]
    seconds: float | None
    hung: bool

    @property
    def sentence(self) -> str:
        """Return the diagnosis from the files alone."""
        return next((each for each in self.files if self.exhibit.expects(each)), "; ".join(self.files))


def visit(shown: Exhibit, *, timeout: float = 3.0) -> Visit:
    """Run an exhibit on real ranks. One that hangs is ended after `timeout` seconds, and leaves nothing behind.

    Where a busy machine has not printed the diagnosis by then, run it again with twice the time, three times at most.
    """
    for factor in (1, 2, 4, 8):
        visited = _visit(shown, timeout * factor)
        if not visited.hung or visited.sentence in visited.live:
            break
    return visited


def _visit(shown: Exhibit, timeout: float) -> Visit:
    stamped = _TimedOutput()
    with contextlib.redirect_stdout(stamped):
        cluster = Cluster(shown.ranks, rpc=shown.rpc, checksums=True, hang_after=HANG_AFTER)
        run = cluster.run({0: shown.job} if shown.rpc else shown.job, timeout=timeout, check=False)
    ended_ns = time.monotonic_ns()
    trace = Trace.load(run.folder / "trace")
    hung = shown.ends == "hangs" and not any(process.exit_status for process in trace.processes)
    printed_ns = stamped.printed_ns if hung else ended_ns
    seconds = None
    stuck: list[tuple[Sequence[Any], Sequence[int]]] = []
    stuck += [(hang.operation.ends, hang.waiting) for hang in hangs(trace)]
    stuck += [(meeting.calls, meeting.inside) for meeting in meetings(trace)]
    if stuck and printed_ns is not None:
        calls, waiting = stuck[0]
        begun_ns = max(call.start_ns for call in calls if call.rank in waiting)
        seconds = (printed_ns - begun_ns) / 1e9
    live = tuple(sentence for output in run.output.values() for sentence in _LIVE.findall(output))
    error = run.error.what if run.error is not None else ""
    return Visit(shown, run, live, error, tuple(each.removesuffix(".") for each in story(trace)), seconds, hung)


class _TimedOutput(io.StringIO):
    """The output of the ranks, and the time of the first line about a hang."""

    printed_ns: int | None = None

    def write(self, text: str) -> int:
        if self.printed_ns is None and "nothing has happened" in text:
            self.printed_ns = time.monotonic_ns()
        return super().write(text)


# What bare torch says -------------------------------------------------------------------------------------------------


def bare(shown: Exhibit, *, detail: bool = False) -> str:
    """Run without dlearn's hooks; return what the ranks say, a line for each.

    The process group's timeout (of RPC: the call's) is `TORCH_SECONDS`; `detail` is
    TORCH_DISTRIBUTED_DEBUG=DETAIL.
    """
    cluster = Cluster(shown.ranks, rpc=shown.rpc, init=False, record=False)
    job = partial(_bare, shown.job, rpc=shown.rpc, detail=detail)
    with contextlib.redirect_stdout(io.StringIO()):
        run = cluster.run({0: job} if shown.rpc else job, timeout=TORCH_SECONDS + 3, check=False)
    ranks = [0] if shown.rpc else range(shown.ranks)
    said = [f"rank {rank}: {run.results[rank]}" for rank in ranks if rank in run.results]
    if run.error is not None and "SIG" in run.error.what:
        return "\n".join([*(_shortened(line) for line in run.error.what.splitlines()), *said])
    silent = [rank for rank in ranks if rank not in run.results]
    return "\n".join([*said, *(f"rank {rank}: nothing, until it is ended" for rank in silent)])


def _bare(job: Callable[[], object], *, rpc: bool, detail: bool) -> str:
    """Run the job on a rank; return the last line of torch's message."""
    import datetime

    import torch.distributed as dist
    from torch._C._distributed_c10d import DebugLevel, set_debug_level

    if detail:
        set_debug_level(DebugLevel.DETAIL)  # What the environment variable does when torch is loaded.
    if rpc:
        from torch._C._distributed_rpc import _set_rpc_timeout

        _set_rpc_timeout(TORCH_SECONDS)
    else:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TORCH_SECONDS))
    try:
        result = job()
    except Exception as error:  # Whatever torch raises is what this is about.
        return f"{type(error).__name__}: {_last_line(str(error))}"
    return "returned" if result is None else f"returned {result}"


def _last_line(text: str) -> str:
    """Return the last line before the stacks of C++ and Python."""
    lines = [line for line in re.split(r"\n+(?:At:|Exception raised from)", text)[0].splitlines() if line.strip()]
    return _shortened(lines[-1]) if lines else ""


def _shortened(line: str) -> str:
    """Cut positions in torch's and gloo's source, and the default options of a tensor."""
    line = re.sub(r"\[(?:enforce fail at )?/[^]]*\] ", "", line)
    line = re.sub(r", TensorDeviceTypes=TensorOptions\(.*?\(nullopt\)\)", "", line)
    return line if len(line) <= _MOST_TEXT else f"{line[:_MOST_TEXT]} ..."


# The table ------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One exhibit: what dlearn says after how many seconds, and what bare torch says, with and without DETAIL."""

    visit: Visit
    torch: str
    detail: str


@dataclass(frozen=True)
class Comparison:
    """What bare torch and dlearn say of each exhibit. It shows itself in a notebook."""

    rows: Sequence[Row]

    def __str__(self) -> str:
        return "\n\n".join(
            f"{row.visit.exhibit.name}: {row.visit.exhibit.what}\n"
            f"  bare torch: {_indented(row.torch)}\n  DETAIL:     {_indented(row.detail)}\n"
            f"  dlearn:     {row.visit.sentence} [{_seconds_text(row.visit)}]"
            for row in self.rows
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head, *rows = [("exhibit", "bare torch", "with DETAIL", "dlearn", "after")]
        for visit, torch, detail in self.rows:
            rows.append((visit.exhibit.what, torch, detail, visit.sentence, _seconds_text(visit)))
        more = rows[_ROWS_SHOWN:]
        table, rest = (Table([head, *part], names=5).html() for part in (rows[:_ROWS_SHOWN], more))
        if more:
            table += f"<details><summary>{len(more)} more programs</summary>{rest}</details>"
        return table.replace("<tr>", '<tr style="vertical-align:top">').replace("\n", "<br>")


def _indented(text: str) -> str:
    return text.replace("\n", "\n              ")


def _seconds_text(visited: Visit) -> str:
    return f"{visited.seconds:.1f} s" if visited.seconds is not None else "at the end"


def table(visits: Sequence[Visit]) -> Comparison:
    """Run the same exhibits on bare torch; each takes a few seconds."""
    return Comparison([Row(each, bare(each.exhibit), bare(each.exhibit, detail=True)) for each in visits])
