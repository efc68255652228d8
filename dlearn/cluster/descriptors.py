"""An open file or socket for another process, over a connection between the two.

Not by multiprocessing's `send_handle`: its receiver answers with a byte on the same connection (on macOS, and from
Python 3.14 on everywhere), where another thread of the sender may be waiting for something else, and would take it.
"""

from __future__ import annotations

import socket
from multiprocessing.connection import Connection


def send_descriptor(connection: Connection, descriptor: int) -> None:
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as way:
        socket.send_fds(way, [b"d"], [descriptor])


def receive_descriptor(connection: Connection) -> int:
    """EOFError if the sender has gone."""
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as way:
        _, descriptors, _, _ = socket.recv_fds(way, 1, 1)
    if not descriptors:
        raise EOFError
    return descriptors[0]
