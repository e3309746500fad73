"""Every private name of torch that the package relies on, once: what for, and what happens without it.

A name that this torch lacks is reported in one line, when it is first needed. Then a feature is degraded, or raises a
clear error where anything else would be wrong; no import fails. ``tests/contract/test_torch_internals.py`` goes through
all of them: run it first on a new torch. Seen in torch 2.11, 2.13, 2.14 and 2.15.
"""

import argparse
import functools
import importlib
import inspect
import itertools
import operator
import pkgutil
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from traceback import walk_stack
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import ConfigurationError

INSTEAD: dict[str, Any] = {}  # by the private name: what stands in for it


def _late(path: str, without: str, instead: Any = None) -> Callable[[], Any]:
    """Return a function that returns the object at ``path``, or ``instead``. It imports torch's module when called."""
    INSTEAD[path] = instead

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


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ConfigurationError(
        f"This cannot work with torch {torch.__version__}, which lacks what a line above names.\n"
        "Use a version of torch that Lockstep knows: 2.11 to 2.15."
    )


# --- autograd ---------------------------------------------------------------------------------------------------------

# Calls a function when the running backward ends, unless it fails. Outside of backward: RuntimeError.
queue_callback: Callable[[Callable[[], None]], None] = _now(
    "torch.autograd.Variable._execution_engine.queue_callback", "distributed backwards raise an error.", _refuse
)


# Returns the number of the running backward of this thread; -1 outside of backward.
current_graph_task_id: Callable[[], int] = _now(
    "torch._C._current_graph_task_id", "distributed backwards raise an error.", _refuse
)

_will_execute: Callable[[Any], bool] = _now(
    "torch._C._will_engine_execute_node", "autograd.grad() through DDP counts as a backward.", lambda _node: True
)


def will_execute(node: Any) -> bool:
    """Return whether the running backward calls a node of the graph; False for a leaf of ``autograd.grad``.

    Without the function: True. So also outside of the engine, as in compiled autograd.
    """
    try:
        return _will_execute(node)
    except RuntimeError as error:
        return "autograd.grad" not in str(error)


# In this context, tensors change without a new version, so autograd does not refuse tensors that it saved.
unsafe_preserve_version_counter: Callable[[tuple[Tensor, ...]], Any] = _now(
    "torch.autograd._unsafe_preserve_version_counter",
    "a backward after two forwards with broadcast buffers may raise an error.",
    lambda _tensors: nullcontext(),
)

profiler_enabled: Callable[[], bool] = _now(
    "torch.autograd._profiler_enabled", "profiles lack the ranges of the engines.", lambda: False
)

# The number of changes of a tensor in place. Without it: AttributeError when gradients are accumulated.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")


def tensor_address(tensor: Tensor) -> int:
    """Return the address of what is exchanged by ``torch.utils.swap_tensors``. Without the attribute: 0."""
    return int(getattr(tensor, "_cdata", 0))


# The running transforms of torch.func, innermost last, or None.
interpreter_stack: Callable[[], Any] = _now(
    "torch._C._functorch.get_interpreter_stack", "torch.func raises unclear errors in the engines.", lambda: None
)
# In this context, operations ignore these transforms.
outside_transforms: Callable[[], Any] = _now("torch._C._DisableFuncTorch", "vmap raises an error.", nullcontext)
_is_wrapped, _unwrapped = (
    _now(f"torch._C._functorch.{name}", "vmap raises an error.", bool)
    for name in ("is_functorch_wrapped_tensor", "get_unwrapped")
)


def differentiates() -> bool:
    """Return whether one of these transforms computes derivatives itself, without a backward of the caller's."""
    return any(interpreter.key().name in ("Grad", "Jvp") for interpreter in interpreter_stack() or ())


def unwrap(tensor: Tensor) -> Tensor:
    """Return the tensor of autograd that a tensor of a transform wraps, or ``tensor`` itself."""
    while _is_wrapped(tensor):
        tensor = _unwrapped(tensor)
    return tensor


# The modes of Python that the operations of this thread pass through, of both kinds.
_function_modes: Callable[[], Sequence[Any]] = _now(
    "torch.overrides._get_current_function_mode_stack", "replicas do not see modes.", tuple
)
_num_dispatch_modes: Callable[[], int] = _now("torch._C._len_torch_dispatch_stack", "replicas do not see modes.", int)
_DeviceContext: Any = _now("torch.utils._device.DeviceContext", "replicas run one after the other in it.", tuple)
_saved_tensors_hooks: Callable[..., Any] = _now(
    "torch._C._autograd._top_saved_tensors_default_hooks", "replicas do not see these hooks.", lambda _: None
)


