"""The caller of an operation: phase, call site and DDP's part in it, read off the Python stack.

Hooks on every module, every optimizer and the autograd engine would have a state that goes wrong
when one of them raises. A walk has none, and costs a few microseconds where something is sent.
"""

import inspect
import os
import sys
import sysconfig
import tempfile
import threading
import traceback
from collections.abc import Callable
from concurrent import futures
from concurrent.futures.thread import _WorkItem
from contextlib import suppress
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import typing_extensions
from torch._C._distributed_c10d import GradBucket
from torch.autograd import graph as autograd_graph
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed import utils as distributed_utils
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dlearn.events.site import file_label
from dlearn.hooks import Emit, Undo
from dlearn.hooks.patches import Patches


class Caller(NamedTuple):
    """The caller of an operation; `bucket_index` is that of the communication hook above it."""

    site: str
    phase: str
    role: str
    launcher: str
    backward: int | None
    bucket_index: int | None
    module: str


class _Note(NamedTuple):
    """The meaning of one function on the stack."""

    code: CodeType
    phase: str = ""
    role: str = ""
    site: str | None = None  # The file's label; None for torch, dlearn and Python's machinery.
    own: bool = False  # The user's own code, not an installed library's.
    recorder: bool = False  # Code of dlearn that is no lesson and no exercise.


