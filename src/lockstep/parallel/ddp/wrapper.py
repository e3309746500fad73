"""``DistributedDataParallel``: one process a device, gradients averaged during backward. Design: docs/design/ddp.md."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer

from lockstep.comm.collectives import Group, Joinable, all_gather, default_group, mesh_group, reduces_on_its_own
from lockstep.comm.process import keep_freed_memory
from lockstep.errors import ConfigurationError, NonFiniteGradient
from lockstep.parallel.compile import leave_all_uncompiled, leave_uncompiled, run_in_parts
from lockstep.parallel.consistency import Buffers, find_difference, replica_of
from lockstep.parallel.ddp.bucket_api import FlatGradients
from lockstep.parallel.ddp.bucket_events import BucketStamps
from lockstep.parallel.ddp.buckets import Bucket, Buckets
from lockstep.parallel.ddp.cap_search import CapSearch
from lockstep.parallel.ddp.comm_hooks import (
    CompressedAllReduce,
    WireDtype,
    builtin_comm_hook,
    check_comm_hook,
    compression_dtype,
    overlapped_optimizer,
    width_of,
)
from lockstep.parallel.ddp.delayed import DelayedReduction
from lockstep.parallel.ddp.module_io import anchor_tensors, find_tensors, move_to
from lockstep.parallel.ddp.optimizer_overlap import BucketOptimizer
from lockstep.parallel.ddp.pipeline import in_words
from lockstep.parallel.ddp.reducer import Reducer, live_reducers, watch_frozen
from lockstep.parallel.ddp.setup import (
    BucketCap,
    ModelSync,
    bucket_caps_bytes,
    buffer_policy,
    check_batch_norms,
    check_combination,
    check_group,
    check_parameters,
    check_placement,
    ignored_names,
    sparse_parameters,
)
from lockstep.parallel.ddp.torch_compat import TorchReducer, accept_bare_keys, forward_attribute
from lockstep.parallel.ddp.uneven_inputs import SyncLayerShadow, UnevenInputs, announce_backward, common_rank
from lockstep.parallel.ddp.weighting import WeightMessage, check_weight
from lockstep.parallel.flat import are_finite, combine_norms, list_norms, total

# Several micro-batches in one step, and what each of them counts.


class Accumulation(UnevenInputs):
    """The part of ``DistributedDataParallel`` that makes one gradient of many micro-batches."""

    require_backward_grad_sync: bool

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank alone: forwards inside the context are not synchronised.

        The first backward of a forward outside the context averages all that was accumulated.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def weight(self, n: float | Tensor) -> None:
        """Say what the next backward counts: how many samples or tokens its loss is the mean of.

        Call it once per micro-batch, on every rank, at any time before its backward. The gradients of the step are then
        the sum of weight times gradient over all ranks and all micro-batches since the last synchronised backward,
        divided by the sum of the weights: those of one process on the whole global batch. Losses stay plain means;
        do not divide them by the number of micro-batches. Without it, gradients are averaged over ranks.

        A micro-batch of weight 0 counts for nothing, even if its gradients are NaN. If all weights of a step are 0,
        its gradients are 0. Blocks if ``n`` is a tensor that an accelerator still computes.

        Args:
            n: A finite number, 0 or more, or a tensor with no dimensions.

        Raises:
            ConfigurationError: ``n`` is nothing of that kind. From ``backward``, on every rank: some ranks gave a
                weight and others did not; names the latter.
        """
        self._reducer.weigh(check_weight(n))


# What users can do with the gradients of a whole bucket at a time.


class PerBucket(Accumulation):
    """The part of ``DistributedDataParallel`` that works on reduced buckets."""

    wire_dtype: torch.dtype | None = None
    """What gradients are rounded to for the way between the ranks."""

    flat_gradients: FlatGradients
    """For `fit`: the gradients, a tensor for each bucket."""

    _finds_caps: bool = False
    _bucket_caps_bytes: tuple[int, ...]
    _cap_search: CapSearch | None
    _has_remarked = False
    _per_bucket: ClassVar = {"flat_gradients", "_cap_search"}
    """Attributes that belong to the reducer, and neither to a copy nor to a pickle."""

    def _use_buckets(self) -> None:
        """Attach to the reducer, when it is new."""
        self.flat_gradients = FlatGradients(self._reducer, self.module.parameters())
        if self.wire_dtype is not None and self.process_group.size() > 1:
            self._reducer.departures.transport = CompressedAllReduce(
                self._reducer.row, self.process_group, self.wire_dtype
            )
        self._cap_search = None
        if self._finds_caps:
            width = width_of(self.wire_dtype, self._reducer.row.buckets)
            self._cap_search = CapSearch(self._reducer, self.process_group, self._bucket_caps_bytes, width=width)

    def stamp_buckets(self, stamps: BucketStamps | None) -> None:
        """For whoever records steps: have the moments of buckets taken from now on, or not any more."""
        self._reducer.departures.stamps = stamps

    @property
    def bucket_report(self) -> str:
        """What buckets the gradients travel in; with ``bucket_cap_mb="auto"`` also what was gained by that."""
        if self._cap_search is not None:
            return self._cap_search.report
        return f"{in_words([bucket.spec for bucket in self._reducer.row.buckets])}."

    def take_remarks(self) -> list[str]:
        """For `fit`: return what was found since this was called last."""
        search = self._cap_search
        if search is None or not search.is_done or self._has_remarked:
            return []
        self._has_remarked = True
        return [search.report]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients down so that their norm is at most ``max_norm``; return the norm they had.

        As ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, but a bucket at a time, which takes far fewer
        kernels, and the norm is as accurate for large parameters as for small ones. Not collective: after a
        synchronised backward all ranks hold the same gradients and find the same norm. Does not block.

        Args:
            max_norm: The largest norm allowed.
            norm_type: The p of the p-norm; may be infinite.

        Raises:
            ConfigurationError: This rank has only a slice of the gradients.
        """
        if not self._reducer.departures.transport.leaves_whole:
            raise ConfigurationError(
                "clip_grad_norm_() needs all gradients, but with shard_gradients=True each rank has a slice of them."
                "\nCall clip_grad_norm_() of the optimizer."
            )
        norm_type = float(norm_type)
        if norm_type <= 0:
            return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)
        norm = self.flat_gradients.norm(norm_type)
        self.flat_gradients.multiply_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def overlap_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Let ``optimizer`` step within backward from now on, each bucket as soon as it is reduced.

        Each synchronised backward then ends with the parameters updated, to the same bits as ``optimizer.step()`` after
        it would, for every optimizer that treats each parameter on its own and draws no random numbers. Gradients
        stay until they are zeroed. Nothing may look at or change gradients in between: no clipping, no loss scaling.
        ``optimizer.step()`` raises as long as this holds; learning-rate schedulers step after backward as ever.

        With weights (`weight`) and with communication hooks all buckets are stepped when backward ends.

        Args:
            optimizer: Of this model's parameters.

        Returns:
            What ends it.

        Raises:
            ConfigurationError: The optimizer cannot step without a closure, or divides its work among the ranks;
                or parameters are reduced with a delay.
        """
        reducer = self._reducer
        if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
            raise ConfigurationError(
                "overlap_optimizer() cannot be had with ZeroRedundancyOptimizer, which divides a step among ranks."
                "\nCall optimizer.step() after backward."
            )
        if reducer.companions:
            raise ConfigurationError(
                "overlap_optimizer() cannot be had with delay_all_reduce_named_params: those gradients come too late.\n"
                "Call optimizer.step() after backward."
            )
        stepping = BucketOptimizer(optimizer, reducer.row.parameters)
        reducer.set_transport(reducer.departures.transport)  # a rank alone begins to watch its gradients
        reducer.on_reduced.append(stepping.on_reduced)
        reducer.on_closed.append(stepping.on_closed)
        reducer.departures.eager = True

        def end() -> None:
            reducer.on_reduced.remove(stepping.on_reduced)
            reducer.on_closed.remove(stepping.on_closed)
            stepping.remove()

        return end


# Communication hooks: what runs instead of the mean over ranks, and torch's private ways to ask for one.

NO_WEIGHTS_WITH_FUSED_OPTIMIZER = (
    "Weights do not work with an optimizer that runs inside a communication hook: it steps before the sum of the "
    "weights is known.\nRun the optimizer after backward."
)


class Hookable(PerBucket):
    """The part of ``DistributedDataParallel`` that takes communication hooks."""

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket of gradients instead of the mean over ranks.

        torch's stock hooks (``torch.distributed.algorithms.ddp_comm_hooks``) work unchanged. The hook gets an object
        with the methods of ``GradBucket`` and returns a future of the reduced, divided flat gradients.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: Its annotations say that it expects or returns something else.
            RuntimeError: There is a hook already.
        """
        with self._noting_errors():
            check_comm_hook(hook, self.wire_dtype)
            if self._comm_hooks:
                raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._comm_hooks.append((hook, state))
        self._comm_hook_name = hook.__qualname__
        self._reducer.set_comm_hook(hook, state)

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self.register_comm_hook(self.process_group, builtin_comm_hook(comm_hook_type))
        self._comm_hook_name = str(comm_hook_type)

    def _register_fused_optim(
        self, optim: type, *args: Any, optim_params: Sequence[nn.Parameter] | None = None, **kwargs: Any
    ) -> None:
        """Run an optimizer on each bucket as soon as it is reduced (torch's functional optimizers)."""
        try:
            overlapped_optimizer(optim, optim_params, *args, **kwargs).register_ddp(self)
            self._reducer.weights.refusal = NO_WEIGHTS_WITH_FUSED_OPTIMIZER
        except NotImplementedError as error:
            raise RuntimeError(f"{optim} does not support overlapped DDP.") from error


