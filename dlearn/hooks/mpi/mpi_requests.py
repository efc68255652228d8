"""Requests of mpi4py whose wait and test tell when a call that does not block is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpi4py import MPI

from dlearn.hooks.mpi.mpi_watch import Post, error_name, standing_class

_NAMES = ("Wait", "Test", "Waitall", "Testall", "Waitany", "Testany", "Waitsome", "Testsome")
"""Each also over objects, in small letters."""


class RequestCalls:
    """Add to `Request` the calls that it stands for: one, or of Isendrecv two."""

    posts: Sequence[Post | None] = ()

    def __new__(cls, request: Any = None) -> Any:
        made = super().__new__(cls, request)  # type: ignore[call-arg]
        made.posts = getattr(request, "posts", ())
        return made


def _waiting(name: str) -> Any:
    """Return mpi4py's method of this name, or its class method for several requests; it tells which are over."""
    call, kind = getattr(MPI.Request, name), name.lower()
    many = kind.endswith(("all", "some"))
    places = "requests", "statuses" if many else "status"

    def method(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(places, args, strict=False)) | kwargs
        asked, status = given["requests"], given.get(places[1])
        if status is None:
            status = [] if many else MPI.Status()
        statuses: Any = status if many else [status]
        requests = [asked] if kind in ("wait", "test") else asked
        try:
            answer = call(asked, status)
        except BaseException as error:
            for request in requests:
                _ended(request, error=error_name(error))
            raise
        for place, each in zip(_over(kind, answer, len(requests)), statuses, strict=False):
            _ended(requests[place], status=each)
        return answer

    return method if kind in ("wait", "test") else staticmethod(method)


def _over(kind: str, answer: Any, count: int) -> Iterable[int]:
    """The places of the requests that are over, as mpi4py answers; over objects these come behind."""
    if kind in ("wait", "waitall"):
        return range(count)
    told = answer[0] if isinstance(answer, tuple) else answer
    if kind in ("test", "testall"):
        return range(count if told else 0)
    if kind in ("waitany", "testany"):
        return () if told == MPI.UNDEFINED else (told,)
    return told or ()


def _ended(request: Any, **how: Any) -> None:
    for post in getattr(request, "posts", ()):
        if post is not None:
            post.ended(by="wait", **how)


_METHODS: dict[str, Callable[..., Any]] = {each: _waiting(each) for name in _NAMES for each in (name, name.lower())}
Request = standing_class("Request", RequestCalls, _METHODS)