_ENGINE = autograd_graph._engine_run_backward.__code__
_RUN_TASK = _WorkItem.run.__code__
_TORCH_DIR = os.path.dirname(torch.__file__) + os.sep
_POWER_SGD = os.path.join(_TORCH_DIR, "distributed", "algorithms", "ddp_comm_hooks", "powerSGD_hook.py")
_DLEARN_DIR = os.path.dirname(os.path.dirname(__file__)) + os.sep
_READERS_DIRS = tuple(os.path.join(_DLEARN_DIR, room) + os.sep for room in ("lessons", "course"))
_PATHS = sysconfig.get_paths()
_INSTALLED = tuple(_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_THREADS = (threading.__file__, os.path.dirname(futures.__file__) + os.sep)
_MACHINERY = (_TORCH_DIR, *_THREADS, typing_extensions.__file__, "<frozen")
_CYTHON = ".pyx"  # Its frames name files of the build, as mpi4py's do.
_FSDP_DIR = os.path.join(_TORCH_DIR, "distributed", "fsdp", "_fully_shard")
_FSDP2_CALLS = os.path.join(_FSDP_DIR, "_fsdp_collectives.py")
_FSDP2_GROUP = os.path.join(_FSDP_DIR, "_fsdp_param_group.py")
_FSDP2, _FSDP2_GATHERS = "FSDP2", "FSDP2 gathers"
_FSDP2_ROLES = {"foreach_reduce": _FSDP2, "foreach_all_gather": _FSDP2_GATHERS}
_FX_CODE = "<eval_with_key>"
"""The first characters of the file name of code that torch.fx makes while it compiles."""

fsdp2_reduces: list[Callable[[], object]] = []
"""What to do when FSDP2 is first seen to reduce gradients."""

cell_names: dict[str, str] = {}
"""File name of a notebook cell's code -> the cell's label, "In[3]". Set by the cluster."""


def caller(frame: FrameType | None) -> Caller:
    """Find phase, line and more of a call by the stack above `frame`, the hook's own."""
    task = torch._C._current_graph_task_id()
    backward = task if task >= 0 else None
    # The innermost function that is not ours made the call.
    while frame is not None and (_notes.get(id(frame.f_code)) or _make_note(frame.f_code)).recorder:
        frame = frame.f_back
    by_engine = (frame is None and backward is not None) or (frame is not None and frame.f_code is _ENGINE)
    launcher = "reducer" if by_engine else ""
    main = threading.main_thread().ident or 0
    on_main = threading.get_ident() == main
    phase, role, site, bucket = _walk(frame, look_for_bucket=not by_engine, look_at_bottom=not on_main)
    if bucket is not None:
        launcher = "comm hook"
    if role == _FSDP2:
        launcher = _FSDP2
        while fsdp2_reduces:
            fsdp2_reduces.pop()()
    module = ""
    if role in _FSDP2_ROLES.values():
        module, role = _fsdp2_module(frame), ""
    if not phase and backward is not None:
        phase = "backward"
    if not (on_main or (phase and site)):
        # A thread that torch started for us knows neither; the thread that waits for it does.
        its_phase, its_site = _phase_and_site(sys._current_frames().get(main))
        phase, site = phase or its_phase, site or its_site
    return Caller(site, phase or "none", role, launcher, backward, bucket, module)


def install(emit: Emit) -> Undo:
    """Remember the caller that submits work to a pool, whose threads run no user code."""

    def submitted(result: None, item: Any, *args: Any, **kwargs: Any) -> None:
        phase, site = _phase_and_site(sys._getframe(1))
        item._dlearn_submitter = phase or "none", site

    undo = Patches()
    undo.around(emit, _WorkItem, "__init__", after=submitted)
    return undo.close


def site_of(frame: FrameType | None) -> str:
    """Return the innermost line of user code from `frame` outwards, or ""."""
    return _phase_and_site(frame)[1]


def site_of_error(error: BaseException) -> str:
    """Return the innermost line of user code that an exception came through, or ""."""
    site = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        note = _notes.get(id(frame.f_code)) or _make_note(frame.f_code)
        if note.own and note.site is not None:
            site = f"{note.site}:{line}"
    return site


def class_name(error: BaseException) -> str:
    """Return "ValueError"; "MPI.Exception" of mpi4py's, whose bare name says nothing."""
    kind = type(error)
    return f"MPI.{kind.__name__}" if kind.__module__ == "mpi4py.MPI" else kind.__name__


def _phase_and_site(frame: FrameType | None) -> tuple[str, str]:
    phase, _, site, _ = _walk(frame, look_for_bucket=False)
    return phase, site


def _walk(
    frame: FrameType | None, *, look_for_bucket: bool, look_at_bottom: bool = False
) -> tuple[str, str, str, int | None]:
    """Return phase, role, site and bucket, as the functions on the stack from `frame` outwards say."""
    phase = role = own_site = any_site = ""
    bucket: int | None = None
    below: FrameType | None = None
    while frame is not None:
        code = frame.f_code
        if id(code) not in _silent:
            _, its_phase, its_role, site, own, _ = _notes.get(id(code)) or _make_note(code)
            if its_phase and not (below is not None and below.f_code.co_filename.startswith(_FX_CODE)):
                phase = phase or its_phase  # A graph that was compiled is called as a module, and is none.
            role = role or its_role
            if site is not None and not own_site:
                if own:
                    own_site = f"{site}:{frame.f_lineno}"
                elif not any_site:
                    any_site = f"{site}:{frame.f_lineno}"
            if code is _ENGINE and look_for_bucket:
                bucket = bucket if bucket is not None else _bucket_of(below)
            if code is _RUN_TASK:
                its_phase, site = getattr(frame.f_locals["self"], "_dlearn_submitter", ("", ""))
                return phase or its_phase, role, own_site or site, bucket
            if own_site and phase:
                return phase, role, own_site, bucket  # A role is played further in, between user and c10d.
        below, frame = frame, frame.f_back
    if look_for_bucket and look_at_bottom and bucket is None:
        bucket = _bucket_of(below)
    return phase, role, own_site or any_site, bucket


def _bucket_of(called_by_cpp: FrameType | None) -> int | None:
    """Return the bucket for which C++ called a hook; torch's PowerSGD keeps only its index."""
    if called_by_cpp is None:
        return None
    values = called_by_cpp.f_locals
    power_sgd = called_by_cpp.f_code.co_filename == _POWER_SGD
    known = values.get("bucket_index") if power_sgd else None
    return next((value.index() for value in values.values() if isinstance(value, GradBucket)), known)


def _fsdp2_module(frame: FrameType | None) -> str:
    """Return FSDP2's name of the module that it gathers or reduces; "" where it cannot be read."""
    while frame is not None and frame.f_code.co_filename != _FSDP2_GROUP:
        frame = frame.f_back
    name = getattr(frame.f_locals.get("self"), "_module_fqn", None) if frame is not None else None
    return (name or ".") if isinstance(name, str) else ""


def _make_note(code: CodeType) -> _Note:
    name = code.co_filename
    # Code made by torch.compile is called by the user's function that it was made of.
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor_"))
    ours = name.startswith(_DLEARN_DIR) and not name.startswith(_READERS_DIRS)
    if ours or name.startswith((*_MACHINERY, _FX_CODE, cache)):
        role = _FSDP2_ROLES.get(code.co_name, "") if name == _FSDP2_CALLS else ""
        note = _Note(code, role=role, recorder=name.startswith(_DLEARN_DIR))
    else:
        below = os.devnull  # No file is below that.
        with suppress(FileNotFoundError):  # It was deleted; the program goes on.
            below = os.getcwd()
        own = not (name.startswith(_INSTALLED) or name.endswith(_CYTHON))
        note = _Note(code, site=file_label(name, cell_names, below), own=own)
    if len(_notes) > 20_000:
        _silent.clear()
        _notes.clear()
        _notes.update(_known())
    # The note holds the code object, so its id stays its own.
    _notes[id(code)] = note
    if note.site is None and not note.role:
        _silent.add(id(code))
    return note


def _known() -> dict[int, _Note]:
    """Return notes of the functions of torch whose presence on the stack means something."""
    # From Python 3.14 on the code of its annotations stands there, too.
    codes = [const for const in Optimizer.profile_hook_step.__code__.co_consts if isinstance(const, CodeType)]
    step_wrapper = next(code for code in codes if code.co_name == "wrapper")
    ddp, joins = DistributedDataParallel, "Join counts the ranks that still have inputs"
    meanings = (
        (torch.nn.Module._call_impl, "forward", ""),
        (ddp.__init__, "setup", ""),
        (ddp._pre_forward, "forward", "DDP agrees on the rebuilt buckets"),
        (Join.notify_join_context, "", joins),
        (Join._get_num_nonjoined_procs, "", joins),
        (ddp._check_global_requires_backward_grad_sync, "", "DDP asks whether gradients are summed this time"),
        (ddp._find_common_rank, "", "DDP finds a rank that has the final model"),
        (ddp._sync_buffers, "", "DDP sends rank 0's buffers"),
        (distributed_utils._verify_param_shape_across_processes, "", "DDP compares the parameters' shapes"),
        (distributed_utils._sync_module_states, "", "DDP sends rank 0's model"),
        (distributed_c10d.init_process_group, "setup", ""),
        (distributed_c10d.new_group, "setup", ""),
        (device_mesh.init_device_mesh, "setup", ""),
        (distributed_c10d.destroy_process_group, "cleanup", ""),
    )
    notes = [_Note(_ENGINE, "backward"), _Note(_RUN_TASK), _Note(step_wrapper, "optimizer")]
    for function, phase, role in meanings:
        # Torch wraps some of these for logging and deprecation; what runs below is the innermost.
        code: CodeType = inspect.unwrap(function).__code__
        notes.append(_Note(code, phase, role))
    return {id(note.code): note for note in notes}


_notes: dict[int, _Note] = _known()
_silent: set[int] = set()  # Functions without a meaning: most of a stack, and passed over fast.