def has_modes() -> bool:
    """Return whether this thread has modes or hooks of Python, other than a default device, which others do not see."""
    is_seen = any(not isinstance(mode, _DeviceContext) for mode in _function_modes())
    return is_seen or _num_dispatch_modes() > 0 or _saved_tensors_hooks(True) is not None


def default_device() -> torch.device | None:
    """Return the default device that this thread has set, if any."""
    return next((mode.device for mode in reversed(_function_modes()) if isinstance(mode, _DeviceContext)), None)


def has_hooks(weight: Tensor) -> bool:
    """Return whether autograd calls hooks when it adds to ``weight.grad``. Without the attributes: True, so slower."""
    return bool(getattr(weight, "_backward_hooks", True) or getattr(weight, "_post_accumulate_grad_hooks", True))


def in_backward_optimizers(parameter: nn.Parameter) -> list[torch.optim.Optimizer]:
    """Return the optimizers that torch's ``_apply_optimizer_in_backward`` gave it. Without the attribute: none."""
    return getattr(parameter, "_in_backward_optimizers", [])


def optimizer_hooks(optimizer: torch.optim.Optimizer, event: str) -> dict[str, dict[int, Any]]:
    """Return the hooks before and after ``event``, by attribute. Without the attributes: none."""
    names = [f"_optimizer_{event}_{when}_hooks" for when in ("pre", "post")]
    return {name: getattr(optimizer, name, {}) for name in names}


def is_counted_step(method: Any) -> bool:
    """Return whether a scheduler replaced ``optimizer.step`` by this, to count calls. Without the attribute: False."""
    return hasattr(method, "_wrapped_by_lr_sched")


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Let schedulers know that ``optimizer`` has made steps. Where torch reads something else, it may warn."""
    vars(optimizer)["_opt_called"] = True


# --- tensors ----------------------------------------------------------------------------------------------------------


# Methods of many tensors, in few kernels.
foreach_copy_, foreach_add_, foreach_mul_, foreach_zero_ = (
    _now(f"torch._foreach_{name}_", "flat buffers raise an error.", _refuse) for name in ("copy", "add", "mul", "zero")
)
foreach_norm: Callable[..., list[Tensor]] = _now("torch._foreach_norm", "flat buffers raise an error.", _refuse)

# Whether ``module.to`` can give the old parameter, the first argument, the storage of the new one, and keep the object.
has_compatible_shallow_copy_type: Callable[[Tensor, Tensor], bool] = _now(
    "torch._has_compatible_shallow_copy_type", "modules are moved by swapping tensors.", lambda _old, _new: False
)

# How many tensors share the storage at an address.
storage_use_count: Callable[[int], int] = _now(
    "torch._C._storage_Use_Count",
    "buckets are allocated anew in each step, as if the script kept its gradients.",
    lambda _address, calls=iter(itertools.count()): next(calls),  # noqa: B008
)


def storage_address(tensor: Tensor) -> int:
    """Return the address of the storage of ``tensor``, for `storage_use_count`. Without the attribute: 0."""
    return int(getattr(tensor.untyped_storage(), "_cdata", 0))


# Of sparse tensors: the public methods refuse tensors that are not coalesced. Without them: AttributeError.
nnz, indices_of, values_of = map(operator.methodcaller, ("_nnz", "_indices", "_values"))

# Public constructors warn about invariants in torch 2.11.
_sparse = _now("torch.ops.aten._sparse_coo_tensor_with_dims", "embeddings with sparse=True raise an error.", _refuse)


def empty_sparse(shape: Sequence[int], **options: Any) -> Tensor:
    """Return a sparse tensor of rows of an embedding, none yet."""
    return _sparse(1, len(shape) - 1, shape, layout=torch.sparse_coo, **options)  # type: ignore[no-any-return]


# --- modules ----------------------------------------------------------------------------------------------------------

_LAYERS = "torch.nn.modules"
_UNKNOWN = "layers of other classes than the usual are not recognised."
BatchNorm: Any = _now(f"{_LAYERS}.batchnorm._BatchNorm", _UNKNOWN, nn.BatchNorm2d)
NormBase: Any = _now(f"{_LAYERS}.batchnorm._NormBase", _UNKNOWN, nn.BatchNorm2d)
LazyNorm: Any = _now(f"{_LAYERS}.batchnorm._LazyNormBase", _UNKNOWN, nn.LazyBatchNorm2d)
Dropout: Any = _now(f"{_LAYERS}.dropout._DropoutNd", _UNKNOWN, nn.Dropout)


def check_batch_norm_input(layer: nn.SyncBatchNorm, input: Tensor) -> None:
    """Raise torch's errors for an input that ``layer`` cannot normalise. Without these methods: nothing is checked."""
    for check in ("_check_input_dim", "_check_non_zero_input_channels"):
        getattr(layer, check, bool)(input)


