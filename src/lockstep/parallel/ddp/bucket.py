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


@dataclass(frozen=True)
class Share:
    """What a rank's gradients count in the sum over the ranks.

    Attributes:
        factor: What gradients are multiplied by.
        unused_factor: The same for the gradients from before, of parameters that received none in this step.
        ballot: What the tail ends with, see [Note: ballots]; None: what a rank without weights says.
    """

    factor: float
    unused_factor: float
    ballot: Sequence[float] | None = None


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

    @property
    @abstractmethod
    def ballot(self) -> Tensor | None:
        """The end of the tail, see [Note: ballots]; None if there is no tail."""

    @abstractmethod
    def gather(self, used: Sequence[int], share: Share) -> None:
        """Bring this rank's gradients in.

        Args:
            used: At place k, whether that parameter received a gradient since the last step.
            share: What they are multiplied by.
        """

    @abstractmethod
    def scale(self, factor: float) -> None:
        """Multiply the reduced gradients by ``factor``; after the reduction and before `settle`."""

    @abstractmethod
    def settle(self, num_users: Sequence[int] | None) -> None:
        """Hand the reduced gradients to the parameters.

        Args:
            num_users: On how many ranks each parameter of the model received a gradient; None: as the tail says.
        """

    @abstractmethod
    def adopt(self) -> None:
        """Take over the gradients that the parameters have now, from a bucket of an earlier plan."""

    @abstractmethod
    def arrived(self, *, even_in_place: bool) -> list[bool]:
        """Return by place whether a gradient is there that the bucket did not leave there; a sparse one always is.

        Args:
            even_in_place: Whether a gradient that the bucket left counts if it was changed since `seal`.
        """

    @property
    @abstractmethod
    def holds_all(self) -> bool:
        """Whether `gradients` is what all its parameters have as their gradients."""

    @abstractmethod
    def seal(self) -> None:
        """Take the gradients in the bucket for unchanged, as they are now; `gather` does."""
