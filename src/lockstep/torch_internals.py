"""Every private name of torch that the package relies on, once: what for, and what happens without it.

A name that this torch lacks is reported in one line, when it is first needed. Then a feature is degraded, or raises a
clear error where anything else would be wrong; no import fails. ``tests/contract/test_torch_internals.py`` goes through
all of them: run it first on a new torch. Seen in torch 2.11, 2.13 and 2.14.
"""

import argparse
import functools
import itertools
import operator
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import ConfigurationError

WITHOUT: dict[str, str] = {}
"""By the private name: what happens without it."""


def _late(path: str, without: str, instead: Any = None) -> Callable[[], Any]:
    """Return a function that returns the object at ``path``, or ``instead``. It imports torch's module when called."""
    WITHOUT[path] = without

    @functools.cache
    def find() -> Any:
        try:
            return pkgutil.resolve_name(path)
        except (ImportError, AttributeError):
            print(f"lockstep: torch {torch.__version__} has no {path}: {without}", file=sys.stderr, flush=True)
            return instead

    return find


def _now(path: str, without: str, instead: Any = None) -> Any:
    """Return the object at ``path``, or ``instead``."""
    return _late(path, without, instead)()


def _attribute(path: str, without: str, instead: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that returns the attribute at ``path`` of an object of that class, or calls ``instead``."""
    return operator.attrgetter(path.rpartition(".")[2]) if _now(path, without) is not None else instead


def _method(path: str, without: str, instead: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls the method at ``path`` of its first argument, or calls ``instead``."""
    name = path.rpartition(".")[2]
    if _now(path, without) is None:
        return instead
    return lambda owner, *args, **kwargs: getattr(owner, name)(
        *args, **kwargs
    )  # that of its class, perhaps a derived one


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(
        f"This cannot work with torch {torch.__version__}, which lacks what a line above names.\n"
        "Use a version of torch that Lockstep knows: 2.11 to 2.14."
    )


_NEVER_TWICE = itertools.count()

# --- autograd ---------------------------------------------------------------------------------------------------------

queue_callback: Callable[[Callable[[], None]], None] = _now(
    "torch.autograd.Variable._execution_engine.queue_callback",
    "DistributedDataParallel raises an error in backward.",
    _refuse,
)
"""Call a function when the running backward ends, unless it fails. Outside of backward: RuntimeError."""


def _is_in_backward() -> int:
    try:
        queue_callback(lambda: None)
    except RuntimeError:
        return -1
    return 0


current_graph_task_id: Callable[[], int] = _now(
    "torch._C._current_graph_task_id", "a backward in a backward counts as a part of it.", _is_in_backward
)
"""Return the number of the running backward of this thread; -1 outside of backward."""

unsafe_preserve_version_counter: Callable[[tuple[Tensor, ...]], Any] = _now(
    "torch.autograd._unsafe_preserve_version_counter",
    "a backward after two forwards with broadcast buffers may raise an error.",
    lambda _tensors: nullcontext(),
)
"""In this context, tensors change without a new version, so autograd does not refuse those that it saved."""

profiler_enabled: Callable[[], bool] = _now(
    "torch.autograd._profiler_enabled", "profiles lack the ranges of the engines.", lambda: False
)

version_of: Callable[[Tensor], int] = _attribute(
    "torch.Tensor._version",
    "each step reads all accumulated gradients to find out whether they were reset.",
    lambda _tensor: next(_NEVER_TWICE),
)
"""Return the number of changes of a tensor in place."""

_backward_hooks = _attribute("torch.Tensor._backward_hooks", "the next line.", lambda _: True)
_post_accumulate_grad_hooks = _attribute(
    "torch.Tensor._post_accumulate_grad_hooks", "DataParallel adds gradients one by one.", lambda _: True
)


def has_hooks(weight: Tensor) -> bool:
    """Return whether autograd calls hooks when it adds to the gradient of ``weight``."""
    return bool(_backward_hooks(weight)) or bool(_post_accumulate_grad_hooks(weight))


def in_backward_optimizers(parameter: nn.Parameter) -> list[torch.optim.Optimizer]:
    """Return the optimizers that torch's ``_apply_optimizer_in_backward`` gave it. Without the attribute: none."""
    return getattr(parameter, "_in_backward_optimizers", [])


# --- tensors ----------------------------------------------------------------------------------------------------------


def _one_by_one(method: str) -> Callable[..., None]:
    def apply(tensors: Sequence[Tensor], *others: Any) -> None:
        for index, tensor in enumerate(tensors):
            getattr(tensor, method)(*(each[index] if isinstance(each, (list, tuple)) else each for each in others))

    return apply


_SLOWER = "a kernel for each tensor, so slower."
foreach_copy_: Callable[..., None] = _now("torch._foreach_copy_", _SLOWER, _one_by_one("copy_"))
foreach_add_: Callable[..., None] = _now("torch._foreach_add_", _SLOWER, _one_by_one("add_"))
foreach_mul_: Callable[..., None] = _now("torch._foreach_mul_", _SLOWER, _one_by_one("mul_"))
foreach_zero_: Callable[..., None] = _now("torch._foreach_zero_", _SLOWER, _one_by_one("zero_"))

has_compatible_shallow_copy_type: Callable[[Tensor, Tensor], bool] = _now(
    "torch._has_compatible_shallow_copy_type", "modules are moved by swapping tensors.", lambda _old, _new: False
)
"""Return whether ``module.to`` gives the old parameter the storage of the new one, and so keeps the object."""

_address_of = _attribute("torch.UntypedStorage._cdata", "the next line.", lambda storage: storage.data_ptr())
storage_use_count: Callable[[int], int] = _now(
    "torch._C._storage_Use_Count",
    "buckets are allocated anew in each step, as if the script kept its gradients.",
    lambda _address: next(_NEVER_TWICE),
)
"""Return how many tensors share the storage at an address."""


def storage_address(tensor: Tensor) -> int:
    """Return the address of the storage of ``tensor``, for `storage_use_count`."""
    return int(_address_of(tensor.untyped_storage()))


# Of sparse tensors. The public methods demand coalesced ones, and copy in autograd.
nnz = _method("torch.Tensor._nnz", "sparse gradients are slower.", lambda each: each.coalesce().values().shape[0])
indices_of = _method("torch.Tensor._indices", "sparse gradients are slower.", lambda each: each.coalesce().indices())
values_of = _method("torch.Tensor._values", "embeddings with sparse=True raise an error.", _refuse)


def empty_sparse(shape: Sequence[int], **options: Any) -> Tensor:
    """Return a sparse tensor with rows of an embedding, none yet. Public constructors warn in torch 2.11."""
    return _empty_sparse(1, len(shape) - 1, shape, layout=torch.sparse_coo, **options)  # type: ignore[no-any-return]


_empty_sparse = _now(
    "torch.ops.aten._sparse_coo_tensor_with_dims",
    "embeddings with sparse=True may print a warning of torch.",
    lambda _sparse, _dense, shape, layout, **options: torch.sparse_coo_tensor(size=shape, **options),
)

# --- modules ----------------------------------------------------------------------------------------------------------

BatchNorm: Any = _now(
    "torch.nn.modules.batchnorm._BatchNorm", "batch norm of a user's own class is not recognised.", nn.BatchNorm1d
)
NormBase: Any = _now(
    "torch.nn.modules.batchnorm._NormBase", "statistics of instance norm are not recognised.", nn.BatchNorm1d
)
LazyNorm: Any = _now(
    "torch.nn.modules.batchnorm._LazyNormBase", "converting lazy batch norm raises torch's error.", nn.LazyBatchNorm1d
)
Dropout: Any = _now("torch.nn.modules.dropout._DropoutNd", "dropout is recognised for vectors only.", nn.Dropout)


def check_batch_norm_input(layer: nn.SyncBatchNorm, input: Tensor) -> None:
    """Raise torch's errors for an input that ``layer`` cannot normalise. Without these methods: nothing is checked."""
    for check in ("_check_input_dim", "_check_non_zero_input_channels"):
        getattr(layer, check, bool)(input)


_dispatch_key = _now("torch._C._dispatch_key_for_device", "the next line.")
_has_kernel = _now(
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "SyncBatchNorm uses the kernels of batch_norm, also on a GPU.",
    lambda _operation, _key: False,
)


def has_kernel(operation: str, device_type: str) -> bool:
    """Return whether ``operation`` of ATen runs on devices of this type."""
    return _dispatch_key is not None and bool(_has_kernel(operation, _dispatch_key(device_type)))


# A module's dictionaries; they exist since torch 0.1, and libraries without number use them.
submodules: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")

apply_to_tensors = _method("torch.nn.Module._apply", "models on the meta device raise an error.", _refuse)
"""Replace each parameter and buffer of a module by what a function returns for it."""


def replicate_for_data_parallel(module: nn.Module) -> nn.Module:
    """Return the copy that the class of ``module`` makes for DataParallel, or ``module`` if it has no such method.

    That of ``GraphModule`` is not used: it compiles the graph again, and sharing the class works as well.
    """
    plain = [getattr(each, "_replicate_for_data_parallel", None) for each in (nn.Module, torch.fx.GraphModule)]
    if getattr(type(module), "_replicate_for_data_parallel", None) in plain:
        return module
    return module._replicate_for_data_parallel()  # type: ignore[no-any-return]


def flat_weights(layer: nn.RNNBase) -> dict[str, Any]:
    """Return the list that an RNN keeps of its weights, by name; empty without it."""
    return dict(zip(getattr(layer, "_flat_weights_names", ()), getattr(layer, "_flat_weights", ()), strict=True))


COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module in which ``module.compile()`` keeps what is called instead."""

ORIGINAL = "_orig_mod"
"""The attribute, and so a part of names, under which ``torch.compile`` keeps the module that it was given."""

reparametrize_module: Callable[..., Any] = _now(
    "torch.nn.utils.stateless._reparametrize_module", "sharded models on the meta device raise an error.", _refuse
)
"""In this context a module has other tensors, by name."""

DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a module in which ``_set_params_and_buffers_to_ignore_for_model`` keeps names."""


class _Failed:
    """Stands in for torch's ExceptionWrapper."""

    def __init__(self, where: str) -> None:
        self._where, self._error = where, sys.exc_info()[1]

    def reraise(self) -> NoReturn:
        assert self._error is not None
        self._error.add_note(f"Caught {self._where}.")
        raise self._error


ExceptionWrapper: Any = _now("torch._utils.ExceptionWrapper", "errors of replicas are worded differently.", _Failed)
"""The exception of a thread, to be raised in another with the place in its text."""

tree_leaves: Callable[[Any], list[Any]] = _now("torch.utils._pytree.tree_leaves", "ZeRO raises an error.", _refuse)
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _now(
    "torch.utils._pytree.tree_flatten", "`verify` raises an error.", _refuse
)

# --- torch.compile ----------------------------------------------------------------------------------------------------

_FRAMES = "torch._C._dynamo.eval_frame"
_set_strategy = _now(f"{_FRAMES}.set_code_exec_strategy", "imports take seconds longer.")
_Strategy = _now(f"{_FRAMES}._FrameExecStrategy", "imports take seconds longer.")
_Action = _now(f"{_FRAMES}._FrameAction", "imports take seconds longer.")


def leave_frames(function: Callable[..., Any], *, and_callees: bool) -> None:
    """Make torch.compile run ``function`` as it is: all that it calls as well, or only this frame."""
    # The public ``torch.compiler.disable`` imports the compiler, which takes seconds in scripts that never compile.
    if None in (_set_strategy, _Strategy, _Action):
        torch.compiler.disable(function, recursive=and_callees)
    else:
        _set_strategy(function.__code__, _Strategy(_Action.SKIP, _Action.SKIP if and_callees else _Action.DEFAULT))


def end_graph_at(function: Any) -> None:
    """Make torch.compile end a graph at each call of ``function``. Without the attribute: it may compile into it."""
    function._torchdynamo_disable = True


# --- devices, loaders, the profiler -----------------------------------------------------------------------------------

is_allocator_initialized: Callable[[], bool] = _now(
    "torch._C._accelerator_isAllocatorInitialized",
    "the watchdog takes GPU ranks for busy CPU ranks.",
    lambda: False,
)
privateuse1_name: Callable[[], str] = _now(
    "torch._C._get_privateuse1_backend_name",
    "ranks are forked also with a plug-in device.",
    lambda: "privateuseone",
)


def is_in_bad_fork(device_type: str) -> bool:
    """Return whether this process was forked from one that used the device. Without the function: unknown, so False."""
    return bool(getattr(torch.get_device_module(device_type), "_is_in_bad_fork", bool)())


BaseDataLoaderIter: Any = _now(
    "torch.utils.data.dataloader._BaseDataLoaderIter",
    "waits for a DataLoader are not measured.",
    type("NoLoader", (), {"__next__": None}),
)
_loader_iterators = "faults of `rehearse` in a loader are not injected."
LoaderIters: tuple[Any, ...] = (
    _now("torch.utils.data.dataloader._SingleProcessDataLoaderIter", _loader_iterators),
    _now("torch.utils.data.dataloader._MultiProcessingDataLoaderIter", _loader_iterators),
)


def hide_worker_info() -> None:
    """Make `get_worker_info` return None in this loader process. Without the attribute: streams skip samples."""
    torch.utils.data._utils.worker._worker_info = None


def profile_all_threads() -> Any:
    """Return the setting with which ``torch.profiler`` traces the threads that exist. Without it: only this one."""
    return _Profiling() and _Profiling()(profile_all_threads=True)


_Profiling = _late("torch._C._profiler._ExperimentalConfig", "a profile of dp lacks the threads of replicas.")
TorchDispatchMode: Any = _now("torch.utils._python_dispatch.TorchDispatchMode", "`verify` raises an error.", _refuse)
"""The class of contexts that see each operation."""


def schema_of(operation: Any) -> Any:
    """Return the name and arguments of an operation that a dispatch mode sees. Without it: AttributeError."""
    return operation._schema


# --- torch.distributed ------------------------------------------------------------------------------------------------

_C10D = "torch.distributed.distributed_c10d"

default_store: Callable[[], dist.Store] = _now(f"{_C10D}._get_default_store", "process groups raise an error.", _refuse)
"""Return the store of the default group."""

abort_process_group: Callable[[], None] = _now(
    f"{_C10D}._abort_process_group", "a group that is stuck is left after a time-out.", dist.destroy_process_group
)

default_timeout: Callable[[str], timedelta] = _now(
    f"{_C10D}._get_default_timeout",
    "collectives of every backend wait for half an hour.",
    lambda _backend: dist.distributed_c10d.default_pg_timeout,
)
"""Return torch's time limit for a collective of a backend."""

# The public function is new in torch 2.14, which deprecates the other one.
set_timeout: Callable[[timedelta], None] = getattr(dist, "set_timeout", None) or _now(
    f"{_C10D}._set_pg_timeout", "collectives keep the time limit of connecting.", lambda _limit: None
)


def process_groups() -> list[dist.ProcessGroup]:
    """Return the groups of this process. Without torch's table: none, so none is aborted or counted."""
    return list(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ()))