@functools.cache
def has_kernel(operation: str, device_type: str) -> bool:
    """Return whether ``operation`` of ATen runs on devices of this type. Without the functions: on CUDA."""
    try:
        key = torch._C._dispatch_key_for_device(device_type)
        return torch._C._dispatch_has_kernel_for_dispatch_key(operation, key)
    except AttributeError:
        return device_type == "cuda"


# The dictionaries of a module, which libraries without number use. Without them: AttributeError.
submodules: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")
own_parameters: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = operator.attrgetter("_buffers")


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replace each parameter and buffer by what ``function`` returns for it. Without the method: AttributeError."""
    module._apply(function)


def replicate_for_data_parallel(module: nn.Module) -> nn.Module:
    """Return the copy that the class of ``module`` makes for DataParallel, or ``module`` if it has no such method.

    That of ``GraphModule`` is not used: it compiles the graph again, and sharing the class works as well.
    """
    plain = [getattr(cls, "_replicate_for_data_parallel", None) for cls in (nn.Module, torch.fx.GraphModule)]
    if getattr(type(module), "_replicate_for_data_parallel", None) in plain:
        return module
    return module._replicate_for_data_parallel()  # type: ignore[no-any-return]


def flat_weights(layer: nn.RNNBase) -> dict[str, Any]:
    """Return the list that an RNN keeps of its weights, by name. Without it: empty."""
    return dict(zip(getattr(layer, "_flat_weights_names", ()), getattr(layer, "_flat_weights", ()), strict=True))


# Attributes of modules: what is called after ``module.compile()``; the module that ``torch.compile`` was given, also a
# part of names; and the names that DDP ignores.
COMPILED_CALL, ORIGINAL = "_compiled_call_impl", "_orig_mod"
DDP_IGNORED = "_ddp_params_and_buffers_to_ignore"

# In this context a module has other tensors, by name.
reparametrize_module: Callable[..., Any] = _now(
    "torch.nn.utils.stateless._reparametrize_module", "sharded models on the meta device raise an error.", _refuse
)

# Takes the exception of a thread, to be raised in another with the place in its text.
ExceptionWrapper: Any = _now("torch._utils.ExceptionWrapper", "DataParallel raises an error.", _refuse)

_TREES = "torch.utils._pytree"
tree_leaves: Callable[[Any], list[Any]] = _now(f"{_TREES}.tree_leaves", "containers raise an error.", _refuse)
tree_flatten: Callable[[Any], Any] = _now(f"{_TREES}.tree_flatten", "containers raise an error.", _refuse)

# --- torch.compile ----------------------------------------------------------------------------------------------------


def leave_frames(function: Callable[..., Any], *, and_callees: bool) -> None:
    """Make torch.compile run ``function`` as it is: all that it calls as well, or only this frame.

    The public ``torch.compiler.disable`` imports the compiler. That takes seconds, even in scripts that never compile.
    Without the names: it is used.
    """
    try:
        frames = torch._C._dynamo.eval_frame
        skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        strategy = frames._FrameExecStrategy(skip, skip if and_callees else default)
        frames.set_code_exec_strategy(function.__code__, strategy)
    except AttributeError:
        torch.compiler.disable(function, recursive=and_callees)


def end_graph_at(function: Any) -> None:
    """Make torch.compile end a graph at each call of ``function``. Without the attribute: it may compile it."""
    function._torchdynamo_disable = True


def set_compiled_call(module: nn.Module, compiled: Callable[..., Any], *, is_exact: bool, in_hooks: bool) -> None:
    """Have ``module(...)`` call ``compiled(call, inputs, kwargs)``, where ``call`` is what it called before.

    As after ``module.compile()``, of which a module of torch's own stays uncompiled. Without the names: an error.

    Args:
        module: A module.
        compiled: What ``torch.compile`` has returned.
        is_exact: Refuse to run uncompiled. Otherwise the first dimension of inputs may vary without a new graph.
        in_hooks: Leave out the hooks of ``module``.
    """
    attribute = "forward" if in_hooks else COMPILED_CALL
    call, dynamo = module.forward if in_hooks else module._call_impl, importlib.import_module("torch._dynamo")
    strict = {"fail_on_recompile_limit_hit": True, "recompile_limit": 64}

    def exact(*inputs: Any, **kwargs: Any) -> Any:
        with dynamo.config.patch(strict):
            return compiled(call, inputs, kwargs)

    def marked(*inputs: Any, **kwargs: Any) -> Any:
        for tensor in tree_leaves((inputs, kwargs)):
            if isinstance(tensor, Tensor) and tensor.dim():
                dynamo.maybe_mark_dynamic(tensor, 0)
        return compiled(call, inputs, kwargs)

    setattr(module, attribute, exact if is_exact else marked)


# --- devices, loaders, the profiler -----------------------------------------------------------------------------------

is_allocator_initialized: Callable[[], bool] = _now(
    "torch._C._accelerator_isAllocatorInitialized", "the watchdog takes GPU ranks for CPU ranks.", lambda: False
)
privateuse1_name: Callable[[], str] = _now(
    "torch._C._get_privateuse1_backend_name", "no rank is forked.", lambda: "unknown"
)


def is_in_bad_fork(device_type: str) -> bool:
    """Return whether this process was forked from one that used the device. Without the function: False."""
    return bool(getattr(torch.get_device_module(device_type), "_is_in_bad_fork", bool)())


# The classes of a DataLoader's iterators: their base; the one in this process, and the one with loader processes.
BaseDataLoaderIter, *LoaderIters = (
    _now(f"torch.utils.data.dataloader._{name}Iter", "loaders are not watched.", type(name, (), {"__next__": None}))
    for name in ("BaseDataLoader", "SingleProcessDataLoader", "MultiProcessingDataLoader")
)


# The property of a DataLoader, and the attribute of its iterators, that yields the indices of each batch.
INDEX_SAMPLER = "_index_sampler"


def unread_iterator(iterator: Any, divide: Callable[[Iterator[Any]], Iterator[Any]]) -> Any:
    """Return a copy of a loader's iterator whose index lists are those that ``divide`` makes of its own.

    Returns None if it has begun to read, as loader processes do at once, or without the attributes.
    """
    attributes = vars(iterator)
    if type(iterator) is not LoaderIters[0] or attributes.get("_num_yielded") != 0 or "_sampler_iter" not in attributes:
        return None
    copied = object.__new__(type(iterator))
    vars(copied).update(attributes, _sampler_iter=divide(attributes["_sampler_iter"]))
    return copied


def fetch_of(iterator: Any) -> Any:
    """Return the function by which a loader's iterator, without processes, reads a list of indices; else None."""
    return getattr(getattr(iterator, "_dataset_fetcher", None), "fetch", None)


