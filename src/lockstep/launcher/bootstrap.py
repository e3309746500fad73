"""The first file that a rank's interpreter runs: it makes the rank end with the launcher, then runs the user's program.

Started by path, as ``python -u bootstrap.py ORDERS TARGET [ARGS]``. It imports the standard library and the few modules
of ours that need no more, because every script pays for its imports. The program then runs as under ``python -u TARGET
ARGS``: it is ``__main__``, pickle and spawned children find it under that name, and it has its own ``sys.argv`` and
``sys.path[0]``.
"""

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import io
import json
import linecache
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.machinery import BuiltinImporter, FrozenImporter, PathFinder, SourceFileLoader
from multiprocessing import current_process
from pkgutil import resolve_name
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from lockstep.base import activity
from lockstep.base.rank_files import CRASH, ERROR, RESULT, RUN_DIR, SPARE, FailureRecord, keep_name, own_name, rank_file
from lockstep.comm.shm import register_when_needed
from lockstep.errors import RESUME_EXIT_CODE, LockstepError, is_of_signal_handler
from lockstep.health.heartbeat import Heartbeat, has_joined

# The environment variable with the functions that each rank calls before the program: a JSON list of
# ["module:function", arguments]. The launcher does not know these functions: ``--adopt``, ``--monitor``, ``lockstep
# rehearse`` and ``lockstep verify`` use this variable.
RANK_SETUP = "LOCKSTEP_RANK_SETUP"

# An environment variable of setproctitle.
_KEEP_ENVIRON = "SPT_NOENV"

# From Linux's fcntl.h; Python's name for it depends on the version.
_F_SETSIG = 10


def main(argv: list[str]) -> None:
    """Follow the orders in ``argv[1]``: a JSON object, written by `supervise`."""
    orders = json.loads(argv[1])
    mode, target, args, run_dir = orders["mode"], argv[2], argv[3:], orders["run_dir"]
    end_with_launcher(run_dir, orders["launcher_pid"])
    os.environ[RUN_DIR] = run_dir
    keep_name()
    # A spare is no rank yet, so nobody is to see what it prints.
    streams = [(number, os.dup(number)) for number in (1, 2)] if SPARE in os.environ else []
    if streams or orders["has_pipes"]:
        redirect_output(run_dir)
    if mode == "command":
        # None of our Python code runs there: no heartbeat, no record of an exception, only an exit status.
        os.execvp(target, [target, *args])
    # After a fatal signal no Python code runs. A script that enables it itself, or PYTHONFAULTHANDLER, has priority.
    if not faulthandler.is_enabled():
        path = rank_file(run_dir, CRASH, own_name())
        faulthandler.enable(open(path, "w"))  # noqa: SIM115 - stays open until the process ends

    title = ""

    def show_title() -> None:
        nonlocal title
        spare = os.environ.get(SPARE, "").replace("-", " ")
        title = f"{spare or 'rank {RANK} of {WORLD_SIZE}'.format(**os.environ)}, {orders['program']}"
        set_title(title)

    show_title()
    os.register_at_fork(after_in_child=lambda: set_title(f"child of {title}"))  # loader workers
    sys.argv = [target, *args]
    # A function of `lockstep.launch` may be meant to run alone.
    num_peers = int(os.environ["WORLD_SIZE"]) if mode != "call" else 1
    heartbeat = Heartbeat(run_dir, own_name(), patience_s=orders["watchdog_s"], num_peers=num_peers)

    def on_failure(error: BaseException) -> None:
        record_end(error)
        heartbeat.write()  # peers are released at once, not at the next beat

    def on_rank(before: str) -> None:
        keep_name()
        heartbeat.rename(before, own_name())
        show_title()
        if orders["has_pipes"]:
            redirect_output(run_dir)
        while streams:
            number, saved = streams.pop()
            if not orders["has_pipes"]:
                os.dup2(saved, number)
            os.close(saved)

    activity.now.on_failure, activity.now.on_rank = on_failure, on_rank

    def program() -> None:
        heartbeat.start()
        keep_sockets_in(run_dir)
        # New interpreters that `multiprocessing` starts import Lockstep with this, so `meeting_place` applies there.
        current_process()._config["lockstep"] = register_when_needed  # type: ignore[attr-defined]
        for name, *arguments in json.loads(os.environ.pop(RANK_SETUP, "[]")):  # not for programs that this one starts
            resolve_name(name)(*arguments)
        {"script": run_script, "module": run_module, "call": run_call}[mode](target)

    run_recorded(program)


