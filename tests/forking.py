"""Have processes that a test starts forked off one that has imported torch, instead of new interpreters.

An interpreter that imports torch and makes its first optimizer has spent more than four seconds of a core; tests start
hundreds. What `subprocess` would start as a new interpreter (a rank, ``python -m lockstep``, a script of a test) is
forked here off a server, which has no threads, and becomes a child of whoever started it. Where the environment differs
in what only a new interpreter reads, a new one is started.

Forked processes hash strings alike. Workers of the pool are interpreters of their own, so that an order that depends on
a set differs between the ranks there, as it does for users.
"""

import atexit
import ctypes
import io
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time

BOOTSTRAP = "lockstep/launcher/bootstrap.py"
MOST_BYTES = 1 << 20
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
CLONE_NEWNET = 0x40000000
NAME = "fork-server"

_lock = threading.Lock()
_execute_child = subprocess.Popen._execute_child


def install(connect):
    """Have `subprocess` ask the server behind ``connect()``, a function that returns the socket to it."""

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
        environ = dict(os.environ if env is None else env)
        pipes = (stdin_read, stdin_write, stdout_read, stdout_write, stderr_read, stderr_write)
        if executable is not None or pass_fds or not _can_fork(args, environ):
            settings = (close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            return _execute_child(self, args, executable, preexec_fn, *settings, *pipes, *others)
        has_new_session = others[-2]
        request = (args, environ, str(cwd or os.getcwd()), preexec_fn, has_new_session, os.getpid())
        standard = [own if fd == -1 else fd for own, fd in enumerate((stdin_read, stdout_write, stderr_write))]
        libc = ctypes.CDLL(None)
        with _lock:
            connection = connect()
            libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # so that the new process becomes a child of this one
            socket.send_fds(connection, [pickle.dumps(request)], standard)
            self.pid = int(connection.recv(64))
            libc.prctl(PR_SET_CHILD_SUBREAPER, 0)
        self._child_created = True
        self._close_pipe_fds(*pipes)

    subprocess.Popen._execute_child = execute_child


def _can_fork(args, environ):
    if not isinstance(args, list) or args[0] != sys.executable or len(args) < 2:
        return False
    words = [word for word in args[1:4] if word != "-u"]
    names = [name for name in {*environ, *os.environ} if name.startswith(("PYTHON", "LD_"))]
    is_ours = words[0].endswith(".py") or words[:2] == ["-m", "lockstep"]
    return is_ours and all(environ.get(name) == os.environ.get(name) for name in names)


def serve(requests):
    """Fork a process for each request until there is nobody to ask any more; returns in these.

    Returns:
        The words of the command line after the interpreter, and what to call before them.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_NAME, NAME.encode())
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MOST_BYTES, 3)
        if not message:
            os._exit(0)
        args, environ, cwd, preexec, has_new_session, parent = pickle.loads(message)
        if (middle := os.fork()) == 0:
            if os.fork() > 0:
                os._exit(0)  # whoever asked adopts its child
            while os.getppid() != parent:
                time.sleep(0.0005)
            requests.send(str(os.getpid()).encode())
            requests.close()
            libc.prctl(PR_SET_NAME, b"python")
            if not has_new_session:
                os.setpgid(0, os.getpgid(parent))
            become(environ, cwd, has_new_session, descriptors)
            return args[1:], preexec
        os.waitpid(middle, 0)
        for descriptor in descriptors:
            os.close(descriptor)


def become(environ, cwd, has_new_session, descriptors, network=None):
    """Give this process a place of its own.

    Args:
        environ: Its environment.
        cwd: Its folder.
        has_new_session: Whether it leads a session of its own.
        descriptors: Its standard input, output and error.
        network: The name of the network namespace that it moves to.
    """
    for number, descriptor in enumerate(descriptors):  # which are above 2: this process has its own
        os.dup2(descriptor, number)
        os.close(descriptor)
    if has_new_session:
        os.setsid()
    if network is not None:
        with open(f"/var/run/netns/{network}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"this process cannot move to {network}")
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)


def start(words):
    """Do what ``python WORDS`` would, with what a new interpreter reads from its environment."""
    import numpy
    import torch

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    numpy.random.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count())))
    if words[0] == "-u":
        for name, number in (("stdout", 1), ("stderr", 2)):
            stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), write_through=True)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        words = words[1:]
    sys.argv = words
    if words[0].endswith(BOOTSTRAP):
        from lockstep.launcher import bootstrap

        bootstrap.main(sys.argv)
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(words[0]))
        runpy.run_path(words[0], run_name="__main__")


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
