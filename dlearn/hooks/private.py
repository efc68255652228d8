"""The private names of torch that hooks stand on. torch may drop any of them in its next release, without a word.

So all of them are looked up here, before any hook uses one: a torch that does not fit is refused in one sentence.
"""

from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch._C._dynamo import eval_frame

from dlearn.errors import SetupError

TRIED = "2.8 to 2.15"  # The versions of torch with which the tests were run.

NAMES = {
    "torch": "_disable_dynamo",
    "torch._C": "_current_graph_task_id _dispatch_has_kernel_for_dispatch_key _dispatch_keyset_full_after"
    " _get_dispatch_mode _TorchDispatchModeKey.FAKE",
    "torch._C._distributed_autograd": "_current_context _retrieve_context",
    "torch._C._distributed_c10d": "FakeProcessGroup GradBucket HashStore PrefixStore TCPStore _dump_fr_trace_json"
    " ProcessGroup.unbox ProcessGroup._get_sequence_number_for_group"
    " Store.clone Store.queue_len Store.queue_pop Store.queue_push Work.unbox Work._source_rank",
    "torch._C._distributed_rpc": "PyRRef _get_current_rpc_agent _is_current_rpc_agent_set _set_rpc_timeout",
    "torch._C._dynamo.eval_frame": "_FrameAction.SKIP _FrameExecStrategy set_code_exec_strategy",
    "torch.autograd": "_engine_run_backward",
    "torch.autograd.graph": "_engine_run_backward",
    "torch.distributed.autograd": "_new_context _release_context backward",
    "torch.distributed.distributed_c10d": "_get_default_store _new_process_group_helper"
    " _world.pg_coalesce_state _world.pg_group_ranks _world.pg_map",
    "torch.distributed.rpc.api": "_finalize_shutdown _init_rpc_states _invoke_remote_builtin _invoke_remote_python_udf"
    " _invoke_remote_torchscript _invoke_rpc_builtin _invoke_rpc_python_udf _invoke_rpc_torchscript",
    "torch.distributed.rpc.backend_registry": "_init_process_group init_backend",
    "torch.distributed.rpc.internal": "_InternalRPCPickler._py_rref_receiver _InternalRPCPickler._py_rref_reducer",
    "torch.distributed.rpc.rref_proxy": "_local_invoke _local_invoke_async_execution",
    "torch.distributed.utils": "_sync_module_states _verify_param_shape_across_processes",
    "torch.jit._builtins": "_find_builtin _get_builtin_table _register_builtin",
    "torch.library": "Library._destroy",
    "torch.nn": "Module._call_impl",
    "torch.nn.parallel": "DistributedDataParallel._inside_ddp_forward DistributedDataParallel._pre_forward"
    " DistributedDataParallel._sync_buffers",
    "torch.optim": "Optimizer.profile_hook_step",
}


def unfit(why: str) -> SetupError:
    """Make the error that says why the installed torch cannot be recorded."""
    return SetupError(
        f"dlearn cannot record with torch {torch.__version__}: {why}."
        f" Install torch {TRIED}; for a newer one, look for a newer dlearn."
    )


def ask_for_names() -> None:
    """Raise SetupError if the installed torch lacks one of the names."""
    for module, names in NAMES.items():
        for name in names.split():
            try:
                attrgetter(name)(import_module(module))
            except (ImportError, AttributeError):
                raise unfit(f"it has no {module}.{name}") from None


F = TypeVar("F", bound=Callable[..., Any])


def untraced(function: F) -> F:
    """Exclude this function, and all that it calls, from torch.compile: hooks run below compiled code.

    The same as `torch.compiler.disable`, which would import torch._dynamo (seconds) in every job that we record.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return function