def set_title(title: str) -> None:
    """Show ``lockstep: TITLE`` as the command line of this process: a forked one has that of the launcher."""
    try:
        # Besides the extension it imports only logging, which torch imports as well.
        from setproctitle import setproctitle, setthreadtitle
    except ImportError:  # not installed: ranks work without titles
        return

    # The name of a file may be no text.
    text = title.encode(errors="replace")
    # Otherwise it overwrites /proc/PID/environ, by which schedulers and administrators find the processes of a job.
    is_set = _KEEP_ENVIRON in os.environ
    os.environ[_KEEP_ENVIRON] = "1"
    setproctitle(f"lockstep: {text.decode()}")
    # For ``top``. The kernel cuts it after 15 bytes, within a letter, which other programs fail to read.
    setthreadtitle(text[:15].decode(errors="ignore"))
    if not is_set:
        del os.environ[_KEEP_ENVIRON]


# The lifetime of the process: it ends when the launcher ends, for any reason.


def end_with_launcher(run_dir: str, launcher_pid: int) -> None:
    """Make the kernel end this rank and its children with the launcher; and register with the reaper.

    The reaper ends this rank's session when the launcher is gone, but may have been killed with it, for example by a
    broad ``pkill``. So each rank, which torch elastic starts as the leader of a process group, has the launcher's FIFO
    open: the kernel signals the whole group when the last writer is gone (Linux). PR_SET_PDEATHSIG would end only this
    process.

    The reaper gets a copy of the descriptor, to cancel this after a job that ended without errors: processes that
    ranks left behind on purpose may stay.
    """
    alive = os.open(os.path.join(run_dir, "alive"), os.O_RDONLY | os.O_NONBLOCK)
    os.set_inheritable(alive, True)  # kept if this process executes another program
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as reaper:
        reaper.connect(os.path.join(run_dir, "reaper"))
        socket.send_fds(reaper, [str(os.getpid()).encode()], [alive])
    fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(alive, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(alive, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    if os.getppid() != launcher_pid:  # it ended before the lines above
        os.kill(os.getpid(), signal.SIGKILL)


def redirect_output(run_dir: str) -> None:
    """Redirect the output of this process and its children to the pipes that the launcher reads; a spare's nowhere."""
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        path = os.devnull if SPARE in os.environ else str(rank_file(run_dir, stream, os.environ["LOCAL_RANK"]))
        file = os.open(path, os.O_WRONLY)
        os.dup2(file, descriptor)
        os.close(file)


def keep_sockets_in(run_dir: str) -> None:
    """Make `multiprocessing` create its folder for sockets, ``pymp-...``, in the launcher's, which is removed later.

    In the folder for temporary files, a killed rank would leave it behind. If that folder has a long name, loader
    processes could not bind their sockets, whose names are at most 107 bytes long.
    """
    import multiprocessing.util
    import tempfile

    before, tempfile.tempdir = tempfile.tempdir, run_dir
    try:
        multiprocessing.util.get_temp_dir()  # creates it once; child processes use the same
    finally:
        tempfile.tempdir = before


# Running the program as the interpreter itself would.


def run_script(path: str) -> None:
    """Run a file, or a folder or archive with a ``__main__.py``."""
    if os.path.isdir(path) or path.endswith((".pyz", ".zip")):
        _replace_first_path(os.path.abspath(path))
        _fresh_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _replace_first_path(os.path.dirname(os.path.realpath(path)))
    full_path = os.path.abspath(path)
    module = _fresh_main()
    module.__file__ = full_path
    loader = module.__loader__ = SourceFileLoader("__main__", full_path)
    # Not runpy.run_path, which clears the module after the script: threads and exit handlers still need it.
    exec(loader.source_to_code(loader.get_data(path), full_path), module.__dict__)


def run_module(name: str) -> None:
    """Run a module as ``python -m`` would."""
    _replace_first_path(os.getcwd())
    _fresh_main()
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]


def run_call(run_dir: str) -> None:
    """Run the call that `lockstep.launch` wrote to ``run_dir``, and write the result, or the exception, there."""
    import pickle

    main = _fresh_main()

    class IntoMain(pickle.Unpickler):
        """Gives functions of the script's ``__main__`` the names of this one, where torch.compile looks for them.

        cloudpickle gives them a dictionary of their own; so it does here if its private function has another name.
        """

        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            if (module, name) != ("cloudpickle.cloudpickle", "_make_function"):
                return found

            def make(code: object, names: dict[str, Any], *rest: object) -> Any:
                return found(code, vars(main) if names.get("__name__") == "__main__" else names, *rest)

            return make

    with open(os.path.join(run_dir, "call"), "rb") as sent:
        path, sources = pickle.load(sent)
        _forget_shadowed(path[0])
        sys.path[:] = path
        for name, lines in sources.items():
            linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
        fn, args = IntoMain(sent).load()
    import cloudpickle

    def leave(kind: str, value: object) -> None:
        rank_file(run_dir, kind, own_name()).write_bytes(cloudpickle.dumps(value))

    try:
        result = fn(*args)
    except Exception as error:
        # The traceback is sent as text in any case; some exceptions cannot be pickled.
        with contextlib.suppress(Exception):
            leave(ERROR, error)
        raise
    try:
        leave(RESULT, result)
    except Exception as error:
        raise LockstepError(
            f"What {getattr(fn, '__name__', 'the function')} returned on rank {own_name()} cannot be sent back: "
            f"{error}\n"
            "Return numbers, CPU tensors or other data that can be pickled."
        ) from error


def _fresh_main() -> ModuleType:
    # A permanent new module, unlike runpy's: code that runs after the script, such as exit handlers, needs its names.
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __cached__=None)
    if sys.version_info < (3, 14):  # from 3.14 on annotations are evaluated lazily
        module.__annotations__ = {}
    # The second is the name that `multiprocessing`, which is already imported, uses in spawned children.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    return module


