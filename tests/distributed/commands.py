"""Run the command line in a process of its own, as a user would.

Commands that a test only waits for are forked off a process that has imported torch already: that import is what most
of them spend their time on.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


def start(*args, **kwargs):
    """Start ``lockstep ARGS``."""
    return subprocess.Popen([sys.executable, "-m", "lockstep", *args], text=True, **kwargs)


def lockstep(*args, timeout=100, cwd=None, env=None):
    """Run ``lockstep ARGS`` to its end."""
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        open(os.devnull) as nothing,
        _connection() as connection,
    ):
        request = {"args": args, "cwd": str(cwd or os.getcwd()), "env": dict(os.environ if env is None else env)}
        descriptors = [nothing.fileno(), out.fileno(), err.fileno()]
        socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
        pid = int(connection.recv(64))
        connection.settimeout(timeout)
        try:
            code = int(connection.recv(64))
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(args, timeout) from None
        for file in (out, err):
            file.seek(0)
        return Done(code, out.read().decode(), err.read().decode())


_ROOT = Path(__file__).parents[2]
_lock = threading.Lock()
_server = []


def _connection():
    """Connect to the process that forks, which is started at the first time and ends with this one."""
    with _lock:
        if not _server:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                command = [sys.executable, "-m", "tests.distributed.command_server", str(theirs.fileno())]
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, cwd=_ROOT)
            _server[:] = [ours, process]
            atexit.register(_stop)
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(_server[0], [b"x"], [theirs.fileno()])
        return mine


def _stop():
    connection, process = _server
    connection.close()
    process.wait(10)