def describe_node(node: Any) -> str:
    """Return the operation of a node of the autograd graph, with the number and the reduction that it has saved."""
    name, other = node.name().removesuffix("Backward0"), getattr(node, "_saved_other", None)
    number = f" by {float(other):g}" if isinstance(other, Tensor) and other.numel() == 1 else ""
    return f"{name}{number}{' sum' * (getattr(node, '_saved_reduction', None) == 2)}"


def progress_of_calling_loader() -> Callable[[], tuple[int, int]]:
    """Return how many batches of its pass the DataLoader that called has read ahead and returned, as a function.

    Without loader processes, or the attributes of such an iterator: (0, 1), as if nothing were read ahead.
    """
    frame, module = inspect.currentframe(), BaseDataLoaderIter.__module__
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    # Only its locals: those of other frames would be kept alive, and with its own a cycle. They outlive the iterator.
    state: dict[str, Any] = {} if frame is None else getattr(frame.f_locals.get("self"), "__dict__", {})
    last: list[tuple[int, int]] = []
    watch: Any = None

    def progress() -> tuple[int, int]:
        return last[0] if watch and last else (state.get("_send_idx", 0), state.get("_rcvd_idx", 1))

    with suppress(TypeError):  # with persistent workers, another pass replaces what is watched, and counts anew
        watch = weakref.ref(state.get("_sampler_iter"), lambda _: last.append(progress()))
    return progress


def is_state_of_loader() -> bool:
    """Return whether torchdata's StatefulDataLoader calls: it asks for the state of what it has read ahead."""
    return any(frame.f_globals.get("__name__", "").startswith("torchdata.") for frame, _ in walk_stack(sys._getframe()))


