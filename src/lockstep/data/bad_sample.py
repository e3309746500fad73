"""A sample that could not be read: which, where in the run, and why; made in a loader process, told by every rank."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from lockstep.errors import DataError, LockstepError

_ADVICE = (
    "Repair or remove what cannot be read, or go on without such samples and have them counted: "
    'bad_samples="skip" (--bad-samples skip).'
)


class BadSample(NamedTuple):
    """A sample that could not be read.

    Args:
        sample: Index in the data set; of a stream, how many came before it in the epoch.
        epoch: Counted from 0.
        step: Counted from 0 over all epochs; in an evaluation, the number of the batch.
        cause: What the data set said; for an exception that is not ours, with its type and where it was raised.
        file: Path of the file, where the data set named it; so for ``offset``.
        offset: Byte where the record begins.
        trace: The traceback of an exception that is not ours.
        others: Further samples of a batch that cannot be made of them, each of which can be read: no rule skips that.
    """

    sample: int
    epoch: int
    step: int
    cause: str
    file: str | None = None
    offset: int | None = None
    trace: str | None = None
    others: tuple[int, ...] = ()

    @classmethod
    def of(cls, error: Exception, index: int, epoch: int, step: int) -> Self:
        """Return what ``error`` says of the sample ``index``."""
        if isinstance(error, DataError):
            return cls(index, epoch, step, str(error), error.file, error.offset)
        if isinstance(error, LockstepError):
            return cls(index, epoch, step, str(error))
        words = "".join(traceback.format_exception_only(error)).strip()
        trace = "".join(traceback.format_exception(error))
        return cls(index, epoch, step, f"{words} ({_place(error)})", trace=trace)

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> Self:
        """Return what another rank sent as a list."""
        *rest, others = fields
        return cls(*rest)._replace(others=tuple(others))

    @classmethod
    def of_batch(cls, error: Exception, indices: Sequence[int], epoch: int, step: int) -> Self:
        """Return what ``error`` says of samples that cannot be made into a batch."""
        return cls.of(error, indices[0], epoch, step)._replace(others=tuple(indices[1:]))

    @property
    def name(self) -> str:
        """The sample and the cause, in one line."""
        return f"sample {self.sample}: {self.cause.splitlines()[0]}"


def _place(error: Exception) -> str:
    """Return the line that raised ``error``: the last one that is not in a library, for that is the one to mend."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_library(frame.filename)]
    if not frames:
        return "in the data set"
    last = frames[-1]
    return f"{last.filename}:{last.lineno} in {last.name}"


def _is_library(filename: str) -> bool:
    return "site-packages" in filename or filename.startswith((str(Path(__file__).parent), "<frozen"))


def stop_error(bad: Sequence[BadSample], data: str, *, evaluation: bool) -> DataError:
    """Return the error that ends a run in which samples of ``data`` could not be read: those of one step."""
    first = next((sample for sample in bad if sample.others), bad[0])
    place = "" if evaluation else f" (epoch {first.epoch + 1}, step {first.step + 1})"
    if first.others:
        head = f"Samples {_listed([first.sample, *first.others])} of {data} cannot be made into a batch{place}."
        tail = "Return samples of one kind and shape from the data set, or make batches of them with Task.collate."
    else:
        head = f"Sample {first.sample} of {data} cannot be read{place}."
        more = f"Nor can {len(bad) - 1} more: {_listed([sample.sample for sample in bad[1:]])}.\n" * (len(bad) > 1)
        tail = f"{more}{_ADVICE}"
    text = f"{head}\n{first.cause}\n{tail}"
    error = DataError(text, file=first.file, offset=first.offset, sample=first.sample)
    if first.trace is not None:
        error.add_note(first.trace)
    return error


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + ", ..." * (len(numbers) > 5)
