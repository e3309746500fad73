"""Errors that Lockstep raises: the cause on the first line, what to do on the lines that follow."""

import linecache
import os
import re
import sys
import traceback
from collections.abc import Callable
from functools import wraps
from signal import SIGINT, getsignal, valid_signals
from typing import Any, ParamSpec, TypeVar

# Texts in errors: of collectives, which fail where another rank is gone, is silent, or does something else; of
# connections that another process has closed; and other ways to report a rank that is gone.
OF_COLLECTIVES = (
    *("CollectiveError", "DistBackendError", "DistNetworkError", "DistStoreError"),
    *("gloo/transport", "NCCL error"),
)
OF_LINKS = ("BrokenPipeError", "ConnectionResetError", "closed by peer", "reset by peer", "remote process exited")
_OF_LOST_RANKS = (
    *OF_LINKS,
    *("Broken pipe", "got 0 bytes", "process has ended", "has left the group", "gave up", "left a group that lost"),
    *("closed the group after an error", "rank was lost", "rank that was lost", "was interrupted in"),
)


def tells_of_others(error: BaseException | str) -> int:
    """Return what an error, or its type and message, tells of other ranks.

    0: nothing. 1: it may be the consequence of what another rank did. 2: it only reports that another rank is gone.
    """
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    may_be_consequence = any(mark in text for mark in (*OF_COLLECTIVES, *OF_LINKS))
    return may_be_consequence + (may_be_consequence and any(mark in text for mark in _OF_LOST_RANKS))


def is_of_signal_handler(error: BaseException) -> bool:
    """Return whether a handler of a signal raised an error, such as that of DataLoader for a killed worker.

    A handler runs in the midst of any wait, and its error says nothing about other ranks.
    """
    handlers = [getattr(each, "func", each) for each in map(getsignal, valid_signals())]
    codes = {getattr(each, "__code__", getattr(type(each).__call__, "__code__", None)) for each in handlers}
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


# What every failing ``lockstep`` command returns; Ctrl-C returns 130.
EXIT_CODE = 1


class LockstepError(RuntimeError):
    """Base of all errors that Lockstep raises on purpose."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: the caller's lines and the message, which tells the cause without our frames."""
        hidden = (os.path.dirname(__file__), "/IPython/", "<string>")  # a dataclass's own methods have no file
        frames = traceback.extract_tb(self.__traceback__)
        callers = [frame for frame in frames if not any(part in frame.filename for part in hidden)]
        return [_with_cells(text) for text in (*traceback.format_list(callers), f"{type(self).__name__}: {self}")]


def _with_cells(text: str) -> str:
    """Replace the files that IPython names for the code of cells by the cells: ``Cell In[3], line 2``."""
    shell: Any = sys.modules["IPython"].get_ipython()
    for file in list(linecache.cache) if shell is not None else ():
        if (named := shell.compile.format_code_name(file)) is not None:
            cell = " ".join(named)
            text = text.replace(f'File "{file}", line', f"{cell}, line")
            text = re.sub(rf"{re.escape(file)}:(\d+)", rf"{cell}, line \1", text)
    return text


class ConfigurationError(LockstepError, ValueError):
    """The caller requested something that cannot work; the message names it and what to do instead."""


class WorldSizeMismatch(LockstepError):
    """Fewer or more processes arrived at start-up than the world size; names the missing ranks."""


class ModelMismatch(LockstepError):
    """The model differs between ranks; names the ranks, the parameter and both shapes or dtypes."""


class CollectiveError(LockstepError):
    """A collective failed or timed out; names this rank, the operation and the tensors it was for."""


# In the first line of the error of a rank that made such a call alone, as far as it can know.
CALLED_ALONE = "collective: call it on every rank, not behind `if rank == 0`."

P = ParamSpec("P")
T = TypeVar("T")


def called_by_all(name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate the public collective ``name``: an error says first that every rank must call it."""

    def decorate(call: Callable[P, T]) -> Callable[P, T]:
        @wraps(call)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return call(*args, **kwargs)
            except CollectiveError as error:
                raise CollectiveError(f"{name} is {CALLED_ALONE}\n{error}") from error

        return run

    return decorate


class RankFailed(LockstepError):
    """A rank of a launched job failed; carries the first failing rank's own traceback.

    Attributes:
        rank: The rank that failed first; ``None`` if that is not known.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class JobHangs(LockstepError):
    """Ranks of a launched job waited for each other for too long and were ended; names who waits for whom."""


# What a ``lockstep`` command returns after `JobHangs`.
HANG_EXIT_CODE = 83


class LaunchTimeout(LockstepError, TimeoutError):
    """The ranks of a launched job had not finished in time, and were ended."""


class Stopped(LockstepError):
    """A signal ended the launcher, and it has ended the ranks.

    Attributes:
        signal: Its number.
        saved: Whether the ranks stopped in order, and saved what they had.
        results: What the ranks of `launch` then returned, by rank.
    """

    def __init__(self, message: str, *, signal: int, saved: bool = False) -> None:
        super().__init__(message)
        self.signal = signal
        self.saved = saved
        self.results: list[Any] | None = None

    @property
    def exit_code(self) -> int:
        """What a ``lockstep`` command returns after it."""
        return exit_code_after(self.signal, saved=self.saved)


# What a ``lockstep`` command returns if the run was stopped from outside and saved: start it again to go on.
RESUME_EXIT_CODE = 75


def exit_code_after(signal: int, *, saved: bool) -> int:
    """Return what a command returns that a signal has stopped: after Ctrl-C it is not to be started again."""
    return RESUME_EXIT_CODE if saved and signal != SIGINT else 128 + signal


class DataError(LockstepError):
    """A record of a data set cannot be read; names the file, the place in it, the sample and the cause.

    Attributes:
        file: Path of the file.
        offset: Byte in it where the record begins; ``None`` where the error is about the whole file.
        sample: Index or key of the sample that was read; ``None`` if none was.
    """

    def __init__(
        self, message: str, *, file: str | None = None, offset: int | None = None, sample: int | str | None = None
    ) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset
        self.sample = sample


class NonFiniteGradient(LockstepError):
    """A step's gradient is NaN or infinite; names the rank, the parameter, the step and the samples.

    Attributes:
        step: Counted from 0 over all epochs.
        ranks: Those on which it arose; empty where that is not known.
    """

    def __init__(self, message: str, *, step: int | None = None, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.ranks = ranks


class ReplicasDiffer(LockstepError):
    """The ranks do not hold the same bits any more; names the first tensor that differs, and the ranks on each side.

    Attributes:
        tensor: Its name.
        sides: The ranks that agree with each other, by side; the largest side first.
    """

    def __init__(self, message: str, *, tensor: str | None = None, sides: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__(message)
        self.tensor = tensor
        self.sides = sides


class LoaderDied(LockstepError):
    """A process that loads samples is gone; names the rank and the process, what it probably died of and what helps."""


class OutOfMemory(LockstepError):
    """A rank ran out of memory in forward or backward; has its memory, and the micro-batch to try."""


class CheckpointError(LockstepError):
    """A checkpoint cannot be read or written; names the file."""
