"""The first file that a rank's interpreter runs: ties its life to the launcher's, then becomes the user's program."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Any

# What a rank is equipped with before its program runs, by the launcher or by variables of its environment.

REHEARSAL = "LOCKSTEP_REHEARSAL"
"""The variable with which `lockstep rehearse` tells the ranks what is to go wrong in them."""

_SHORT_ENOUGH = 64
"""The name of a folder for temporary files that loader processes have no trouble with, for sure."""

MONITOR = "LOCKSTEP_MONITOR"
"""The variable with which ``lockstep run --monitor`` tells the ranks into which folder they are recorded."""


def set_up_rank(orders: dict[str, Any], record: Callable[[BaseException], None]) -> None:
    """Equip this rank.

    Args:
        orders: Of the launcher.
        record: Writes down what has ended this rank.
    """
    if orders["patience_s"] > 0:
        _start_heartbeat(orders["run_dir"], orders["patience_s"], record)
    if len(os.environ.get("TMPDIR", "")) > _SHORT_ENOUGH:
        _make_sockets_possible(orders["run_dir"])
    if REHEARSAL in os.environ:
        from lockstep.study.rehearse.injection import activate

        activate(os.environ[REHEARSAL])
    if orders["adopt"]:
        from lockstep.adoption import adopt

        adopt()
    if MONITOR in os.environ:
        folder = os.environ.pop(MONITOR)  # programs that this one starts are not recorded
        from lockstep.observe.monitor import attach

        attach(folder)


def _make_sockets_possible(run_dir: str) -> None:
    """Have loader processes of the program make their sockets where their names are not too long."""
    from lockstep.env import ensure_short_socket_folder
    from lockstep.errors import ConfigurationError

    with contextlib.suppress(ConfigurationError):  # it may have no loader processes
        ensure_short_socket_folder(run_dir)


def _start_heartbeat(run_dir: str, patience_s: float, record: Callable[[BaseException], None]) -> None:
    """Have the launcher's watchdog see what this rank is doing."""
    from lockstep import activity
    from lockstep.telemetry.heartbeat import Heartbeat

    beacon = Heartbeat(run_dir, int(os.environ["RANK"]), patience_s=patience_s)

    def tell(error: BaseException) -> None:
        record(error)
        beacon.write()

    activity.callbacks.on_failure = tell
    beacon.start()


# The first file that a rank's interpreter runs: ties its life to the launcher's, then becomes the user's program.
#
# Started by path, as ``python -u bootstrap.py ORDERS TARGET [ARGS]``, and free of imports beyond the standard library:
# what it loads, every script would pay for. The program then runs as it would under ``python -u TARGET ARGS``: it is
# ``__main__``, found under that name by pickle and by spawned children, with its own ``sys.argv`` and ``sys.path[0]``.

_PR_SET_PDEATHSIG = 1

RUN_DIR = "LOCKSTEP_RUN_DIR"
"""The variable that tells a rank where it and the launcher leave files for each other, as `requests` does."""


