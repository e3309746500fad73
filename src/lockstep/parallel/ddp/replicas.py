"""Replicas that differ are found within a few steps: a digest of the model travels with the gradients."""

import warnings
import weakref
import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.comm.collectives import Group, all_gather_object
from lockstep.parallel.consistency import fold, refuse_difference


class Replicas:
    """Compares the model and the numbers of its optimizers between the ranks, without a collective of its own.

    [Note: the digest of replicas]
    In the steps 1, 2, 4, 8, ... and each `every` steps, the weight message has 16 bits of the bits of all parameters,
    and of the numbers (learning rates and others) in the groups of the optimizers that update them; see
    [Note: weight messages]. They are taken when the backward begins, when the ranks should be equal. Optimizer state is
    left out, which would cost two times as much: if it differs, so do the parameters after the next update.

    If the digests differ, every rank reads it from the same sums, and all of them look for the first tensor that
    differs: only this needs collectives. 16 bits miss a difference once in 65,536 checks.

    Args:
        group: The ranks.
        device: A device whose tensors the ranks can exchange.

    Attributes:
        every: The steps between two checks later on; 0: none are made.
        parameters: Returns the parameters of the model by name; None: it is not known.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self.every = 1000
        self.parameters: Callable[[], Mapping[str, Tensor]] | None = None
        self._optimizers: dict[int, weakref.ref[Optimizer]] = {}  # by id, in the order of their first update
        self._num_groups: dict[int, int] = {}
        self._step = self._last_step = 0  # of the newest check, and of the one before

    def add(self, optimizer: Optimizer) -> bool:
        """Record that an optimizer updates the model; return whether its groups are others than at its last update."""
        self._optimizers.setdefault(id(optimizer), weakref.ref(optimizer))
        before = self._num_groups.get(id(optimizer))
        self._num_groups[id(optimizer)] = len(optimizer.param_groups)
        return before != len(optimizer.param_groups)

    def digest(self, step: int) -> int:
        """Return 16 bits of what should be equal on all ranks; 0 if no check is due. Blocks on a device.

        Args:
            step: Counted from 1.
        """
        if self.parameters is None or not self.every or (step & (step - 1) and step % self.every):
            return 0
        self._step, self._last_step = step, self._step
        parameters = self.parameters()
        numbers = zlib.crc32(repr(self._numbers(parameters)).encode())
        return (fold(list(parameters.values())) + numbers) & 0xFFFF

    def refuse_difference(self) -> bool:
        """Compare everything; return whether replicas may differ in rounding, and are not compared any more.

        Collective: every rank. Blocks.

        Raises:
            ReplicasDiffer: On every rank: they differ; names the first that does.
        """
        if self.parameters is None:
            return False
        kinds = all_gather_object(_processor(self._device), group=self._group, device=self._device)
        if len(set(kinds)) > 1:
            if self._group.rank() == 0:
                text = "Processors of several kinds round differently, so the ranks do not hold the same bits: {}."
                warnings.warn(text.format("; ".join(dict.fromkeys(kinds))), stacklevel=2)
            self.every = 0
            return True
        parameters = self.parameters()
        numbers = {name: torch.tensor(value, dtype=torch.float64) for name, value in self._numbers(parameters).items()}
        replica = numbers | {f"parameter {name}": tensor for name, tensor in parameters.items()}
        since = f"They were equal at step {self._last_step}." if self._last_step else "They never were equal."
        refuse_difference(
            replica,
            group=self._group,
            device=self._device,
            now=f" (before the update of step {self._step})",
            since=since,
        )
        return False

    def _numbers(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the numbers in the groups that update the model, by name."""
        own, numbers = set(map(id, parameters.values())), dict[str, float]()
        optimizers = [optimizer for ref in self._optimizers.values() if (optimizer := ref()) is not None]
        for place, optimizer in enumerate(optimizers):
            which = f" of optimizer {place}" if len(optimizers) > 1 else ""
            numbers[f"number of parameter groups{which}"] = len(optimizer.param_groups)
            for number, group in enumerate(optimizer.param_groups):
                if own.isdisjoint(map(id, group["params"])):
                    continue
                for name, value in group.items():
                    values = value if isinstance(value, tuple | list) and name != "params" else [value]
                    for index, each in enumerate(values):
                        if isinstance(each, int | float) or (isinstance(each, Tensor) and each.numel() == 1):
                            full = f"{name}{f'[{index}]' if values is value else ''} of parameter group {number}{which}"
                            numbers[full] = float(each)
        return numbers


def _processor(device: torch.device) -> str:
    """Return on what rounding depends."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
