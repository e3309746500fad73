"""Signals that stop a run early after it has saved, such as preemption by a scheduler."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from lockstep.base import rank_files
from lockstep.errors import RESUME_EXIT_CODE, exit_code_after

# Maximum delay between a signal and the launcher's request.
_REQUEST_WITHIN_S = 0.5
_NOT_SAVED = (
    "lockstep: Stopped by {} after {}; nothing was saved, because no folder for checkpoints was given.\n"
    "Add checkpoint=DIR (--checkpoint DIR): then a run that is stopped saves, and the same command resumes it.\n"
)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)


class StopSignals:
    """Handles signals that have no other handler during a run: preemption becomes a graceful stop.

    SIGTERM, SIGUSR1 and Ctrl-C become a request that is polled once per step. If the run cannot save, they end it at
    once, and rank zero says so. A context manager. Handlers can only be installed in the main thread; in other threads
    only the launcher's request is seen. Processes that are forked in the meantime have the previous handlers, but
    ignore Ctrl-C.

    [Note: signals in a rank]
    Our launcher turns a signal into a request in a file (`base/rank_files.py`). So a signal that a rank gets itself
    can mean two things. Either the signal was sent to all processes, as SLURM does: then there is a request, or will be
    soon. Or the launcher ends this rank, because another one failed or the time is up: then the rank has to end at
    once, even while it waits in native code, where Python runs no handlers. So a thread checks each signal, which the
    interpreter writes to a socket when it arrives.

    Args:
        saves: Whether the run can save.
        rank: Rank of this process.

    Attributes:
        progress: Returns in words what the run has done, such as ``step 3 of 10, loss 0.5``.
    """

    def __init__(self, *, saves: bool, rank: int) -> None:
        self._saves, self._rank = saves, rank
        self.progress: Callable[[], str] = lambda: "step 0"
        self._run_dir = rank_files.launcher_folder()
        self._received: signal.Signals | None = None
        self._before: dict[int, Any] = {}
        self._wakeup: socket.socket | None = None
        self._wakeup_before = -1

    @property
    def has_launcher(self) -> bool:
        """Whether our launcher handles the signals."""
        return self._run_dir is not None

    def asked(self) -> str | None:
        """Return the name of the signal that requests the run to stop, or None."""
        if self._run_dir is not None:
            return rank_files.stop_reason(self._run_dir)
        return None if self._received is None else self._received.name

    def report(self, text: str) -> None:
        """Report to the launcher, if there is one, that this rank has stopped gracefully."""
        if self._run_dir is not None:
            rank_files.report_stopped(self._run_dir, rank_files.own_name(), text)

    def __enter__(self) -> StopSignals:
        global _active
        handles = self._saves or self._rank == 0
        if handles and _active is None and threading.current_thread() is threading.main_thread():
            _active = self
            for number in rank_files.STOP_SIGNALS:
                # Without anything to save, Ctrl-C stays a KeyboardInterrupt.
                if (handler := signal.getsignal(number)) in _DEFAULTS and (self._saves or number != signal.SIGINT):
                    self._before[number] = handler
                    signal.signal(number, self._on_signal)
            if self._run_dir is not None or not self._saves:
                self._listen()
        if self._run_dir is not None and self._saves:
            rank_files.announce_graceful_stop(self._run_dir, rank_files.own_name())
        return self

    def __exit__(self, *_: object) -> None:
        global _active
        if self._run_dir is not None and self._saves:
            rank_files.withdraw_graceful_stop(self._run_dir, rank_files.own_name())
        if _active is self:
            _active = None
            if self._wakeup is not None:
                signal.set_wakeup_fd(self._wakeup_before)
                self._wakeup.close()  # ends the thread
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def say_not_saved(self, name: str) -> None:
        """Print on rank zero, which alone listens, that a signal ends the run, and nothing was saved."""
        os.write(2, _NOT_SAVED.format(called(name), self.progress()).encode())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._wakeup is not None:  # the thread handles it
            return
        if number == signal.SIGINT:
            if self._received is signal.SIGINT:
                raise KeyboardInterrupt
            os.write(2, rank_files.FIRST_CTRL_C_MESSAGE)
        self._received = signal.Signals(number)

    def _listen(self) -> None:
        self._wakeup, reader = socket.socketpair()
        self._wakeup.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._judge, args=[reader], name="lockstep-signals", daemon=True).start()

    def _judge(self, signals: socket.socket) -> None:
        with signals:
            while number := signals.recv(1):
                if number[0] in self._before and not self._saves:
                    name = signal.Signals(number[0]).name
                    # If the launcher has got no signal, another rank has failed, and that is what it reports.
                    if self._run_dir is None or self.asked() is not None:
                        self.say_not_saved(self.asked() or name)
                    _end_by(number[0])
                deadline = time.monotonic() + _REQUEST_WITHIN_S
                while number[0] in self._before and self.asked() is None:
                    if time.monotonic() > deadline:
                        _end_by(number[0])
                    time.sleep(0.01)


def called(name: str) -> str:
    """Return what people call a signal."""
    return "Ctrl-C" if name == "SIGINT" else name


def exit_code_of(stopped: str | None, *, has_launcher: bool) -> int:
    """Return the exit code for a run that was ``stopped`` for this reason; None: it was not.

    It is 0 if our launcher requested the stop, which would treat any other exit code as a failure.
    """
    folder = rank_files.launcher_folder() if has_launcher else None
    if stopped is None or (folder is not None and rank_files.stop_reason(folder) is not None):
        return 0
    if stopped == rank_files.ANOTHER_MACHINE:  # which waits to join; our launcher starts this process again
        return RESUME_EXIT_CODE
    return exit_code_after(signal.Signals[stopped], saved=True)


_active: StopSignals | None = None


def _leave_to_parent() -> None:
    """In a forked child: restore the handlers, but ignore Ctrl-C, which a terminal sends to all processes."""
    with contextlib.suppress(ValueError):  # not forked by the main thread
        if _active is not None:
            signal.set_wakeup_fd(-1)
            for number, handler in _active._before.items():
                signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else handler)


os.register_at_fork(after_in_child=_leave_to_parent)


def _end_by(number: int) -> None:
    """End this process by a signal, from any thread, as if it had no handler."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    set_handler(number, None)
    os.kill(os.getpid(), number)
