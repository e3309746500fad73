"""``DistributedDataParallel``: one process a device, gradients averaged during backward. Design: docs/design/ddp.md."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from lockstep.comm.collectives import Group, default_group, mesh_group, reduces_on_its_own
from lockstep.comm.freed_memory import keep_freed_memory
from lockstep.comm.join import Joinable
from lockstep.parallel.ddp.attributes import forward_attribute
from lockstep.parallel.ddp.ballot import Ballot
from lockstep.parallel.ddp.bucket_row import BucketRow
from lockstep.parallel.ddp.checks import Checks
from lockstep.parallel.ddp.delayed import DelayedReduction
from lockstep.parallel.ddp.dynamo import leave_all_uncompiled, leave_uncompiled, run_in_parts
from lockstep.parallel.ddp.inputs import move_to
from lockstep.parallel.ddp.join import announce_backward, common_rank
from lockstep.parallel.ddp.model_sync import ModelSync
from lockstep.parallel.ddp.options import (
    BucketCap,
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
from lockstep.parallel.ddp.outputs import anchor_tensors, find_tensors
from lockstep.parallel.ddp.parameter_hooks import watch_frozen
from lockstep.parallel.ddp.reducer import Reducer
from lockstep.parallel.ddp.state_keys import accept_bare_keys
from lockstep.parallel.ddp.torch_reducer import TorchReducer
from lockstep.parallel.ddp.wire import WireDtype, wire_dtype_of
from lockstep.parallel.follow import Follow


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
        self.wire_dtype, self._finds_caps = wire_dtype_of(wire_dtype), bucket_cap_mb == "auto"
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
        self._follow = Follow(self.module, group=self.process_group, device=self.device)
        self._model_sync = ModelSync(self.module, self.parameters_to_ignore, self.process_group, self.device)
        self.register_load_state_dict_pre_hook(accept_bare_keys)  # type: ignore[no-untyped-call]

    def _watch_parameters(self) -> None:
        parameters = self._model_sync.named_parameters()
        trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
        row = BucketRow(
            trained,
            sparse=sparse_parameters(self.module),
            caps_bytes=self._bucket_caps_bytes,
            keep_held_gradients=not self.gradient_as_bucket_view,
            ballot=Ballot(is_missing=True).encode(self.process_group.rank(), self.process_group.size()),
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