def _replace_first_path(path: str) -> None:
    if not sys.flags.safe_path:
        _forget_shadowed(path)
        sys.path[0] = path


# The interpreter imports the first before it knows the program; the second is the module that this file belongs to.
_KEPT = {"encodings", "lockstep", "__main__", "__mp_main__"}


def _forget_shadowed(folder: str) -> None:
    """Forget imported modules whose names the program's folder has, too: ``python TARGET`` would import its files.

    Who has imported them keeps them. Nothing in a folder precedes what is built in or frozen. Called before the folder
    is on the path.
    """
    shadowed = set()
    for name in {name.partition(".")[0] for name in sys.modules} - _KEPT:
        spec = PathFinder.find_spec(name, [folder])
        if spec is None or spec.loader is None or BuiltinImporter.find_spec(name) or FrozenImporter.find_spec(name):
            continue
        if getattr(sys.modules.get(name), "__file__", None) != spec.origin:
            shadowed.add(name)
    if shadowed and "torch" in sys.modules:
        # Otherwise the parts that are imported later would get the program's files.
        for name in ("torch._dynamo", *(f"lockstep.{name}" for name in resolve_name("lockstep").__all__)):
            with contextlib.suppress(ImportError):
                resolve_name(name)
    for name in [name for name in sys.modules if name.partition(".")[0] in shadowed]:
        del sys.modules[name]


# Recording how the program ended, before peers notice: failure_report.py turns it into the launcher's message.

# The exceptions that were recorded, by `id`, and when each was raised, in nanoseconds.
_recorded: dict[int, tuple[BaseException, int]] = {}

# A process closes its connections a moment before its parent gets SIGCHLD.
_SIGNAL_DELAY_S = 0.1

# How long a failed rank may take to free its objects, after its exit handlers.
_FREE_S = 5.0

# In the names of files that are not the user's; and those of the frames that start the program.
_STARTERS = (os.path.dirname(os.path.abspath(__file__)), runpy.__file__, "<frozen runpy>")
_LIBRARIES = ("site-packages", "dist-packages", os.path.dirname(os.__file__), os.path.dirname(_STARTERS[0]), "<frozen")


def run_recorded(program: Callable[[], None]) -> None:
    """Run the program; record how it ends before exit handlers run, which may take long, and which peers notice."""
    sys.excepthook = print_unless_recorded
    try:
        program()
        record_end(None)
        return
    except BaseException as error:
        try:
            code = _record_failure(error)
        except Exception as cause:
            if not is_of_signal_handler(cause):
                raise
            cause.__suppress_context__ = True
            code = _record_failure(cause.with_traceback(error.__traceback__))
    _leave(code)  # outside the block, in which the exception holds the variables of the program's functions


def _record_failure(error: BaseException) -> int:
    """Record and print an exception; return the exit status. The handler of a signal may raise meanwhile."""
    if isinstance(error, OSError | EOFError) and callable(signal.getsignal(signal.SIGCHLD)):
        # DataLoader's handler knows more about a connection to a process that was killed.
        time.sleep(_SIGNAL_DELAY_S)
    code = error.code if isinstance(error, SystemExit) else 130 if isinstance(error, KeyboardInterrupt) else 1
    if code in (None, 0):
        record_end(error, is_failure=False)
        raise error
    trace = error.__traceback__ = own_frames_removed(error.__traceback__)
    if code == RESUME_EXIT_CODE:
        record_end(error)  # not failed: it has stopped when it was asked to, and nobody waits for it
    else:
        activity.now.fail(error)  # calls `record_end`
    if isinstance(error, SystemExit):
        if not isinstance(code, int):
            print(code, file=sys.stderr)
        return code & 0xFF if isinstance(code, int) else 1
    # As the interpreter would: exit handlers read it to see that the program failed.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)
    return int(code)


