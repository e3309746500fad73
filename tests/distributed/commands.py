"""Run the command line in a process of its own, as a user would."""

import subprocess
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def start(*args, **kwargs):
    """Start ``lockstep ARGS``."""
    return subprocess.Popen([sys.executable, "-m", "lockstep", *args], text=True, **kwargs)


def lockstep(*args, timeout=100, **kwargs):
    """Run ``lockstep ARGS`` to its end."""
    pipe = subprocess.PIPE
    with start(*args, stdout=pipe, stderr=pipe, stdin=subprocess.DEVNULL, **kwargs) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Done(process.returncode, out, err)
