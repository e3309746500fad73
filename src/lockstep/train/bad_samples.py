"""Samples that cannot be read, over all ranks: all ranks stop, or skip and count them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from lockstep.comm.collectives import Group, all_gather_object, all_reduce
from lockstep.data.loader import BadSample, BatchSplit, MicroBatch, stop_error
from lockstep.errors import DataError

# Number of different samples that may be bad, or fraction of the data set if that is more.
_MOST, _MOST_OF_ALL = 10, 0.01


@dataclass(kw_only=True)
class BadSamples:
    """Collects the samples that the ranks could not read.

    Args:
        skip: Whether the run continues without them.
        device: Device of this rank.
        group: The ranks that train together; None: only this process.
        num_samples: Length of the data set; None for a stream.
        evaluation: Whether this is the data set for evaluation.

    Attributes:
        skipped: The samples that were skipped so far, over all ranks.
        num_in_step: Number of bad samples in the current step that were exchanged.
        pending: Bad samples of this rank that were not exchanged yet.
    """

    skip: bool
    device: torch.device
    group: Group | None
    num_samples: int | None
    evaluation: bool = False
    skipped: list[BadSample] = field(default_factory=list)
    pending: list[BadSample] = field(default_factory=list)
    num_in_step: int = 0

    def add(self, micro: MicroBatch) -> None:
        """Add the bad samples of a micro-batch of the step.

        Raises:
            DataError: The run is to stop, and there are no other ranks.
        """
        # If there are other ranks, this rank still takes part in the step, like a rank without samples, otherwise they
        # would wait. The number is sent with the sums of the losses, so it needs no additional exchange.
        self.pending += micro.bad
        if self.pending and self.group is None:
            self._take([self.pending])

    def all_have_samples(self, micro: MicroBatch, index: int, split: BatchSplit) -> bool:
        """Return whether all ranks have samples in a micro-batch, for engines that must know it before forward.

        Collective: every rank, if there is a group and each should have samples. Blocks. Neither on a device if the run
        stops at bad samples.

        Args:
            micro: The micro-batch of this rank, after `add`.
            index: The number of the micro-batch in its step.
            split: Whether each rank should have samples follows from it.

        Raises:
            DataError: On a device, on this rank alone: it could not read its samples, and the run is to stop.
        """
        if not split.all_have_samples(micro.num_global, index):
            return False
        has_samples = bool(micro.batches)
        if self.group is None:
            return has_samples
        if self.device.type != "cpu" and not self.skip:
            if not has_samples:
                self._take([self.pending])
            return True
        flag = torch.tensor([int(has_samples)], device=self.device)
        all_reduce(flag, group=self.group, op="min")
        return bool(flag.item())

    def exchange(self, last_step: float = math.inf) -> None:
        """Exchange the bad samples of all ranks.

        Collective: every rank, if there is a group. Blocks.

        Args:
            last_step: Those of later steps stay.

        Raises:
            DataError: There are some, and the run is to stop; or there are too many.
        """
        if self.group is None:
            return
        # On CPUs this happens before the parameters are updated. On a device it happens in the next step, so that the
        # host does not wait; the parameters of a run that stops here are not used.
        mine = [list(sample) for sample in self.pending if sample.step <= last_step]
        later = [sample for sample in self.pending if sample.step > last_step]
        ranks = all_gather_object(mine, group=self.group, device=self.device)
        # JSON turns tuples into lists, which are not hashable.
        self._take([[BadSample(*each)._replace(others=tuple(each[-1])) for each in samples] for samples in ranks])
        self.pending = later

    def _take(self, ranks: Sequence[Sequence[BadSample]]) -> None:
        self.pending = []
        # Every rank reads the whole stream, so all report the same sample.
        different = {sample for samples in ranks for sample in samples}
        bad = sorted(different, key=lambda sample: (sample.step, sample.sample))
        if not bad:
            return
        data = "the evaluation data set" if self.evaluation else "the data set"
        if not self.skip or any(sample.others for sample in bad):
            raise stop_error(bad, data, evaluation=self.evaluation)
        self.skipped += bad
        self.num_in_step += len(bad)
        num_different = len({sample.sample for sample in self.skipped})
        num_allowed = math.inf if self.num_samples is None else max(_MOST, int(_MOST_OF_ALL * self.num_samples))
        if num_different > num_allowed:
            raise DataError(
                f'{num_different} samples of {data} cannot be read, more than bad_samples="skip" allows '
                f"({num_allowed}). The last is {bad[-1].name}\n"
                "Check that the storage is available and the files are complete. Repair or remove unreadable samples."
            )
