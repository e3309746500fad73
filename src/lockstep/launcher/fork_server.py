"""Fork ranks from a process that has imported torch: they need not import it again, and share its memory.

    launcher                   server                             rank
    import torch
    start() ---- fork -------> imports what ranks need
    fork()  ---- request ----> forks twice ---------------------> is the launcher's child; bootstrap.py
            <----------------------------------------- its pid ---

The server is forked from the command ``lockstep`` before that has threads, devices or the user's task. `launch` is
called by programs that may have all of these, so its server is a new interpreter. The process between server and rank
ends at once, and the launcher adopts the rank (PR_SET_CHILD_SUBREAPER); torch elastic then polls and kills it like any
child.

If a program needs a new interpreter, ranks are not forked (`_needs_interpreters`). All forked ranks have the same
string hashes, and /proc/PID/environ shows the launcher's variables: their titles have the rank. A forked rank ends like
any interpreter.
"""

import atexit
import ctypes
import gc
import io
import itertools
import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TextIO

from lockstep.base.activity import log
from lockstep.base.env import usable_cores
from lockstep.base.rank_files import STOP_SIGNALS
from lockstep.launcher import bootstrap

_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
MOST_BYTES = 1 << 20
# That end a launcher, as torch elastic's. Schedulers send them to all processes of a job, terminals to all of a group.
END_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
_POLL_S, _PAUSE_S, _EXIT_S = 0.01, 0.0005, 10.0
# Variables that a new interpreter, the loader, or a library reads only once, when it is started or imported.
_READ_ONCE = re.compile(
    r"\b(?!TORCHELASTIC|TORCH_NCCL|TORCH_DISABLE_SHARE_RDZV"  # read later, and set for ranks
    r"|KMP_INIT_AT_FORK|KMP_DUPLICATE_LIB_OK)"  # set by scikit-learn itself
    r"(PYTHON|(LD|GLIBC|MALLOC|OMP|GOMP|KMP|MKL|OPENBLAS|DNNL|ONEDNN|NPY|PYTORCH|TORCH[A-Z]*)_)[A-Z]"
)
# The first optimizer of a rank imports it, which takes nearly as long as torch.
OPTIMIZER = "torch._dynamo"

# The launcher's side.


