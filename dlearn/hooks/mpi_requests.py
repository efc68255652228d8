"""Requests of mpi4py whose wait and test tell when a non-blocking call is over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from mpi4py import MPI

from dlearn.hooks.mpi_watch import Post, error_name


class RequestCalls:
    """What the recording classes of `Request` and `Prequest` have in common. `posts` are the calls that it stands for:
    one, or of Isendrecv two."""

    mpi4py_class: type[Any]
    posts: Sequence[Post | None] = ()

    def __new__(cls, request: Any = None) -> Any:
        made = super().__new__(cls, request)  # type: ignore[call-arg]
        made.posts = getattr(request, "posts", ())
        return made

    def Wait(self, status: Any = None) -> Any:
        return self._one("Wait", status, lambda answer: True)

    def wait(self, status: Any = None) -> Any:
        return self._one("wait", status, lambda answer: True)

    def Test(self, status: Any = None) -> Any:
        return self._one("Test", status, bool)

    def test(self, status: Any = None) -> Any:
        return self._one("test", status, lambda answer: bool(answer[0]))

    def _one(self, name: str, status: Any, is_over: Callable[[Any], bool]) -> Any:
        own = status if status is not None else MPI.Status()
        with _Failing([self]):
            answer = getattr(self.mpi4py_class, name)(self, own)
        if is_over(answer):
            _ended(self, own)
        return answer

    @classmethod
    def Waitall(cls, requests: Any, statuses: Any = None) -> Any:
        return cls._all("Waitall", requests, statuses, lambda answer: True)

    @classmethod
    def waitall(cls, requests: Any, statuses: Any = None) -> Any:
        return cls._all("waitall", requests, statuses, lambda answer: True)

    @classmethod
    def Testall(cls, requests: Any, statuses: Any = None) -> Any:
        return cls._all("Testall", requests, statuses, bool)

    @classmethod
    def testall(cls, requests: Any, statuses: Any = None) -> Any:
        return cls._all("testall", requests, statuses, lambda answer: bool(answer[0]))

    @classmethod
    def _all(cls, name: str, requests: Any, statuses: Any, is_over: Callable[[Any], bool]) -> Any:
        own = statuses if statuses is not None else []
        with _Failing(requests):
            answer = getattr(cls.mpi4py_class, name)(requests, own)
        if is_over(answer):
            for request, status in zip(requests, own, strict=False):
                _ended(request, status)
        return answer

    @classmethod
    def Waitany(cls, requests: Any, status: Any = None) -> Any:
        return cls._any("Waitany", requests, status, lambda answer: answer)

    @classmethod
    def waitany(cls, requests: Any, status: Any = None) -> Any:
        return cls._any("waitany", requests, status, lambda answer: answer[0])

    @classmethod
    def Testany(cls, requests: Any, status: Any = None) -> Any:
        return cls._any("Testany", requests, status, lambda answer: answer[0] if answer[1] else MPI.UNDEFINED)

    @classmethod
    def testany(cls, requests: Any, status: Any = None) -> Any:
        return cls._any("testany", requests, status, lambda answer: answer[0] if answer[1] else MPI.UNDEFINED)

    @classmethod
    def _any(cls, name: str, requests: Any, status: Any, which: Callable[[Any], int]) -> Any:
        own = status if status is not None else MPI.Status()
        with _Failing(requests):
            answer = getattr(cls.mpi4py_class, name)(requests, own)
        if which(answer) != MPI.UNDEFINED:
            _ended(requests[which(answer)], own)
        return answer

    @classmethod
    def Waitsome(cls, requests: Any, statuses: Any = None) -> Any:
        return cls._some("Waitsome", requests, statuses, lambda answer: answer)

    @classmethod
    def waitsome(cls, requests: Any, statuses: Any = None) -> Any:
        return cls._some("waitsome", requests, statuses, lambda answer: answer[0])

    @classmethod
    def Testsome(cls, requests: Any, statuses: Any = None) -> Any:
        return cls._some("Testsome", requests, statuses, lambda answer: answer)

    @classmethod
    def testsome(cls, requests: Any, statuses: Any = None) -> Any:
        return cls._some("testsome", requests, statuses, lambda answer: answer[0])

    @classmethod
    def _some(cls, name: str, requests: Any, statuses: Any, which: Callable[[Any], Any]) -> Any:
        own = statuses if statuses is not None else []
        with _Failing(requests):
            answer = getattr(cls.mpi4py_class, name)(requests, own)
        for index, status in zip(which(answer) or (), own, strict=False):
            _ended(requests[index], status)
        return answer


class PrequestCalls(RequestCalls):
    """A persistent request: each start is a call of its own."""

    post: Callable[[], Sequence[Post | None]] | None = None

    def Start(self) -> None:
        self.posts = self.post() if self.post is not None else ()
        with _Failing([self]):
            self.mpi4py_class.Start(self)

    @classmethod
    def Startall(cls, requests: Any) -> None:
        for request in requests:
            if isinstance(request, PrequestCalls) and request.post is not None:
                request.posts = request.post()
        with _Failing(requests):
            cls.mpi4py_class.Startall(requests)


def _ended(request: Any, status: Any) -> None:
    for post in getattr(request, "posts", ()):
        if post is not None:
            post.ended(by="wait", status=status)


class _Failing:
    """If the call raises, so have the requests ended."""

    def __init__(self, requests: Iterable[Any]) -> None:
        self._requests = requests

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        for request in self._requests:
            for post in getattr(request, "posts", ()):
                if post is not None:
                    post.ended(by="wait", error=error_name(error))