def main(argv: list[str]) -> None:
    """Follow the orders in ``argv[1]``: a JSON object, written by `lockstep.launcher.supervise`."""
    orders = json.loads(argv[1])
    die_with(orders["launcher_pid"])
    enlist(orders["run_dir"])
    os.environ[RUN_DIR] = orders["run_dir"]
    if orders["captures"]:
        lead_output(orders["run_dir"], f"{{}}-{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if orders["streams"]:
        lead_output(orders["run_dir"], f"pipe-{{}}-{os.environ['LOCAL_RANK']}", os.O_WRONLY | os.O_NOCTTY)
    mode, target, args = orders["mode"], argv[2], argv[3:]
    if mode == "command":
        os.execvp(target, [target, *args])
    log_crashes(orders["run_dir"])
    _run_dir.append(orders["run_dir"])
    with contextlib.suppress(OSError):
        os.unlink(failure_file())  # of this rank before a restart
    sys.argv = [target, *args]

    set_up_rank(orders, record)
    runners: dict[str, Callable[[str], None]] = {"script": run_script, "module": run_module, "call": run_call}
    run_recorded(lambda: runners[mode](target))


def die_with(launcher_pid: int) -> None:
    """Have the kernel end this process when the launcher ends, however that happens (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher_pid:  # It died before the line above.
        os.kill(os.getpid(), signal.SIGKILL)


def enlist(run_dir: str) -> None:
    """Tell the guardian of this process, whose session it clears when the launcher is gone."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as guardian:
        guardian.connect(os.path.join(run_dir, "guard"))
        guardian.send(str(os.getpid()).encode())


def lead_output(run_dir: str, name: str, flags: int) -> None:
    """Lead what this process and its children write into files or pipes in the run's folder, for the launcher to show.

    Args:
        run_dir: The folder.
        name: Of the file, with {} for the stream.
        flags: How it is opened.
    """
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        file = os.open(os.path.join(run_dir, name.format(stream)), flags, 0o600)
        os.dup2(file, descriptor)
        os.close(file)


def log_crashes(run_dir: str) -> None:
    """Have a fatal signal leave the Python stack in a file for the launcher to show."""
    if not faulthandler.is_enabled():
        path = os.path.join(run_dir, f"crash-{os.environ.get('RANK', os.getpid())}")
        faulthandler.enable(open(path, "w"))  # noqa: SIM115 - stays open until the process ends


def run_script(path: str) -> None:
    """Run a file, or a folder or archive with a ``__main__.py``, as the interpreter itself would."""
    if os.path.isdir(path) or path.endswith((".pyz", ".zip")):
        _replace_first_path(os.path.abspath(path))
        _fresh_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _replace_first_path(os.path.dirname(os.path.realpath(path)))
    full_path = os.path.abspath(path)
    module = _fresh_main()
    module.__file__ = full_path
    module.__loader__ = SourceFileLoader("__main__", full_path)
    with open(path, "rb") as file:
        code: CodeType = compile(file.read(), full_path, "exec", dont_inherit=True)
    exec(code, module.__dict__)


def run_module(name: str) -> None:
    """Run a module as ``python -m`` would."""
    _replace_first_path(os.getcwd())
    _fresh_main()
    runpy._run_module_as_main(name, alter_argv=True)  # type: ignore[attr-defined]


def run_call(run_dir: str) -> None:
    """Run the function that `lockstep.launch` left in ``run_dir`` and leave its result there."""
    _fresh_main()
    sys.path[:1] = []
    with open(os.path.join(run_dir, "sys_path.json")) as file:
        sys.path[:] = json.load(file)
    from lockstep.launcher.api import run_call

    run_call(run_dir)


def _fresh_main() -> ModuleType:
    # A new module for good, unlike runpy's: what runs after the script, such as exit handlers, still finds its names.
    module = ModuleType("__main__")
    module.__dict__.update(__builtins__=__builtins__, __cached__=None)
    if sys.version_info < (3, 14):  # From then on annotations are made when somebody asks for them.
        module.__annotations__ = {}
    sys.modules["__main__"] = module
    return module


def _replace_first_path(path: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = path


def run_recorded(program: Callable[[], None]) -> None:
    """Run the program; what ends it early goes into the error file that torch elastic reads, before peers notice."""
    sys.excepthook = print_unless_recorded
    # Registered first, so it runs after all others.
    atexit.register(lambda: skip_destructors(_failed_with[-1]) if _failed_with else None)
    try:
        program()
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            record(leaving)
            _failed_with.append(leaving.code & 0xFF if isinstance(leaving.code, int) else 1)
        raise
    except BaseException as error:
        trace = own_frames_removed(error.__traceback__)
        error.__traceback__ = trace
        fail(error)
        # As the interpreter would: exit handlers look at it to learn that the program failed.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error, trace)
        _failed_with.append(130 if isinstance(error, KeyboardInterrupt) else 1)
        sys.exit(_failed_with[-1])


def print_unless_recorded(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Stand in for the interpreter's hook: the launcher will show the first rank's traceback, once.

    Hooks of the user or of a library replace or wrap this one, and still run.
    """
    if not any(error is seen for seen, _ in _recorded):
        sys.__excepthook__(kind, error, trace)


_recorded: list[tuple[BaseException, int]] = []
_run_dir: list[str] = []
_failed_with: list[int] = []


def own_frames_removed(trace: TracebackType | None) -> TracebackType | None:
    """Return ``trace`` from the user's first frame on, or whole if there is none."""
    here = os.path.dirname(os.path.abspath(__file__))
    theirs = trace
    while theirs is not None:
        name = theirs.tb_frame.f_code.co_filename
        if os.path.dirname(os.path.abspath(name)) != here and name not in (runpy.__file__, "<frozen runpy>"):
            break
        theirs = theirs.tb_next
    return theirs or trace


def record(error: BaseException) -> None:
    """Write ``error`` where torch elastic expects it, in its format."""
    paths = [path for path in (os.environ.get("TORCHELASTIC_ERROR_FILE"), failure_file()) if path]
    now_ns = time.time_ns()
    # It may be seen twice: as it leaves the block of `lockstep.init`, and at the top.
    failed_at_ns = next((at_ns for seen, at_ns in _recorded if seen is error), now_ns)
    trace = own_frames_removed(error.__traceback__)
    frames = traceback.extract_tb(trace)
    text = "".join(traceback.format_exception(type(error), error, trace))
    data = {
        "message": {
            "message": f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
            "extraInfo": {
                "py_callstack": text,
                "timestamp": str(int(time.time())),
                "time_ns": failed_at_ns,
                "type": type(error).__name__,
                "where": place_of(frames),
                **marks(),
            },
        }
    }
    try:
        for path in paths:
            # Renamed into place: the launcher may read at any moment.
            with open(f"{path}.new", "w") as file:
                json.dump(data, file)
            os.replace(f"{path}.new", path)
    except OSError:
        return
    if failed_at_ns == now_ns and paths:
        _recorded.append((error, now_ns))


def fail(error: BaseException) -> None:
    """Record what ended the program, and let the launcher know now, as exit handlers may take long."""
    activity = sys.modules.get("lockstep.activity")
    if activity is not None and activity.callbacks.on_failure is not None:
        activity.now.fail(error)
    else:
        record(error)


def failure_file() -> str:
    """Return where this rank leaves its exception, for the launcher to find even if the program goes on."""
    return os.path.join(_run_dir[0], f"failure-{os.environ.get('RANK')}") if _run_dir else ""


def marks() -> dict[str, object]:
    """Return in which step this rank is, as far as it is known."""
    activity = sys.modules.get("lockstep.activity")
    if activity is None:
        return {}
    now = activity.now
    return {"step": now.step, "phase": now.phase, "num_steps": now.num_steps}


def place_of(frames: traceback.StackSummary) -> str:
    """Return file and line of the innermost frame that is neither an installed package, this one, nor Python itself."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    libraries = ("site-packages", "dist-packages", os.path.dirname(os.__file__), package)
    theirs = [frame for frame in frames if not any(part in frame.filename for part in libraries)]
    last = (theirs or list(frames))[-1:]
    return f"{last[0].filename}:{last[0].lineno}" if last else ""


def skip_destructors(code: int) -> None:
    """End the process here and now: the last exit handler of a failed rank.

    Destructors of process groups may wait for peers that wait for this rank: the job would hang instead of failing.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv)