backend_of = _method("torch.distributed.ProcessGroup._get_backend", "groups raise an error.", _refuse)
"""Return what serves a group for a device."""

all_gather_single: Callable[..., dist.Work] = _method(
    "torch.distributed.ProcessGroup._allgather_base", "sharded states raise an error.", _refuse
)
reduce_scatter_single: Callable[..., dist.Work] = _method(
    "torch.distributed.ProcessGroup._reduce_scatter_base", "ZeRO raises an error.", _refuse
)


def timeout_of(backend: Any) -> timedelta:
    """Return the time limit of a backend's operations. Without the attribute: torch's default."""
    return getattr(backend.options, "_timeout", None) or dist.distributed_c10d.default_pg_timeout


def set_default_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the time limit of a backend's operations. Without the method: it stays that of connecting."""
    getattr(backend, "_set_default_timeout", bool)(timeout)


def group_of(
    backend: Any, kind: Any, store: dist.Store, rank: int, size: int, device: torch.device
) -> dist.ProcessGroup:
    """Return a group outside of torch's table, which ``backend`` serves. Without the methods: AttributeError."""
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(device, kind, backend)
    return group


def sequence_number(group: dist.ProcessGroup) -> int:
    """Return the number of collectives that were called on a group. Without the method, or where it has none: 0."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # groups written in Python may not count
        return 0


def flight_records() -> Iterator[str]:
    """Yield torch's records of collectives as JSON: NCCL's, and that of all. Without them: none. Queries events."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        text = ""
        with suppress(Exception):  # no such function, or no such record
            text = getattr(sys.modules.get("torch._C._distributed_c10d"), name)()
        if text:
            yield text


