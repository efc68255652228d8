"""The engines of an ipyparallel client as places for ranks: who they are, whether they fit, and how to ask them."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from dlearn.cluster.launch import LOOPBACK, warm_up
from dlearn.cluster.rank import HostPlace
from dlearn.errors import SetupError, optional
from dlearn.version import __version__

T = TypeVar("T")

ANSWER_SECONDS = 60.0
"""An engine that does not answer for so long counts as gone. Other work that it is given should not take longer."""

_INTRODUCTION = """
import importlib.metadata, importlib.util, os, platform, socket, tempfile
def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "" if importlib.util.find_spec(package) is None else getattr(__import__(package), "__version__", "")
def boot():
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip() + os.readlink("/proc/self/ns/net")
    except OSError:
        return ""
def route(towards):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # Sends nothing.
        try:
            probe.connect((towards, 9))
            return probe.getsockname()[0]
        except OSError:
            return ""
def controller():
    from ipyparallel.engine.app import IPEngine
    return IPEngine.instance().registration_url.split("://")[-1].rpartition(":")[0] if IPEngine.initialized() else ""
def interfaces():
    import psutil
    return {each.address: name for name, all in psutil.net_if_addrs().items() for each in all if each.family == 2}
told = {
    "host": socket.gethostname(), "boot": boot(), "python": platform.python_version(), "dlearn": version("dlearn"),
    "torch": version("torch"), "scratch": tempfile.gettempdir(),
    "wanted": os.environ.get("GLOO_SOCKET_IFNAME", ""), "controller": controller(), "interfaces": interfaces(),
    "routes": {towards: route(towards) for towards in [controller(), *towards]},
}
"""
"""Runs on the engine, as text: it must work where Python is another, and dlearn is not installed."""


class EngineGone(Exception):
    """The engine cannot be asked any more; the text says why. Never leaves the cluster's code."""


@dataclass(frozen=True)
class Engine:
    """One engine, and the place of the rank beside it. `address` is that of its host, as the other hosts reach it."""

    id: int
    client: Any
    told: dict[str, Any] = field(default_factory=dict)
    address: str = LOOPBACK
    place: HostPlace | None = None

    def __str__(self) -> str:
        return f"engine {self.id} on {self.told['host']}" if self.told else f"engine {self.id}"

    @property
    def host(self) -> tuple[str, str]:
        """Name, and boot with network namespace: containers may share the one or the other."""
        return self.told["host"], self.told["boot"]

    def ask(self, function: Callable[..., T], *args: Any, seconds: float = ANSWER_SECONDS) -> T:
        """What `function(*args)` returns on the engine. EngineGone if it does not, within `seconds`."""
        from ipyparallel.error import RemoteError

        with _asking:  # A client takes note of what it sent by looking at what has come since.
            try:
                if self.id not in self.client.ids:
                    raise EngineGone("was killed, or has ended")
                view = self.client.direct_view(self.id)
                asked = view.apply_async(function, *args)
            except (OSError, IndexError, RuntimeError) as error:  # The client was closed.
                raise EngineGone(f"cannot be reached any more ({error})") from None
            with suppress(ValueError):
                for number in asked.msg_ids:
                    self.client.history.remove(number)  # What the user asked last stays the last there.
        try:
            answer: T = asked.get(seconds)
        except RemoteError as error:
            if error.ename == "EngineError":
                raise EngineGone("was killed, or has ended") from None
            raise EngineGone(f"failed: {error.ename}: {error.evalue}") from None
        except TimeoutError:
            raise EngineGone(f"has not answered for {seconds:.0f} s") from None
        return answer


_asking = threading.Lock()


