"""The private and deprecated names of torch's class that libraries and torch's own tools rely on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from lockstep.comm.collectives import Group, broadcast_coalesced
from lockstep.comm.join import Joinable
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.bucket_plan import MIB
from lockstep.parallel.ddp.inputs import move_to
from lockstep.parallel.ddp.logging_data import logging_data
from lockstep.parallel.ddp.model_sync import BufferHook, ModelSync, RegisteredBufferHook
from lockstep.parallel.ddp.options import bucket_caps_bytes

if TYPE_CHECKING:
    from lockstep.parallel.ddp.reducer import Reducer


class TorchNames(nn.Module, Joinable):
    """What ``DistributedDataParallel`` answers to besides its documented interface."""

    broadcast_bucket_size = 250 * MIB
    module: nn.Module
    device: torch.device
    device_ids: list[int] | None
    output_device: int | None
    process_group: Group
    is_multi_device_module: bool
    forward_sync_buffers: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    bucket_bytes_cap: int
    bucket_bytes_cap_list: list[int]
    require_forward_param_sync: bool
    require_backward_grad_sync: bool
    _joins_uneven_inputs: bool = False
    _last_error = ""
    _comm_hook_name = ""
    _comm_hooks: list[tuple[Callable[..., Any], object]]
    _model_sync: ModelSync
    _module_parameters: list[nn.Parameter]
    _reducer: Reducer
    _active_ddp_module: ClassVar[nn.Module | None] = None  # set by torch's ``replicate`` while it runs on this class

    def will_sync_module_buffers(self) -> bool:
        """Tell whether the next ``forward`` synchronises buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and self._model_sync.has_buffers

    @classmethod
    def _get_active_ddp_module(cls) -> nn.Module | None:
        """Answer torch.compile, which asks this of the class that stands where torch's name is."""
        return cls._active_ddp_module or TorchDistributedDataParallel._active_ddp_module

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a pickle holds: an object of this class, or one of torch's, written before ``adopt()``."""
        if "_bucket_caps_bytes" not in state:
            cap_mb = None if state["bucket_bytes_cap_default"] else state["bucket_bytes_cap"] / MIB
            device_ids = state["device_ids"]
            absent = {  # the latter four in some versions of torch
                "_bucket_caps_bytes": bucket_caps_bytes(cap_mb, None),
                "_divide_by_initial_world_size": True,
                "_input_device": torch.device(state["device_type"], device_ids[0]) if device_ids else None,
                "bucket_bytes_cap_list": [],
                "skip_all_reduce_unused_params": False,
                "batched_grad_copy": False,
                "forward_sync_buffers": state.get("broadcast_buffers", True),
            }
            state = absent | state
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    @property
    def broadcast_buffers(self) -> bool:
        """Torch's older name for ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def modules_buffers(self) -> list[Tensor]:
        """The buffers that are synchronised."""
        return list(self._model_sync.named_buffers().values())

    @property
    def named_module_buffers(self) -> dict[str, Tensor]:
        """The buffers that are synchronised, by name."""
        return self._model_sync.named_buffers()

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> tuple[tuple[Any], tuple[Any]]:
        """Return inputs and keyword arguments on a device, in torch's wrapping."""
        device = self.device if self.device.type == "cpu" else torch.device(self.device.type, device_id)
        return (move_to(inputs, device),), (move_to(kwargs, device),)

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._reducer.row.is_rebuilt

    @property
    def _distributed_rank(self) -> int:
        return self.process_group.rank()

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Return torch's facts for debugging, and the times of some steps; on CUDA the last of these must be over."""
        return logging_data(self, self._reducer)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Take the times of one of so many steps, after the first ones."""
        with self._noting_errors():
            if sample_rate < 1:
                raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")
        self._reducer.times.rate = sample_rate

    @contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Let `_get_ddp_logging_data` tell of an error inside, as it does of some with torch's class."""
        try:
            yield
        except (TypeError, ValueError, RuntimeError) as error:
            self._last_error = f"{type(error)}: {error}"
            raise

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are never cloned."""

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _remove_autograd_hooks(self) -> None:
        self._reducer.remove_hooks()

    def _check_reducer_finalized(self) -> None:
        self._reducer.check_finished()

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Broadcast buffers, as buffer hooks do that want the usual and more. Collective: every rank."""
        tensors = self.modules_buffers if bufs is None else bufs
        broadcast_coalesced(tensors, group=self.process_group, src=authoritative_rank)

    def _register_buffer_comm_hook(self, state: object, hook: BufferHook, comm_hook_location: Any = None) -> None:
        """Let ``hook(state, named_buffers)`` synchronise buffers; ``comm_hook_location`` is torch's enum."""
        after_forward = comm_hook_location is None or comm_hook_location.name == "POST_FORWARD"
        self._model_sync.registered = RegisteredBufferHook(hook, state, after_forward)

    def _update_process_group(self, new_process_group: Any) -> None:
        """Average over the ranks of another group from the next forward on; a rank that is not in it changes nothing.

        Not collective by itself. Buckets are built anew after the first backward. Parameters are not compared or
        broadcast, and communication hooks keep the group that they use themselves, as with torch's class.

        Raises:
            ConfigurationError: An optimizer is tied to the group that was.
        """
        if not isinstance(new_process_group, Group) or new_process_group.rank() < 0:
            return
        departures = self._reducer.departures
        if departures.eager or not departures.transport.leaves_whole:
            raise ConfigurationError(
                "The process group cannot change while an optimizer steps within backward, or has slices of the "
                "gradients.\nWrap the model again, with a new optimizer."
            )
        self._reducer.remove_hooks()
        self.process_group = new_process_group
        self._connect()
        self._watch_parameters()
        for hook, state in self._comm_hooks:
            self._reducer.set_comm_hook(hook, state)

    @abstractmethod
    def _connect(self) -> None: ...

    @abstractmethod
    def _watch_parameters(self) -> None: ...

    @abstractmethod
    def _sync_buffers(self, *, after_forward: bool, src: int) -> None: ...

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module, named_params: bool = False
    ) -> Iterator[nn.Parameter | tuple[str, nn.Parameter]]:
        for name, parameter in module.named_parameters():
            if not hasattr(parameter, "_ddp_ignored"):
                yield (name, parameter) if named_params else parameter

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: nn.Module, params_and_buffers_to_ignore: Any) -> None:
        """Mark parameters and buffers, by full name, that a wrapper of ``module`` leaves alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]