class ForkedProcess:
    """A child of this process, with what torch elastic uses of `subprocess.Popen` and of its own handler of one."""

    def __init__(self, pid: int) -> None:
        self.pid, self.proc = pid, self
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; ``None`` if it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # its status was already read; Popen also returns 0 then
                pid, status = self.pid, 0
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        """Block until it has ended, at most ``timeout`` seconds; return its exit status."""
        end_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(_POLL_S)
        return code

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Send a signal to its group."""
        os.killpg(self.pid, death_sig)


class ForkServer:
    """The connection to a server, and the variables that the server has read from its environment.

    Args:
        connection: To the server, which ends when this is closed.
        process: The server, a child of this process.
    """

    _lock = threading.Lock()

    def __init__(self, connection: socket.socket, process: ForkedProcess | subprocess.Popen[bytes]) -> None:
        self._connection, self._process = connection, process
        self._environ = dict(os.environ)

    def preload(self, names: Sequence[str]) -> None:
        """Make the server import modules for all ranks; does not block."""
        with suppress(OSError):  # the server is gone: `fork` will notice
            self._connection.send(json.dumps(names).encode())

    def fork(self, args: Sequence[str], environ: Mapping[str, str], files: Sequence[int]) -> ForkedProcess | None:
        """Start a process that runs as ``python ARGS``; return ``None`` if this needs a new interpreter.

        Args:
            args: The arguments of the interpreter.
            environ: Its whole environment.
            files: The descriptors of its standard input, output and error.
        """
        if self._has_read_others(environ):
            return None
        libc, before = ctypes.CDLL(None), ctypes.c_int()
        with self._lock, suppress(OSError, ValueError):
            request = {"args": args, "parent": os.getpid(), "environ": dict(environ), "cwd": os.getcwd()}
            reply, sent = map(open, os.pipe(), "rw")
            libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                with reply:
                    with sent:
                        socket.send_fds(self._connection, [json.dumps(request).encode()], [*files, sent.fileno()])
                    # The reply has no number if the server, or its child, is gone.
                    return ForkedProcess(int(reply.read()))
            finally:
                libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value)
        return None

    def _has_read_others(self, environ: Mapping[str, str]) -> bool:
        """Return whether the server has read another value of a read-once variable; threads can be set again."""
        old, new = ({name: of[name] for name in of if _READ_ONCE.match(name)} for of in (self._environ, environ))
        if "OMP_NUM_THREADS" in new:
            old["OMP_NUM_THREADS"] = new["OMP_NUM_THREADS"]
        return old != new

    def restart_if_ended(self) -> None:
        """Start another server if this one was killed: without one, a new rank takes seconds to import torch."""
        if self._process.poll() is not None:
            log("the process that forks ranks has ended; another one is started")
            self._connection.close()
            server = _interpreter()
            self._connection, self._process, self._environ = server._connection, server._process, server._environ
            self.preload(["torch.distributed", OPTIMIZER])

    def close(self) -> None:
        """End the server; ranks are not ended."""
        self._connection.close()
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)  # it may be importing a module
            self._process.wait(_EXIT_S)


_server: ForkServer | None = None


@contextmanager
def signal_handlers(numbers: Iterable[int], handler: signal.Handlers | Callable[[int, object], None]) -> Iterator[None]:
    """Install ``handler`` for these signals inside the block; without effect in other threads than the main thread.

    A signal that is ignored stays ignored, as ``nohup`` wants of SIGHUP, and a shell without job control of SIGINT and
    SIGQUIT in programs that it starts in the background.
    """
    with ExitStack() as stack:
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            if (before := signal.getsignal(number)) != signal.SIG_IGN:
                stack.callback(signal.signal, number, before or signal.SIG_DFL)
                signal.signal(number, handler)
        yield


def end_early(number: int, _frame: object) -> None:
    """End this process, in which nothing has begun, by Ctrl-C: KeyboardInterrupt may be lost in the imports."""
    os.write(2, b"lockstep: stopped by Ctrl-C before anything was started\n")
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def start() -> None:
    """Import torch and fork the server from this process, if it is the command ``lockstep`` at its start.

    Ranks leave through its stack, with `SystemExit`, so that their interpreter ends like any other.
    """
    global _server
    if re.search(r"\blockstep(/__main__\.py)?$", sys.argv[0]) is None:
        return  # programs that call it from Python use the server of `launch`
    with signal_handlers((signal.SIGINT,), end_early):
        import_modules(["torch"])
    if _server is None and _can_fork() and threading.active_count() == 1:
        _server = fork_here()


def preload(*names: str) -> None:
    """Make the server, if one was started, import modules for its ranks; does not block."""
    if _server is not None:
        _server.preload(names)


@contextmanager
def server_for(mode: str, target: str, num_ranks: int) -> Iterator[ForkServer | None]:
    """Yield a server that forks ranks, which ends with the block; ``None`` if they must be new interpreters.

    Args:
        mode: What they run; see `lockstep.launcher.api.supervise`.
        target: Likewise.
        num_ranks: The number of ranks. For a single rank, starting a new interpreter as the server is not worth it.
    """
    if not _can_fork() or _needs_interpreters(mode, target) or (_server is None and num_ranks == 1):
        yield None
        return
    # A script's first line would have to wait for that import, two seconds. With a core for each rank, the first step
    # comes nearly as early if each rank imports it, for 1.5 times the processor time and 64 MiB more per rank; eight
    # ranks on two cores would take 13 seconds instead of 5. A command's call (`fit`) has no such line.
    with nullcontext(_server) if _server is not None else closing(_interpreter()) as server:
        if mode == "call" or num_ranks > usable_cores():
            server.preload(["torch.distributed", OPTIMIZER])
        yield server


def _interpreter() -> ForkServer:
    """Start a server that is a new interpreter."""
    own_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with server_end:
        command = [sys.executable, "-u", __file__, str(server_end.fileno())]
        process = subprocess.Popen(command, pass_fds=[server_end.fileno()], start_new_session=True)
    return ForkServer(own_end, process)


def _can_fork() -> bool:
    """Return whether a fork of this process, or of one with its settings, is equivalent to a new interpreter."""
    option = sys.orig_argv[1] if len(sys.orig_argv) > 1 else ""
    is_plain = not option.startswith("-") or option in ("-m", "-c", "-u")  # not -O, -X ..., which ranks do not get
    is_traced = sys.gettrace() is not None or sys.getprofile() is not None  # a debugger, or coverage
    if sys.version_info >= (3, 12):
        is_traced = is_traced or any(map(sys.monitoring.get_tool, range(6)))
    return sys.platform == "linux" and os.environ.get("LOCKSTEP_FORK") != "0" and is_plain and not is_traced


def _needs_interpreters(mode: str, target: str) -> bool:
    """Return whether the program, or a device, needs a new interpreter."""
    from lockstep.base import torch_internals

    if mode == "command":
        return True
    # A plug-in backend, which torch imports by itself, may have threads or a device as soon as it is imported.
    if torch_internals.privateuse1_name() != "privateuseone":
        return True
    # A script sets such variables before it imports torch; here torch is already imported.
    is_file = mode == "script" and os.path.isfile(target)
    return is_file and _READ_ONCE.search(Path(target).read_text("latin-1")) is not None


# The server's side.


def serve(connection: socket.socket) -> list[str]:
    """Fork a process for each request until the launcher is gone; return in each child, with its arguments."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in END_SIGNALS}  # it ends with its launcher
    bootstrap.set_title("fork server")
    environ = dict(os.environ)
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # a reader of the launcher's output must see its end
        os.dup2(null, number)
    os.close(null)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MOST_BYTES, 4)
        if not message:
            os._exit(0)
        request = json.loads(message)
        if isinstance(request, list):
            import_modules(request)
            continue
        if (between := os.fork()) == 0:
            between = os.getpid()
            if _is_bound_to_device() or os.fork() > 0:
                os._exit(0)
            while os.getppid() == between:  # until the launcher has adopted it
                time.sleep(_PAUSE_S)
            if os.getppid() != request["parent"]:
                os._exit(1)
            connection.close()
            reply = descriptors.pop()
            take_place(request, descriptors)
            for number, handler in handlers.items():
                is_default = handler in (signal.SIG_DFL, end_early) and number == signal.SIGINT
                signal.signal(number, signal.default_int_handler if is_default else handler)
            if (threads := os.environ.get("OMP_NUM_THREADS", "")) != environ.get("OMP_NUM_THREADS", ""):
                _set_num_threads(threads)
            os.write(reply, str(os.getpid()).encode())
            os.close(reply)
            return list(request["args"])
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def _is_bound_to_device() -> bool:
    """Return, in a child of the server, whether the server has used a device: then this process cannot use it."""
    import torch

    from lockstep.base import torch_internals

    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and torch_internals.is_in_bad_fork(accelerator.type)


