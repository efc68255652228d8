"""The only room that touches the insides of torch and of mpi4py. Each hook is `install(host) -> undo` and a guest.

A guest changes no result, gives everything back when `undo` is called, and never breaks training: an error inside a
hook is reported to `host.failed`, and the call goes on. A hook reports to `Emit`, which is in events/source.py; a
`Host` (host.py) is that, with the state that dlearn's own hooks share.
"""

from dlearn.events.source import Emit, Undo
from dlearn.hooks.private import ask_for_names

__all__ = ["Emit", "Undo"]

ask_for_names()