# What a script can ask of the wrapper: is the gradient finite, and do all ranks still hold the same bits?
#
# [Note: local gradients]
# A reduced gradient tells that it is not finite, but not whose fault that is: the part of this rank is gone. So once a
# script has asked, each bucket is looked at when it leaves: one pass over it, whose result stays on the device until it
# is needed.


class Checks(Hookable):
    """The part of ``DistributedDataParallel`` that looks whether all is well."""

    forward_sync_buffers: bool
    parameters_to_ignore: set[str]
    _looks: LocalLooks | None = None
    _num_good_checks = 0
    _per_bucket = Hookable._per_bucket | {"_looks"}

    def gradients_are_finite(self) -> bool:
        """Return whether no gradient is NaN or infinite: the same verdict on every rank, after the same backward.

        Not collective: NaN and infinity survive the sum over the ranks, all of which hold the same bits of it. So all
        can skip the same step without asking each other. Parameters that are not synchronised are left out. Blocks
        until backward is done.

        Raises:
            ConfigurationError: This rank has only a slice of the gradients.
        """
        if not self._reducer.departures.transport.leaves_whole:
            raise ConfigurationError(
                "gradients_are_finite() needs all gradients, but with shard_gradients=True each rank has a slice of "
                "them.\nCall clip_grad_norm_() of the optimizer with max_norm=math.inf, which returns the norm of all."
            )
        reduced = self.flat_gradients.reduced()
        return are_finite(reduced, combine_norms(list_norms(reduced)))

    def check_gradients(self) -> None:
        """Raise an error that names rank and parameter if a gradient is NaN or infinite.

        Call it between backward and ``optimizer.step()``. From the first call on each bucket is looked at when it
        leaves, so the ranks are known in all steps behind the first. Blocks until backward is done.

        Collective if a gradient is not finite: every rank.

        Raises:
            NonFiniteGradient: On every rank.
            ConfigurationError: This rank has only a slice of the gradients.
        """
        looked = self._looks is not None
        part_is_bad = self.watch_part()
        if self.gradients_are_finite():
            return
        bad = {id(each) for each in self._reducer.row.parameters if each.grad is not None and not _is_finite(each.grad)}
        first = next(name for name, parameter in self.module.named_parameters() if id(parameter) in bad)
        flag = torch.tensor([int(looked and part_is_bad())], device=self.device)
        ranks = [rank for rank, bad in enumerate(all_gather(flag, group=self.process_group)) if int(bad)]
        where = f" on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""
        raise NonFiniteGradient(
            f"The gradient is not finite{where}: first that of parameter {first}.\n"
            "Look at the loss and the samples of this step there. To go on without the step, ask "
            "gradients_are_finite() and call optimizer.step() only if they are.",
            ranks=tuple(ranks),
        )

    def watch_part(self) -> Callable[[], bool]:
        """For `fit`: look at each bucket when it leaves, from now on.

        Returns:
            What tells whether this rank's part of the last backward was not finite. Blocks.
        """
        looks = self._looks
        if looks is None:
            looks = self._looks = LocalLooks()
            self._reducer.departures.on_leaving.append(looks.look)
        return lambda: looks.saw_bad(self._reducer.row.buckets)

    def check_replicas(self, optimizer: Optimizer | None = None) -> None:
        """Raise an error that names the first tensor of which the ranks hold different bits.

        Parameters and buffers are compared, and the state of ``optimizer`` if it is given: by a checksum, so this
        takes about as long as copying them, and one exchange of 8 bytes. Left out are what is not to be synchronised,
        buffers that the next forward overwrites with rank 0's (``broadcast_buffers=True``), else the running
        statistics of BatchNorm layers, and the state of a ``ZeroRedundancyOptimizer``, of which each rank has a part.

        Collective: every rank, between two steps. Blocks.

        Raises:
            ReplicasDiffer: On every rank; names the tensor, the ranks on each side and the elements.
        """
        buffers: Buffers = "healed" if self.forward_sync_buffers else "own"
        replica = replica_of(self.module, optimizer, buffers=buffers, ignore=self.parameters_to_ignore)
        difference = find_difference(replica, group=self.process_group, device=self.device)
        if difference is not None:
            times = f"{self._num_good_checks} check{'s' * (self._num_good_checks > 1)}"
            since = f"{times} before found none." if self._num_good_checks else "This was the first check."
            raise difference.error(now="", since=since)
        self._num_good_checks += 1


