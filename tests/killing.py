"""A process that ends in the middle of a save: nothing reaches the disk from some byte or operation on."""

import contextlib
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
        real = {name: getattr(os, name) for name in (*OPERATIONS, "open", "write")}

        def operation(name):
            def run(*args, **kwargs):
                self._spend(1)
                return real[name](*args, **kwargs)

            return run

        def create(path, flags, *args, **kwargs):
            if flags & os.O_CREAT:
                self._spend(1)
            return real["open"](path, flags, *args, **kwargs)

        def write(descriptor, piece):
            with self._lock:
                left = self._limit - self.count
                self.count += min(left, len(piece))
            if len(piece) > left:
                real["write"](descriptor, piece[:left])
                self._kill()
            return real["write"](descriptor, piece)

        for name in OPERATIONS:
            monkeypatch.setattr(os, name, operation(name))
        monkeypatch.setattr(os, "open", create)
        monkeypatch.setattr(os, "write", write)
        # As this changes nothing that the process can see, it need not be counted, nor cost time.
        monkeypatch.setattr(os, "fsync", lambda descriptor: None)

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
