"""What each rank does now, and which ranks hang: read from trace files while they are written."""

from __future__ import annotations

import html
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlearn.diagnosis.hang_detection import Hang, hangs, last_seen
from dlearn.diagnosis.hang_report import report
from dlearn.diagnosis.meeting_report import meeting_report
from dlearn.errors import TraceError
from dlearn.events.event import Collective, RpcCall
from dlearn.events.job_facts import EXITED, RETURNED
from dlearn.events.printable import printable
from dlearn.events.rendezvous import Rendezvous
from dlearn.live.follower import BARS, WAITED, WINDOW_BYTES, Call, Follower
from dlearn.shown import count_text, in_a_notebook, size_text
from dlearn.trace import Trace

MOST_ROWS = 8
WIDTH = 80
WAITS_SECONDS = 1.0  # A shorter wait is not worth a word.
HANGS_SECONDS = 3.0  # After so long inside of a call the trace is read: which ranks hang?
MOST_BYTES = 50_000_000  # Of a larger trace it is not asked: reading it would take seconds.
SHARE = 0.005  # Of a core, at most, for the rows, and as much for asking who hangs.
MOST_EVENTS, MOST_LETTERS = 4000, 300_000  # Of a trace that a card plays, and of its player.
_LONGEST_NAME = 12
LIVE = {"dlearn": "live"}  # Metadata of an output that depends on how long a cell took.
_ENDS = {RETURNED: "has returned", EXITED: "has ended", "": "gone"}
_RED = "color:var(--jp-error-color1,#b40426);font-weight:600"
_ROW_STYLE = "display:flex;flex-wrap:wrap;align-items:center;gap:0 12px;margin:3px 0"
_SECOND_STYLE = "display:inline-block;width:7px;height:16px;margin:0 1px -3px 0;background:"
_HATCHES = "repeating-linear-gradient(135deg,#888 0 1.2px,transparent 1.2px 4px)"


@dataclass(frozen=True)
class Row:
    """What a rank does now, and its last ten seconds: a letter for each, and the payload given to calls."""

    name: str
    lane: str
    bytes_per_second: float | None
    now: str
    guilty: bool  # Others wait for it without end.

    @property
    def rate(self) -> str:
        """Return "1.51 MB/s"; "" before the first call."""
        return "" if self.bytes_per_second is None else f"{size_text(round(self.bytes_per_second))}/s"

    def html(self, letters: int) -> str:
        """Return a row of a page, its name so wide; on a narrow page `now` is a second line."""
        looks = {" ": "none", WAITED: _HATCHES}
        for eighths, letter in enumerate(BARS):
            looks[letter] = f"linear-gradient(0deg,#888 {12.5 * eighths}%,#e2ebcf 0)"
        lane = "".join(f'<i style="{_SECOND_STYLE}{looks[letter]}"></i>' for letter in self.lane)
        name_style = f"min-width:{letters}ch;{_RED * self.guilty}"
        cells = f'<b role="rowheader" style="{name_style}">{html.escape(self.name)}</b>'
        cells += f'<span role="cell" title="grey: in calls; hatched: waits for a late rank">{lane}</span>'
        cells += f'<span role="cell" style="width:10ch;text-align:right">{self.rate}</span>'
        cells += f'<span role="cell" style="flex:1 1 36ch">{html.escape(self.now)}</span>'
        return f'<div role="row" style="{_ROW_STYLE}">{cells}</div>'