def hide_worker_info() -> None:
    """Make `get_worker_info` return None in this loader process. Without the attribute: streams skip samples."""
    torch.utils.data._utils.worker._worker_info = None


def profile_all_threads() -> Any:
    """Return the setting with which ``torch.profiler`` traces the threads that exist. Without it: only this one."""
    return _profiling() and _profiling()(profile_all_threads=True)


_profiling = _late("torch._C._profiler._ExperimentalConfig", "a profile of dp lacks the threads of replicas.")

# The class of contexts that see each operation, and its name and arguments. Without them: `verify` does not see any.
TorchDispatchMode: Any = _now("torch.utils._python_dispatch.TorchDispatchMode", "`verify` has no experiments.", object)
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")

# The operator of ``item()``, which a mode sees. Without it: recurrent layers with dropout wait for their device.
local_scalar_dense: Any = _now(
    "torch.ops.aten._local_scalar_dense.default", "recurrent layers with dropout wait for their device."
)

# --- torch.distributed ------------------------------------------------------------------------------------------------

_C10D = "torch.distributed.distributed_c10d"

default_store: Callable[[], dist.Store] = _now(f"{_C10D}._get_default_store", "process groups raise an error.", _refuse)
abort_process_group: Callable[[], None] = _now(
    f"{_C10D}._abort_process_group", "a group that is stuck is left after a time-out.", dist.destroy_process_group
)
# By the name of a backend: torch's time limit for its collectives.
default_timeout: Callable[[str], timedelta] = _now(
    f"{_C10D}._get_default_timeout", "collectives wait for half an hour.", lambda _: timedelta(minutes=30)
)
# The public function is new in torch 2.14, which deprecates the other one.
set_timeout: Callable[[timedelta], None] = getattr(dist, "set_timeout", None) or _now(
    f"{_C10D}._set_pg_timeout", "collectives keep the time limit of connecting.", lambda _: None
)


# NCCL's watchdog writes this key to the store after an error; with any other name nothing reads what it has left there.
EXCEPTION_DUMP = "exception_dump"


def process_groups() -> list[dist.ProcessGroup]:
    """Return the groups of this process. Without torch's table: none, so none is aborted or counted."""
    return list(getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", ()))


def forget_groups() -> None:
    """Make the next default group as the first of a new process. Without torch's table and functions: nothing.

    Groups have numbers as names. An attempt to connect that failed has taken one, of which the other ranks do not know.
    And torch's differentiable collectives, which its optimizers import, keep the default group of that moment as their
    default: it would be used, and its memory stay, when it is closed. None stands for the default group of a call.
    """
    if (world := getattr(dist.distributed_c10d, "_world", None)) is not None:
        world.group_count = 0
    for function in [*getattr(sys.modules.get("torch.distributed.nn.functional"), "__dict__", {}).values()]:
        if defaults := getattr(function, "__defaults__", None):
            function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return what serves ``group`` for a device. Without the method: AttributeError."""
    return group._get_backend(device)


def abort_together(backends: Sequence[Any]) -> None:
    """Abort the collectives of several backends, those of NCCL as one call, as they may wait for each other.

    Without NCCL's methods for that: one by one.
    """
    first = next((backend for backend in backends if hasattr(backend, "_group_start")), None)
    if first is not None:
        first._group_start()
    for backend in backends:
        with suppress(RuntimeError):
            backend.abort()
    if first is not None:
        first._group_end()


def all_gather_single(group: dist.ProcessGroup, *arguments: Any) -> dist.Work:
    """Call the method of a group, which the public function calls with checks. Without it: AttributeError."""
    return group._allgather_base(*arguments)


def reduce_scatter_single(group: dist.ProcessGroup, *arguments: Any, **kwargs: Any) -> dist.Work:
    """Call the method of a group, which the public function calls with checks. Without it: AttributeError."""
    return group._reduce_scatter_base(*arguments, **kwargs)


def registered_memory(group: dist.ProcessGroup, device: torch.device) -> Callable[..., Tensor] | None:
    """Return what allocates memory that the backend of a group registers. Without it: None, for ordinary memory."""
    backend = backend_of(group, device)
    has_some = getattr(backend, "supports_tensor_alloc", None)
    return backend.allocate_tensor if has_some is not None and has_some(device) else None


def timeout_of(backend: Any) -> timedelta:
    """Return the time limit of a backend's operations. Without the attribute: half an hour."""
    return getattr(backend.options, "_timeout", timedelta(minutes=30))


def set_default_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the time limit of a backend's operations. Without the method: it stays that of connecting."""
    getattr(backend, "_set_default_timeout", bool)(timeout)


def group_of(backend: Any, store: dist.Store, rank: int, size: int, device: torch.device) -> dist.ProcessGroup:
    """Return a group outside of torch's table, which Gloo serves. Without the methods: AttributeError."""
    group, gloo = dist.ProcessGroup(store, rank, size), dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(gloo)
    group._register_backend(device, gloo, backend)
    return group


def leave_unrecorded(backend: str) -> None:
    """Keep torch's flight recorder, which fails on groups written in Python, from those of a backend.

    Without the set, as before torch 2.15: nothing.
    """
    getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set[str]()).add(backend)


