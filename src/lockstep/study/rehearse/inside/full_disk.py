"""A disk without any room: files can be made, but what is written to them fails as it does then."""

from __future__ import annotations

import builtins
import functools
import io
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR
_SPARED = (f"{tempfile.gettempdir()}{os.sep}lockstep-", "/dev/", "/proc/")
"""The launcher's own folder, without which nobody could say what happened, and what is no disk."""


def fill(is_full: Callable[[], bool]) -> None:
    """Let writing to files fail from the moment on when ``is_full`` says so, in this process, for good.

    The descriptor is led to /dev/full, so that the error is the kernel's own. Programs that open files in native code
    by their name are not covered, but for those of torch and safetensors.
    """
    open_file, open_descriptor = builtins.open, os.open

    @functools.wraps(open_file)
    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        found = open_file(file, mode, *args, **kwargs)
        if set(mode) & set("wax+"):
            lead_nowhere(found.fileno())
        return found

    @functools.wraps(open_descriptor)
    def opened_low(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        found = open_descriptor(path, flags, *args, **kwargs)
        if flags & _WRITING:
            lead_nowhere(found)
        return found

    def lead_nowhere(descriptor: int) -> None:
        if not _is_on_disk(descriptor) or not is_full():
            return
        nowhere = open_descriptor("/dev/full", os.O_WRONLY)
        os.dup2(nowhere, descriptor, inheritable=False)
        os.close(nowhere)

    builtins.open = io.open = opened
    os.open = opened_low
    _write_in_python()


def _is_on_disk(descriptor: int) -> bool:
    if sys.platform != "linux" or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    return not os.readlink(f"/proc/self/fd/{descriptor}").startswith(_SPARED)


def _write_in_python() -> None:
    """Let what torch and safetensors write in native code go through Python's files."""
    import safetensors.torch
    import torch

    save = torch.save

    @functools.wraps(save)
    def saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, str | os.PathLike):
            return save(obj, f, *args, **kwargs)
        with open(f, "wb") as file:
            return save(obj, file, *args, **kwargs)

    def save_file(tensors: Any, filename: Any, metadata: Any = None) -> None:
        data = safetensors.torch.save(tensors, metadata)
        with open(filename, "wb") as file:
            file.write(data)

    torch.save = saved
    safetensors.torch.save_file = save_file
