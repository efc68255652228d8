"""What the C++ RPC agent really sent, told by the agent itself: a subclass of it that takes notes, compiled once."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

SOURCE = Path(__file__).parent / "oracle" / "log_agent.cpp"
NAME = "dlearn_log_agent"
FLAGS = ["-O0", "-DUSE_C10D", "-DUSE_RPC", "-DUSE_TENSORPIPE", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED"]

IS_REQUEST, IS_RESPONSE = 0x100, 0x200
"""These bits of a message's type."""


class Sent(NamedTuple):
    """One message that left the agent of worker `src`. A reply has the number of its request."""

    src: int
    id: int
    kind: str
    request: bool
    payload_bytes: int
    tensor_count: int
    tensor_bytes: int
    payload: bytes


def build() -> Path:
    """The compiled agent, from a folder named after torch's version and the source. Skips where it cannot be built."""
    if shutil.which("g++") is None:
        pytest.skip("the C++ oracle needs g++")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("the C++ oracle needs Python's headers (Debian: python3-dev)")
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(FLAGS).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = cache / "dlearn" / f"{torch.__version__}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{NAME}.so"
    with (folder / "one-builder").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            from torch.utils import cpp_extension

            os.environ.setdefault("MAX_JOBS", "2")
            # Where nothing is activated, ninja stands beside this Python.
            os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            cpp_extension.load(NAME, [str(SOURCE)], extra_cflags=FLAGS, build_directory=str(folder))
    return library


def install(library: str) -> Any:
    """Inside a rank, before `init_rpc`: the agent will take notes. Returns the compiled module."""
    import torch.distributed.rpc as rpc

    spec = importlib.util.spec_from_file_location(NAME, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rpc.TensorPipeAgent = module.LogAgent
    return module


def types() -> dict[int, str]:
    """Number of a message type -> its name, as torch's own header says."""
    header = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "rpc" / "message.h"
    entry = re.compile(r"(\w+)\s*=\s*(0x[0-9a-f]+)\s*\|\s*MessageTypeFlags::(REQUEST|RESPONSE)_TYPE")
    flags = {"REQUEST": IS_REQUEST, "RESPONSE": IS_RESPONSE}
    return {int(number, 16) | flags[way]: name for name, number, way in entry.findall(header.read_text())}


def sent(module: Any, src: int) -> list[Sent]:
    """Every message that this worker's agent has sent so far."""
    names = types()
    return [
        Sent(src, number, names[kind], bool(kind & IS_REQUEST), payload_bytes, count, tensor_bytes, payload)
        for _, kind, number, payload_bytes, count, tensor_bytes, payload in module.sent()
    ]