class LocalLooks:
    """Whether this rank's own gradients were finite when their buckets left."""

    def __init__(self) -> None:
        self._totals: WeakKeyDictionary[Bucket, Tensor] = WeakKeyDictionary()  # buckets are made anew now and then

    @torch.no_grad()
    def look(self, bucket: Bucket) -> None:
        """Take note of a bucket that leaves. Does not block."""
        if not bucket.spec.sparse:
            self._totals[bucket] = total(bucket.gradients)

    def saw_bad(self, buckets: Iterable[Bucket]) -> bool:
        """Return whether one of ``buckets`` was not finite when it left last. Blocks."""
        return any(not bool(self._totals[bucket].isfinite()) for bucket in buckets if bucket in self._totals)


def _is_finite(gradient: Tensor) -> bool:
    return are_finite([gradient], torch.tensor(math.nan))


# ``DistributedDataParallel``: one process a device, gradients averaged during backward. Design: docs/design/ddp.md.


class DistributedDataParallel(Checks):
    """Train one model in many processes: each computes gradients on its own data, and all get their mean.

    A drop-in for ``torch.nn.parallel.DistributedDataParallel`` of torch 2.13: same arguments, same ``state_dict``
    keys (a bare model's keys load too), same joining, hooks and private names that libraries use.

    Gradients are averaged in buckets while backward still runs. Each backward through an output of this module is one
    synchronised step; parameters without a gradient, also on some ranks only, need no flag. A parameter that no
    rank used keeps its gradient as it was. The mean is over ranks, as in torch, or over samples where the script calls
    `weight`.

    Collective: the constructor, ``forward`` (if the module has buffers) and every synchronised backward. All block
    until the other ranks take part, at most as long as the process group's time-out.

    Args:
        module: The model, on its device, the same on every rank in shapes and dtypes. Values come from rank 0.
        device_ids: ``[device]`` of a module on one GPU: inputs are moved there. None: inputs stay where they are.
        output_device, dim: Accepted as in torch.
        broadcast_buffers: Broadcast buffers from rank 0 at construction and before each ``forward``. Default: True.
        init_sync: Compare the model between ranks and broadcast it from rank 0. False: the caller has done so.
        process_group: The ranks that take part. Default: all.
        bucket_cap_mb: Size of a bucket in MiB; "auto": found in the first steps. Default: 1 for the first, else 25; on
            shm, where the cores that compute also reduce, 25 for all.
        find_unused_parameters: Accepted and never needed.
        check_reduction: Accepted as in torch.
        gradient_as_bucket_view: Gradients are views of the buckets in any case. True promises that nobody keeps
            a gradient after ``zero_grad()``, which saves a check.
        static_graph: Accepted and never needed.
        delay_all_reduce_named_params: Parameters whose gradients are reduced when that of
            ``param_to_hook_all_reduce`` is ready.
        param_to_hook_all_reduce: See above; both or neither.
        mixed_precision: Not supported; use ``torch.autocast``.
        device_mesh: A one-dimensional mesh, instead of ``process_group``.
        skip_all_reduce_unused_params: Do not reduce buckets that received no gradient. Only right if the same
            parameters stay unused on all ranks.
        bucket_cap_mb_list: One size per bucket, the last for all that follow.
        batched_grad_copy: Accepted; gradients are always copied a bucket at a time.
        forward_sync_buffers: Broadcast buffers before each ``forward``; they are broadcast at construction anyhow.
        wire_dtype: Round float32 and float64 gradients to ``torch.bfloat16`` or ``float16`` for the way between ranks.

    Raises:
        ModelMismatch: On every rank: the model differs between ranks; names the parameter, the rank and both shapes.
        ConfigurationError: There is no process group, or ``mixed_precision`` was asked for.
        RuntimeError: No parameter requires a gradient.
        ValueError: Arguments contradict each other or the module's device.
        CollectiveError: From ``backward``: another rank ended or did not take part.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Group | None = None,
        bucket_cap_mb: BucketCap = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: object | None = None,
        device_mesh: Any | None = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        wire_dtype: WireDtype = None,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        check_combination(mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce)
        check_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
            process_group = mesh_group(device_mesh, module)
        self.process_group: Group = default_group() if process_group is None else process_group

        delayed = list(delay_all_reduce_named_params or ())
        self.parameters_to_ignore = ignored_names(module) | {name for name, _ in delayed}
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        if not delayed:
            check_parameters(self._module_parameters)
        placement = check_placement(self._module_parameters or [p for _, p in delayed], device_ids, output_device)

        self.module = module
        self.dim = dim
        self.device_type = placement.device_type
        self.is_multi_device_module = placement.is_multi_device
        self.device = (self._module_parameters or [p for _, p in delayed])[0].device
        self._input_device = placement.input_device
        self.device_ids = None if placement.input_device is None else [placement.input_device.index]
        self.output_device = placement.output_device
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.batched_grad_copy = batched_grad_copy
        self.mixed_precision = None
        self.wire_dtype, self._finds_caps = compression_dtype(wire_dtype), bucket_cap_mb == "auto"
        can_overlap = reduces_on_its_own(self.process_group, self.device)
        self._bucket_caps_bytes = bucket_caps_bytes(bucket_cap_mb, bucket_cap_mb_list, can_overlap=can_overlap)
        self.bucket_bytes_cap = self._bucket_caps_bytes[-1]
        self.bucket_bytes_cap_list = list(self._bucket_caps_bytes) if bucket_cap_mb_list else []
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divide_by_initial_world_size = True
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []

        buffers = buffer_policy(broadcast_buffers, forward_sync_buffers)
        self.forward_sync_buffers = buffers.before_forward
        self._connect()
        if init_sync:
            self._model_sync.check(with_buffers=buffers.at_start)
            self._model_sync.broadcast(src=0, with_buffers=buffers.at_start)
        self._watch_parameters()
        if param_to_hook_all_reduce is not None:
            self._delayed = DelayedReduction(
                delayed, param_to_hook_all_reduce, reducer=self._reducer, group=self.process_group
            )

    # --- construction, copies and pickles ---------------------------------------------------------------------------

    def _connect(self) -> None:
        """Make what talks to the process group but not yet to other ranks."""
        if self.device.type == "cpu":
            keep_freed_memory()
        check_batch_norms(self.module, self.device_type)
        self._follow = SyncLayerShadow(self.module, group=self.process_group, device=self.device)
        self._model_sync = ModelSync(self.module, self.parameters_to_ignore, self.process_group, self.device)
        self.register_load_state_dict_pre_hook(accept_bare_keys)  # type: ignore[no-untyped-call]

    def _watch_parameters(self) -> None:
        parameters = self._model_sync.named_parameters()
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        row = Buckets(
            trained,
            sparse=sparse_parameters(self.module),
            caps_bytes=self._bucket_caps_bytes,
            keep_held_gradients=not self.gradient_as_bucket_view,
            ballot=WeightMessage(is_missing=True).encode(self.process_group.rank(), self.process_group.size()),
        )
        self._reducer = Reducer(row, group=self.process_group, skip_unused_buckets=self.skip_all_reduce_unused_params)
        self._follow.weigh_with(self._reducer.weights)
        self.reducer = TorchReducer(self._reducer, self.process_group)
        self._use_buckets()
        watch_frozen(parameters, self._reducer)

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group != default_group():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        return self._portable_state()

    def _portable_state(self) -> dict[str, Any]:
        tied = {
            "process_group",
            "reducer",
            "_looks",
            "_reducer",
            "_model_sync",
            "_follow",
            "_load_state_dict_pre_hooks",
        }
        state = {name: value for name, value in self.__dict__.items() if name not in tied | self._per_bucket}
        return state | {"_comm_hooks": [], "_comm_hook_name": "", "_last_error": ""}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.process_group = default_group()
        super().__setstate__(state)
        self._connect()
        self._watch_parameters()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        nn.Module.__setstate__(clone, copy.deepcopy(self._portable_state(), memo))
        clone.process_group = self.process_group
        clone._connect()
        clone._watch_parameters()
        return clone

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
        return forward_attribute(self, module, name)

    # --- forward ----------------------------------------------------------------------------------------------------

    @leave_uncompiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs; see its ``forward`` for what goes in and out.

        Collective: every rank, if buffers are broadcast.
        """
        profiling = torch.autograd._profiler_enabled()
        with record_function("DistributedDataParallel.forward") if profiling else nullcontext():
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(run_in_parts(self, self.module, inputs, kwargs))

    @leave_all_uncompiled
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._reducer.on_forward(will_sync=torch.is_grad_enabled() and self.require_backward_grad_sync)
        self._notify_joined_ranks()
        enabled = self._join_config.enable
        if self.will_sync_module_buffers():
            self._sync_buffers(after_forward=False, src=common_rank(self, candidate=True) if enabled else 0)
        if enabled:
            announce_backward(self, will_sync=self.require_backward_grad_sync)
        device = self._input_device
        return (inputs, kwargs) if device is None else (move_to(inputs, device), move_to(kwargs, device))

    @leave_all_uncompiled
    def _post_forward(self, output: Any) -> Any:
        self._end_forward(output)
        if self.will_sync_module_buffers():
            self._sync_buffers(after_forward=True, src=0)
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if not torch.is_grad_enabled():
            return output
        self._reducer.disarm()
        if not self.require_backward_grad_sync:
            self._reducer.expect_accumulation(output)
            return output
        watched = [tensor for tensor in find_tensors(output) if tensor.requires_grad]
        if self.training and not watched:
            output = anchor_tensors(output)
            watched = list(find_tensors(output))
        self._reducer.prepare_for_backward(watched)
        return output

    def _sync_buffers(self, *, after_forward: bool, src: int) -> None:
        self._reducer.post_backward += self._model_sync.sync_buffers(after_forward=after_forward, src=src)


