"""A sequence whose items are made when somebody looks at them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar, overload

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")


class Lazy(Sequence[Item]):
    """Equal to any sequence of the same items. A slice of it is a list."""

    @abstractmethod
    def at(self, places: NDArray[np.intp]) -> list[Item]:
        """The items at these places; any may be there twice."""

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        places = range(len(self))[index]
        return self.at(np.array(places, np.intp)) if isinstance(places, range) else self.at(np.array([places]))[0]

    def __iter__(self) -> Iterator[Item]:
        return iter(self.at(np.arange(len(self))))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
