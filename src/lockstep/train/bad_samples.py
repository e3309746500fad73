"""Samples that could not be read, over all ranks: the run stops at them, on every rank, or leaves them out and counts.

[Note: bad samples]
A rank that cannot read a sample goes through the step all the same, as ranks without samples do, or else the others
would wait for it. How many there are travels with the sums of the losses, so it costs no exchange of its own. Only if
there are any do the ranks tell each other which; then all raise the same error, or all count the same samples.
On CPUs that is before the parameters are updated. On CUDA it is when the next step begins, or before anything is kept
of this one, so that no step waits for the device: the parameters that a run stopped with are not to be used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.comm.collectives import Group, all_gather_object, all_reduce
from lockstep.data.loader import BadSample, MicroBatch, stop_error
from lockstep.data.order import BatchSplit
from lockstep.errors import DataError

_MOST, _MOST_OF_ALL = 10, 0.01
"""So many different samples may be bad, or this part of the data set if that is more."""


class BadSamples:
    """Takes note of the samples that this rank could not read, and of those of the others.

    Args:
        skip: Whether the run goes on without them.
        device: Of this rank.
        group: The ranks that train together, or None if it is only this process.
        num_samples: Length of the data set; None for a stream.
        evaluation: Whether it is the data set for evaluation.
    """

    def __init__(
        self,
        *,
        skip: bool,
        device: torch.device,
        group: Group | None,
        num_samples: int | None,
        evaluation: bool = False,
    ) -> None:
        self.skip, self._device, self._group = skip, device, group
        self._evaluation = evaluation
        self._data = "the evaluation data set" if evaluation else "the data set"
        self._num_allowed = None if num_samples is None else max(_MOST, int(_MOST_OF_ALL * num_samples))
        self.skipped: list[BadSample] = []
        self._different: set[int] = set()
        self._mine: list[BadSample] = []
        self._num_read = self._num_skipped = 0
        self._notes: Tensor | None = None
        self.heard: tuple[int, int] = (0, 0)
        """What else the ranks told each other in the last step that was settled; see `lockstep.train.stopping`."""
        self._arrived: torch.cuda.Event | None = None

    @property
    def num_pending(self) -> int:
        """Those of this rank that the others do not know of yet."""
        return len(self._mine)

    def begin_step(self) -> None:
        """Begin a step: see `settle`, whose errors it raises. Collective: every rank, if there is a group."""
        self.settle()
        self._num_read = self._num_skipped = 0

    def begin_again(self) -> None:
        """Forget what was read in the step that is done again."""
        self._num_read, self._mine = 0, []

    def add(self, micro: MicroBatch) -> None:
        """Add what this rank read of a micro-batch of the step, and what it could not read.

        Raises:
            DataError: It could not read something, the run is to stop at that, and no other rank has to know.
        """
        self._num_read += sum(micro.sizes)
        self._mine += micro.bad
        if self._mine and self._group is None:
            self._take([self._mine])

    def all_have_samples(self, micro: MicroBatch, index: int, division: BatchSplit) -> bool:
        """Return whether all ranks have samples in a micro-batch, where they must know that before forward.

        Collective: every rank, if there is a group and each should have samples. Blocks; on CUDA it is not, and does
        not, if the run stops at bad samples.

        Args:
            micro: Of this rank, which has been added.
            index: The number of the micro-batch in its step.
            division: Says whether each should have samples.

        Raises:
            DataError: On CUDA, on this rank alone: it could not read its samples, and the run is to stop at that.
        """
        if not division.all_have_samples(micro.num_global, index):
            return False
        has_samples = bool(micro.batches)
        if self._group is None:
            return has_samples
        if self._device.type == "cuda" and not self.skip:
            if not has_samples:
                self._take([self._mine])
            return True
        flag = torch.tensor([int(has_samples)], device=self._device)
        all_reduce(flag, group=self._group, op="min")
        return bool(flag.item())

    def send(self, notes: Tensor, *, is_sum: bool = True) -> None:
        """Let the ranks know how many there are, and on CPUs, which.

        Collective: every rank, if there is a group.

        Args:
            notes: How many, and what else there is to tell, on the device.
            is_sum: Whether these are the numbers over all ranks already, or only those of this one.

        Raises:
            DataError: As `settle`, which on CUDA is left to be called later.
        """
        if self._group is None:
            return
        if not is_sum:
            all_reduce(notes, group=self._group)
        if self._device.type != "cuda":
            self._notes = notes
            self.settle()
            return
        self._notes = torch.empty_like(notes, device="cpu", pin_memory=True)
        self._notes.copy_(notes, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record(torch.cuda.current_stream(self._device))

    def settle(self) -> None:
        """Learn which samples of the last step were bad.

        Collective: every rank, if there is a group. On CUDA, blocks until the forward passes of that step are done.

        Raises:
            DataError: There are some, and the run is to stop at them; or they are too many to go on without.
        """
        if self._notes is None:
            return
        num_bad, stop, failed = self._told()
        self._notes, self.heard = None, (stop, failed)
        if num_bad:
            self.share()

    def share(self) -> None:
        """Tell the other ranks which samples were bad, and learn of theirs.

        Collective: every rank, if there is a group. Blocks.

        Raises:
            DataError: As `settle`.
        """
        if self._group is None:
            return
        mine = [list(sample) for sample in self._mine]
        ranks = all_gather_object(mine, group=self._group, device=self._device)
        self._take([[BadSample.from_json(fields) for fields in samples] for samples in ranks])

    def all_missing(self, num_global: int) -> bool:
        """Return whether no rank could read any of the ``num_global`` samples of the step; the same on every rank.

        On CUDA, blocks if this rank has read none, until the forward passes of the step are done.
        """
        if not self.skip or self._num_read:
            return False
        return (self._num_skipped if self._notes is None else self._told()[0]) >= num_global

    def _told(self) -> tuple[int, int, int]:
        assert self._notes is not None
        if self._arrived is not None:
            self._arrived.synchronize()
        num_bad, stop, failed = self._notes.tolist()
        return int(num_bad), int(stop), int(failed)

    def _take(self, ranks: Sequence[Sequence[BadSample]]) -> None:
        self._mine = []
        # Every rank reads all of a stream, so all report the same sample of it.
        bad = sorted(
            {sample for samples in ranks for sample in samples}, key=lambda sample: (sample.step, sample.sample)
        )
        if not bad:
            return
        if not self.skip or any(sample.others for sample in bad):
            raise stop_error(bad, self._data, evaluation=self._evaluation)
        self.skipped += bad
        self._num_skipped += len(bad)
        self._different |= {sample.sample for sample in bad}
        if self._num_allowed is not None and len(self._different) > self._num_allowed:
            raise DataError(
                f'{len(self._different)} samples of {self._data} cannot be read, more than bad_samples="skip" goes on '
                f"without ({self._num_allowed}). The last is {bad[-1].name}\n"
                "Is the storage still there, and are the files complete? Repair or remove what cannot be read."
            )
