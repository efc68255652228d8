"""Messages that a matched probe has taken out of the line (Mprobe), and how they are received."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from dlearn.hooks.mpi_comms import begun
from dlearn.hooks.mpi_watch import Post, ending


class MessageCalls:
    """What the class that stands in the place of mpi4py's `Message` adds."""

    mpi4py_class: type[Any]
    posts: Sequence[Post | None] = ()

    def Recv(self, buf: Any, status: Any = None) -> None:
        own = status or MPI.Status()
        ending(self.posts, lambda: self.mpi4py_class.Recv(self, buf, own), own)

    def recv(self, status: Any = None) -> Any:
        own = status or MPI.Status()
        return ending(self.posts, lambda: self.mpi4py_class.recv(self, own), own)

    def Irecv(self, buf: Any) -> Any:
        return begun(self.posts, lambda: self.mpi4py_class.Irecv(self, buf))

    def irecv(self) -> Any:
        return begun(self.posts, lambda: self.mpi4py_class.irecv(self))
