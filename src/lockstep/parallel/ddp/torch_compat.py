"""The private and deprecated names of torch's class that libraries and torch's own tools rely on."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel

from lockstep.comm.collectives import Group, Joinable, all_reduce_async, backend_name, broadcast_coalesced
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.bucket_plan import MIB
from lockstep.parallel.ddp.comm_hooks import GradBucket
from lockstep.parallel.ddp.reducer import Reducer
from lockstep.parallel.ddp.setup import BufferHook, ModelSync
from lockstep.parallel.module_io import Wrapper


class TorchReducer(Reducer):
    """The reducer, with what Accelerate, Lightning and torch's hooks call of torch's C++ class by ``ddp.reducer``."""

    def _rebuild_buckets(self) -> bool:
        return False  # ours are rebuilt at the end of the first synchronised backward

    def _run_allreduce_hook(self, bucket: GradBucket) -> Future[Any]:
        return all_reduce_async(bucket.buffer(), group=self._group)

    def _install_post_backward_futures(self, futures: Sequence[Future[Any]]) -> None:
        self.post_backward += futures

    _remove_autograd_hooks = Reducer.remove_hooks
    _check_reducer_finalized = Reducer.check_finished


class TorchCompat(Wrapper, Joinable):
    """What ``DistributedDataParallel`` answers to besides its documented interface."""

    broadcast_bucket_size = 250 * MIB
    module: nn.Module
    device: torch.device
    process_group: Group
    forward_sync_buffers: bool
    find_unused_parameters: bool
    gradient_as_bucket_view: bool
    static_graph: bool
    bucket_bytes_cap: int
    require_forward_param_sync: bool
    require_backward_grad_sync: bool
    _comm_hook_name = _hook_error = ""
    _comm_hooks: list[tuple[Callable[..., Any], object]]
    _model_sync: ModelSync
    _reducer: Reducer
    _active_ddp_module: ClassVar[nn.Module | None] = None  # set by torch's ``replicate`` while it runs on this class

    # --- attributes -------------------------------------------------------------------------------------------------

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

    @property
    def _has_rebuilt_buckets(self) -> bool:
        return self._reducer.bucket_set.is_rebuilt

    @classmethod
    def _get_active_ddp_module(cls) -> nn.Module | None:
        """Answer torch.compile, which asks this of the class that stands where torch's name is."""
        return cls._active_ddp_module or TorchDistributedDataParallel._active_ddp_module

    # --- buffers ----------------------------------------------------------------------------------------------------

    def _default_broadcast_coalesced(
        self, bufs: Sequence[Tensor] | None = None, bucket_size: int | None = None, authoritative_rank: int = 0
    ) -> None:
        """Broadcast buffers, as buffer hooks do that want the usual and more. Collective: every rank."""
        tensors = self.modules_buffers if bufs is None else bufs
        broadcast_coalesced(tensors, group=self.process_group, src=authoritative_rank)

    def _register_buffer_comm_hook(self, state: object, hook: BufferHook, comm_hook_location: Any = None) -> None:
        """Let ``hook(state, named_buffers)`` synchronise buffers; ``comm_hook_location`` is torch's enum."""
        after_forward = comm_hook_location is None or comm_hook_location.name == "POST_FORWARD"
        self._model_sync.buffer_hook = hook, state, after_forward

    # --- debugging --------------------------------------------------------------------------------------------------

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Return those of torch's keys that libraries read."""
        data: dict[str, str | int] = {
            "module_name": type(self.module).__name__,
            "world_size": self.process_group.size(),
            "rank": self.process_group.rank(),
            "iteration": max(0, self._reducer.num_forwards - 1),
            "backend_name": backend_name(self.process_group),
            "broadcast_buffers": int(self.forward_sync_buffers),
            "find_unused_parameters": int(self.find_unused_parameters),
            "gradient_as_bucket_view": int(self.gradient_as_bucket_view),
            "static_graph": int(self.static_graph),
            "can_set_static_graph": 0,  # it would gain nothing; Lightning advises it where this says 1
            "bucket_cap_bytes": self.bucket_bytes_cap,
            "has_rebuilt_buckets": int(self._has_rebuilt_buckets),
            "num_buckets_reduced": self._reducer.num_buckets_reduced,
        }
        if self._comm_hooks:
            data["comm_hook"] = self._comm_hook_name
        if self._hook_error:
            data |= {"has_error": 1, "error": self._hook_error}
        return data

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Check the number as torch does; steps are timed where a run is recorded, see docs/watching.md."""
        if sample_rate < 1:
            raise ValueError("DDP runtime logging sample rate should be equal or greater than 1")

    def _check_reducer_finalized(self) -> None:
        self._reducer.check_finished()

    def _remove_autograd_hooks(self) -> None:
        self._reducer.remove_hooks()

    # --- settings ---------------------------------------------------------------------------------------------------

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Do nothing: outputs are never cloned."""

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _update_process_group(self, new_process_group: Any) -> None:
        """Average over the ranks of another group from the next forward on; a rank that is not in it changes nothing.

        Not collective by itself. Buckets are rebuilt after the first backward. Parameters are not compared or
        broadcast, and communication hooks keep the group that they use themselves, as with torch's class.

        Raises:
            ConfigurationError: An optimizer is tied to the group that was.
        """
        if not isinstance(new_process_group, Group) or new_process_group.rank() < 0:
            return
        if self._reducer.finishes_early or not self._reducer.reduction.leaves_whole:
            raise ConfigurationError(
                "The process group cannot change while an optimizer steps within backward, or has slices of the "
                "gradients.\nWrap the model again, with a new optimizer."
            )
        # The old reducer's hooks would stay on the parameters, and average over the group that was.
        self._reducer.remove_hooks()
        self.process_group = new_process_group
        self._connect()

    @abstractmethod
    def _connect(self) -> None:
        """Make everything that holds the process group, and watch the parameters."""

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module, named_params: bool = False
    ) -> Iterator[nn.Parameter | tuple[str, nn.Parameter]]:
        # torch's optimizer_overlap_hooks asks for these.
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