class LiveRows:
    """The ranks whose files are in a folder. `names` are what they are called; without it, by their numbers."""

    def __init__(self, folder: Path, names: Sequence[str] = ()) -> None:
        self._folder, self._names = folder, names
        self._files: dict[Path, Follower] = {}
        self._asked: set[tuple[int, int]] = set()
        self._guilty: set[int] = set()
        self._ask_again = 0.0
        self.rest_seconds = 0.0  # Before the rows are worth their cost again.
        self.hang = ""  # Who waits for whom once a wait has lasted three seconds; else "".

    def rows(self) -> list[Row]:
        """Read on, and return a row for each rank."""
        began = time.thread_time()
        try:
            for path in self._folder.glob("*.jsonl"):
                if path not in self._files and (new := Follower.of(path, len(self._files))) is not None:
                    self._files[path] = new
            for follower in self._files.values():
                follower.catch_up(WINDOW_BYTES // len(self._files))
        except OSError:  # The folder has just been tidied away, or is not there yet.
            return []
        self.rest_seconds = (time.thread_time() - began) / SHARE
        self._ask_who_hangs()
        followers = sorted(self._files.values(), key=lambda follower: follower.rank)
        return [self._row(follower) for follower in followers]

    def lines(self, width: int | None = WIDTH, rows: list[Row] | None = None) -> list[str]:
        """Return the first rows as text, at most `width` columns, and the sentence of a hang."""
        rows = self.rows() if rows is None else rows
        rows = sorted(rows, key=lambda row: not row.guilty) if len(rows) > MOST_ROWS else rows
        widest = min(max((len(row.name) for row in rows[:MOST_ROWS]), default=0), _LONGEST_NAME)
        lines = []
        for row in rows[:MOST_ROWS]:
            name = f"{row.name:{widest}.{widest}}"
            lines.append(f"{name}  {row.lane}  {row.rate:>9}  {row.now}"[:width])
        if len(rows) > MOST_ROWS:
            lines.append(f"and {len(rows) - MOST_ROWS} more ranks")
        for sentence in self.hang.splitlines():
            lines += textwrap.wrap(printable(sentence), width or WIDTH)
        return lines

    def html(self, rows: list[Row]) -> str:
        """Return all rows and the sentence of a hang; a rank that is waited for is red."""
        letters = max((len(row.name) for row in rows), default=0)
        shown = "".join(row.html(letters) for row in rows)
        shown = f'<div role="table" aria-label="What each rank does">{shown}</div>' * bool(rows)
        for sentence in self.hang.splitlines():
            shown += f'<p role="status" style="{_RED};margin:4px 0">{html.escape(sentence)}</p>'
        return shown

    def _name(self, rank: int) -> str:
        return self._names[rank] if rank < len(self._names) else f"rank {rank}"

    def _row(self, rank: Follower) -> Row:
        now_ns = time.monotonic_ns()
        now = self._doing(rank, now_ns)
        for span in [*rank.spans.values()][-1:]:
            now = f"{span.name}: {now}"
        lane = rank.lane(now_ns)
        name, guilty = self._name(rank.rank), rank.rank in self._guilty
        return Row(name, lane, rank.bytes_per_second(now_ns), printable(now), guilty)

    def _doing(self, rank: Follower, now_ns: int) -> str:
        """Say what a rank does, and since when if that is long."""
        if rank.ended or rank.is_gone:
            return _ENDS.get(rank.ended, f"has raised {rank.ended}")
        call = min(rank.open, key=lambda call: call.start_ns, default=None)
        since_ns = rank.last_ns if call is None else call.start_ns
        seconds = (now_ns - since_ns) / 1e9
        for_long = f" for {seconds:.1f} s" if since_ns and seconds >= WAITS_SECONDS else ""
        if call is None:
            return f"computes{for_long}"
        site = f" ({call.site})" if call.site else ""
        late = self._late(rank, call) if for_long and isinstance(call, Collective) else []
        if not late:
            return f"in {_what(call)}{for_long}{site}"
        rank.waits_since(call.start_ns, now_ns)
        names = ", ".join(map(self._name, late[:3])) + ", ..." * (len(late) > 3)
        return f"waits {seconds:.1f} s for {names} in {_what(call)}{site}"

    def _late(self, rank: Follower, call: Collective) -> list[int]:
        """Return the members of its group that have not come as far; ranks of which nothing is known are left out."""
        members, late = rank.groups.get(call.group, ()), []
        for other in self._files.values():
            if other.rank in members and other.reached.get(call.group, call.seq if other.skipped else 0) < call.seq:
                late.append(other.rank)
        return late

    def _ask_who_hangs(self) -> None:
        """Read the whole trace once for each set of calls that last too long: it says for whom they wait, and why."""
        now = time.monotonic()
        long_ago_ns = time.monotonic_ns() - round(1e9 * HANGS_SECONDS)
        stuck = set()
        for rank in self._files.values():
            long = [call.number for call in rank.open if call.start_ns < long_ago_ns]
            stuck |= {(rank.rank, number) for number in long if not rank.ended}
        if not stuck:
            self._asked, self._guilty, self.hang = stuck, set(), ""
        stuck |= {(rank.rank, -1) for rank in self._files.values() if rank.ended and stuck}
        has_ended = any(number < 0 for _, number in stuck - self._asked)
        if stuck != self._asked and (has_ended or now >= self._ask_again):
            began = time.thread_time()
            self._asked, self.hang = stuck, self._report()
            self._ask_again = now + (time.thread_time() - began) / SHARE

    def _report(self) -> str:
        if sum(rank.read_to for rank in self._files.values()) > MOST_BYTES:
            return "a call lasts long; this trace is too large to be read while it grows: see explain(run.trace)"
        try:
            trace = Trace.load(self._folder)
        except TraceError:  # A line is half written, or the first is: the rows say what is known.
            return ""
        stuck = [hang for hang in hangs(trace) if waits_for_a_call(hang)]
        self._guilty = set().union(*(hang.operation.missing for hang in stuck))
        known = last_seen(trace)
        unseen = [rank for rank in self._files.values() if rank.rank not in known]
        doing = {rank.rank: "computes" for rank in unseen if not rank.open}
        sentences = [reported.sentence for reported in report(stuck, trace, doing)]
        sentences += [sentence for _, sentence in meeting_report(trace, stuck, doing)]
        return "\n".join(sentences)


def waits_for_a_call(hang: Hang) -> bool:
    """Return whether a rank has to call something. Where all have come, data is under way."""
    operation = hang.operation
    return bool(operation.missing) or operation.mismatch is not None or operation.exchange is not None


def _what(call: Call) -> str:
    """Return "all_reduce #12, bucket 1" or "all_gather_single #3, blocks.0"."""
    if isinstance(call, RpcCall):
        return f"{call.op} {call.function}()"
    if isinstance(call, Rendezvous):
        return call.op
    what = call.module.strip(".") if isinstance(call, Collective) else ""
    if isinstance(call, Collective) and call.bucket_index is not None:
        what = f"bucket {call.bucket_index}"
    return f"{call.op} #{call.seq}, {what}".removesuffix(", ")


def playable(trace: Trace) -> str:
    """Return the player of a small trace, folded up; "" of a large one, and without messages."""
    from dlearn.play.player import player

    shown = player(trace) if len(trace.table) <= MOST_EVENTS else None
    if shown is None or not shown.walk.messages or len(shown.snippet) > MOST_LETTERS:
        return ""
    summary = f"Play {count_text(len(shown.walk.messages), 'message')}"
    return f"<details><summary>{summary}</summary>{shown.snippet}</details>"


class LiveDisplay:
    """An output that appears after two seconds and changes once a second; at the end one sentence is left."""

    AFTER_SECONDS, AGAIN_SECONDS = 2.0, 1.0

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._next = self._start + self.AFTER_SECONDS
        self._lines: list[str] = []
        self._output: Any = None

    def __enter__(self) -> LiveDisplay:
        return self

    def __exit__(self, *failure: object) -> None:
        if failure[0] is not None:
            self.step_aside()
            self.end_with("")

    def update(self, head: str, rows: LiveRows | None = None) -> None:
        """Show the head, how long it has taken, and the rows, which are read only if they are to be shown."""
        now = time.monotonic()
        if now < self._next:
            return
        head = f"{head}, {now - self._start:.0f} s"
        if in_a_notebook():
            self._show_output(head, rows)
        elif sys.stderr.isatty():
            self._show_lines([head, *(rows.lines() if rows is not None else [])])
        self._next = now + max(self.AGAIN_SECONDS, 0.0 if rows is None else rows.rest_seconds)

    def step_aside(self) -> None:
        """Clear a terminal's lines before something else is printed: they come back below it."""
        if self._lines:
            self._show_lines([])

    def end_with(self, sentence: str, card: str = "") -> None:
        """Replace the rows, if there were any, by a sentence or the run's card."""
        if self._output is not None:
            card = card or f"<p>{html.escape(sentence)}</p>"
            self._replace({"text/html": card, "text/plain": sentence})
            self._output = None

    def _show_output(self, head: str, rows: LiveRows | None) -> None:
        lines, shown = [head], f"<p><strong>{html.escape(head)}</strong></p>"
        if rows is not None:
            seen = rows.rows()
            lines, shown = lines + rows.lines(rows=seen), shown + rows.html(seen)
        self._replace({"text/html": shown, "text/plain": "\n".join(lines)})

    def _replace(self, data: dict[str, str]) -> None:
        if self._output is not None:
            self._output.update(data, raw=True, metadata=LIVE)
            return
        from IPython.display import display

        self._output = display(data, raw=True, display_id=True, metadata=LIVE)  # type: ignore[no-untyped-call]

    def _show_lines(self, lines: list[str]) -> None:
        up = "\033[1A\033[K" * (len(self._lines) - 1)
        print(f"\r\033[K{up}" + "\n".join(lines), end="", file=sys.stderr, flush=True)
        self._lines = lines
