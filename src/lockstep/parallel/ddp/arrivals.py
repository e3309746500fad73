"""Which gradients have arrived on this rank, and so which buckets are complete.

[Note: hooks on few parameters]
Calling a hook costs more than a microsecond a parameter, which is much for models of many small ones. In the usual loop
it can be done without: where no parameter has a gradient as a backward begins, those that have one later are those
that arrived. So after some steps of that kind only one parameter of each bucket keeps a hook, that which completed it
in the step before; when it runs, the others of the bucket are looked at. If some are missing, the bucket leaves with a
later one, or when the step closes; if that repeats, all parameters get their hooks back. They also get them back, even
while a backward runs, as soon as a step is of another kind: gradients are there already (accumulation, gradients zeroed
in place, several backwards), there are weights, outputs cannot be found, buckets are held back, or autograd makes a
graph of the backward. After a number of usual steps, which grows each time, the hooks are taken away again.

Each rank decides that for itself: it changes when a bucket leaves, not in which order.

[Note: arrived unseen]
While most parameters have no hook, gradients can come in a backward that nobody announced: through the bare module.
The first of the few hooks that runs then, or the next step, gives all parameters their hooks back, and takes a gradient
that the last step did not leave there for one that arrived. A gradient that autograd has added to in place counts too
if a hook has told of that backward; if none has, it cannot be told from one that the script has changed, and does not.
"""

from __future__ import annotations

from enum import Enum

from lockstep.parallel.ddp.bucket_row import BucketRow
from lockstep.parallel.ddp.parameter_hooks import Listener, ParameterHooks, second_gradient

_FIRST_PATIENCE, _GROWTH, _MOST_PATIENCE = 2, 8, 10_000
"""After how many usual steps hooks are taken away: at first, times this after each failure, at most."""
_MOST_LATE_STEPS = 2
"""After how many steps in a row in which a bucket left late the hooks come back."""


class _Hooked(Enum):
    NONE = "no parameter"
    EVERY = "every parameter"
    FEW = "one a bucket"


