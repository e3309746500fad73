"""Run the command line in a process of its own, as a user would.

Commands that a test only waits for are forked off a process that has imported torch already: that import is what most
of them spend their time on.
"""

import atexit
import contextlib
import functools
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


class Command:
    """A command that runs: what a test uses of `subprocess.Popen`. Its output is read when it has ended, or by line."""

    def __init__(self, args, *, cwd=None, env=None, stdout=None, stderr=None, start_new_session=False, network=None):
        given = {"stdout": stdout, "stderr": stderr}
        self._pipes = dict.fromkeys(given)
        with contextlib.ExitStack() as stack:
            descriptors = [stack.enter_context(open(os.devnull)).fileno()]
            for number, (name, file) in enumerate(given.items(), 1):
                if file == subprocess.PIPE:
                    ours, theirs = os.pipe()
                    self._pipes[name] = open(ours)  # noqa: SIM115 - closed when it has been read
                    stack.callback(os.close, theirs)
                    descriptors.append(theirs)
                else:
                    descriptors.append(number if file is None else file.fileno())
            self._connection = _connection()
            request = {
                "args": [os.fspath(word) for word in args],
                "cwd": str(cwd or os.getcwd()),
                "environ": dict(os.environ if env is None else env),
                "new_session": start_new_session,
                "network": network,
            }
            socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
            self.pid = int(self._connection.recv(64))
        self.stdout, self.stderr = self._pipes.values()
        self.returncode = None

    def wait(self, timeout=None):
        """Wait for its end; return its exit code."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(64))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("lockstep", timeout) from None
            self._connection.close()
        return self.returncode

    def poll(self):
        """Return its exit code; none if it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        """Return all that it writes until its end; may be called again after that."""
        threads, texts = [], {}
        for name, pipe in self._pipes.items():
            if pipe is not None and not pipe.closed:
                read = functools.partial(_read_all, pipe, texts, name)
                threads.append(threading.Thread(target=read, daemon=True))
                threads[-1].start()
        self.wait(timeout)
        for thread in threads:
            thread.join(timeout)
        return texts.get("stdout", ""), texts.get("stderr", "")


def _read_all(pipe, texts, name):
    with pipe:
        texts[name] = pipe.read()


def start(*args, **kwargs):
    """Start ``lockstep ARGS``, with empty standard input."""
    return Command(args, **kwargs)


def lockstep(*args, timeout=100, cwd=None, env=None):
    """Run ``lockstep ARGS`` to its end."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = start(*args, cwd=cwd, env=env, stdout=out, stderr=err)
        try:
            code = command.wait(timeout)
        except subprocess.TimeoutExpired:
            command.kill()
            raise
        for file in (out, err):
            file.seek(0)
        return Done(code, out.read().decode(), err.read().decode())


_ROOT = Path(__file__).parents[2]
_lock = threading.Lock()
_server = []


@functools.cache
def connection_for_children():
    """Return the connection to a process that forks what this process starts: see tests/forking.py."""
    connection = _connection()
    connection.send(b"null")
    return connection


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
