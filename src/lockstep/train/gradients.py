"""What happens to the gradient between backward and the optimizer: one division, one norm, one clip."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.parallel.flat_math import are_finite, combine_norms, list_norms, multiply_

if TYPE_CHECKING:
    from lockstep.parallel.distributed import DistributedDataParallel


class Gradients(ABC):
    """The gradient of a whole model, which backward has left behind. Abstract; a strategy says which kind it leaves."""

    @abstractmethod
    def norm(self) -> Tensor:
        """Return the Euclidean norm of all gradients together, a 0-dimensional tensor. Does not block."""

    @abstractmethod
    def multiply_(self, factor: Tensor) -> None:
        """Multiply all gradients in place by a 0-dimensional tensor. Does not block."""

    @abstractmethod
    def is_finite(self, norm: Tensor) -> bool:
        """Return whether all gradients are finite, the same on every rank. Blocks on CUDA.

        Args:
            norm: What `norm` returned for these gradients, or that times something finite.
        """

    @abstractmethod
    def expect_norm(self) -> None:
        """Compute what `norm` needs as early as can be, from now on."""


@final
class ParameterGradients(Gradients):
    """Gradients parameter by parameter: the same bits on every rank that has them, so all come to the same verdict.

    Args:
        model: The bare model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())

    def _all(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    @override
    def expect_norm(self) -> None:
        """Do nothing: there is no earlier."""

    @override
    def norm(self) -> Tensor:
        return global_norm(self._all())

    @override
    def multiply_(self, factor: Tensor) -> None:
        multiply_(self._all(), factor)

    @override
    def is_finite(self, norm: Tensor) -> bool:
        return are_finite(self._all(), norm)


@final
class BucketGradients(Gradients):
    """Gradients bucket by bucket, as our `DistributedDataParallel` leaves them: the same bits on every rank.

    So every rank comes to the same verdict on its own; see `are_finite` for ranks that compute differently.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self.model = model

    @override
    def expect_norm(self) -> None:
        self.model.flat_gradients.compute_norms_early()

    @override
    def norm(self) -> Tensor:
        return self.model.flat_gradients.norm()

    @override
    def multiply_(self, factor: Tensor) -> None:
        self.model.flat_gradients.multiply_(factor)

    @override
    def is_finite(self, norm: Tensor) -> bool:
        return are_finite(self.model.flat_gradients.tensors(), norm)


def global_norm(grads: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients together, a 0-dimensional tensor."""
    return combine_norms(list_norms(list(grads)))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor that brings ``norm`` down to ``max_norm``, or one; the formula of ``clip_grad_norm_``."""
    factor: Tensor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return factor
