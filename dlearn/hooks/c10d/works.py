"""How the end of an operation is seen, without ever waiting for it.

A collective's Work has a future, which calls back on a thread of the backend: that thread and the
program's then take turns at Python's lock, which costs more than all the rest of recording. So the
future is used only where the program's own wait does not show the end. Sends, receives and gloo's
reduce_scatter have none, and a second `wait` of theirs hangs: the hook holds each Work until then
(torch makes a new Python object for a Work without references).
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import Work

from dlearn.events.event import NOT_OBSERVED
from dlearn.hooks import Emit, Undo
from dlearn.hooks.patches import guarded
from dlearn.hooks.private import untraced

WORKS_HELD = 1000
WORK_BYTES_HELD = 64 << 20
"""A Work keeps its tensors alive, so we hold few: beyond either limit the oldest is let go, and counted."""


def future_of(work: Work) -> Any:
    """Return the future of a Work; None of one that has none."""
    try:
        return work.get_future()
    except RuntimeError:
        return None


def outcome_of(future: Any) -> tuple[Any, str]:
    """Return the value with which a future is done, and ""; else its error, and the error's class."""
    try:
        return future.value(), ""
    except Exception as error:  # The operation's own, of any class: the user sees it at `wait`.
        return error, type(error).__name__


class Callbacks:
    """Ends that the futures of collectives, or of RPC calls, report on a thread of the backend or agent."""

    CLOSE_SECONDS = 5.0

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._open: dict[int, list[Any]] = {}
        """The future of each event that has no end yet; an empty list while its end is being written."""

    def watch(self, number: int, future: Any, learn: Callable[[Any], dict[str, Any]] | None = None) -> None:
        """Report the end of event `number` and what `learn` finds in the future's value or error."""
        self._open[number] = [future]
        future.add_done_callback(partial(self._done, number, learn))

    @untraced
    def _done(self, number: int, learn: Callable[[Any], dict[str, Any]] | None, future: Any) -> None:
        value, error = outcome_of(future)
        if number in self._open:
            facts = guarded(self._emit, "a result", learn, value) if learn is not None else None
            self._end(number, by="callback", error=error, **(facts or {}))

    def settle(self) -> None:
        """Wait for callbacks on their way: a future wakes the training thread before it calls back."""
        deadline = time.monotonic() + self.CLOSE_SECONDS
        while any(map(_is_on_its_way, list(self._open.values()))) and time.monotonic() < deadline:
            time.sleep(0.0005)

    def release(self) -> None:
        """Report, at the end of the recording, that no other ends were observed."""
        self.settle()
        for number in list(self._open):
            self._end(number, by=NOT_OBSERVED)

    def _end(self, number: int, **facts: Any) -> None:
        """Report the end of an event, once: a callback may run while the recording ends."""
        try:
            self._open[number].pop()
        except (KeyError, IndexError):
            return  # Another thread reports it.
        # It is open until its line is written: else the file might be closed before.
        self._emit.end(number, **facts)
        del self._open[number]


def _is_on_its_way(future: list[Any]) -> bool:
    return not future or any(pending.done() for pending in future)


class _Held(NamedTuple):
    """A Work, its event's number, the bytes that it keeps alive, and the address of its output."""

    work: Work
    number: int
    size: int
    any_source: bool
    address: int


class WaitingWorks:
    """Works whose end the program's own wait will report."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._by_output: dict[int, Work] = {}
        self._bytes = 0

    def hold(
        self, work: Work, number: int, size: int = 0, *, any_source: bool = False, output: torch.Tensor | None = None
    ) -> None:
        """Keep `work`, and `size` bytes with it, until it, or its `output`, is waited for."""
        address = output.untyped_storage().data_ptr() if output is not None else 0
        self._held[id(work)] = _Held(work, number, size, any_source, address)
        if address:
            self._by_output[address] = work
        self._bytes += size
        while len(self._held) > WORKS_HELD or (self._bytes > WORK_BYTES_HELD and len(self._held) > 1):
            oldest = self._forget(next(iter(self._held)))
            if oldest is not None:
                self._emit.end(oldest.number, by=NOT_OBSERVED)
                self._emit.dropped()

    def _forget(self, work_id: int) -> _Held | None:
        held = self._held.pop(work_id, None)
        if held is not None:
            self._bytes -= held.size
            self._by_output.pop(held.address, None)
        return held

    def watch_wait(self, original: Any) -> Any:
        """Make the function that replaces `Work.wait`."""

        @untraced
        def wait(work: Work, *args: Any, **kwargs: Any) -> Any:
            error = KeyboardInterrupt.__name__  # Ctrl-C may come in here, as soon as C++ is left.
            try:
                result = original(work, *args, **kwargs)
                error = ""
                return result
            except BaseException as failure:
                error = type(failure).__name__
                raise
            finally:
                guarded(self._emit, "Work.wait", self._ended, work, error)

        return wait

    def watch_wait_tensor(self, after: torch.DispatchKeySet) -> Undo:
        """Watch the op `wait_tensor`, by which functional collectives wait in C++ on their output."""
        library = torch.library.Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]
        redispatch = torch.ops._c10d_functional.wait_tensor.default._handle.redispatch_boxed

        @untraced
        def kernel(keyset: Any, tensor: torch.Tensor) -> Any:
            result = redispatch(keyset & after, tensor)
            # While torch.compile traces, tensors are fakes without an address.
            if self._by_output and type(tensor) is torch.Tensor:
                guarded(self._emit, "wait_tensor", self._output_ended, tensor)
            return result

        library.impl("wait_tensor", kernel, "BackendSelect", with_keyset=True)  # type: ignore[no-untyped-call]
        undo: Undo = library._destroy
        return undo

    def _output_ended(self, tensor: torch.Tensor) -> None:
        work = self._by_output.get(tensor.untyped_storage().data_ptr())
        if work is not None:
            self._ended(work)

    def _ended(self, work: Work, error: str = "") -> None:
        held = self._forget(id(work))
        if held is not None:
            peer = work._source_rank() if held.any_source and not error else None
            self._emit.end(held.number, by="wait", error=error, peer=peer)

    def release(self) -> None:
        """Report, at the end of the recording, that the program has not waited for these."""
        for work_id in list(self._held):
            if (held := self._forget(work_id)) is not None:
                self._emit.end(held.number, by=NOT_OBSERVED)
