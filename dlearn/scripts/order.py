"""What `dlearn run` asks of the processes of its job: one environment variable, which their children inherit."""

from __future__ import annotations

import os

import msgspec

VARIABLE = "DLEARN_RUN"


class Order(msgspec.Struct, frozen=True):
    """The options of a recorded job. `job` is "" where other hosts take part; at `gate` calls wait."""

    folder: str
    job: str
    launcher: int  # The pid of `dlearn run`.
    graph: bool = False
    steps: tuple[int, int] | None = None
    hang_after: float | None = None
    gather: bool = False
    sources: tuple[str, ...] = ()
    gate: str = ""

    def environment(self) -> dict[str, str]:
        """Return the variables that the job's processes get in addition."""
        site = os.path.join(os.path.dirname(__file__), "site")
        path = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {VARIABLE: msgspec.json.encode(self).decode(), "PYTHONPATH": os.pathsep.join(path)}


def order_of_process() -> Order | None:
    """Return the options of the job that this process belongs to, if any."""
    text = os.environ.get(VARIABLE)
    return msgspec.json.decode(text, type=Order) if text else None
