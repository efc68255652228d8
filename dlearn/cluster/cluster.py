"""Cluster: real ranks on this machine, or beside ipyparallel's engines, from a notebook cell or a script."""

from __future__ import annotations

import inspect
import reprlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from textwrap import shorten
from typing import Any, Literal

import cloudpickle

from dlearn.cluster import engines, networks, pmi_server, warm_pool
from dlearn.cluster.answers import Raised, Returned
from dlearn.cluster.faults import rank_error
from dlearn.cluster.output import OutputStreams
from dlearn.cluster.paused_run import PausedRun
from dlearn.cluster.payload import environment_here, pack
from dlearn.cluster.rank_pool import DEFAULT_SECONDS, Died, Ended, Outcome, RankPool
from dlearn.cluster.rank_process import RankProcess
from dlearn.cluster.rank_protocol import Call, HostPosition
from dlearn.cluster.run import Run, keep_folder, new_folder
from dlearn.errors import Interrupted, SetupError, optional
from dlearn.events.job_facts import Exit, Stopped, Switched
from dlearn.events.options import Measure, Options
from dlearn.events.writer import file_of_rank, note_end
from dlearn.live.gate_server import GateServer, Hold, Name, rank_text
from dlearn.live.live_rows import LiveDisplay
from dlearn.network.link import Link
from dlearn.network.live import LiveNetwork
from dlearn.network.namespace import DEVICE, NotPermitted
from dlearn.network.plan import Network
from dlearn.notices import notice

Function = Callable[..., Any]

BACKENDS = ("gloo", "nccl", "mpi", "dlearn_ring")
MOST_RANKS = 64
LONGEST_NAME = 40
EXPOSED = "other users of this machine could reach its RPC workers"


