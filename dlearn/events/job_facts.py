"""What a process, or the command that started it, tells of its job: lines that are no events."""

from dlearn.events import event
from dlearn.events.event import Count, Line, Nanoseconds
from dlearn.events.mpi_facts import OtherMpiCall, Probe
from dlearn.events.rendezvous import Rendezvous
from dlearn.events.source import SourceFact
from dlearn.events.wiring import Wired

RETURNED, EXITED = "returned", "exited"
DEFAULT = "default_pg"  # How torch describes the default group.
_NO_PURPOSE = ("", "undefined", "mesh_default", DEFAULT)


def dimensions_of(description: str) -> tuple[str, ...]:
    """Return what a group is for, by the description that torch keeps: of a mesh ("shard",)."""
    return () if description in _NO_PURPOSE else (description.removeprefix("mesh_"),)


def group_name(name: str, description: str) -> str:
    """Return "shard 3": several groups have one description; torch's name is a count."""
    return " ".join((*dimensions_of(description), name))


class Joined(Line, tag="joined", frozen=True, kw_only=True):
    """The process has met others, in a default group or as workers of RPC. All who meet there find the same `job`."""

    job: str


class ClockReading(Line, tag="clock", frozen=True, kw_only=True):
    """At `at_ns` of this process's clock the clock `reference` stood `offset_ns` further, give or take `error_ns`.

    The best of `rounds` exchanges of four time stamps (NTP, RFC 5905 section 8): the error is half of the time that
    question and answer travelled, and holds however unequally that is divided between the two ways.
    """

    at_ns: Nanoseconds
    offset_ns: Nanoseconds
    error_ns: Count
    reference: str
    rounds: Count


class Peer(Line, tag="peer", frozen=True, kw_only=True):
    rank: Count
    host: str
    path: str


class Heartbeat(Line, tag="place", frozen=True, kw_only=True):
    """Where the program was when nothing had been recorded for a while: `site` is the line of user code.

    A cluster's rank whose function is over says so: `ended` is "returned", or the class of the
    exception; a script that is over "exited", or the class, with the line that raised it.
    """

    at_ns: Nanoseconds
    site: str = ""
    ended: str = ""


class Exit(Line, tag="exit", frozen=True, kw_only=True):
    """How the process ended, as its parent saw it. `status` is its exit status; below 0 the signal that killed it."""

    status: int


class Stopped(Line, tag="stopped", frozen=True, kw_only=True):
    """At `at_ns` its cluster stopped the process, which was still at work."""

    at_ns: Nanoseconds


class Switched(Line, tag="network", frozen=True, kw_only=True):
    """The process was on a network that was chosen: `asked` in words; `sent` by its switch.

    For each rank that it sent to in this run, TCP's payload in bytes, each once, and what it sent
    again.
    """

    asked: str
    sent: dict[int, tuple[Count, Count]]


class Imported(Line, tag="imported", frozen=True, kw_only=True):
    """The file was made from another tool's: `source` says from which, and what its times are. `complete`: whether a
    call that is not in it was never made. Calls that it did not tell enough about are `unexplained`, and as long."""

    source: str
    complete: bool
    unexplained: Count = 0
    unexplained_ns: Count = 0


class Reached(Line, tag="reached", frozen=True, kw_only=True):
    """How far the process had come in a group: the numbers of the last call that it made there, and of the last that
    ended, where there were none before -1. `inferred`: which group that is told of is not written, but follows."""

    group: str
    called: int
    ended: int
    inferred: bool = False


class DeviceReading(Line, tag="device clock", frozen=True, kw_only=True):
    """At `at_ns` of this process's clock, give or take `error_ns`, `device_ns` had passed on a GPU since its first."""

    device: str
    device_ns: Count
    at_ns: Nanoseconds
    error_ns: Count


class DeviceTime(Line, tag="device time", frozen=True, kw_only=True):
    """From when to when a GPU was at what event `event` had launched, in ns since that GPU's first reading.

    Of a collective: from when on it could run there. Of a gradient: when it was ready, twice. The event's own times are
    the host's. An event of a GPU without this line had not ended with the recording, or was not timed.
    `blocks`: the stream that called it did nothing else meanwhile.
    """

    event: Count
    device: str
    start_ns: Nanoseconds
    end_ns: Nanoseconds
    blocks: bool = False


class DdpModel(Line, tag="ddp model", frozen=True, kw_only=True):
    """A DDP model was made at `site`, over `group`: its parameters that want a gradient, and their bytes."""

    model: Count
    group: str
    site: str = ""
    parameters: tuple[str, ...] = ()
    bytes: Count = 0


class OptimizerMade(Line, tag="optimizer", frozen=True, kw_only=True):
    """Optimizer number `optimizer` made its first step: its class, and whose parameters it has."""

    optimizer: Count
    name: str
    models: tuple[Count, ...] = ()


# Every line that a file may hold -------------------------------------------------------------------------------------

ProcessLine = event.Header | event.Footer | event.GroupFact | event.Socket | event.Worker | event.NotMeasured
JobFact = Joined | ClockReading | Peer | Heartbeat | Exit | Stopped | Switched | DeviceReading | DeviceTime
OfOtherTool = Imported | Reached | Wired
Call = event.Collective | event.PointToPoint | Probe | OtherMpiCall | Rendezvous
DdpEvent = DdpModel | OptimizerMade | event.Bucket | event.Gradient | event.PhaseSpan
RpcEvent = event.RpcCall | event.RpcRun | event.RpcReply | event.RpcArrival | event.RpcWindow
GraphEvent = event.AutogradNode | event.AutogradRun
Other = SourceFact | event.End | event.Span | event.Counters
AnyLine = ProcessLine | JobFact | OfOtherTool | Call | DdpEvent | RpcEvent | GraphEvent | Other