TorchDistributedDataParallel.register(DistributedDataParallel)  # libraries decide by isinstance


# ``backward`` with a weight, for the loops of one's own that need not know what their model is wrapped in.


def backward(loss: Tensor, *, count: float | Tensor) -> None:
    """Run ``loss.backward()`` with the weight ``count`` for each wrapped model that it reaches.

    It is short for ``model.weight(count)`` on every ``DistributedDataParallel`` that takes part, and
    ``loss.backward()``; see there for what a weight does. One call per micro-batch.

    Collective: every rank, if the backward is synchronised; then it blocks as that does.

    Args:
        loss: A scalar: the mean loss of this rank's micro-batch, also scaled by a ``GradScaler``.
        count: How many samples, tokens or whatever it is the mean of: a finite number, 0 or more, or a tensor with no
            dimensions.

    Raises:
        ConfigurationError: ``count`` is nothing of that kind, or the backward reached no wrapped model. On every
            rank: some ranks gave a weight and others did not; names the latter.
    """
    weight = check_weight(count)
    reducers = [reducer for reducer in live_reducers if reducer.has_run]
    for reducer in reducers:
        reducer.weigh(weight)
    try:
        loss.backward()
    finally:
        num_left_out = sum(reducer.withdraw() for reducer in reducers)
    if num_left_out == len(reducers):
        raise ConfigurationError(
            "The backward reached no model that is wrapped in DistributedDataParallel, so the count had no effect.\n"
            "Compute the loss with the wrapped model, not with its .module, or call loss.backward()."
        )