def sequence_number(group: Any) -> int:
    """Return the number of collectives that were called on a group. Without the method, or if it has none: 0."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # groups written in Python may not count
        return 0


def flight_records() -> Iterator[str | bytes]:
    """Yield torch's records of collectives as JSON: NCCL's, and that of all. Without them: none. Queries events."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        with suppress(Exception):  # no such function, or no such record
            yield getattr(sys.modules["torch._C._distributed_c10d"], name)()


def root_mesh(mesh: Any) -> Any:
    """Return the mesh of which ``mesh`` is a part, or itself. Without the method: itself."""
    return getattr(mesh, "_get_root_mesh", lambda: mesh)()


# Makes the parameters of a tensor-parallel module ones that DDP takes.
pre_dp_module_transform = _late(
    "torch.distributed.tensor.parallel.ddp._pre_dp_module_transform", "DDP with tensor parallelism is refused.", _refuse
)

# Static methods of torch's DDP: one sets the names that DDP ignores, the other yields the parameters that it does not.
ignore_in_ddp, ddp_parameters = (
    _now(f"torch.nn.parallel.distributed.DistributedDataParallel.{method}", "libraries miss it on ours.", _refuse)
    for method in ("_set_params_and_buffers_to_ignore_for_model", "_get_data_parallel_params")
)

# What a ``Join`` has set on a wrapper that is in it. Without the attribute: AttributeError in forward.
join_config: Callable[[Any], Any] = operator.attrgetter("_join_config")


def comm_hooks_of(module: Any) -> Sequence[Any]:
    """Return the communication hooks of torch's DDP. Without the attribute: none, so `rehearse` may be refused one."""
    return getattr(module, "_comm_hooks", ())


def active_ddp_module() -> Any:
    """Return the wrapped module at whose buckets torch.compile splits graphs. Without the attribute: None."""
    return getattr(nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def set_active_ddp_module(module: Any) -> None:
    """Make torch.compile split graphs at the buckets of ``module``; None: of none. Without it: it does not split."""
    nn.parallel.DistributedDataParallel._active_ddp_module = module


for _function in (active_ddp_module, set_active_ddp_module):  # with fullgraph=True, the compiler must not see them
    leave_frames(_function, and_callees=True)


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


def set_num_processes(context: Any, number: int) -> None:
    """Make a `SubprocessContext`, whose first processes were replaced, have only so many. Without it: none has ended.

    Args:
        context: Of torch elastic.
        number: How many there are.
    """
    context.nprocs, context._running_local_ranks = number, set(range(number))


def set_restarts_left(agent: Any, number: int) -> None:
    """Make an agent of torch elastic restart its ranks only so often from now on. Without it: as often as at first."""
    agent._remaining_restarts = number


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


# --- NumPy ------------------------------------------------------------------------------------------------------------


def numpy_default() -> tuple[Any, str, Any]:
    """Return NumPy's default generator, after the module and the name where SciPy and scikit-learn look it up.

    Without the name, `verify` does not see what they draw. Seen in NumPy 2.4.
    """
    return np.random.mtrand, "_rand", getattr(np.random.get_state, "__self__", np.random.RandomState())


# --- torchmetrics -----------------------------------------------------------------------------------------------------


def averaged_states(metric: Any) -> set[str]:
    """Return the names of the states of a metric that are averaged over processes.

    Without the attribute: none, so that each rank has the same weight in them. Seen in torchmetrics 1.9.
    """
    reductions: dict[str, Any] = getattr(metric, "_reductions", {})
    return {name for name, reduce in reductions.items() if getattr(reduce, "__name__", "") == "dim_zero_mean"}
