"""Replicas that differ are found within a few steps: a digest of the model travels with the gradients."""

import sys
import warnings
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from lockstep.base.accelerator import HostCopy
from lockstep.base.torch_internals import version_of
from lockstep.comm.collectives import Group, all_gather_object
from lockstep.parallel.consistency import fold, refuse_difference

# On a device, a digest is sent so many steps after it was taken: by then the host need not wait for it.
_NUM_LATER = 5
_TRAINS, _KEPT = "requires_grad of parameter", "whether gradients of the step before were kept (no zero_grad())"
_ORDER = "the place, among the wrapped models, of the one that runs backward"


class Replicas:
    """Compares the model and the numbers of its optimizers between the ranks, without a collective of its own.

    [Note: the digest of replicas]
    In the steps 1, 2, 4, 8, ... and each `every` steps, 16 bits are taken of the bits of all parameters, when the
    backward begins, and of numbers: those (learning rates and others) in the groups of the optimizers that made the
    update before, which parameters are frozen, whether gradients were zeroed, and which of several models this is, as
    two with the same values may be used in another order. They travel in the weight message of this step, or on a
    device in that of a later one; see [Note: weight messages]. Optimizer state is left out, which would cost two times
    as much: if it differs, so do the parameters after the next update.

    If the digests differ, every rank reads it from the same sums, and all of them look for the first tensor that
    differs: only this needs collectives. 16 bits miss a difference once in 65,536 checks.

    Args:
        group: The ranks.
        device: A device whose tensors the ranks can exchange.

    Attributes:
        every: The steps between two checks later on; 0: none are made.
        next_due: The step in which the next digest is taken.
        taken: What was not sent: the step, a digest of the parameters, and the numbers.
        number: Of the model, on which the ranks have agreed; 0: they have not.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        self._parameters: Callable[[], Mapping[str, Tensor]] | None = None
        self.every = self.number = 0
        self.next_due = sys.maxsize
        self.taken: deque[tuple[int, HostCopy, dict[str, float]]] = deque()
        # A parameter, its gradient, which keeps its bucket in use, and the version of that.
        self._reduced: tuple[Tensor, weakref.ref[Tensor], int] | None = None
        self._num_groups: dict[int, int] = {}  # of an optimizer, by its id
        # Of the update before the next due step: numbers by name, and the parameters it has updated.
        self._numbers: dict[str, float] = {}
        self._updated: set[int] = set()
        self._compared: dict[str, float] = {}  # the numbers that were sent last
        self._step = self._last_step = 0  # of the newest check that was sent, and of the one before

    def begin(self, parameters: Callable[[], Mapping[str, Tensor]], *, every: int) -> None:
        """Compare from the next step on, the first: ``parameters`` returns those of the model by name."""
        self._parameters, self.every = parameters, every
        self.next_due = 1 if every else sys.maxsize

    def before_update(self, optimizer: Optimizer, step: int) -> bool:
        """Record an update; return whether the groups of the optimizer are others than at its last one.

        Args:
            optimizer: Updates the model.
            step: The next one, counted from 1.
        """
        before = self._num_groups.get(id(optimizer))
        self._num_groups[id(optimizer)] = len(optimizer.param_groups)
        if step == self.next_due:
            self._add_numbers(optimizer)
        return before != len(optimizer.param_groups)

    def after_step(self, parameters: Iterable[Tensor]) -> None:
        """Record the first gradient, which all ranks have: whether it is zeroed is seen in the next step, a due one."""
        found = ((each, each.grad) for each in parameters)
        noted = ((each, weakref.ref(grad), version_of(grad)) for each, grad in found if grad is not None)
        self._reduced = next(noted, None)

    def _add_numbers(self, optimizer: Optimizer) -> None:
        """Record the numbers in the groups of an optimizer.

        At once, and not by reference: when an optimizer that a script has dropped is freed, differs between ranks.
        """
        parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if not parameters.isdisjoint(self._updated):
            return  # the optimizer of a rank's part, within a ZeroRedundancyOptimizer
        which = " of a further optimizer" * bool(self._updated)
        self._updated |= parameters
        self._numbers[f"number of parameter groups{which}"] = len(optimizer.param_groups)
        for number, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                values = value if isinstance(value, tuple | list) and name != "params" else [value]
                for index, each in enumerate(values):
                    # Not a tensor on a device, for which the host would wait; nor how an update is computed.
                    is_number = isinstance(each, Tensor) and each.is_cpu and each.numel() == 1
                    if (is_number or isinstance(each, int | float)) and name not in ("foreach", "fused", "capturable"):
                        place = f"[{index}]" if values is value else ""
                        self._numbers[f"{name}{place} of parameter group {number}{which}"] = float(each)

    def digest(self, step: int, *, is_compared: bool) -> int:
        """Return 16 bits of what should be equal on all ranks; 0 if none are sent in this step.

        Args:
            step: Counted from 1: the next due one, or any while there is something in `taken`.
            is_compared: Whether they may be taken and sent in this step.
        """
        is_due = step == self.next_due
        if is_due:
            self.next_due = min(1 << step.bit_length(), step - step % self.every + self.every)
            numbers, self._numbers, self._updated = self._numbers, {}, set()
            reduced, self._reduced = self._reduced, None
        if is_due and is_compared:
            assert self._parameters is not None
            named = self._parameters()
            state = {f"{_TRAINS} {name}": 0.0 for name, parameter in named.items() if not parameter.requires_grad}
            state |= {_ORDER: float(self.number)} if self.number else {}
            if reduced is not None:
                parameter, before, version = reduced
                gradient = parameter.grad
                # In place, a script may have zeroed it, or clipped it, or added to it.
                if gradient is None or (gradient is before() and version_of(gradient) == version):
                    state[_KEPT] = float(gradient is not None)
            self.taken.append((step, HostCopy(fold(list(named.values()), self._device)), state | numbers))
        if not is_compared or not self.taken or (self._device.type != "cpu" and step < self.taken[0][0] + _NUM_LATER):
            return 0
        self._last_step = self._step
        self._step, copy, self._compared = self.taken.popleft()
        total = int(copy.value if copy.has_arrived() else copy.read())
        others = zlib.crc32(repr(sorted(self._compared.items())).encode()) if self._compared else 0
        return ((total ^ total >> 16 ^ total >> 32 ^ total >> 48) + others) & 0xFFFF

    def refuse_difference(self) -> bool:
        """Compare everything; return whether digests may differ though replicas do not, but for rounding.

        Collective: every rank. Blocks.

        Raises:
            ReplicasDiffer: On every rank: they differ; names the first that does.
        """
        if self._parameters is None:
            return False
        # Which optimizers report their steps depends on what a process has created before: some never do.
        known = all_gather_object(sorted(self._compared), group=self._group, device=self._device)
        common = sorted(set(known[0]).intersection(*known))
        common += sorted({name for names in known for name in names if name.startswith(_TRAINS)}.difference(common))
        replica = {name: torch.tensor(self._compared.get(name, 1.0), dtype=torch.float64) for name in common}
        kinds = all_gather_object(_processor(self._device), group=self._group, device=self._device)
        if len(set(kinds)) == 1:
            replica |= {f"parameter {name}": tensor for name, tensor in self._parameters().items()}
        since = f"They were equal at step {self._last_step}." if self._last_step else "They never were equal."
        now = f" (before the update of step {self._step})"
        refuse_difference(replica, group=self._group, device=self._device, now=now, since=since)
        if len(set(kinds)) > 1:  # numbers are the same on any processor, parameters are not
            if self._group.rank() == 0:
                text = "Processors of several kinds round differently, so the ranks do not hold the same bits: {}."
                warnings.warn(text.format("; ".join(dict.fromkeys(kinds))), stacklevel=2)
            self.every, self.next_due = 0, sys.maxsize
            return True
        return any(not set(common).issuperset(names) for names in known)


def _processor(device: torch.device) -> str:
    """Return on what rounding depends."""
    if device.type != "cpu":
        return str(torch.get_device_module(device).get_device_name(device))
    return f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
