"""A process that ends in the middle of a save: nothing reaches the disk from some byte or operation on."""

import shutil

from lockstep.train import checkpoint_storage

OPERATIONS = ("make_folder", "create", "rename", "remove", "remove_folder")


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it, and clearing up does not work either."""


class Killer:
    """Counts what reaches the disk, a byte or an operation at a time, and lets nothing through once that is enough."""

    def __init__(self, monkeypatch, limit):
        self.count, self._limit = 0, limit
        real = {name: getattr(checkpoint_storage, name) for name in (*OPERATIONS, "write")}

        def operation(name):
            def run(*args):
                self._spend(1)
                return real[name](*args)

            return run

        def write(file, piece):
            left = self._limit - self.count
            if len(piece) > left:
                real["write"](file, piece[:left])
                self.count = self._limit
                raise Killed
            self.count += len(piece)
            real["write"](file, piece)

        for name in OPERATIONS:
            monkeypatch.setattr(checkpoint_storage, name, operation(name))
        monkeypatch.setattr(checkpoint_storage, "write", write)
        # As these change nothing that the process can see, they need not be counted, nor cost time.
        monkeypatch.setattr(checkpoint_storage, "flush", lambda file: None)
        monkeypatch.setattr(checkpoint_storage, "flush_folder", lambda path: None)

    def _spend(self, number):
        if self.count + number > self._limit:
            raise Killed
        self.count += number


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
            Killer(patch, limit)
            try:
                save(copy)
                done = True
            except Killed:
                done = False
        found.append(check(copy))
        if done:
            return len(found) - 1, found
        limit += stride