class Cluster:
    """Real ranks on this machine, connected over loopback; with `engine`, beside ipyparallel's engines.

    `ranks` is how many, or their names, in the order of ranks. Each `run` has fresh processes; inside
    `with Cluster(4) as c:` they stay, with their state and process group. Inside the function the
    process group is ready (`backend` "gloo", or "nccl" with a GPU for each rank, or "dlearn_ring", whose
    every step is a message that you can see); with `init=False` your code makes it, by its own
    `init_process_group("gloo")`. With `backend="mpi"` the ranks are a real MPI job of MPICH's.

    With `rpc=True` every rank is an RPC worker of its own name (of a number: "worker0"), and serves until
    all functions have returned. A client that reaches a worker can have it run anything: so these ranks
    share a network that no other process is in, and that has no way out (no download); where that is not
    permitted, `run.exposed` says why. `private=False` leaves them on this machine's loopback; True
    insists, without RPC, too.

    What ranks send is recorded unless `record=False`; `measure`, `checksums`, `graph`, `hang_after` and
    `sources` are those of `dlearn.record`.

    `engine` is an ipyparallel Client: each rank is a fresh process beside an engine, in the order of the
    engines' ids, as many as engines without `ranks`, with the engine's environment and module path. With
    engines on several hosts ports are opened that all of their network can reach (docs/tour.md).

    `network` puts between ranks a network that is as slow as you say: "1 Gbit/s, 100 us", or a
    `dlearn.network.Network`. `cluster.network` changes it while ranks run; `run.network` says what it did.

    `hold=True` has every call wait at a gate until you let it through: `run` returns at once with a run
    whose `step()`, `release(rank)`, `run_until(op=)` and `free()` do so (docs/live.md). With a function
    of a call, only calls for which it is true wait; with `hold=run.schedule`, that run's order is kept.

        run = Cluster(3).run(train, 10, timeout=60)
        run.results[0], run.output[0], run.trace
    """

    def __init__(
        self, ranks: int | Sequence[str] | None = None, *, engine: Any = None,
        backend: Literal["gloo", "nccl", "mpi", "dlearn_ring"] = "gloo", init: bool = True,
        rpc: bool = False, private: bool | None = None,
        record: bool = True, measure: Measure | None = "span", checksums: bool = False,
        graph: bool = False, hang_after: float | None = None, sources: Sequence[str] = (),
        network: Network | Link | str | None = None, hold: Hold = False,
    ) -> None:  # fmt: skip
        here = engine is None
        over_tcp = here and backend in ("gloo", "dlearn_ring")
        may_hold = here and record and backend != "nccl"
        no_backend = f"there is no backend {backend!r} here"
        rules = {
            f"{no_backend}; use 'gloo', 'nccl' with a GPU for each rank, 'mpi' or 'dlearn_ring'.":
                backend not in BACKENDS,
            "backend='mpi' has its ranks on this machine, and not beside engines.":
                backend == "mpi" and not here,
            "a chosen network is between ranks of this machine that speak TCP: gloo, dlearn_ring, RPC.":
                network is not None and not over_tcp,
            "hold= is for recorded ranks of this machine, over gloo, dlearn_ring, MPI or RPC.":
                hold is not False and not may_hold,
            "private= is for ranks of this machine over gloo, dlearn_ring or RPC.":
                bool(private) and not over_tcp,
        }  # fmt: skip
        if refusal := next((sentence for sentence, broken in rules.items() if broken), ""):
            raise SetupError(refusal)
        names = None if ranks is None and not here else _names(ranks)
        self._engines = [] if here else engines.choose(engine, len(names or ()))
        self.names: tuple[Name, ...] = names or _names(len(self._engines))
        if backend == "mpi":
            optional("mpi4py", needed_by="backend='mpi'")  # Better said now than at the first run.
        self.network = LiveNetwork(Network.of(network), self.names) if network is not None else None
        self._hold_calls = hold
        wanted = rpc if private is None else private
        self._private, self._must_be_private = over_tcp and network is None and wanted, bool(private)
        self._exposed = EXPOSED if rpc and network is None else ""
        self.backend, self.init, self.rpc = backend, init, rpc
        options = Options(measure, checksums, graph=graph, hang_after=hang_after, sources=sources)
        self.record = options if record else None
        self._inside_with = False
        self._pool: RankPool | None = None
        self._paused_run: Callable[[], PausedRun | None] = lambda: None

    def run(
        self, function: Function | Mapping[Name, Function], *args: Any,
        timeout: float | None = DEFAULT_SECONDS, check: bool = True, **kwargs: Any,
    ) -> Run:  # fmt: skip
        """Call `function(*args, **kwargs)` on every rank; a name that a dict leaves out serves.

        Returns when all are done. Raises RankError if a rank fails, or if they are not done after
        `timeout` seconds: 300, if you give none (None waits for ever). With `check=False` the error
        stands in `run.error` instead. TypeError if a function does not take these arguments.

        With `hold` it returns at once, a `PausedRun` that has no timeout and whose `join()` raises what this would.
        """
        if timeout is not None and not (isinstance(timeout, int | float) and 0 < timeout < float("inf")):
            raise SetupError(f"timeout is a number of seconds above 0, or None to wait for ever, not {timeout!r}.")
        given = {"timeout": timeout is not DEFAULT_SECONDS, "check": not check}
        functions = self._functions(function)
        payload = pack([each and _bind(each, args, kwargs, given) for each in functions], args)
        if self._inside_with and (paused := self._paused_run()) is not None and paused.under_way:
            raise SetupError("a held run of these ranks is under way: free() and join() it, or end() it, first.")
        run = Run(new_folder(), self.record is not None)
        keep_folder(run)
        gate_server = None if self._hold_calls is False else GateServer(self.names, self._hold_calls)
        pool: RankPool | None = None
        try:
            pool = self._pool_for_call()
            run.private, run.exposed = self._private and not self._exposed, self._exposed
            if gate_server is None:
                calls = self._calls(payload, run)
                return self._carry_out(run, pool, calls, timeout, check=check)
            calls = self._calls(payload, run, gate=gate_server.address)
            finish = partial(self._carry_out, run, pool, calls, None, check=False)
            end = partial(warm_pool.kill_all, tuple(pool.ranks))
            paused = PausedRun.of(run, gate_server, finish, end)
            self._paused_run = weakref.ref(paused)  # When the user's reference is gone, it ends.
            return paused
        except BaseException:
            if gate_server is not None:
                gate_server.close()
            if pool is not None and pool is not self._pool:
                pool.kill()
            raise

    def _carry_out(self, run: Run, pool: RankPool, calls: list[Call], timeout: float | None, *, check: bool) -> Run:
        """Follow the ranks to the end of their calls, and fill in the run."""
        with LiveDisplay() as display:
            try:
                if self.network is not None:
                    self.network.begin()
                outcomes, streams = pool.call(calls, timeout, display)
            except KeyboardInterrupt:
                kept = f"what they had recorded is in {run.folder}/trace"
                raise Interrupted(f"the ranks were ended; {kept}") from None
            self._fill(run, outcomes, streams)
            run.error = rank_error(self.names, outcomes, run, timeout)
            if run.error is not None and self.network is not None and self.network.trouble():
                run.error.what += f"\n{self.network.trouble()}"
            card = run._repr_html_() if run.error is not None and check else ""
            display.end_with(str(next(iter(run.paragraphs()))), card)
            if run.error is not None and check:
                raise run.error
        return run

    def _fill(self, run: Run, outcomes: list[Outcome], streams: OutputStreams) -> None:
        """Keep output and results, and note in the trace how ranks ended and what their network sent."""
        for index, (name, outcome) in enumerate(zip(self.names, outcomes, strict=True)):
            run.output[name] = streams.ranks[index].text
            if isinstance(outcome, Returned) and outcome.value is not None:
                try:
                    run.results[name] = cloudpickle.loads(outcome.value)
                except Exception as error:  # Any object's own __setstate__ may raise anything.
                    message = f"its result cannot be taken apart here: {type(error).__name__}: {error}"
                    outcomes[index] = Raised(type(error).__name__, message, "", time.monotonic_ns())
            _note_end(run, index, _end(outcome))
        if self.network is not None:
            run.network = self.network.latest()
            for rank, sent in enumerate(self.network.sent()):
                _note_end(run, rank, Switched(asked=str(self.network.asked), sent=sent))

    def __enter__(self) -> Cluster:
        if self._inside_with:
            raise SetupError("this cluster is inside a `with` already; make another Cluster for another `with`.")
        self._inside_with = True
        return self

    def __exit__(self, *failure: object) -> None:
        if (paused := self._paused_run()) is not None:
            paused.end()
        self._inside_with = False
        if self._pool is not None:
            self._pool.stop()
            self._pool = None

    def __repr__(self) -> str:
        return f"Cluster({list(self.names)}, backend={self.backend!r})"

    def _functions(self, function: Function | Mapping[Name, Function]) -> list[Function | None]:
        """Return each rank's function, None for one that serves. SetupError if they fit no rank."""
        if callable(function):
            return [_sync(function)] * len(self.names)
        if not isinstance(function, Mapping):
            raise SetupError(
                f"run() takes a function, or a dict of names and functions, not {type(function).__name__}."
            )
        if not function:
            raise SetupError("run() got an empty dict: give at least one rank a function.")
        for name, own in function.items():
            if name not in self.names:
                raise SetupError(f"this cluster has no rank {name!r}; its ranks are {list(self.names)}.")
            if not callable(own):
                raise SetupError(f"rank {name!r} got {type(own).__name__}, which cannot be called.")
        return [_sync(function[name]) if name in function else None for name in self.names]

    def _pool_for_call(self) -> RankPool:
        if self._pool is not None and self._pool.alive:
            return self._pool
        if self._pool is not None:
            notice("the ranks had ended, and start afresh; the state that they kept is gone.")
            self._pool.kill()
            self._pool = None
        pool = RankPool([*map(rank_text, self.names)], self._start_ranks())
        if self._inside_with:
            self._pool = pool
        return pool

    def _start_ranks(self) -> Sequence[RankProcess]:
        """Return fresh ranks. SetupError if they cannot be on the network that was asked for."""
        count = len(self.names)
        if self._engines:
            return engines.start_ranks(self._engines)
        if self.network is not None:
            return networks.start_switched(self.network, count)
        if self.backend == "mpi":
            return pmi_server.start_mpi(count)
        if self._private:
            self._exposed = ""
            try:
                return networks.start_private(count)
            except NotPermitted as refused:
                if self._must_be_private:
                    raise SetupError(f"these ranks cannot be private on this machine: {refused}.") from None
                self._exposed = f"{EXPOSED}: {refused}"
        return warm_pool.take(count)

    def _calls(self, payload: bytes, run: Run, gate: str = "") -> list[Call]:
        around, world_size, calls = environment_here(), len(self.names), []
        for rank, name in enumerate(self.names):
            on_network = HostPosition(DEVICE, rank, world_size) if self.network is not None else None
            calls.append(Call(
                payload=payload, environment=around, rank=rank, world_size=world_size,
                name=str(name), backend=self.backend, init=self.init, job=run.folder.name,
                folder=str(run.folder), record=self.record, keep=self._inside_with, rpc=self.rpc,
                position=on_network, gate=gate, own_log=bool(self._engines),
            ))  # fmt: skip
        return calls


