"""Have processes that a test starts forked off one that has imported torch, instead of new interpreters.

An interpreter that imports torch and makes its first optimizer has spent more than four seconds of a core; tests start
hundreds. What `subprocess` would start as a new interpreter (``python -m lockstep``, a script of a test) is forked here
as `lockstep.launcher.fork_server` forks ranks.

Forked processes hash strings alike. Workers of the pool are interpreters of their own, so that an order that depends on
a set differs between the ranks there, as it does for users.
"""

import atexit
import functools
import os
import pickle
import runpy
import signal
import subprocess
import sys
import threading

from lockstep.launcher import bootstrap, fork_server

# An environment variable: the folder of a forked process, and what it calls first.
PLACE = "FORKED_PLACE"
# Environment variables that lockstep.cli and torch._dynamo set when they are imported. The server has imported both;
# the tests' own process does so at some point, and what it starts after that can be forked all the same.
SET_BY_IMPORTS = ("TORCH_CPP_LOG_LEVEL", "TORCHINDUCTOR_CACHE_DIR")

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


def install(connect, *, for_single_ranks=False):
    """Have `subprocess`, and `lockstep.launch`, ask the server behind ``connect()``, which returns the socket to it.

    Args:
        connect: Called when something is started for the first time.
        for_single_ranks: Whether also a single rank is forked, for which `launch` starts no server.
    """
    before = dict(os.environ)

    @functools.cache
    def server():
        return Server(connect(), before)

    def execute_child(
        self,
        args,
        executable,
        preexec_fn,
        close_fds,
        pass_fds,
        cwd,
        env,
        startupinfo,
        creationflags,
        shell,
        stdin_read,
        stdin_write,
        stdout_read,
        stdout_write,
        stderr_read,
        stderr_write,
        *others,
    ):
        args = args if isinstance(args, str | os.PathLike) else [os.fspath(word) for word in args]
        pipes = (stdin_read, stdin_write, stdout_read, stdout_write, stderr_read, stderr_write)
        process = None
        if executable is None and not pass_fds and _can_fork(args):
            environ = dict(os.environ if env is None else env)
            environ[PLACE] = pickle.dumps((cwd, preexec_fn)).hex()
            standard = [own if fd == -1 else fd for own, fd in enumerate((stdin_read, stdout_write, stderr_write))]
            process = server().fork(args[1:], environ, standard, new_session=others[-2])
        if process is None:
            settings = (close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            return _execute_child(self, args, executable, preexec_fn, *settings, *pipes, *others)
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
    return args[1].endswith(".py") or args[1:3] == ["-m", "lockstep"]


def start(words):
    """Be ``python WORDS``: a script or a rank."""
    if words[1:2] == [bootstrap.__file__]:
        fork_server.become(words)
    sys.argv = words
    sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
    runpy.run_path(words[0], run_name="__main__")


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
