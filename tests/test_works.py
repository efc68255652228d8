"""How the ends of operations are told, where the recording ends at the same moment."""

import threading

import torch

from dlearn.hooks.c10d.works import Callbacks
from dlearn.trace.event import NOT_OBSERVED

LONG_S = 30


class Ends:
    """Notes each end that is told; the one of event 7 takes until it may go on."""

    def __init__(self) -> None:
        self.told: list[tuple[int, str]] = []
        self.begun, self.go_on = threading.Event(), threading.Event()

    def end(self, number: int, *, by: str, error: str = "") -> None:
        if number == 7:
            self.begun.set()
            assert self.go_on.wait(LONG_S)
        self.told.append((number, by))


def test_a_recording_ends_after_the_end_that_a_callback_is_telling():
    """The callback's thread may lose Python's lock, or its core, between taking the event and writing its line."""
    emit = Ends()
    callbacks = Callbacks(emit)
    future = torch.futures.Future()
    callbacks.watch(7, future)
    backend = threading.Thread(target=future.set_result, args=[None])
    backend.start()
    assert emit.begun.wait(LONG_S)
    released = threading.Thread(target=lambda: (callbacks.release(), emit.told.append((-1, "released"))))
    released.start()
    threading.Timer(0.1, emit.go_on.set).start()
    backend.join(LONG_S)
    released.join(LONG_S)
    assert emit.told == [(7, "callback"), (-1, "released")]


def test_what_never_calls_back_is_told_once_as_not_observed():
    emit = Ends()
    callbacks = Callbacks(emit)
    future = torch.futures.Future()
    callbacks.watch(1, future)
    callbacks.release()
    future.set_result(None)
    callbacks.release()
    assert emit.told == [(1, NOT_OBSERVED)]
