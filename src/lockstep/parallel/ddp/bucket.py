"""What a bucket is: the gradients of some parameters on their way through one collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.parallel.ddp.bucket_plan import BucketSpec


@dataclass(frozen=True)
class Absent:
    """A parameter that received no gradient on this rank: its place in the bucket and the gradient it had before."""

    place: int
    previous: Tensor | None


class Bucket(ABC):
    """The gradients of ``spec.parameters`` on their way through one collective."""

    def __init__(self, spec: BucketSpec, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]) -> None:
        self.spec = spec
        self.parameters = [parameters[index] for index in spec.parameters]
        self.names = [names[index] for index in spec.parameters]
        self.absent: list[Absent] = []

    @property
    @abstractmethod
    def gradients(self) -> Tensor:
        """The gradients alone, as communication hooks see them."""

    @gradients.setter
    @abstractmethod
    def gradients(self, value: Tensor) -> None: ...

    @property
    @abstractmethod
    def payload(self) -> Tensor:
        """What the collective sums: the gradients and what travels with them."""

    @abstractmethod
    def gradient_views(self) -> list[Tensor]:
        """Return the gradients one by one, by place."""

    @abstractmethod
    def gather(self, used: Sequence[int], *, divisor: float) -> None:
        """Bring this rank's gradients in, divided by ``divisor``.

        Args:
            used: At place k, whether that parameter received a gradient since the last step.
            divisor: What to divide by before the gradients are summed.
        """

    @abstractmethod
    def settle(self, num_users: Sequence[int] | None) -> None:
        """Hand the reduced gradients to the parameters.

        Args:
            num_users: On how many ranks the parameter at each place received a gradient; None: as the tail says.
        """

    @abstractmethod
    def adopt(self) -> None:
        """Take over the gradients that the parameters have now, from a bucket of an earlier plan."""
