"""``DistributedDataParallel``: one process a device, gradients averaged during backward. Design: docs/design/ddp.md."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.optim import Optimizer

from lockstep.base import torch_internals
from lockstep.base.activity import plural
from lockstep.base.containers import find_tensors, hook_tensors
from lockstep.comm import collectives
from lockstep.comm.collectives import Group, Join, Joinable, JoinHook, default_group, group_or_default
from lockstep.comm.fully_shard import is_sharded
from lockstep.comm.process import keep_freed_memory
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.parallel import module_io
from lockstep.parallel.compile import keep_out_of_graphs, leave_uncompiled
from lockstep.parallel.compression import CompressedMean, check_method, make_reduction
from lockstep.parallel.consistency import Buffers, check_arguments_agree, refuse_difference, replica_of
from lockstep.parallel.ddp import bucket_events, bucket_gradients, comm_hooks, setup
from lockstep.parallel.ddp.buckets import FIRST_CAP_BYTES, MIB, BucketSet, WrappedParameters
from lockstep.parallel.ddp.reducer import Reducer
from lockstep.parallel.ddp.shares import BatchesInUse, Scaling
from lockstep.parallel.ddp.uneven_inputs import StepJoinHook, SyncLayerShadow
from lockstep.parallel.ddp.weighting import USUAL_UPDATES, check_weight, encode_message
from lockstep.parallel.flat import are_finite, combine_norms, list_norms
from lockstep.telemetry import ranges

_MISSING = object()
_NO_RANGE = nullcontext()
_numbers = itertools.count(1)  # of the wrappers that this process has made


class DistributedDataParallel(module_io.Wrapper, Joinable):
    """Train one model in many processes: each computes gradients on its own data, and all get their mean.

    A drop-in for ``torch.nn.parallel.DistributedDataParallel`` of torch 2.13: same arguments, same ``state_dict``
    keys (a bare model's keys load too), same joining, hooks and private names that libraries use.

    Gradients are averaged in buckets while backward still runs. Each backward through an output of this module is one
    synchronised step. Parameters without a gradient need no flag, even if only some ranks lack it. A parameter that no
    rank used keeps its gradient. The mean is over ranks, as in torch, or over samples if the script calls `mean_over`.

    Collective: the constructor, ``forward`` (if the module has buffers) and every synchronised backward. All block
    until the other ranks take part, at most for the process group's timeout.

    Args:
        module: The model, on its device, the same on every rank in shapes and dtypes. Values come from rank 0.
        device_ids: ``[device]`` of a module on one GPU: inputs are moved there. None: inputs stay where they are.
        output_device, dim: Accepted as in torch.
        broadcast_buffers: Deprecated: broadcast buffers from rank 0 at construction and before each ``forward``.
        init_sync: Compare the model between ranks and broadcast it from rank 0. False: the caller has done so.
        process_group: The ranks that take part. Default: all.
        bucket_cap_mb: Size of a bucket in MiB. Default: 1 for the first, else 25, or 4 for each rank if more than 8
            have an accelerator, or 8 with compression; on shm, where the cores that compute also reduce, 25 for all.
        find_unused_parameters: Accepted and never needed.
        check_reduction: Accepted as in torch.
        gradient_as_bucket_view: Gradients are views of the buckets in any case. True: the script keeps no gradient
            after ``zero_grad()``, which saves a check.
        static_graph: Accepted and never needed.
        delay_all_reduce_named_params, param_to_hook_all_reduce: Not supported.
        mixed_precision: Not supported; use ``torch.autocast``.
        device_mesh: A one-dimensional mesh, instead of ``process_group``.
        skip_all_reduce_unused_params: Do not reduce buckets that received no gradient. Only right if the same
            parameters stay unused on all ranks.
        bucket_cap_mb_list: One size per bucket, the last for all that follow.
        batched_grad_copy: Accepted; gradients are always copied a bucket at a time.
        forward_sync_buffers: Broadcast buffers before each ``forward``; they are always broadcast at construction.
        compression: How float32 and float64 gradients are sent between ranks: rounded to ``"bf16"`` or ``"fp16"``; as
            integers with error feedback, ``"int8"`` or ``"int4"``; as products of narrow matrices with error feedback,
            ``"powersgd:RANK"``. For slow networks; see docs/speed.md. None: not compressed.
        check_replicas: In the steps 1, 2, 4, 8, ... and each so many steps, a digest of the parameters and of the
            optimizer's learning rates travels with the gradients. If it differs, all raise `ReplicasDiffer`. 0: never.

    Raises:
        ModelMismatch: On every rank: the model differs between ranks; names the parameter, the rank and both shapes.
        ConfigurationError: There is no process group, or an argument is not supported, or gradients are sparse and the
            backend cannot sum them (NCCL).
        RuntimeError: No parameter requires a gradient.
        ValueError: Arguments contradict each other or the module's device.
        CollectiveError: From ``backward``: another rank ended or did not take part.
        LockstepError: From ``forward``: a parameter was replaced after wrapping.
    """

    module: nn.Module
    _batches: BatchesInUse | None = None  # set by `use_batches`
    _joined_step = -1  # the last one that ranks without data, in `join`, were told of
    broadcast_bucket_size = 250 * MIB  # read by scripts that synchronise a model with torch's functions
    _active_ddp_module: ClassVar[nn.Module | None] = None  # set by torch's ``replicate`` while it runs on this class

    def __init__(
        self,
        module: nn.Module,
        device_ids: Sequence[int | str | torch.device] | None = None,
        output_device: int | str | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Group | None = None,
        bucket_cap_mb: float | None = None,
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
        compression: str | None = None,
        check_replicas: int = 1000,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        setup.refuse_unsupported(mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce)
        if device_mesh is not None:
            if process_group is not None:
                raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
            self.device_mesh = device_mesh
            process_group = collectives.mesh_group(device_mesh, module)
        self.process_group: Group = group_or_default(process_group)

        self.parameters_to_ignore = set(getattr(module, torch_internals.DDP_IGNORED, ()))
        self._module_parameters = [p for n, p in module.named_parameters() if n not in self.parameters_to_ignore]
        setup.check_parameters(self._module_parameters)
        devices = list(dict.fromkeys(parameter.device for parameter in self._module_parameters))
        self._input_device, self.output_device = setup.check_placement(devices, device_ids, output_device)

        self.module = module
        self.dim = dim
        self.device = devices[0]
        self.device_type = self.device.type
        self.device_ids = None if self._input_device is None else [self._input_device.index]
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = None
        self.compression, self._check_every = compression, check_replicas
        if compression is not None:
            check_method(compression)
        can_overlap = collectives.reduces_on_its_own(self.process_group, self.device)
        self._bucket_caps_bytes = setup.bucket_caps_bytes(
            bucket_cap_mb,
            bucket_cap_mb_list,
            can_overlap=can_overlap,
            is_compressed=self.compression is not None,
            num_devices=self.process_group.size() if self.device.type != "cpu" else 1,
        )
        self.bucket_bytes_cap = self._bucket_caps_bytes[-1]
        self.bucket_bytes_cap_list = list(self._bucket_caps_bytes) if bucket_cap_mb_list else []
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._divide_by_initial_world_size = True
        self._comm_hooks: list[tuple[Callable[..., Any], object]] = []
        self._comm_hook_name = ""
        self._logged_error: dict[str, str | int] = {}

        with_buffers, self.forward_sync_buffers = setup.buffer_policy(broadcast_buffers, forward_sync_buffers)
        setup.check_batch_norms(module, self.device_type)
        self._connect()
        if init_sync:
            arguments = (
                f"compression={compression}, check_replicas={check_replicas}, buckets of {self._bucket_caps_bytes} "
                f"bytes, forward_sync_buffers={self.forward_sync_buffers}"
            )
            check_arguments_agree(arguments, group=self.process_group, device=self.device)
            self.reducer.replicas.number = collectives.broadcast_object(
                next(_numbers), group=self.process_group, device=self.device
            )
            self._model_sync.check(with_buffers=with_buffers)
            self._model_sync.broadcast(src=0, with_buffers=with_buffers)

    def _connect(self) -> None:
        """Create everything that holds the process group, and hook the parameters. Sends nothing."""
        if self.device.type == "cpu":
            keep_freed_memory()  # otherwise the memory of activations returns to the system after each step
        group = self.process_group
        self._model_sync = setup.ModelSync(self.module, self.parameters_to_ignore, group, self.device)
        bucket_set = BucketSet(
            self._model_sync.named_parameters(),
            sparse=setup.sparse_parameters(self.module, group, self.device),
            caps_bytes=self._bucket_caps_bytes,
            keep_held_gradients=not self.gradient_as_bucket_view,
            message=encode_message(group.rank(), group.size(), is_missing=True, num_updates=USUAL_UPDATES),
            num_slices=group.size(),
        )
        self._wrapped_parameters = WrappedParameters(self.module, self.parameters_to_ignore, bucket_set)
        self.reducer = Reducer(bucket_set, group=group, skip_unused_buckets=self.skip_all_reduce_unused_params)
        self.reducer.replicas.begin(partial(_parameters_of, weakref.ref(self)), every=self._check_every)
        self._sync_layers = SyncLayerShadow(self.module, group=group, device=self.device, weights=self.reducer.weights)
        # Also used by `fit`: the gradients, one tensor for each bucket.
        self.flat_gradients = bucket_gradients.FlatGradients(self.reducer, self.module.parameters())
        if self._batches is not None:
            self.use_batches(self._batches)
        self._monitor: bucket_gradients.LocalGradientMonitor | None = None
        self._compressed: comm_hooks.BucketReduction | None = None
        self.kept: dict[str, dict[str, Tensor]] | None = None
        if self.compression is not None:
            self._compressed = make_reduction(self.compression, bucket_set, group)
            if group.size() > 1:
                self.reducer.reduction = self._compressed

    # --- recovery in place: `lockstep.loop.recovery.Connected` -----------------------------------------------------

    def reconnect(self, world: World) -> None:
        """Use the default group of ``world`` from now on, in place of one that lost a rank. Collective: every rank."""
        observers, before, compression_state = self.reducer.observers, self.process_group, self.kept
        if any(isinstance(observer, bucket_gradients.BucketOptimizer) for observer in observers):
            raise ConfigurationError(
                "A step with overlap_optimizer() cannot be done again after a rank was lost, as it may have updated "
                "some parameters: all ranks restart.\nTo go on in place, call optimizer.step() after backward."
            )
        if any(state is not None and state is not before for _, state in self._comm_hooks):
            raise ConfigurationError(
                "A communication hook with a state cannot go on in place, as a rank that takes the place of a lost one "
                "has another state: all ranks restart.\nTo go on in place, use compression=..., which keeps its state."
            )
        self.reducer.remove_hooks()
        self.process_group = world.group
        hooks = [(hook, state and self.process_group) for hook, state in self._comm_hooks]
        self._connect()
        if compression_state is not None:
            self.load_compression_state_dict(compression_state)
        # Another rank may be lost before all have met.
        self._comm_hooks, self.kept = hooks, compression_state
        self.reducer.observers += [stamps for stamps in observers if isinstance(stamps, bucket_events.BucketStamps)]
        for hook, state in hooks:
            self.reducer.set_reduction(comm_hooks.CommHookReduction(self.process_group, hook, state))

    def modules_to_restore(self) -> list[nn.Module]:
        """Return the modules whose buffers change in a step."""
        return [self.module]

    def keep(self) -> None:
        """Keep residuals of compressed gradients for `reconnect`: they change within a step."""
        if self.compression is not None:
            state = self.compression_state_dict()
            residuals = {name: residual.clone() for name, residual in state["residuals"].items()}
            self.kept = {"residuals": residuals, "bases": state["bases"]}

    def restore(self) -> None:
        """Return to the begin of the step that a lost rank has interrupted."""
        self.zero_grad(set_to_none=True)

    def agreed_plan(self) -> Any:
        """Return the names of the trained parameters, and the order of the buckets, if the ranks have agreed on one."""
        trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        return [trained, self.reducer.bucket_set.agreed_plan]

    def use_plan(self, plan: Any) -> None:
        """Train what another rank trains, with its order of buckets. Collective: every rank. Blocks until complete."""
        trained, order = plan
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name in trained)
        self.reducer.use_parameters(set(trained), order)

    def replica_state(self) -> dict[str, Any]:
        """Return the state that is the same on all ranks: residuals of compressed gradients differ."""
        return {"model": self.state_dict(), "bases": self.compression_state_dict()["bases"]}

    def load_replica_state(self, state: dict[str, Any]) -> None:
        """Load what another rank's `replica_state` returned."""
        self.load_state_dict(state["model"])
        self.load_compression_bases(state["bases"])

    # --- copies and pickles -------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.process_group != default_group():
            raise RuntimeError(
                "DDP Pickling/Unpickling are only supported when using DDP with the default process group. That is, "
                "when you have called init_process_group and have not passed process_group argument to DDP constructor"
            )
        return self._portable_state()

    def _portable_state(self) -> dict[str, Any]:
        # Objects that `_connect` creates are not copied or pickled.
        tied = {"process_group", "reducer", "_model_sync", "_wrapped_parameters", "_sync_layers"}
        tied |= {"flat_gradients", "_monitor", "_compressed", "kept", "_batches"}
        state = {name: value for name, value in self.__dict__.items() if name not in tied}
        return state | {"_comm_hooks": [], "_comm_hook_name": "", "_logged_error": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_bucket_caps_bytes" not in state:
            raise ConfigurationError(
                "This pickle holds a DistributedDataParallel of another class than lockstep's.\n"
                "Load it with the class that wrote it, and save model.module.state_dict() instead."
            )
        self.process_group = default_group()  # groups cannot be pickled
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._connect()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedDataParallel:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        nn.Module.__setstate__(clone, copy.deepcopy(self._portable_state(), memo))
        clone.process_group = self.process_group
        clone._connect()
        return clone

    # --- forward ------------------------------------------------------------------------------------------------------

    @leave_uncompiled
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on this rank's inputs; see its ``forward`` for arguments and results.

        Collective: every rank, if buffers are broadcast.
        """
        if torch_internals.interpreter_stack() is not None:
            return self._forward_in_transform(*inputs, **kwargs)
        if self.reducer.is_alone and self._begin_alone():
            # `_run_module` takes 20 us more.
            output = _call(torch_internals.submodules(self)["module"], inputs, kwargs)
            return output if type(output) is Tensor and output.requires_grad else self._post_forward(output)
        profiling = torch_internals.profiler_enabled()
        with record_function("DistributedDataParallel.forward") if profiling else _NO_RANGE:
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
            return self._post_forward(self._run_module(inputs, kwargs))

    @keep_out_of_graphs
    def _forward_in_transform(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module in transforms of torch.func; what they differentiate is this rank's, as with torch's class."""
        if torch_internals.differentiates():
            return self.module(*inputs, **kwargs)
        # With vmap, the caller's backward differentiates the tensors that the outputs wrap.
        with torch_internals.outside_transforms():
            inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        output = self._run_module(inputs, kwargs)
        with torch_internals.outside_transforms():
            self._post_forward([torch_internals.unwrap(tensor) for tensor in find_tensors(output)])
        return output

    @keep_out_of_graphs
    def _begin_alone(self) -> bool:
        """Begin a training step that needs no communication and no notification; return whether it is one."""
        # For small steps on one rank: `_pre_forward` and `_post_forward` would take 50 microseconds of 1,000.
        is_watched = ranges.now or torch_internals.profiler_enabled() or torch_internals.join_config(self).enable
        trains = self.require_backward_grad_sync and torch.is_grad_enabled()
        if self._input_device is not None or is_watched or not trains:
            return False
        self._add_unfrozen()
        return self.reducer.begin_alone()

    def _add_unfrozen(self) -> None:
        if unfrozen := self._wrapped_parameters.find_unfrozen(self.module):
            setup.sparse_parameters(self.module, self.process_group, self.device)
            self.reducer.add_parameters(unfrozen)

    @keep_out_of_graphs
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        is_training = torch.is_grad_enabled()
        if is_training:
            self._add_unfrozen()
        # In this order, and the same in `_shadow_step`: ranks that have joined mirror each collective.
        self.reducer.begin_forward(will_sync=is_training and self.require_backward_grad_sync)
        is_in_join = torch_internals.join_config(self).enable
        # Ranks may call the module unequally often in a step. Others without data take part in the first call only.
        is_joining = is_in_join and self._joined_step != self.reducer.num_steps
        self.reducer.only_step = self.reducer.only_step if is_in_join else None
        if is_joining:
            self._notify_joined_ranks()
            if is_training and self.require_backward_grad_sync:
                self._joined_step = self.reducer.num_steps
        elif is_in_join:
            self._sync_layers.require_closed()
        if self.will_sync_module_buffers() and is_joining == is_in_join:
            self._model_sync.sync_buffers(src=self._agree(self.process_group.rank()) if is_joining else 0)
        if is_joining:
            self._agree(int(is_training and self.require_backward_grad_sync))
        if self._batches is not None:
            part = self._batches.of_forward((inputs, kwargs), trains=is_training and self.training)
            scaling = None if part is None else Scaling(part, in_training_mode=self.training)
            self.reducer.scaling, self._sync_layers.counts = scaling, part is None or part.share > 0
            inputs, kwargs = (inputs, kwargs) if scaling is None else scaling.of_inputs((inputs, kwargs))
        device = self._input_device
        return (inputs, kwargs) if device is None else module_io.move_to((inputs, kwargs), device)

    @leave_uncompiled
    def _run_module(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module; torch.compile then compiles it in graphs of about one bucket each."""
        # A graph returns all its gradients when its backward ends, so with one graph for the whole model there would be
        # no overlap. torch.compile splits graphs while its own class has an active module, and reads
        # ``bucket_bytes_cap`` of that module. It accepts no value below that of its first bucket.
        module = torch_internals.submodules(self)["module"]  # without `__getattr__`
        if self.bucket_bytes_cap < FIRST_CAP_BYTES or self.process_group.size() == 1:
            return _call(module, inputs, kwargs)
        before = torch_internals.active_ddp_module()
        torch_internals.set_active_ddp_module(self)
        try:
            return _call(module, inputs, kwargs)
        finally:
            torch_internals.set_active_ddp_module(before)

    @keep_out_of_graphs
    def _post_forward(self, output: Any) -> Any:
        if self._sync_layers.is_needed:
            self._end_forward(output)
        self.reducer.weights.check_last_step()  # now the device has a forward to do while the host waits
        is_training = torch.is_grad_enabled()
        if self.reducer.scaling is not None and self._batches is not None:
            self._batches.of_output(output, self.reducer.scaling.part)
        will_sync = is_training and self.require_backward_grad_sync
        if self.require_forward_param_sync != will_sync:  # setting an attribute of a module is slow
            self.require_forward_param_sync = will_sync
        if not is_training:
            return output
        self.reducer.disarm()  # forget the backward that the last forward announced, or one that failed
        if not self.require_backward_grad_sync:
            self.reducer.expect_accumulation(output)
            return output
        # One rank gets the error of autograd.
        needs_none = self.training and all(tensor.grad_fn is None for tensor in find_tensors(output))
        self.reducer.is_anchored = needs_none and not self.reducer.is_alone
        if self.reducer.is_anchored:
            output = module_io.anchor_tensors(output)
        self.reducer.prepare_for_backward(output)
        return output

    def __getattr__(self, name: str) -> Any:
        """Return plain attributes of the wrapped module, such as ``model.config``.

        Methods, submodules and tensors that require a gradient are not returned: a forward through them would silently
        train without synchronisation.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            value = _MISSING if module is None or name.startswith("_") else getattr(module, name, _MISSING)
            if value is _MISSING:
                raise
        trains = isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.requires_grad)
        if trains or (callable(value) and not isinstance(value, type)):
            raise AttributeError(
                f"'{type(self).__name__}' object has no attribute '{name}'\n"
                f"The wrapped {type(module).__name__} has one, but a forward through it would not synchronise "
                f"gradients. If that is what you want, write `.module.{name}`."
            )
        return value

    # --- accumulation and weights -------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank alone: forwards inside the context are not synchronised.

        The first backward of a forward outside the context averages all accumulated gradients.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def mean_over(self, n: float | Tensor) -> None:
        """Set the weight of the next backward: the number of samples or tokens that its loss is the mean of.

        Call it once per micro-batch, on every rank, at any time before its backward. The gradients of the step are then
        the sum of weight times gradient over all ranks and all micro-batches since the last synchronised backward,
        divided by the sum of the weights: those of one process on the whole global batch. Losses stay plain means;
        do not divide them by the number of micro-batches. Without weights, gradients are averaged over ranks.

        A micro-batch of weight 0 counts for nothing, even if its gradients are NaN. If all weights of a step are 0,
        its gradients are 0. Blocks if ``n`` is a tensor that an accelerator still computes.

        Args:
            n: A finite number, 0 or more, or a tensor with no dimensions.

        Raises:
            ConfigurationError: ``n`` is not such a value. From ``backward``, on a device from a later ``forward``, on
                every rank: some ranks gave a weight and others did not; names the latter.
        """
        self.reducer.set_weight(check_weight(n))

    # --- communication hooks ------------------------------------------------------------------------------------------

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook(state, bucket)`` reduce each bucket of gradients instead of the mean over ranks.

        torch's stock hooks (``torch.distributed.algorithms.ddp_comm_hooks``) work unchanged. The hook gets an object
        with the methods of ``GradBucket`` and returns a future of the reduced, divided flat gradients.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: Its annotations say that it expects or returns something else.
            RuntimeError: A hook is already registered.
        """
        try:
            comm_hooks.check_comm_hook(hook, self.compression)
        except (TypeError, ValueError) as error:
            self._logged_error = {"has_error": 1, "error": f"{type(error)}: {error}"}  # as torch's class does
            raise
        if self._comm_hooks:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")
        self._comm_hooks.append((hook, state))
        self._comm_hook_name = hook.__qualname__
        self.reducer.set_reduction(comm_hooks.CommHookReduction(self.process_group, hook, state))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        name = "allreduce_hook" if comm_hook_type == collectives.BuiltinCommHookType.ALLREDUCE else "fp16_compress_hook"
        self.register_comm_hook(self.process_group, getattr(collectives.stock_comm_hooks(), name))
        self._comm_hook_name = str(comm_hook_type)

    # --- compression --------------------------------------------------------------------------------------------------

    def compression_state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return this rank's state of compression, so that training can resume exactly; copies nothing.

        ``residuals``: by parameter, what this rank has not sent yet, float32 on the CPU; they differ between ranks.
        ``bases``: by parameter, PowerSGD's initial bases, equal on all ranks. Both are empty if the method keeps none.
        `lockstep.save` of the wrapped model, and `fit`, save them automatically.
        """
        reduction = self._compressed
        return reduction.state_dict() if isinstance(reduction, CompressedMean) else {"residuals": {}, "bases": {}}

    def load_compression_state_dict(self, *states: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load states that `compression_state_dict` returned on any ranks; their residuals are summed.

        Only the sum of the residuals over all ranks matters. So on another number of ranks, load each state on one of
        them. With each state on its own rank, training resumes with the same bits. Not collective.

        Args:
            states: Without any state: reset, without residuals.

        Raises:
            ConfigurationError: The states belong to another model.
        """
        if isinstance(self._compressed, CompressedMean):
            self._compressed.load_state_dict(states)

    def load_compression_bases(self, bases: Mapping[str, Tensor]) -> None:
        """Load PowerSGD's bases alone."""
        if isinstance(self._compressed, CompressedMean):
            self._compressed.load_bases(bases)

    def scale_compression_residuals(self, factor: float) -> None:
        """Multiply this rank's residuals by ``factor``, when the scale of gradients changes.

        For a loop with loss scaling, after ``scaler.update()``, with the new scale divided by the old one. Without this
        call, residuals are once added with the old scale. Call it on every rank; not collective.
        """
        for residual in self.compression_state_dict()["residuals"].values():
            residual.mul_(factor)

    # --- uneven inputs ------------------------------------------------------------------------------------------------

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Join:
        """Return a context in which ranks may have different numbers of batches.

        A rank that leaves its loop early takes part in the other ranks' steps with zero gradients, and then copies the
        final model. Collective: every rank enters it; each ``forward`` inside costs one more small all-reduce.
        `SyncBatchNorm` layers continue over the ranks that have data. With such layers each forward must be followed by
        one backward, unless it is under ``no_grad``.

        Args:
            divide_by_initial_world_size: Divide gradients by the number of all ranks, else by those with data.
            enable: False: do nothing.
            throw_on_early_termination: Raise RuntimeError on every rank when the first one runs out of data.
        """
        divides = {"divide_by_initial_world_size": divide_by_initial_world_size}
        return Join([self], enable, throw_on_early_termination, **divides)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Return the hook that a rank without data runs in each step; for ``Join`` with several participants."""
        self._divide_by_initial_world_size = kwargs.get("divide_by_initial_world_size", True)
        return StepJoinHook(self._shadow_step, self._copy_last_model)

    def _shadow_step(self) -> None:
        """Take part in one step of the other ranks with zero gradients. Collective."""
        # The order is that of `_pre_forward`, forward, `_post_forward` and backward on the ranks with data.
        self._sync_layers.open(has_batch=False)
        if self.will_sync_module_buffers():
            self._model_sync.sync_buffers(src=self._agree(-1))
        self.require_forward_param_sync = bool(self._agree(0))  # whether some rank's backward will be synchronised
        self._sync_layers.end_forward(backward_follows=False)
        self._sync_layers.end_backward()
        if self.require_forward_param_sync:
            self.reducer.shadow_step()

    def _copy_last_model(self, was_last: bool) -> None:
        """Copy the model of a rank that trained to the end. Collective."""
        # Several ranks may end with the same step. All have the same model, except for buffers: the highest is copied.
        src = self._agree(self.process_group.rank() if was_last else -1)
        self._model_sync.broadcast(src=src, with_buffers=self.forward_sync_buffers)

    def _agree(self, number: int) -> int:
        """Return the largest number of all ranks, with and without data. Collective. Blocks until complete."""
        largest = torch.tensor([number], device=self.device)
        collectives.all_reduce(largest, group=self.process_group, op="max")
        return int(largest.item())

    @property
    def join_device(self) -> torch.device:
        """The device of the tensors that ``Join`` sends."""
        return self.device

    @property
    def join_process_group(self) -> Group:
        """The group that ``Join`` uses."""
        return self.process_group

    def will_sync_module_buffers(self) -> bool:
        """Return whether the next ``forward`` synchronises buffers."""
        syncs_in_forward = self.require_forward_param_sync and self.forward_sync_buffers and self._batches is None
        return syncs_in_forward and self._model_sync.find_buffers()

    # --- batches of prepared loaders ----------------------------------------------------------------------------------

    def use_batches(self, batches: BatchesInUse) -> None:
        """Scale the gradients of each forward from now on by the share of its batch; see [Note: shares].

        Buffers are then synchronised after each backward, not before a forward: in an evaluation, a rank without a part
        of a batch makes no forward.
        """
        self._batches = batches
        self.reducer.begin_strict(self)

    @property
    def shares_statistics(self) -> bool:
        """Whether a forward is collective now, since layers exchange the statistics of the batch."""
        return self.training and self._sync_layers.is_needed

    def on_event(self, kind: bucket_events.Event, bucket: object) -> None:
        """Handle an event of the reducer of a prepared model. Collective when a step closes: every rank."""
        if kind is bucket_events.Event.CLOSED and self.forward_sync_buffers and self._model_sync.find_buffers():
            self._model_sync.sync_buffers(src=0)

    def _notify_joined_ranks(self) -> None:
        """Notify ranks without data that another step begins. Collective: every rank of a ``join()``."""
        self._sync_layers.require_closed()  # otherwise they still wait for the end of the last step
        num_active = 0.0
        work = Join.notify_join_context(self)
        if work is not None:  # only the first of several participants learns which ranks are left
            work.wait()
            num_active, num_ranks = float(work.result()[0].item()), float(self.process_group.size())
            self.reducer.divisor = num_ranks if self._divide_by_initial_world_size else num_active
        self.reducer.only_step = None
        if num_active < self.process_group.size():
            self.reducer.only_step = self.reducer.num_steps
            self._sync_layers.open(has_batch=True)

    @contextmanager
    def some_without_batch(self, *, has_batch: bool) -> Iterator[None]:
        """Run one forward and its backward inside, in which some rank may be without a batch.

        A rank without one runs a forward that uses no layer of the module, and its backward only if that
        synchronises gradients. It takes part in the other ranks' `SyncBatchNorm` layers.

        Collective: every rank, if the module has such layers. Blocks until complete.

        Args:
            has_batch: Whether this rank has a batch.

        Raises:
            ConfigurationError: On every rank: a layer of torch's class, or over another group than the gradients.
        """
        self._sync_layers.open(has_batch=has_batch)
        try:
            yield
            self._sync_layers.end_backward()  # for a rank without a backward; after a backward it does nothing
        finally:
            self._sync_layers.abandon()

    def _end_forward(self, output: Any) -> None:
        """Announce the end of forward to ranks without a batch; arrange the same for the end of its backward."""
        self._sync_layers.end_forward(backward_follows=torch.is_grad_enabled())
        delays = self._sync_layers.must_delay_buckets(uneven=self.reducer.bucket_set.is_uneven)
        self.reducer.before_launch = self._sync_layers.end_backward if delays else None
        if self._sync_layers.is_open and not self.require_backward_grad_sync:  # no reducer will call it
            hook_tensors(output, self._sync_layers.on_local_backward)

    # --- gradients of whole buckets -----------------------------------------------------------------------------------

    def stamp_buckets(self, stamps: bucket_events.BucketStamps | None) -> None:
        """Record the times of buckets with ``stamps`` from now on; None: stop."""
        observers = self.reducer.observers
        observers[:] = [observer for observer in observers if not isinstance(observer, bucket_events.BucketStamps)]
        if stamps is not None:
            observers.append(stamps)

    def _refuse_slices(self, method: str, remedy: str = "") -> None:
        if not self.reducer.reduction.leaves_whole:
            raise ConfigurationError(
                f"{method}() needs all gradients, but with shard_gradients=True each rank has a slice of them.\n"
                f"Call clip_grad_norm_() of the optimizer{remedy}."
            )

    def gradients_are_finite(self) -> bool:
        """Return whether no gradient is NaN or infinite: the same verdict on every rank, after the same backward.

        Not collective: NaN and infinity survive the sum over the ranks, and all ranks hold the same bits of the sum. So
        all ranks can skip the same step without communication. Parameters that are not synchronised are not checked.
        Blocks until backward is done.

        Raises:
            ConfigurationError: This rank has only a slice of the gradients.
        """
        self._refuse_slices("gradients_are_finite", " with max_norm=math.inf, which returns the norm of all")
        reduced = self.flat_gradients.reduced()
        return are_finite(reduced, combine_norms(list_norms(reduced)))

    def check_gradients(self) -> None:
        """Raise an error that names rank and parameter if a gradient is NaN or infinite.

        Call it between backward and ``optimizer.step()``. From the first call on, each bucket is checked when it is
        launched, so the ranks are known in all steps after the first. Blocks until backward is done.

        Collective if a gradient is not finite: every rank.

        Raises:
            NonFiniteGradient: On every rank.
            ConfigurationError: This rank has only a slice of the gradients.
        """
        was_monitored = self._monitor is not None
        saw_nonfinite = self.monitor_local_gradients()
        if not self.gradients_are_finite():
            is_here = was_monitored and saw_nonfinite()
            bucket_gradients.refuse_nonfinite(self.reducer.bucket_set, is_here, group=self.process_group)

    def monitor_local_gradients(self) -> Callable[[], bool]:
        """For `fit`: check each bucket when it is launched, from now on.

        Returns:
            A function: whether this rank's part of the last backward was not finite. Blocks.
        """
        if self._monitor is None:
            self._monitor = bucket_gradients.LocalGradientMonitor(self.reducer)
            self.reducer.observers.append(self._monitor)
        return self._monitor.saw_nonfinite

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients down so that their norm is at most ``max_norm``; return the norm they had.

        Like ``torch.nn.utils.clip_grad_norm_(model.parameters(), ...)``, but one bucket at a time, with far fewer
        kernels, and with a norm that is as accurate for large parameters as for small ones. Not collective: after a
        synchronised backward all ranks hold the same gradients and find the same norm. Does not block.

        Args:
            max_norm: The largest norm allowed.
            norm_type: The p of the p-norm; may be infinite.

        Raises:
            ConfigurationError: This rank has only a slice of the gradients.
        """
        self._refuse_slices("clip_grad_norm_")
        norm_type = float(norm_type)
        if norm_type <= 0:
            return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)
        norm = self.flat_gradients.norm(norm_type)
        self.flat_gradients.multiply_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def overlap_optimizer(self, optimizer: Optimizer) -> Callable[[], None]:
        """Step ``optimizer`` within backward from now on, each bucket as soon as it is reduced.

        Each synchronised backward then also updates the parameters, with the same bits as ``optimizer.step()`` after
        backward, for every optimizer that treats each parameter separately and draws no random numbers. Gradients are
        kept until they are zeroed. Nothing may read or change gradients in between: no clipping, no loss scaling.
        ``optimizer.step()`` raises while this is active; learning-rate schedulers step after backward as usual.

        With weights (`mean_over`) and with communication hooks all buckets are stepped when backward ends.

        Args:
            optimizer: Of this model's parameters.

        Returns:
            A function that ends it.

        Raises:
            ConfigurationError: The optimizer cannot step without a closure, or divides its work among the ranks.
        """
        reducer = self.reducer
        stepping = bucket_gradients.BucketOptimizer(optimizer)
        reducer.set_reduction(reducer.reduction)  # a single rank begins to watch its gradients
        reducer.observers.append(stepping)
        reducer.finishes_early = True

        def end() -> None:
            reducer.observers.remove(stepping)
            stepping.remove()

        return end

    # --- consistency --------------------------------------------------------------------------------------------------

    _num_good_checks = 0

    def check_replicas(self, optimizer: Optimizer | None = None) -> None:
        """Raise an error that names the first tensor that does not have the same bits on all ranks.

        Parameters and buffers are compared, and the state of ``optimizer`` if it is given: by a checksum, so this
        takes about as long as copying them, and one exchange of 8 bytes. Not compared are tensors that are not
        synchronised, buffers that the next forward overwrites with rank 0's (``forward_sync_buffers=True``), else the
        running statistics of BatchNorm layers, and the sharded state of a ``ZeroRedundancyOptimizer``.

        Collective: every rank, between two steps. Blocks.

        Raises:
            ReplicasDiffer: On every rank; names the tensor, the ranks on each side and the elements.
        """
        buffers: Buffers = "healed" if self.forward_sync_buffers else "own"
        replica = replica_of(self.module, optimizer, buffers=buffers, ignore=self.parameters_to_ignore)
        num_good = self._num_good_checks
        since = f"{plural(num_good, 'check')} before found none." if num_good else "This was the first check."
        refuse_difference(replica, group=self.process_group, device=self.device, now="", since=since)
        self._num_good_checks += 1

    # --- private and deprecated names of torch's class that libraries and torch's own tools use -----------------------

    @property
    def broadcast_buffers(self) -> bool:
        """Torch's older name for ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @classmethod
    def _get_active_ddp_module(cls) -> nn.Module | None:
        """Return the active module: torch.compile calls this on the class that has torch's name."""
        return cls._active_ddp_module or torch_internals.active_ddp_module()

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Return those of torch's keys that libraries read."""
        data: dict[str, str | int] = {
            "iteration": max(0, self.reducer.num_forwards - 1),
            "can_set_static_graph": 0,  # it would gain nothing; Lightning recommends it if this is 1
            "has_rebuilt_buckets": int(self.reducer.bucket_set.is_rebuilt),
            "num_buckets_reduced": self.reducer.num_buckets_reduced,
        }
        if self._comm_hooks:
            data["comm_hook"] = self._comm_hook_name
        return data | self._logged_error

    def _remove_autograd_hooks(self) -> None:
        self.reducer.remove_hooks()

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are never cloned."""

    def _set_static_graph(self) -> None:
        self.static_graph = True

    _get_data_parallel_params = staticmethod(torch_internals.ddp_parameters)  # for torch's optimizer_overlap_hooks
    _set_params_and_buffers_to_ignore_for_model = staticmethod(torch_internals.ignore_in_ddp)


def _parameters_of(wrapper: weakref.ref[DistributedDataParallel]) -> dict[str, Tensor]:
    """Return the parameters that the ranks should hold alike, also of a module that the script has put in since."""
    model = wrapper()
    if model is None:
        return {}
    return {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if name not in model.parameters_to_ignore
        and parameter.layout is torch.strided
        and parameter.numel()
        and not (parameter.is_meta or is_sharded(parameter))
    }


def _call(module: Any, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call ``module``. A frame that torch.compile does compile, while it skips those of torch's own modules."""
    return module(*inputs, **kwargs)


TorchDistributedDataParallel.register(DistributedDataParallel)  # libraries use isinstance