def choose(client: Any, ranks: int | None) -> tuple[Engine, ...]:
    """Return the first `ranks` engines of an ipyparallel client (None: all), in the order of their ids.

    SetupError if there are too few, or they do not fit each other and this process.
    """
    ipyparallel = optional("ipyparallel", needed_by="engine=")
    if not isinstance(client, ipyparallel.Client):
        raise SetupError(
            "engine= takes an ipyparallel Client, as ipyparallel.Cluster(n=3).start_and_connect_sync() returns, not"
            f" {type(client).__name__}."
        )
    try:
        ids = sorted(client.ids)
    except RuntimeError as error:
        raise SetupError(f"this ipyparallel client has no engines any more: {error}.") from None
    if not ids:
        raise SetupError(
            "this ipyparallel client has no engines; client.wait_for_engines(n) waits until they are there."
        )
    if ranks is not None and ranks > len(ids):
        raise SetupError(f"{ranks} ranks need {ranks} engines, and this ipyparallel client has {len(ids)}.")
    with ThreadPoolExecutor(len(ids)) as at_the_same_time:
        engines = list(at_the_same_time.map(_introduced, [Engine(id, client) for id in ids[:ranks]]))
        _check(engines)
        list(at_the_same_time.map(partial(_ask_or_refuse, function=warm_up), engines))
    return tuple(_placed(engines))


def _introduced(engine: Engine, towards: Sequence[str] = ()) -> Engine:
    # Built-ins travel by name, functions as the byte code of this Python.
    told = _ask_or_refuse(engine, eval, "exec(script) or told", {"script": _INTRODUCTION, "towards": list(towards)})
    return replace(engine, told=told)


def _ask_or_refuse(engine: Engine, function: Callable[..., T], *args: Any) -> T:
    try:
        return engine.ask(function, *args)
    except EngineGone as gone:
        raise SetupError(f"{engine} {gone}: it cannot have a rank.") from None


def _check(engines: Sequence[Engine]) -> None:
    python, first = platform.python_version(), engines[0]
    for engine in engines:
        there = engine.told
        for package in ("dlearn", "torch"):
            if not there[package]:
                raise SetupError(f"{engine} has no {package}: install it there, in the engine's own Python.")
        if there["dlearn"] != __version__:
            raise SetupError(
                f"{engine} has dlearn {there['dlearn']}, and this notebook {__version__}: install the same."
            )
        if there["python"].split(".")[:2] != python.split(".")[:2]:
            raise SetupError(
                f"{engine} runs Python {there['python']}, and this notebook {python}: functions travel only between"
                " the same minor versions."
            )
        if there["torch"] != first.told["torch"]:
            raise SetupError(
                f"{engine} has torch {there['torch']}, and {first} has {first.told['torch']}: install the same."
            )


def _placed(engines: Sequence[Engine]) -> list[Engine]:
    """Each with its place. On one host all stays on loopback; between hosts each needs an address for the others."""
    hosts = [engine.host for engine in engines]
    if len(set(hosts)) == 1:
        return list(engines)
    addresses = _addresses(engines)
    placed = []
    for number, (engine, address) in enumerate(zip(engines, addresses, strict=True)):
        place = HostPlace(
            interface=engine.told["interfaces"][address],
            local_rank=hosts[:number].count(engine.host),
            local_world_size=hosts.count(engine.host),
        )
        placed.append(replace(engine, address=address, place=place))
    return placed


def _addresses(engines: Sequence[Engine]) -> list[str]:
    """Return the address of each host: GLOO_SOCKET_IFNAME's, or the one towards its controller.

    Where that is loopback, it is the one towards the other hosts.
    """
    found = [_own_address(engine) for engine in engines]
    others = [address for address in found if address]
    for number, engine in enumerate(engines):
        if not found[number] and others:
            routes = _introduced(engine, others).told["routes"]
            found[number] = next((routes[other] for other in others if _reaches(routes[other])), "")
        if found[number] not in engine.told["interfaces"]:
            raise SetupError(
                f"no address is known by which the other hosts reach {engine}: start it with the environment variable"
                " GLOO_SOCKET_IFNAME, the name of its host's interface to them."
            )
    return found


def _own_address(engine: Engine) -> str:
    there = engine.told
    wanted = [address for address, name in there["interfaces"].items() if name == there["wanted"]]
    address: str = wanted[0] if wanted else there["routes"][there["controller"]]
    return address if _reaches(address) else ""


def _reaches(address: str) -> bool:
    return bool(address) and not address.startswith("127.")
