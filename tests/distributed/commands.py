"""Run the command line in a process of its own, as a user would; tests/forking.py makes it quick."""

import ctypes
import functools
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def start(*args, network=None, **kwargs):
    """Start ``lockstep ARGS``, with empty standard input, in the network namespace of that name if there is one."""
    join = None if network is None else functools.partial(join_network, network)
    words = [sys.executable, "-m", "lockstep", *map(os.fspath, args)]
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, text=True, preexec_fn=join, **kwargs)


def join_network(name):
    """Move this process to a network namespace."""
    with open(f"/var/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"this process cannot move to {name}")


def lockstep(*args, timeout=100, **kwargs):
    """Run ``lockstep ARGS`` to its end."""
    # Files, not pipes: a process that outlives the command would hold these open.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = start(*args, stdout=out, stderr=err, **kwargs)
        try:
            code = command.wait(timeout)
        except subprocess.TimeoutExpired:
            command.kill()
            raise
        for file in (out, err):
            file.seek(0)
        return Done(code, out.read().decode(), err.read().decode())