def _sync(function: Function) -> Function:
    if inspect.iscoroutinefunction(function):
        raise SetupError("an async function does not run by itself: call asyncio.run(...) inside a plain function.")
    return function


def _bind(function: Function, args: Any, kwargs: dict[str, Any], own: dict[str, bool]) -> Function:
    """Bind `kwargs`; raise TypeError if it takes others, or may want an option of run()'s `own`."""
    name = getattr(getattr(function, "func", function), "__name__", type(function).__name__)
    try:
        # Not of what a decorator wraps, which may add arguments of its own.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # It is written in C, and does not say.
        return partial(function, **kwargs)
    try:
        taken = signature.bind_partial(*args, **kwargs).arguments
        for option in {*signature.parameters}.difference(taken, getattr(function, "keywords", ())):
            if own.get(option):
                hint = f"functools.partial({name}, {option}=...) gives the function its own"
                raise TypeError(f"{option}= is an option of run(), too; {hint}")
        signature.bind(*args, **kwargs)
    except TypeError as error:
        call = f"{name}{shorten(str(signature), 200)}"
        raise TypeError(f"{call}: {error}. (run() itself takes timeout= and check=.)") from None
    return partial(function, **kwargs) if kwargs else function


def _names(ranks: int | Sequence[str] | None) -> tuple[Name, ...]:
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        if not 1 <= ranks <= MOST_RANKS:
            raise SetupError(f"a cluster has 1 to {MOST_RANKS} ranks, not {ranks}.")
        return tuple(range(ranks))
    names = tuple(ranks) if isinstance(ranks, Sequence) and not isinstance(ranks, str) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise SetupError(
            f"give the number of ranks, or a list of names such as ['ps', 'trainer1'], not {reprlib.repr(ranks)}."
        )
    for name in names:
        if not 1 <= len(name) <= LONGEST_NAME or not name.isprintable() or name.isdigit():
            rule = f"1 to {LONGEST_NAME} printable characters, not all digits"
            raise SetupError(f"{reprlib.repr(name)} is no name for a rank: {rule}.")
    if len(set(names)) < len(names) or len(names) > MOST_RANKS:
        raise SetupError(f"the names of a cluster's ranks must differ, and be {MOST_RANKS} at most: {list(names)}.")
    return names


def _note_end(run: Run, rank: int, end: Exit | Stopped | Switched | None) -> None:
    if end is None or not run.recorded:
        return
    try:
        if (path := file_of_rank(run.folder / "trace", rank)) is not None:
            note_end(path, end)
    except OSError as error:  # A full disk costs this line, and not the results of the others.
        what = "sent over its network" if isinstance(end, Switched) else "ended"
        notice(f"the trace does not say how rank {rank} {what}: {error.strerror}")


def _end(outcome: Outcome) -> Exit | Stopped | None:
    match outcome:
        case Died(exit_code=int(status)):
            return Exit(status=status)
        case Ended(at_ns=int(at_ns)):
            return Stopped(at_ns=at_ns)
    return None
