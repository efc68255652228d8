"""Runs, and what fails before their call, leave nothing: no rank, no switch, no descriptor."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from waiting import comes_true

import dlearn
from dlearn import Cluster
from dlearn.cluster import spares
from dlearn.errors import SetupError
from dlearn.network.namespace import refusal

not_here = refusal()
needs_network = pytest.mark.skipif(bool(not_here), reason=not_here or "permitted")
pytestmark = pytest.mark.usefixtures("own_folder")
HOUSE = str(Path(dlearn.__file__).parent)
SLOW = "1 Gbit/s, 100 us"


def processes() -> int:
    return len(psutil.Process().children(recursive=True))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_for_more() -> Callable[[], bool]:
    """Whether there will be no more processes and descriptors than now, with two ranks ready."""
    Cluster(2).run(os.getpid)
    spares._worker.join()
    gc.collect()
    there, opened = processes(), descriptors()
    return lambda: comes_true(lambda: processes() <= there and descriptors() <= opened)


@needs_network
@pytest.mark.parametrize("network", [None, SLOW])
def test_runs_and_a_wrong_hold_or_argument(network):
    nothing_is_left = check_for_more()
    for _ in range(5):
        Cluster(2, network=network).run(os.getpid)
        with pytest.raises(SetupError, match="hold is True, a function of a call, or a schedule"):
            Cluster(2, network=network, hold="yes").run(os.getpid)
        with pytest.raises(SetupError, match="cannot be sent to the ranks"):
            Cluster(2, network=network).run(len, (number for number in range(3)))
    assert nothing_is_left()


def calls_of_a_start(**options: object) -> list[str]:
    """The functions of the cluster that are called from the start of ranks until they are followed."""
    names: list[str] = []

    def note(frame, event, _):
        name = frame.f_code.co_qualname
        begun = names or name == "Cluster._crew_for_call"
        over = "Crew._follow" in names or "HeldRun.of" in names
        if begun and not over and event == "call" and frame.f_code.co_filename.startswith(HOUSE):
            names.append(name)

    sys.setprofile(note)
    try:
        Cluster(2, **options).run(os.getpid)
    finally:
        sys.setprofile(None)
    return [name for name in dict.fromkeys(names) if "<" not in name]


def interrupted_at(name: str, **options: object) -> None:
    def interrupt(frame, event, _):
        if event == "call" and frame.f_code.co_qualname == name:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        Cluster(2, **options).run(os.getpid)


@pytest.mark.slow
@needs_network
@pytest.mark.parametrize("options", [{"network": SLOW}, {"network": SLOW, "hold": True}, {}])
def test_an_interrupt_wherever_it_comes(options):
    names = calls_of_a_start(**options)
    nothing_is_left = check_for_more()
    assert {"Cluster._start_ranks", "surroundings", "Cluster._call"} <= set(names)
    for name in names:
        interrupted_at(name, **options)
        assert nothing_is_left(), name