def import_modules(names: Sequence[str]) -> None:
    """Import the modules that exist; the garbage collector ignores their objects from now on.

    Collections do not write to these objects, so they stay shared with forked processes; and this process ends sooner.
    """
    gc.disable()  # a collection would visit all of torch's objects for nothing
    for name in names:
        with suppress(Exception):  # the rank that needs it will report the error
            import_module(name)
    gc.freeze()
    gc.enable()


def take_place(place: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Give this process its own session, environment, folder, random numbers, and streams as with ``python -u``."""
    os.setsid()
    os.environ.clear()
    os.environ.update(place["environ"])
    os.chdir(place["cwd"])
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        before: TextIO = getattr(sys, f"__{name}__")
        raw = io.FileIO(number, "w", closefd=False)
        raw.name = f"<{name}>"
        stream = io.TextIOWrapper(raw, before.encoding, before.errors, newline="\n", write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # Each process has different ones until the program seeds them; Python seeds its own at a fork.
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _set_num_threads(text: str) -> None:
    """Apply OMP_NUM_THREADS as libraries do when they are loaded."""
    number = text.partition(",")[0].strip()
    if not number.isdecimal() or int(number) == 0:
        return
    import torch

    torch.set_num_threads(int(number))
    with open("/proc/self/maps", errors="surrogateescape") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps if "openblas" in line}  # numpy's
    for library, prefix, suffix in itertools.product(map(ctypes.CDLL, paths), ("", "scipy_"), ("", "64_")):
        with suppress(AttributeError):
            getattr(library, f"{prefix}openblas_set_num_threads{suffix}")(int(number))


def become(words: Sequence[str]) -> NoReturn:
    """Be the rank ``python -u bootstrap.py ...``, whose arguments are ``words``; leaves with `SystemExit`."""
    sys.orig_argv = [sys.executable, *words]
    sys.argv = list(words[1:])
    bootstrap.main(sys.argv)
    sys.exit()


def fork_here(run: Callable[[Sequence[str]], NoReturn] = become) -> ForkServer:
    """Fork a server from this process, which has imported what forked processes need, and has no threads.

    Args:
        run: Called in each forked process, with its arguments.
    """
    own_end, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if (pid := os.fork()) == 0:
        own_end.close()
        run(serve(server_end))
    server_end.close()
    server = ForkServer(own_end, ForkedProcess(pid))
    atexit.register(server.close)
    return server


if __name__ == "__main__":
    become(serve(socket.socket(fileno=int(sys.argv[1]))))