class Arrivals:
    """Notes the gradients that arrive on this rank.

    Args:
        row: The buckets.
        listener: What is told of gradients, and tells us.
        rank: This one.

    Attributes:
        used: By parameter, whether it received a gradient since the last synchronised step. Where few parameters are
            hooked it is brought up to date bucket by bucket, by `look`.
        order: Of the gradients in the first step.
    """

    def __init__(self, row: BucketRow, listener: Listener, *, rank: int) -> None:
        self.used = bytearray(len(row.parameters))
        self._row = row
        self._rank = rank
        self._hooks = ParameterHooks(row.parameters, listener)
        self._hooked = _Hooked.NONE
        self._completed_by: list[int | None] = []
        self._last_completed_by: list[int | None] = []
        self._num_usual, self._patience, self._num_late = 0, _FIRST_PATIENCE, 0
        self._is_usual = False
        self._buckets = row.buckets
        self.restart()

    @property
    def is_listening(self) -> bool:
        """Whether gradients are noted: whether any parameter has a hook."""
        return self._hooked is not _Hooked.NONE

    def listen(self, *, has_begun: bool = False) -> None:
        """Hook every parameter, since something unusual comes; note what may have arrived unseen.

        Args:
            has_begun: Whether a backward is known to run, or to have run since the last step; see
                [Note: arrived unseen].
        """
        if self._hooked is _Hooked.FEW:
            even_in_place = has_begun or self._is_open
            for bucket in self._row.buckets:
                arrived = bucket.arrived(even_in_place=even_in_place)
                for index, has_arrived in zip(bucket.spec.parameters, arrived, strict=True):
                    self.used[index] |= has_arrived
            self._patience = min(self._patience * _GROWTH, _MOST_PATIENCE)
        self._num_usual = 0
        self._is_usual = False
        if self._hooked is not _Hooked.EVERY and self._hooks.set(range(len(self._row.parameters))):
            self._hooked = _Hooked.EVERY

    def stop(self) -> None:
        """Hook no parameter any more, for good."""
        self._hooks.stop()
        self._hooked = _Hooked.NONE

    # --- a step -----------------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Forget what arrived in a step."""
        if self._buckets is not self._row.buckets:
            self._buckets = self._row.buckets
            if self._hooked is _Hooked.FEW:  # of the buckets that were
                self.listen()
        self.order: list[int] = []
        self._came = bytearray(len(self._row.parameters))
        self._missing = [len(bucket.parameters) for bucket in self._row.buckets]
        self._completed_by = [None] * len(self._missing)
        self._seen: set[int] = set()  # buckets that are complete
        self._incomplete: list[int] = []  # those that were not when their parameter with a hook got its gradient
        self._is_open = self._is_usual = False

    def open(self, *, is_usual: bool, has_begun: bool) -> None:
        """Begin a step.

        Args:
            is_usual: False: it is known already that all parameters must be hooked.
            has_begun: Whether gradients of this backward may have come before.
        """
        self._is_usual = is_usual and self._row.is_rebuilt and all(each.grad is None for each in self._row.parameters)
        if not self._is_usual:
            self.listen(has_begun=has_begun)
        if not has_begun:
            self._hooks.move_last()
        self._is_open = True

    def note(self, index: int) -> bool:
        """Take notice of a gradient in a step; return whether its bucket may be complete now."""
        if not self._row.is_rebuilt:
            self.order.append(index)
            return False
        position = self._row.position_of[index]
        if self._hooked is _Hooked.FEW:
            if not self._look(position):
                self._incomplete.append(position)
            return True
        if self._came[index]:
            return False
        self._came[index] = 1
        self._missing[position] -= 1
        if self._missing[position] == 0:
            self._completed_by[position] = index
        return self._missing[position] == 0

    def note_local(self) -> None:
        """Take notice of a gradient that stays on this rank for now."""
        if self._hooked is _Hooked.FEW:
            self.listen(has_begun=True)
        self._num_usual = 0

    def has_come(self, index: int) -> bool:
        """Tell whether a gradient of this parameter was noted in this step already."""
        return bool(self._came[index])

    def is_complete(self, position: int) -> bool:
        """Tell whether all gradients of a bucket have arrived in this step."""
        return self._look(position) if self._hooked is _Hooked.FEW else self._missing[position] == 0

    def _look(self, position: int) -> bool:
        if position in self._seen:
            return True
        bucket = self._row.buckets[position]
        if any(parameter.grad is None for parameter in reversed(bucket.parameters)):  # the last are missing longest
            return False
        for index in bucket.spec.parameters:
            self.used[index] = 1
        self._seen.add(position)
        return True

    def end(self, num_left: int) -> None:
        """Take notice that no more gradients come, when ``num_left`` buckets have left."""
        if self._hooked is not _Hooked.FEW:
            return
        self._check_intact(num_left)
        for position in range(num_left, len(self._row.buckets)):
            bucket = self._row.buckets[position]
            for index, parameter in zip(bucket.spec.parameters, bucket.parameters, strict=True):
                self.used[index] = parameter.grad is not None
        was_late = any(self._look(position) for position in self._incomplete)
        self._num_late = self._num_late + 1 if was_late else 0

    def unused_bytes(self) -> int:
        """Return the size of all parameters that received no gradient, when the step is at its end."""
        return sum(each.nbytes for each, used in zip(self._row.parameters, self.used, strict=True) if not used)

    def _check_intact(self, num_left: int) -> None:
        for bucket in self._row.buckets[:num_left]:
            for name, has_arrived in zip(bucket.names, bucket.arrived(even_in_place=True), strict=True):
                if has_arrived:
                    raise second_gradient(self._rank, name)

    @property
    def _are_simple(self) -> bool:
        """Whether one look at ``param.grad`` tells of a bucket: none on other devices, none sparse."""
        specs = [bucket.spec for bucket in self._row.buckets]
        return not any(spec.sparse or spec.device != specs[0].device for spec in specs)

    def close(self) -> None:
        """Take notice that the step has ended well; decide who is hooked in the next."""
        self.used = bytearray(len(self._row.parameters))
        if self._hooked is _Hooked.FEW:
            if self._num_late >= _MOST_LATE_STEPS:
                self.listen()
            return
        is_steady = (
            self._is_usual and self._completed_by == self._last_completed_by and self._buckets is self._row.buckets
        )
        self._num_usual = self._num_usual + 1 if is_steady else 0
        self._last_completed_by = self._completed_by
        if self._num_usual >= self._patience and self._are_simple:
            self._hooked, self._num_late = _Hooked.FEW, 0
            pairs = zip(self._completed_by, self._row.buckets, strict=True)
            self._hooks.set({bucket.spec.parameters[-1] if index is None else index for index, bucket in pairs})
            for bucket in self._row.buckets:
                bucket.seal()
