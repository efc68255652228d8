"""What hooks saw in one process: the values of a trace, exactly as they stand in its file.

Each line of a trace file is one of these structs as JSON, by its `kind`. Times are nanoseconds of the
process's monotonic clock, sizes are bytes, ranks in a process group are *group* ranks.
"""

from typing import Annotated, ClassVar, Literal

import msgspec

FORMATS = (4, FORMAT := 6)
"""Versions of the trace file (docs/trace-file.md) that are read; the last is written."""

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Nanoseconds = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
Dimension = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Tag = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
GlobalId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # Of autograd: (worker id << 48) + count.

NOT_OBSERVED = "not observed"
"""`ended_by` of an event whose end could not be seen: it neither hangs nor has a duration."""
REFUSED = "refused"
"""`ended_by` of a call that raised before the backend took it: nothing was sent for it."""
RPC, NO_GROUP, UNKNOWN_GROUP = "rpc", "", "?"
"""`Socket.group` of RPC's agent; of connections beside the known groups (messages may go past the
recorder); of those older than the recording, where the process has several groups."""


class Line(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="kind", omit_defaults=True):
    """One line of a trace file. No line holds another, so the garbage collector skips them."""


class TensorInfo(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The outside of a tensor; its values never reach a trace.

    `logical_bytes` is numel x itemsize, `payload_bytes` what is handed to the transport: the same for
    a dense tensor (gloo sends an expanded one in full), indices and values for a sparse one.
    """

    shape: tuple[Dimension, ...]
    dtype: str
    device: str
    logical_bytes: Count
    payload_bytes: Count
    indices_bytes: Count | None = None
    """The part of a sparse tensor's payload; None where duplicates are still to be added up."""
    sparse: bool = False


class Header(Line, tag="header", frozen=True, kw_only=True):
    """The first line: the process that is recorded. `rank` and `name` are given by a cluster; `job` is
    "" until the process meets others (`Joined`)."""

    format: Count
    job: str
    host: str
    pid: Count
    torch: str
    dlearn: str
    start_ns: Nanoseconds
    restart: Count = 0
    rank: Count | None = None
    name: str = ""
    world_size: Count | None = None
    clock: str = ""
    """Which clock the times are of: the host's since its start, in the process's time namespace."""


class Footer(Line, tag="footer", frozen=True, kw_only=True):
    """The last line. A file without it is of a process that died, or still runs."""

    at_ns: Nanoseconds
    lines: Count
    not_written: Count = 0  # Lines that the size limit (`max_bytes`) or the system kept out.
    refusal: str = ""  # Why the system took no more lines: "ENOSPC" is a full disk.
    hook_errors: Count = 0
    works_dropped: Count = 0  # Works let go unfinished: too many were waiting for their `wait`.
    left_out: Count = 0  # Events outside the steps that were asked for.


class GroupFact(Line, tag="group", frozen=True, kw_only=True):
    """A process group. `ranks[i]` is the global rank of group rank `i`. An inner group is `within`
    another. `made` is equal in all members' files, and unique. Meshes call it by `dimensions`."""

    name: str
    backend: str
    rank: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=2**20)]
    ranks: tuple[Count, ...] = ()
    default: bool = False
    within: str = ""
    made: str = ""
    dimensions: tuple[str, ...] = ()


class Socket(Line, tag="socket", frozen=True, kw_only=True):
    """A TCP connection of this process; its peer's has the addresses swapped. `group` is the process
    group that made it, RPC, NO_GROUP or UNKNOWN_GROUP; of NO_GROUP all bytes count."""

    id: Count
    group: str
    local: str
    remote: str


class Worker(Line, tag="worker", frozen=True, kw_only=True):
    """This process as RPC knows it. `wall_ns` is its wall clock less its monotonic one, for the agent's
    log; `log` says why that log is not kept beside the trace."""

    name: str
    id: Count
    wall_ns: Nanoseconds
    log: str = ""


class NotMeasured(Line, tag="not measured", frozen=True, kw_only=True):
    """The reason why the bytes on the wire are not known in this process."""

    reason: str


