"""Samples that could not be read, over all ranks: the run stops at them on all ranks, or leaves them out and counts."""

from collections.abc import Sequence

import torch

from lockstep.comm.collectives import Group, all_gather_object, all_reduce
from lockstep.data.loader import BadSample, MicroBatch, stop_error
from lockstep.data.order import BatchSplit
from lockstep.errors import DataError

# So many different samples may be bad, or this part of the data set if that is more.
_MOST, _MOST_OF_ALL = 10, 0.01


class BadSamples:
    """Takes note of the samples that this rank could not read, and of those of the others.

    Args:
        skip: Whether the run goes on without them.
        device: Of this rank.
        group: The ranks that train together, or None if it is only this process.
        num_samples: Length of the data set; None for a stream.
        evaluation: Whether it is the data set for evaluation.

    Attributes:
        skipped: What the run went without so far, over all ranks.
        num_in_step: Those of the step that runs, as far as they were exchanged.
        pending: Those of this rank that the others do not know of yet.
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
        self.num_in_step = 0
        self._different: set[int] = set()
        self.pending: list[BadSample] = []

    def add(self, micro: MicroBatch) -> None:
        """Add what this rank could not read of a micro-batch of the step.

        Raises:
            DataError: The run is to stop at that, and no other rank has to know.
        """
        # With others, this rank goes through the step all the same, as ranks without samples do, or they would wait for
        # it. How many there are travels with the sums of the losses, so it costs no exchange of its own.
        self.pending += micro.bad
        if self.pending and self._group is None:
            self._take([self.pending])

    def all_have_samples(self, micro: MicroBatch, index: int, split: BatchSplit) -> bool:
        """Return whether all ranks have samples in a micro-batch, where they must know that before forward.

        Collective: every rank, if there is a group and each should have samples. Blocks; on a device it is not, and
        does not, if the run stops at bad samples.

        Args:
            micro: Of this rank, which has been added.
            index: The number of the micro-batch in its step.
            split: Says whether each should have samples.

        Raises:
            DataError: On a device, on this rank alone: it could not read its samples, and the run is to stop at that.
        """
        if not split.all_have_samples(micro.num_global, index):
            return False
        has_samples = bool(micro.batches)
        if self._group is None:
            return has_samples
        if self._device.type != "cpu" and not self.skip:
            if not has_samples:
                self._take([self.pending])
            return True
        flag = torch.tensor([int(has_samples)], device=self._device)
        all_reduce(flag, group=self._group, op="min")
        return bool(flag.item())

    def exchange(self) -> None:
        """Report to the other ranks which samples were bad, and learn of theirs.

        Collective: every rank, if there is a group. Blocks.

        Raises:
            DataError: There are some, and the run is to stop at them; or they are too many to go on without.
        """
        if self._group is None:
            return
        # On CPUs this comes before the parameters are updated. With a device it comes when the next step begins, so
        # that none waits for the device: the parameters that a run stopped with are not to be used.
        mine = [list(sample) for sample in self.pending]
        ranks = all_gather_object(mine, group=self._group, device=self._device)
        # JSON makes lists of tuples, and a list cannot be in a set.
        self._take([[BadSample(*each)._replace(others=tuple(each[-1])) for each in samples] for samples in ranks])

    def _take(self, ranks: Sequence[Sequence[BadSample]]) -> None:
        self.pending = []
        # Every rank reads all of a stream, so all report the same sample of it.
        bad = sorted(
            {sample for samples in ranks for sample in samples}, key=lambda sample: (sample.step, sample.sample)
        )
        if not bad:
            return
        if not self.skip or any(sample.others for sample in bad):
            raise stop_error(bad, self._data, evaluation=self._evaluation)
        self.skipped += bad
        self.num_in_step += len(bad)
        self._different |= {sample.sample for sample in bad}
        if self._num_allowed is not None and len(self._different) > self._num_allowed:
            raise DataError(
                f'{len(self._different)} samples of {self._data} cannot be read, more than bad_samples="skip" goes on '
                f"without ({self._num_allowed}). The last is {bad[-1].name}\n"
                "Is the storage still there, and are the files complete? Repair or remove what cannot be read."
            )
