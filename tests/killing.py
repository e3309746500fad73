"""A process that ends in the middle of a save: nothing reaches the disk from some byte or operation on."""

import contextlib
import io
import os
import shutil
import threading

from lockstep.errors import CheckpointError

OPERATIONS = ("mkdir", "replace", "unlink", "rmdir")


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it, and clearing up does not work either."""


class Killer:
    """Counts what reaches the disk, a byte or an operation at a time, and lets nothing through once that is enough."""

    def __init__(self, monkeypatch, limit):
        self.count, self.has_killed = 0, False
        self._limit, self._lock = limit, threading.Lock()
        real = {name: getattr(os, name) for name in OPERATIONS}
        spend, write, open_file = self._spend, self._write, io.open

        def operation(name):
            def run(*args, **kwargs):
                spend(1)
                return real[name](*args, **kwargs)

            return run

        class Counted(io.FileIO):
            def write(self, piece):
                return write(super().write, piece)

        def create(path, mode="r", *args, **kwargs):
            if not set(mode) & set("wx"):
                return open_file(path, mode, *args, **kwargs)
            spend(1)
            return Counted(path, mode.replace("b", ""))

        for name in OPERATIONS:
            monkeypatch.setattr(os, name, operation(name))
        monkeypatch.setattr(io, "open", create)
        # As this changes nothing that the process can see, it need not be counted, nor cost time.
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def _write(self, write, piece):
        with self._lock:
            left = self._limit - self.count
            self.count += min(left, len(piece))
        if len(piece) > left:
            write(piece[:left])
            self._kill()
        return write(piece)

    def _spend(self, number):
        with self._lock:
            has_left = self.count + number <= self._limit
            self.count = self.count + number if has_left else self._limit
        if not has_left:
            self._kill()

    def _kill(self):
        self.has_killed = True
        raise Killed


def kill_everywhere(monkeypatch, original, scratch, save, check, stride=1):
    """Save into a copy of the folder ``original``, killed at each byte and operation; ``check(copy)`` after each.

    Returns how often it was killed, and what the checks returned, the last after a save that came through. With a
    ``stride``, only at each so many.
    """
    found, limit = [], 0
    while True:
        copy = scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(original, copy)
        with monkeypatch.context() as patch:
            killer = Killer(patch, limit)
            with contextlib.suppress(Killed, CheckpointError):
                save(copy)
        found.append(check(copy))
        if not killer.has_killed:
            return len(found) - 1, found
        limit += stride