class RpcResult(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """What C++ sent back, as the caller got it. `pickled_bytes` are those without the tensors."""

    tensors: tuple[TensorInfo, ...] = ()
    pickled_bytes: Count | None = None
    needs_grad: bool = False


class End(Line, tag="end", frozen=True, kw_only=True):
    """The end of an event, and what is known only now: the `peer` that a message came from, its `tag`,
    what was given and got of pickled objects (`inputs`, `outputs`), an RPC's `result`."""

    event: Count
    by: str
    at_ns: Nanoseconds | None = None
    error: str = ""
    peer: Count | None = None
    tag: Tag | None = None
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    result: RpcResult | None = None


class Event(Line, frozen=True, kw_only=True):
    """One call that a hook saw in one process.

    `number` is unique in the process; `parent` is that of the enclosing span. `ended_by` is what saw the
    end: callback, wait, return, ... `error` is the class of the exception that ended it (of an RPC's
    reply: that the function raised). `phase` is setup, forward, backward, optimizer, cleanup or none.
    `site` is the line of user code, "file.py:14".
    """

    ends: ClassVar[bool] = True  # Whether it lasts: one without an end hangs, or its process died.
    own: ClassVar[tuple[str, ...] | None] = None
    """Fields of numbers that do not repeat (short_lines.py). None: no short lines."""

    number: Count
    start_ns: Nanoseconds
    end_ns: Nanoseconds | None = None
    ended_by: str = ""
    error: str = ""
    parent: Count | None = None
    thread: str = ""
    phase: str = "none"
    site: str = ""
    rank: int = -1  # Not in the file: `Trace.load` fills it in, and overwrites what a file claims.

    @property
    def pending(self) -> bool:
        """Return whether the event began, should end, and its end was not seen."""
        return self.ends and self.end_ns is None and self.ended_by != NOT_OBSERVED

    @property
    def failed(self) -> bool:
        return bool(self.error)

    @property
    def refused(self) -> bool:
        return self.ended_by == REFUSED


class Collective(Event, tag="collective", frozen=True, kw_only=True):
    """One rank's call of a collective, and what it gives and gets; in place: `inputs` only.

    `seq` counts the collectives of its group, from 1; `backward` its rank's backward passes.
    `launcher`: "" user code, "reducer" DDP's C++ one, "comm hook" its hook for `bucket_index`; "FSDP2".
    `module` is FSDP2's, whose parameters or gradients travel; "." the root. `splits`, `takes`:
    bytes for and from each group rank, if given. `checksum`: the inputs' CRC-32.
    """

    own = ("seq", "backward")
    op: str
    group: str
    seq: Count
    inputs: tuple[TensorInfo, ...] = ()
    outputs: tuple[TensorInfo, ...] = ()
    root: Count | None = None
    role: str = ""
    launcher: str = ""
    module: str = ""
    backward: Count | None = None
    bucket_index: Count | None = None
    splits: tuple[Count, ...] = ()
    takes: tuple[Count, ...] = ()
    checksum: Count | None = None


class PointToPoint(Event, tag="p2p", frozen=True, kw_only=True):
    """One rank's `send` or `recv`. `peer` is a group rank; None is a `recv` from any source that has not ended.

    A view begins at `offset_bytes` of `whole_bytes` (0: no view). A send of a glass-box collective has
    its `step`; one of torch's pipeline schedules the `micro_batch` whose data it carries. `checksum` is
    the CRC-32 of the data, on request; a trace never holds the data.
    """

    own = ("seq",)
    op: Literal["send", "recv"]
    group: str
    peer: Count | None
    tag: Tag
    seq: Count
    tensors: tuple[TensorInfo, ...] = ()
    offset_bytes: Count = 0
    whole_bytes: Count = 0
    step: Count = 0
    micro_batch: Count | None = None
    place: Count = 0  # Of some recorded steps: its number among the calls with this op, peer and tag.
    checksum: Count | None = None


class Bucket(Event, tag="bucket", frozen=True, kw_only=True):
    """One bucket of a DDP model: the gradients that travel together. `built` is "first" or "rebuilt". If it
    `may_be_skipped`, DDP leaves it out of a backward pass in which no rank has used its parameters."""

    ends: ClassVar[bool] = False
    model: Count
    index: Count
    count: Count
    bytes: Count
    parameters: tuple[str, ...]
    built: str
    may_be_skipped: bool = False


class Gradient(Event, tag="gradient", frozen=True, kw_only=True):
    """The moment when the gradient of one parameter of a DDP model is ready."""

    ends, own = False, ("backward",)
    model: Count
    parameter: str
    bytes: Count
    backward: Count | None = None


class PhaseSpan(Event, tag="stretch", frozen=True, kw_only=True):
    """A forward pass of DDP model `of` (`synced`: not in no_sync), a backward pass, or a step of
    optimizer `of`, as `phase` says; on a GPU what the CPU takes (the GPU's is a `DeviceTime`)."""

    own = ()
    of: Count | None = None
    synced: bool = True
    training: bool = True


class Span(Event, tag="span", frozen=True, kw_only=True):
    """A span of the user, `with dlearn.span("step 3"):`, or the wait of a call `held` at a gate.
    `of_profiler`: a `record_function` of the program, or a pass of torch's pipeline schedules."""

    name: str
    held: str = ""
    of_profiler: bool = False


class Counters(Event, tag="counters", frozen=True, kw_only=True):
    """The kernel's counters: bytes that this process has written into each of its sockets, by `id`; None
    if closed. `still`: whether they stood still; None if the recorder did not wait for that."""

    ends: ClassVar[bool] = False
    sent_bytes: tuple[Count | None, ...]
    received_bytes: tuple[Count | None, ...] = ()  # RPC's only: its other side knows no phases.
    still: bool | None = None


class RRefFork(msgspec.Struct, frozen=True, gc=False):
    """An RRef that travels in a message: the `owner` of its value, and this copy's own id."""

    owner: Count
    fork: str


class RpcCall(Event, tag="rpc call", frozen=True, kw_only=True):
    """The caller's end of an RPC: the arguments are with the agent at `handed_ns`.

    `to` is a worker's id, `call` numbers the calls of this process. `pickled_bytes` are function and
    arguments without tensors; None where C++ writes them. `observer_bytes` is the recorder's id, which
    joins both ends. `context` is that of distributed autograd. A cluster makes an `observer` call to
    open connections. `result` is there where C++ packed it; else it is in an `RpcReply`.
    """

    own = ("call", "handed_ns", "context", "rrefs")
    op: Literal["rpc_sync", "rpc_async", "remote"]
    function: str
    flavour: Literal["python", "builtin", "script"]
    to: Count
    call: Count
    handed_ns: Nanoseconds
    tensors: tuple[TensorInfo, ...] = ()
    pickled_bytes: Count | None = None
    observer_bytes: Count = 0
    context: GlobalId | None = None
    needs_grad: bool = False
    rrefs: tuple[RRefFork, ...] = ()
    detached: tuple[str, ...] = ()
    """Arguments that were an nn.Parameter: they arrive as plain tensors without a gradient."""
    observer: bool = False
    result: RpcResult | None = None


class RpcRun(Event, tag="rpc run", frozen=True, kw_only=True):
    """The execution, at the callee: it begins with the function. The request was there, unpacked, at `arrived_ns`."""

    own = ("call", "arrived_ns", "context")
    function: str
    caller: Count
    call: Count
    arrived_ns: Nanoseconds
    context: GlobalId | None = None


class RpcReply(Event, tag="rpc reply", frozen=True, kw_only=True):
    """A packed result of the call that `caller` and `call` name; or, `fetched`, an RRef's value, whose
    own two they are. Without a tensor that `needs_grad` it is sent without autograd's data."""

    ends, own = False, ("call", "run", "returned_ns", "rrefs")
    caller: Count
    call: Count
    fetched: bool = False
    run: Count | None = None  # The number of the run, which ended at `returned_ns`.
    returned_ns: Nanoseconds | None = None
    tensors: tuple[TensorInfo, ...] = ()
    pickled_bytes: Count
    observer_bytes: Count = 0
    rrefs: tuple[RRefFork, ...] = ()
    needs_grad: bool = False


class RpcArrival(Event, tag="rpc arrival", frozen=True, kw_only=True):
    """A fetched value has come here; `caller` and `call` as in its `RpcReply`. A reply's is the end of its call."""

    ends, own = False, ("call",)
    caller: Count
    call: Count


class RpcWindow(Event, tag="rpc window", frozen=True, kw_only=True):
    """A part of Python in which C++ sends messages by itself.

    "to_here" fetches a value from `to`. "rref" takes in an RRef of `to`, sent by `parent_worker`.
    "context" is a distributed autograd context, "backward" its backward pass, "release" its end. "rref
    backward" begins one at the owner `to`. "crossing" hands the gradients `tensors` to node `message`
    of another worker, "gradient" is their arrival from `to`. `result`: fetched, packed by C++.
    """

    own = ("context", "message", "fork")
    op: Literal["to_here", "rref", "context", "backward", "rref backward", "release", "crossing", "gradient"]
    to: Count | None = None
    parent_worker: Count | None = None
    fork: str = ""
    context: GlobalId | None = None
    message: GlobalId | None = None
    tensors: tuple[TensorInfo, ...] = ()
    result: RpcResult | None = None


class AutogradNode(Event, tag="autograd node", frozen=True, kw_only=True):
    """A node of distributed autograd's graph of a context in this process, where `node` numbers it.

    It hands gradients to the nodes `next`; `shapes` are those that come in. `message` joins a send to
    the recv on another worker. `parameter` is the name of the one that it collects for.
    """

    ends: ClassVar[bool] = False
    own = ("context", "node", "message", "next")
    context: GlobalId
    node: Count
    name: str
    shapes: tuple[tuple[Dimension, ...], ...] = ()
    parameter: str = ""
    message: GlobalId | None = None
    next: tuple[Count, ...] = ()


class AutogradRun(Event, tag="autograd run", frozen=True, kw_only=True):
    """A node's execution in the backward pass. A recv sends `tensors` to the worker that the value came from."""

    own = ("context", "node")
    context: GlobalId
    node: Count
    tensors: tuple[TensorInfo, ...] = ()
