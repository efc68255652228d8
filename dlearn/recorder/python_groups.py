"""What Python process groups report themselves: torch's dispatcher, where all others are seen, they do not pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import ProcessGroup

from dlearn.hooks.c10d import collectives

if TYPE_CHECKING:
    from dlearn.recorder.recording import Recording


class Outer:
    """A collective of a Python process group, while it is under way."""

    def __init__(self, recording: Recording | None, number: int | None) -> None:
        self._recording, self._number = recording, number

    def __enter__(self) -> None:
        if self._recording is not None and self._number is not None:
            self._recording.enter(self._number)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._recording is not None and self._number is not None:
            self._recording.leave(self._number)
            self._recording.end(self._number, by="return", error=kind.__name__ if kind is not None else "")


class Posted:
    """A send or receive of a Python process group. If nobody waits for it, its end is not observed."""

    def __init__(self, recording: Recording | None, number: int | None) -> None:
        self._recording, self._number = recording, number
        if recording is not None and number is not None:
            recording.posted.add(number)

    def ended(self, *, peer: int | None = None, error: str = "") -> None:
        """The program has waited for it, or found it complete; `peer` is who sent what came from any source."""
        if self._recording is not None and self._number in self._recording.posted:
            self._recording.posted.remove(self._number)
            self._recording.end(self._number, by="wait", error=error, peer=peer)


def collective(
    recording: Recording | None,
    op: str,
    group: ProcessGroup,
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    root: int | None,
    splits: Sequence[int],
) -> Outer:
    """It starts now."""
    if recording is None:
        return Outer(None, None)
    try:
        known, checksums = recording.groups.of(group), recording.options.checksums
        number = collectives.note_collective(
            op, known, tensors, outputs, recording, root=root, splits=splits, checksums=checksums
        )
    except Exception as error:
        recording.failed(op, error)
        return Outer(None, None)
    return Outer(recording, number)


def point_to_point(
    recording: Recording | None, op: str, group: ProcessGroup, tensor: torch.Tensor, peer: int | None, tag: int
) -> Posted:
    """It starts now."""
    if recording is None:
        return Posted(None, None)
    try:
        known, checksums = recording.groups.of(group), recording.options.checksums
        number = collectives.note_p2p(op, known, tensor, peer, tag, recording, checksums=checksums)
    except Exception as error:
        recording.failed(op, error)
        return Posted(None, None)
    return Posted(recording, number)
