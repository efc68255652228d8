"""Why calls that met do not fit together: ops, sizes, dtypes, roots, parts of an all-to-all."""

import math
from collections.abc import Iterator, Sequence

from dlearn.events.event import Collective, TensorInfo
from dlearn.events.mpi_facts import PICKLED
from dlearn.join.ends import End, logical_bytes, payload_bytes, tensors_of
from dlearn.join.wording import Reason, ReasonKind, dtypes_text

ALL_TO_ALL = {"all_to_all", "all_to_all_single"}
MPI = {"mpi4py", "MPI", "mpi"}
"""Backends of MPI: as the recorder, an OTF2 archive and torch name them."""
_EQUAL_SIZES = {"all_reduce", "all_reduce_coalesced", "broadcast", "reduce"}
_EQUAL_SIZES |= {"all_gather", "all_gather_single"}
"""Collectives that every rank must call with as many bytes as the others."""
_TOLD = 8  # Sizes or dtypes in the reason why calls do not fit together.
_BYTES = {"uint8", "int8", "bool", PICKLED}  # Dtypes that may stand for any other.


def mismatch_of_message(send: End, recv: End, backend: str) -> Reason | None:
    """Return why a send does not fit its recv; None where it does."""
    given, taken = tensors_of(send), tensors_of(recv)
    if given == taken:  # Of a million, nearly all.
        return None
    size, room = payload_bytes(send), payload_bytes(recv)
    if size > room:
        return Reason.of(ReasonKind.SMALL_BUFFER, size, room)
    # MPI says how much has come, and Python objects are bytes to it.
    if backend in MPI or len(given) != 1 or len(taken) != 1:
        return None
    if size < room:
        return Reason.of(ReasonKind.LARGE_BUFFER, size, room)
    dtypes = given[0].dtype, taken[0].dtype
    if dtypes[0] != dtypes[1]:
        # Bytes may stand for anything.
        return None if _BYTES.intersection(dtypes) else Reason.of(ReasonKind.OTHER_DTYPE, *dtypes)
    shapes = given[0].shape, taken[0].shape
    reordered = shapes[0] != shapes[1] and sorted(shapes[0]) == sorted(shapes[1])
    # A row sent into a column is the same vector.
    is_vector = max(shapes[0], default=0) == math.prod(shapes[0])
    return Reason.of(ReasonKind.OTHER_ORDER) if reordered and not is_vector else None


def mismatch_of_calls(ends: Sequence[Collective], members: Sequence[int]) -> Reason | None:
    """Return why the calls of a collective do not fit together; None where they do."""
    if len({end.rank for end in ends}) < len(ends):
        return Reason.of(ReasonKind.RANK_TWICE)
    ops = tuple(dict.fromkeys([end.op for end in ends]))
    if len(ops) > 1:
        return Reason.of(ReasonKind.DIFFERENT_OPS, ops)
    # Of Python objects each rank's are as large as they are.
    objects = any(tensor.dtype == PICKLED for end in ends for tensor in tensors_of(end))
    comparable = ops[0] in _EQUAL_SIZES and not objects
    sizes = tuple(dict.fromkeys(map(logical_bytes, ends)))
    if comparable and len(sizes) > 1:
        return Reason.of(ReasonKind.DIFFERENT_SIZES, sizes[:_TOLD])
    dtypes = tuple(dict.fromkeys([dtypes_text(tensors_of(end)) for end in ends]))
    if comparable and len(dtypes) > 1:
        return Reason.of(ReasonKind.DIFFERENT_DTYPES, dtypes[:_TOLD])
    if len({end.root for end in ends}) > 1:
        return Reason.of(ReasonKind.DIFFERENT_ROOTS)
    if ops[0] in ALL_TO_ALL and any(unequal_parts(ends, members)):
        return Reason.of(ReasonKind.DIFFERENT_PARTS)
    return None


UnequalPart = tuple[int, int, int, int]
"""Two ranks, the bytes that the first has for the second, and those that this one takes from it."""


def unequal_parts(ends: Sequence[Collective], members: Sequence[int]) -> Iterator[UnequalPart]:
    """Yield the parts that do not agree; none where a rank's sizes are not known."""
    sent = {end.rank: part_sizes(end, end.splits, end.inputs, len(members)) for end in ends}
    taken = {end.rank: part_sizes(end, end.takes, end.outputs, len(members)) for end in ends}
    unknown = any(len(sizes) != len(members) for sizes in (*sent.values(), *taken.values()))
    if unknown or len(sent) < len(members) or any(end.splits and not end.takes for end in ends):
        return
    for at_src, src in enumerate(members):
        for at_dst, dst in enumerate(members):
            if sent[src][at_dst] != taken[dst][at_src]:
                yield src, dst, sent[src][at_dst], taken[dst][at_src]


def part_sizes(
    call: Collective,
    splits: Sequence[int],
    tensors: Sequence[TensorInfo],
    ranks: int,
) -> tuple[int, ...]:
    """Return the bytes for each group rank: as split, else of a tensor each, or even parts."""
    sizes = tuple(splits or (tensor.payload_bytes for tensor in tensors))
    if call.op == "all_to_all_single" and sizes and not splits:
        return (sum(sizes) // ranks,) * ranks
    return sizes
