"""Bring the files of other hosts to rank 0's folder, through the store in which the ranks have met.

The store is slow beside a copy of the folder, but it is there: no port, no password, no shared disk. Files go
compressed, in pieces, a few at a time, so that the store's memory stays small.
"""

from __future__ import annotations

import sys
import time
import zlib
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

from dlearn.hooks.network.clock import Desk
from dlearn.trace.rpc.agent_log import log_path

PIECE_BYTES = 1 << 20
PIECES_AHEAD = 4
PATIENCE_SECONDS = 60.0
"""How long the next piece, or room for it, is waited for."""
_END = b"end"


def gather(desk: Desk, path: Path) -> None:
    """Rank 0 waits for the files of all others whose folder it does not see; they send theirs."""
    if desk.store is None:
        if desk.out_of_reach:
            print("dlearn: no files were gathered: the job's store is no TCPStore. Copy them by hand.", file=sys.stderr)
        return
    store: Store = desk.store.clone()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=PATIENCE_SECONDS))
    if desk.rank:
        first = desk.peers.get(0)
        if first is None or not (path.parent / Path(first.path).name).exists():
            for file in (path, log_path(path)):
                _send(store, f"dlearn/file/{desk.rank}", file)
        return
    for rank, peer in sorted(desk.peers.items()):
        name = Path(peer.path.replace("\\", "/")).name
        if (path.parent / name).exists():
            continue
        for target in (path.parent / name, log_path(path.parent / name)):
            _receive(store, f"dlearn/file/{rank}", target, f"rank {rank}'s file {peer.path} on host {peer.host}")


def _send(store: Store, queue: str, file: Path) -> None:
    if file.exists():
        with file.open("rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                deadline = time.monotonic() + PATIENCE_SECONDS
                while store.queue_len(queue) >= PIECES_AHEAD:
                    if time.monotonic() > deadline:
                        return  # Rank 0 has stopped to take them, and says so.
                    time.sleep(0.001)
                store.queue_push(queue, zlib.compress(piece, 1))
    store.queue_push(queue, _END)


def _receive(store: Store, queue: str, target: Path, what: str) -> None:
    """Write each piece as it comes: a file may be larger than the memory, and half of one is better than none."""
    stream = None
    try:
        while (piece := store.queue_pop(queue)) != _END:
            stream = stream or target.open("xb")
            stream.write(zlib.decompress(piece))
    except RuntimeError as error:
        print(f"dlearn: {what} did not come whole ({str(error).splitlines()[0]}): copy it by hand.", file=sys.stderr)
    finally:
        if stream is not None:
            stream.close()
