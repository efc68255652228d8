"""Python imports this when it starts, in every process of a job under `dlearn run`: the folder is first on PYTHONPATH.

It gives way to the `sitecustomize` that it hides, and has the process recorded once the program has imported torch. A
rank that is to have a network of its own goes there first, while it has one thread.
"""

import importlib.util
import json
import os
import socket
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


class AfterTorch(MetaPathFinder):
    """Attaches the recorder after the first `import torch`, or after that of dlearn's own recorder."""

    under_way: tuple[str, ...] = ()
    asking = ""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in ("torch", "dlearn.recorder") or name in (*self.under_way, self.asking):
            return None
        # A program may only look whether there is a torch, and import it later.
        self.asking = name
        spec = importlib.util.find_spec(name)
        self.asking = ""
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self.under_way += (name,)
            run(module)
            self.under_way = tuple(other for other in self.under_way if other != name)
            if not self.under_way:
                sys.meta_path.remove(self)
                attach()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def attach() -> None:
    try:
        from dlearn.scripts.attach import attach
    except Exception as error:  # torch does not fit, for one. The program goes on.
        why = f"{sys.executable} cannot import dlearn ({error})"
        print(f"dlearn: this process is not recorded: {why}.", file=sys.stderr)
        return
    attach()


def enter_network(server: str) -> None:
    """Go into a network of its own, hand over its device, and wait until all ranks have."""
    from dlearn.network import namespace

    rank = int(os.environ["RANK"])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(server)
        facts = json.loads(connection.makefile("rb", 0).readline())
        device = namespace.enter(namespace.NetworkNamespace(rank, **facts))
        socket.send_fds(connection, [json.dumps([rank, os.getpid()]).encode()], [device])
        os.close(device)
        if not connection.recv(2):
            raise ConnectionError("dlearn run has ended")
    interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), namespace.DEVICE)
    # The agent's store is on loopback, which is another one here: rank 0 has one of its own.
    os.environ.update(interfaces, MASTER_ADDR=namespace.address(0), TORCHELASTIC_USE_AGENT_STORE="False")


def is_rank() -> bool:
    """Return whether the launcher has started this process: a rank's children have its network."""
    return "RANK" in os.environ and os.getppid() == json.loads(os.environ["DLEARN_RUN"])["launcher"]


def give_way() -> None:
    sys.path[:] = [path for path in sys.path if path != _HERE]
    hidden = PathFinder.find_spec("sitecustomize")
    if hidden is not None and hidden.loader is not None:
        module = importlib.util.module_from_spec(hidden)
        sys.modules["sitecustomize"] = module
        hidden.loader.exec_module(module)


if "DLEARN_RUN_NETWORK" in os.environ and is_rank():
    try:
        enter_network(os.environ["DLEARN_RUN_NETWORK"])
    except Exception as error:  # Python would go on without: on the machine's own network, and say nothing of it.
        print(f"dlearn: this rank found no network: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)
sys.meta_path.insert(0, AfterTorch())
give_way()
