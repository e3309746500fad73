"""Communication hooks: what runs instead of the mean over ranks, and torch's private ways to ask for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from lockstep.parallel.ddp.comm_hooks import builtin_comm_hook, check_comm_hook, overlapped_optimizer
from lockstep.parallel.ddp.per_bucket import PerBucket

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
