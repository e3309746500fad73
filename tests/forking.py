"""Have processes that a test starts forked off one that has imported torch, instead of new interpreters.

An interpreter that imports torch and makes its first optimizer has spent more than four seconds of a core; tests start
hundreds. What `subprocess` would start as a new interpreter (``python -m lockstep``, a script of a test, a worker of
the pool) is forked by the launcher's fork server (`lockstep.launcher.fork_server`), as ranks are. What such a process
starts itself is forked off a copy of it that is made before it has any threads.

Started as ``python -m tests.forking FD`` this is a server. Forked processes hash strings alike. A session of tests has
two servers, so that an order that depends on a set differs between neighbouring ranks of the pool, as for users.
"""

import atexit
import functools
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path

from lockstep.launcher import bootstrap, fork_server

# Environment variables: the folder of a forked process, and what it calls first; and which server it is forked off.
PLACE, SERVER = "FORKED_PLACE", "FORKED_SERVER"
# Environment variables that lockstep.cli and torch._dynamo set when they are imported. The server has imported both;
# the tests' own process does so at some point, and what it starts after that can be forked all the same. And those of
# tests/conftest.py that change no result.
SET_BY_IMPORTS = ("TORCH_CPP_LOG_LEVEL", "TORCHINDUCTOR_CACHE_DIR", "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS")
MODULES = (
    "tests.pool_worker",
    "lockstep.cli",
    "lockstep.cli.run",
    "lockstep.cli.train",
    "lockstep.launcher.command",
    "lockstep.train.fit",
    "encodings.idna",  # of a socket's first address
    "torch.utils.serialization",  # of the first file that is saved
)  # what nearly all need

interpreter = fork_server._interpreter
_execute_child = subprocess.Popen._execute_child


class Server(fork_server.ForkServer):
    """A server that lives on: the one of `launch` ends with it."""

    def __init__(self, connection, environ):
        super().__init__(connection, None)
        self._environ = _without_imports(environ)

    def _has_read_others(self, environ):
        return super()._has_read_others(_without_imports(environ))

    def close(self):
        pass


def _without_imports(environ):
    return {name: value for name, value in environ.items() if name not in SET_BY_IMPORTS}


class WhenNeeded:
    """What ``make()`` returns, made when it is first used."""

    def __init__(self, make):
        self._make = make

    def __getattr__(self, name):
        return getattr(self._make(), name)


@functools.cache
def connection_to_server(number):
    """Start a server, which ends with this process, and return the socket to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        # A forked process shows its title in the place of these words, however short the path of Python is.
        words = [sys.executable, "-m", "tests.forking", str(theirs.fileno()), "room-for-titles" + 64 * "."]
        folder = Path(__file__).parents[1]
        process = subprocess.Popen(words, pass_fds=[theirs.fileno()], cwd=folder)
    atexit.register(process.wait)
    atexit.register(process.kill)  # before that: it may be importing
    return ours


def install(connect, *, for_single_ranks=False):
    """Have `subprocess`, and `lockstep.launch`, ask the server behind ``connect(number)``, the socket to it.

    Args:
        connect: Called when something is started for the first time.
        for_single_ranks: Whether also a single rank is forked, for which `launch` starts no server.
    """
    before, lock = dict(os.environ), threading.Lock()
    cached = functools.cache(lambda number: Server(connect(number), before))

    def server(number=0):
        with lock:  # two threads may start something for the first time
            return cached(number)

    def execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, *others):
        args = args if isinstance(args, str | os.PathLike) else [os.fspath(word) for word in args]
        _creationflags, _shell, *pipes = others[:8]
        process = None
        if executable is None and not pass_fds and _can_fork(args):
            environ = dict(os.environ if env is None else env)
            environ[PLACE] = pickle.dumps((cwd, preexec_fn)).hex()
            standard = [own if fd == -1 else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
            forks = server(int(environ.pop(SERVER, 0)))
            process = forks.fork(args[1:], environ, standard)
        if process is None:
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo)
            return _execute_child(self, *given, *others)
        self.pid = process.pid
        self._child_created = True
        self._close_pipe_fds(*pipes)

    subprocess.Popen._execute_child = execute_child
    fork_server._interpreter = server
    if for_single_ranks:
        fork_server._server = WhenNeeded(server)


def _can_fork(args):
    if not isinstance(args, list) or args[0] != sys.executable or len(args) < 2:
        return False
    return args[1].endswith(".py") or args[1:3] in (["-m", "lockstep"], ["-m", "tests.pool_worker"])


# --- the server, and what is forked off it ----------------------------------------------------------------------------


def run(words):
    """Be ``python WORDS``, as a process that was just forked; does not return."""

    def program():
        take_place()
        if words[:2] == ["-m", "tests.pool_worker"]:
            sys.modules["tests.pool_worker"].main(*words[2:])
            return
        # Of the commands only `rehearse` starts something else than ranks.
        if words[0] != "-u" and (words[1:2] != ["lockstep"] or words[2:3] == ["rehearse"]):
            prepare_children()
        become(words)

    end(program)


def become(words):
    """Run as ``python WORDS``: a rank, a script, or a module after ``-m``."""
    if words[0] == "-u":
        fork_server.become(words)
    sys.orig_argv, is_module = [sys.executable, *words], words[0] == "-m"
    sys.argv = words[is_module:]
    (bootstrap.run_module if is_module else bootstrap.run_script)(sys.argv[0])


def prepare_children():
    """Have what this process starts forked off a copy of it; the copy, and what is forked off it, do not return."""
    server = fork_server.fork_here(run)
    atexit.unregister(server.close)  # it ends with this process; what this forks has no such connection
    install(lambda _: server._connection)


def take_place():
    """Do what a new process does first."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if PLACE in os.environ:
        cwd, prepare = pickle.loads(bytes.fromhex(os.environ.pop(PLACE)))
        os.chdir(cwd or os.getcwd())
        if prepare is not None:
            prepare()


def end(program):
    """Run ``program``, then end as an interpreter does; to take it down would copy all that was imported."""
    code = 0
    try:
        program()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who asked for processes
    gc.disable()  # during the imports, collections would take a fifth of the time
    for module in MODULES:
        import_module(module)
    gc.freeze()  # what was imported stays where it is, in all that are forked
    gc.enable()
    bootstrap.set_title("processes of tests")  # finds the command line, of which the environment is a neighbour, once
    import_module("tests.forking").run(fork_server.serve(socket.socket(fileno=int(sys.argv[1]))))