def _leave(code: int) -> NoReturn:
    """End a failed rank as the interpreter would, but free no process groups.

    Their destructors may wait for peers that wait for this rank, so `torch.distributed` keeps them until the end.
    """
    join_threads = threading._shutdown  # type: ignore[attr-defined]
    for action in (join_threads, atexit._run_exitfuncs, partial(_free_objects, code)):
        with contextlib.suppress(BaseException):  # Ctrl-C, for example
            action()
    os._exit(code)


def _free_objects(code: int) -> None:
    """Free what the user's modules hold, which writes, closes and removes files; at most for a limited time."""
    timer = threading.Timer(_FREE_S, os._exit, [code])
    timer.daemon = True
    timer.start()
    # While a destructor waits without releasing the GIL, that thread cannot run.
    faulthandler.dump_traceback_later(_FREE_S + 1, exit=True, file=open(os.devnull, "w"))  # noqa: SIM115 - stays open
    threading.excepthook = lambda _: None  # daemon threads lose their variables
    for each in gc.get_objects():
        if issubclass(type(each), io.IOBase):
            with contextlib.suppress(Exception):  # it is closed
                each.flush()
    import ctypes

    ctypes.CDLL(None).fflush(None)  # the output of native code
    gc.collect()  # frames that refer to themselves, and to the exception
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    _recorded.clear()
    mains = ("__main__", "__mp_main__")
    freed = {name: module for name, module in sys.modules.items() if name in mains or _is_of_user(module)}
    for name in freed:
        del sys.modules[name]
    variables = [vars(module) for module in freed.values() if vars(module) is not globals()]
    del freed
    gc.collect()  # destructors still find the variables of their modules, if nothing else refers to these
    for of_module in variables:
        while of_module:
            of_module.popitem()  # the newest first: it may use the ones before
    gc.collect()


def _is_of_user(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return path is not None and not any(part in path for part in _LIBRARIES)


def record_end(error: BaseException | None, *, is_failure: bool = True) -> None:
    """Write where the program ended, and by which exception, into the launcher's folder, for its report."""
    usage = None
    if isinstance(error, SystemExit) and error.code != RESUME_EXIT_CODE:
        # argparse has printed why it does not accept the arguments.
        last = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "error"]
        usage = last[-1].f_locals.get("message") if last else None
        # hydra, click and many scripts print an exception and call sys.exit: that exception counts.
        hidden = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        error = hidden if isinstance(hidden, Exception) and usage is None else error
    # The user's traceback begins with the user's file.
    trace = None if error is None else own_frames_removed(error.__traceback__)
    ended = FailureRecord(
        time_ns=time.time_ns(),
        step=activity.now.step,
        phase=activity.now.phase,
        num_steps=activity.now.num_steps,
        pid=os.getpid(),
        has_joined=has_joined(),
        where=user_line(traceback.extract_tb(trace)),
    )
    if error is not None and is_failure:
        # This may be called twice: at the end of the block of `lockstep.init`, and at the top. The first time counts.
        _, raised_at_ns = _recorded.setdefault(id(error), (error, ended.time_ns))
        ended = replace(
            ended,
            message=": ".join(filter(None, (type(error).__name__, usage or activity.text_of(error)))),
            error_type=type(error).__name__,
            trace="".join(traceback.format_exception(type(error), error, trace)),
            time_ns=raised_at_ns,
        )
    ended.write(os.environ[RUN_DIR], own_name())


def print_unless_recorded(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Replace the interpreter's hook: the launcher prints the first rank's traceback, once.

    Hooks of the user or of a library replace or wrap this one, and still run.
    """
    if id(error) not in _recorded:
        sys.__excepthook__(kind, error, trace)


def own_frames_removed(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` from the user's first frame on; if there is none, from the first frame after the launcher's."""
    for hidden in (_LIBRARIES, _STARTERS):
        user_trace = trace
        while user_trace is not None and any(part in user_trace.tb_frame.f_code.co_filename for part in hidden):
            user_trace = user_trace.tb_next
        if user_trace is not None:
            break
    return user_trace or trace


def user_line(frames: traceback.StackSummary) -> str:
    """Return file and line of the innermost frame that is neither an installed package, this one, nor Python itself."""
    user_frames = [frame for frame in frames if not any(part in frame.filename for part in _LIBRARIES)]
    return f"{last[0].filename}:{last[0].lineno}" if (last := (user_frames or list(frames))[-1:]) else ""


if __name__ == "__main__":
    main(sys.argv)