def root_mesh(mesh: Any) -> Any:
    """Return the mesh of which ``mesh`` is a part, or itself. Without the method: itself."""
    return getattr(mesh, "_get_root_mesh", lambda: mesh)()


def prepare_for_data_parallel(module: nn.Module) -> None:
    """Make the parameters of a tensor-parallel module ones that DDP takes."""
    _pre_dp_module_transform()(module)


_pre_dp_module_transform = _late(
    "torch.distributed.tensor.parallel.ddp._pre_dp_module_transform",
    "DistributedDataParallel with tensor parallelism raises an error.",
    _refuse,
)
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_collectives"
_all_gather = _late(f"{_FSDP}.DefaultAllGather", "waits of fully_shard are not counted.")
_reduce_scatter = _late(f"{_FSDP}.DefaultReduceScatter", "waits of fully_shard are not counted.")


def fully_shard_collectives() -> tuple[Any, Any]:
    """Return the classes of what ``fully_shard`` gathers and reduces with."""
    return _all_gather(), _reduce_scatter()


def comm_hooks_of(module: Any) -> Sequence[Any]:
    """Return the communication hooks of torch's DDP. Without the attribute: none, so `rehearse` may be refused one."""
    return getattr(module, "_comm_hooks", ())


def active_ddp_module() -> Any:
    """Return the wrapped module at whose buckets torch.compile splits graphs. Without the attribute: None."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def set_active_ddp_module(module: Any) -> None:
    """Make torch.compile split graphs at the buckets of ``module``; None: of none. Without it: it does not split."""
    nn.parallel.DistributedDataParallel._active_ddp_module = module


# --- torch elastic ----------------------------------------------------------------------------------------------------


def prepare_elastic_ranks(agent: Any, envs: dict[int, dict[str, str]]) -> None:
    """Set LOCAL_RANK in the environments of ranks, and start what torchrun's environment variables ask for.

    These are the file timer (TORCHELASTIC_ENABLE_FILE_TIMER), the health check (TORCHELASTIC_HEALTH_CHECK_PORT) and the
    CUDA_VISIBLE_DEVICES of ``--virtual-local-rank``. Without the methods of `LocalElasticAgent`: nothing of these.

    Args:
        agent: Starts the ranks.
        envs: What is added to the environment of each rank, by its number on this machine; changed in place.
    """
    for local_rank, environ in envs.items():
        environ["LOCAL_RANK"] = str(local_rank)
        getattr(agent, "_set_local_rank_env", _nothing)(environ, local_rank, agent.get_worker_group().spec)
    getattr(agent, "_setup_local_watchdog", _nothing)(envs=envs)
    getattr(agent, "_setup_healthcheck", _nothing)()


def _nothing(*_: Any, **__: Any) -> None:
    pass


def matches_machine_hostname(host: str) -> bool:
    """Return whether torch finds that a host is this machine.

    Raises:
        socket.gaierror: The name of this machine does not resolve.
    """
    return bool(_matches_machine_hostname()(host))


_matches_machine_hostname = _late(
    "torch.distributed.elastic.rendezvous.utils._matches_machine_hostname",
    "a machine hosts the store of --rdzv-endpoint if that is one of its addresses, though another may do so already.",
    lambda _host: False,
)


def stop_heartbeats(handler: Any) -> None:
    """End the keepalives of a dynamic rendezvous. Without the method: each one that fails is logged."""
    getattr(handler, "_stop_heartbeats", _nothing)()


def is_removed(handler: Any) -> bool:
    """Return whether the machines of a dynamic rendezvous go on without this one. Without its state: False."""
    state = getattr(getattr(handler, "_state_holder", None), "state", None)
    return state is not None and getattr(handler, "_this_node", None) not in state.participants


# --- Python -----------------------------------------------------------------------------------------------------------


def argparse_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return what a parser accepts. Without the attribute: nothing, so the help shows torchrun's own texts."""
    return list(getattr(parser, "_actions", ()))


def set_argparse_title(parser: argparse.ArgumentParser, title: str) -> None:
    """Set the title above the options of a parser. Without the attribute: it stays."""
    getattr(parser, "_optionals", parser).title = title  # type: ignore[union-attr]


def put_last_argparse_group_first(parser: argparse.ArgumentParser) -> None:
    """Show the last group of options first. Without the attribute: last."""
    groups = getattr(parser, "_action_groups", None) or [None]
    groups.insert(0, groups.pop())
