"""Prove, or disprove, what Lockstep promises on the GPUs of this machine: `make gpu`.

    tests      tests/gpu
    waits      where the host waits for its GPU in a step of `lockstep.fit`: bench/gpu_waits.py
    benchmark  training steps, ours and torch's, interleaved: bench/gpu_steps.py

Each section is a process with a limit of its own, a share of --minutes; what it does not get to is listed as not
proved. A section or a test that does not end in time has failed, and says where it was. What was found is kept after
each section, also after Ctrl-C, in bench/results/gpu-<device>x<number>.json, which docs/speed.md shows. Needs no
installation and no network: where the C library of CPU ranks is missing, it is compiled with cc, if there is one.

    make gpu OUT=DIR                      on somebody else's machine: the results and a log of each section are in DIR
    make gpu ONLY=tests OUT=DIR           first, if time is short: all 8 minutes are for tests/gpu

Exit status: 0 if nothing failed, 1 if something did, 2 without a GPU, 130 after Ctrl-C.

Usage: PYTHONPATH=src python3 -m bench.gpu_proof [--minutes N] [--only SECTION] [--out DIR]
"""

import argparse
import contextlib
import faulthandler
import functools
import importlib.util
import json
import os
import re
import resource
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

REPO = Path(__file__).parents[1]
if importlib.util.find_spec("lockstep") is None:
    sys.path.insert(0, str(REPO / "src"))

NEEDED = ("torch", "numpy", "click", "rich", "cloudpickle", "psutil", "safetensors")
FOR_TESTS = "pytest"
OLDEST_TORCH = (2, 11)
LIBRARY = REPO / "src" / "lockstep" / "comm" / "shm" / "_native.so"
RESULTS, TRIALS = REPO / "bench" / "results", REPO / "runs" / "bench"
SHARES = {"tests": 0.4, "waits": 0.15, "benchmark": 0.45}
"""Of the time; what a section leaves over is for those after it."""
MISSING = """These Python packages are missing: {0}. Python: {1}
Install them:        python3 -m pip install {0}
Without a network:   elsewhere  python3 -m pip download --python-version {2}.{3} --only-binary=:all: -d wheels {0}
                     here       python3 -m pip install --no-index --find-links wheels {0}
pytest is for the tests only: --only waits --only benchmark does without it."""
MEASURING = 0.6
"""Of the time for waits: to measure them; the rest is for steps in which torch raises."""
BEGINNING = 0.7
"""Of either: after this part no setting begins, so that one that does not end is stuck, and not only late."""
OUTPUT_LINES = 200
GRACE_S, STACKS_S = 10.0, 3.0
"""How long a section that is cut off may take to end, and to say where it was."""
START_S = 60.0
"""How long the ranks of a section may take to import and to join; the clock of what they do begins then."""
END_S, MODEL_S = 8.0, 5.0
"""What the end of a section needs, and what a model needs at least: ranks start, and each contender is made."""
Section = dict[str, Any]
"""``status``: done, failed or stopped (Ctrl-C); ``seconds``; ``problems``, and the ``reasons`` of some; of one that
failed the end of its ``output``; and what the section found."""


def main() -> int:
    options = parse()
    wanted = [*NEEDED, *([FOR_TESTS] if "tests" in (options.only or SHARES) else [])]
    if absent := [name for name in wanted if importlib.util.find_spec(name) is None]:
        print(MISSING.format(" ".join(absent), sys.executable, *sys.version_info[:2]), file=sys.stderr)
        return 1
    if options.section is not None:
        faulthandler.enable()  # for `say_where`
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        try:
            SECTIONS[options.section](options)
        except KeyboardInterrupt:  # its time is over
            return 130
        return 0
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:
        print(f"torch {torch.__version__} is too old: Lockstep needs 2.11 or later.", file=sys.stderr)
        return 1
    count = torch.cuda.device_count() if options.device == "cuda" else 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA GPU on this machine, so there is nothing to prove here.")
        return 2
    return prove(options, count)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="for all sections together (8)")
    parser.add_argument(
        "--only", choices=SHARES, action="append", help="this section; may be repeated; kept in runs/bench"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="put the results and a log of each section there, too")
    # To try the script out without a GPU: tiny models on two CPU ranks or simulated devices; kept in runs/bench.
    parser.add_argument("--device", choices=["cuda", "cpu", "sim"], default="cuda", help=argparse.SUPPRESS)
    # Of a section, which is this script again.
    parser.add_argument("--section", choices=SHARES, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)  # by the clock `time.time`
    parser.add_argument("--found", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def prove(options: argparse.Namespace, count: int) -> int:
    """Run the sections one after the other; write what they found, whatever happens."""
    from dataclasses import asdict

    import psutil

    from lockstep.telemetry.provenance import gather

    problem = compile_library()
    if options.device == "sim":
        from tests import simulated_device

        simulated_device.build()
    end = time.monotonic() + 60 * options.minutes
    facts = machine(options.device, count)
    command = f"python -m bench.gpu_proof {shlex.join(sys.argv[1:])}".strip()
    run = {"command": command, "provenance": asdict(gather()), "gpus": facts, "sections": {}, "not_proved": []}
    sections: dict[str, Section] = run["sections"]
    wanted = {name: share for name, share in SHARES.items() if not options.only or name in options.only}
    status = 0
    print(
        f"{facts['number']} x {facts['name']}, driver {facts['driver']}, NCCL {facts['nccl']}; {options.minutes:g} min"
    )
    folders = [TRIALS if options.device != "cuda" or options.only else RESULTS, *([options.out] if options.out else [])]
    try:
        for name in wanted:
            share = wanted[name] / sum(wanted[each] for each in wanted if each not in sections)
            left_s = (end - time.monotonic()) * share
            print(f"\n{name}: at most {left_s:.0f} s", flush=True)
            log = TRIALS / f"{stem(run)}-{name}.log"
            try:
                run_section(options, name, count, left_s, sections, log)
            finally:
                keep(run, options.device, problem, folders, log)
            report(name, sections[name])
    except KeyboardInterrupt:
        print("\nStopped; what was found so far is kept.", file=sys.stderr)
        status = 130
        for child in psutil.Process().children():  # a section that was just being started
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        keep(run, options.device, problem, folders, None)
    print("\nkept as " + ", ".join(os.path.relpath(folder / f"{stem(run)}.json") for folder in folders))
    if folders[0] == RESULTS:
        from bench.report import gpu

        gpu.write()
        print("written: the GPU table in docs/speed.md")
    failed = [name for name, section in sections.items() if section["status"] == "failed" or section["problems"]]
    print("\nNot proved here:\n" + "".join(f"  - {line}\n" for line in run["not_proved"]))
    print(f"Failed: {', '.join(failed)}" if failed else "Nothing failed.")
    return status or int(bool(failed))


def run_section(
    options: argparse.Namespace, name: str, count: int, seconds: float, sections: dict[str, Section], log: Path
) -> None:
    """Run one in a process group of its own, which is ended when its time is over; what it wrote by then counts."""
    began, problem = time.monotonic(), ""
    section: Section = {"status": "stopped", "problems": [], "seconds": 0.0}
    sections[name] = section
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, log.open("wb") as output, log.open("rb") as shown:
        found = Path(folder, "found.json")
        given = [
            "--device",
            options.device,
            "--count",
            str(count),
            "--end",
            str(time.time() + seconds),
            "--found",
            str(found),
        ]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO / "src"), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "bench.gpu_proof", "--section", name, "--only", name, *given],
            cwd=REPO,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the section in its own way
        )
        is_stopped = False
        try:
            while process.poll() is None and not problem:
                time.sleep(0.1)
                print_new(shown)
                if time.monotonic() - began > seconds:
                    problem = f"cut off after {seconds:.0f} s without a result"
                    say_where(process)
            if process.returncode and not problem:
                problem = f"ended with exit status {process.returncode}"
        except KeyboardInterrupt:
            is_stopped = True
            raise
        finally:
            end_group(process)
            print_new(shown)
            try:
                section.update(json.loads(found.read_text()))
            except (OSError, ValueError):
                problem = problem or "left no result" * (not is_stopped)
            section["problems"] += [problem] if problem else []
            status = "stopped" if is_stopped else "failed" if section["problems"] else "done"
            section.update(status=status, seconds=round(time.monotonic() - began, 1))
            if section["problems"]:
                section["output"] = log.read_text(errors="replace").splitlines()[-OUTPUT_LINES:]


def print_new(log: BinaryIO) -> None:
    """Print what has been added to a log."""
    sys.stdout.write(log.read().decode(errors="replace"))
    sys.stdout.flush()


def say_where(process: subprocess.Popen[bytes]) -> None:
    """Have the processes that a section has started write their stacks, then the section itself."""
    from bench.gpu_tests import abort_children

    abort_children(process.pid)  # a launcher then says which rank was where
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STACKS_S)
    process.send_signal(signal.SIGABRT)


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a section and all that it started."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --- the sections, each in a process of its own


def write(options: argparse.Namespace, found: Section) -> None:
    """Keep what was found so far: the process may be ended at any time."""
    whole = options.found.with_suffix(".new")
    whole.write_text(json.dumps(found))
    whole.replace(options.found)


def tests(options: argparse.Namespace) -> None:
    """Run tests/gpu; on a machine that tries this script out they skip themselves."""
    from bench import gpu_tests

    files, beside = gpu_tests.files_in_order(REPO / "tests/gpu"), 1
    if options.device != "cuda":
        files = files[:1]
    elif "Exclusive" not in nvidia_smi("--query-gpu=compute_mode", "--format=csv,noheader"):
        beside = max(1, min(gpu_tests.BESIDE, (os.cpu_count() or 1) // 4))
    with tempfile.TemporaryDirectory() as folder:
        keep = functools.partial(write, options)
        gpu_tests.run(files, options.end - END_S - time.time(), Path(folder), keep, beside=beside)


def waits(options: argparse.Namespace) -> None:
    """Find where the host waits, then run whole steps in which torch raises if it does."""
    from bench import gpu_waits
    from lockstep.errors import LockstepError

    left, end = list(gpu_waits.SETTINGS), options.end - END_S
    found: Section = {"problems": [], "reasons": {}, "waits": {}, "raised": {}, "passed": [], "left_out": left}
    write(options, found)
    with tempfile.TemporaryDirectory() as folder:
        try:
            seconds = MEASURING * (end - time.time())
            given = (left, options.device, folder, time.time() + BEGINNING * seconds)
            launch_within(seconds, end, options.count, gpu_waits.measure, *given)
        except NotStarted as error:
            fail(found, "all", error)
        except (LockstepError, TimeoutError) as error:
            number = len(list(Path(folder).iterdir()))
            fail(found, left[min(number, len(left) - 1)], error)
        finally:
            files = {name: Path(folder, f"{name}.json") for name in left}
            found["waits"] = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
            found["not_measured"] = [name for name in left if name not in found["waits"]]
            write(options, found)
    for name, everywhere in found["waits"].items():
        places = [each for each in everywhere if gpu_waits.BESIDE not in each["place"]]
        early = [each for each in places if each["part"] == gpu_waits.BEFORE]
        first = sum(each["seconds_per_step"] for each in early)
        # What happens once in many steps is no wait of a step.
        if lines := [each["place"] for each in early if each["per_step"] >= 1]:
            found["problems"].append(f"{name}: waits in each step before the forward, at {', '.join(lines)}")
        total = sum(each["seconds_per_step"] for each in places)
        print(f"  {name:<20}{1e3 * total:8.3f} ms of a step in waits, {1e3 * first:.3f} of them before the forward")
    while left and end - time.time() > MODEL_S:
        with tempfile.TemporaryDirectory() as folder:
            try:
                seconds, problem = end - time.time(), None
                given = (left, options.device, folder, time.time() + BEGINNING * seconds)
                launch_within(seconds, end, options.count, gpu_waits.check, *given)
            except NotStarted as error:
                fail(found, "all, under set_sync_debug_mode", error)
                write(options, found)
                break
            except (LockstepError, TimeoutError) as error:
                problem = error
            passed = [name for name in left if Path(folder, name).exists()]
        found["passed"] += passed
        left = left[len(passed) :]
        if problem is not None:
            found["raised"][left[0]] = str(problem)
            fail(found, left.pop(0), problem)
        found["left_out"] = left
        write(options, found)
        if problem is None:
            break


def benchmark(options: argparse.Namespace) -> None:
    """Measure the models, one after the other, each with its share of what time is left."""
    from bench import gpu_steps
    from bench.harness import show

    end = options.end - END_S
    names = list(gpu_steps.models_of(options.device))
    jobs: list[tuple[str, Callable[..., Any], int]] = [(name, gpu_steps.measure, options.count) for name in names]
    replicas = functools.partial(gpu_steps.measure_replicas, num_devices=options.count)
    jobs += [(f"{name}, dp", replicas, 1) for name in names[:2]]  # with one GPU, twice on it
    found: Section = {"problems": [], "reasons": {}, "models": {}, "left_out": [title for title, *_ in jobs]}
    write(options, found)
    for number, (title, measure, devices) in enumerate(jobs):
        seconds = (end - time.time()) / (len(jobs) - number)
        if seconds < MODEL_S:
            break
        name = title.removesuffix(", dp")
        try:
            figures = measure_model(seconds, end, devices, functools.partial(measure, name, options.device))
        except Exception as error:  # the other models may do better
            fail(found, title, error)
        else:
            for contender, error in figures.pop("failed").items():
                fail(found, f"{title}, {contender}", error)
            found["models"][title] = figures
            if "rounds_s" in figures:
                show(title, figures["rounds_s"], ("none", "torch"))
        found["left_out"].remove(title)
        write(options, found)


def measure_model(seconds: float, end: float, devices: int, measure: Callable[..., Any]) -> dict[str, Any]:
    """Return the figures of a model; a contender that breaks the job is left out in another one, if there is time.

    Args:
        seconds: For the model.
        end: Of the section, by the clock `time.time`.
        devices: The number of ranks.
        measure: Takes the last arguments of `gpu_steps.measure`.
    """
    from bench.gpu_steps import NO_MEMORY
    from lockstep.errors import LockstepError

    failed: dict[str, str] = {}
    deadline = time.time() + seconds
    while True:
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder, "notes.json")
            limit_s = max(deadline - time.time(), 0.0) + seconds + 30
            given = deadline, failed, str(notes)
            try:
                figures: dict[str, Any] = launch_within(limit_s, end, devices, measure, *given)[0]
                # A rank that has no memory while others wait for it breaks the job, and is no fault.
                errors = figures["failed"].items()
                return {**figures, "failed": {name: error for name, error in errors if NO_MEMORY not in error}}
            except (LockstepError, TimeoutError) as error:
                told = json.loads(notes.read_text()) if notes.exists() else {"now": "", "failed": failed}
                # One that has failed before may have left the device in disorder.
                broken = told["failed"] if len(told["failed"]) > len(failed) else failed | {told["now"]: str(error)}
                if not told["now"] or end - time.time() < MODEL_S:
                    raise
                failed = broken
                print(f"  again without {', '.join(failed)}", flush=True)


class NotStarted(TimeoutError):
    """The ranks were late before what they run had begun."""


def launch_within(seconds: float, end: float, devices: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run a function on ranks, which call `gpu_steps.join`; if they are late they are aborted.

    Args:
        seconds: How long they may take when all have joined; for that they have `START_S`.
        end: They have no time beyond this, by the clock `time.time`.
        devices: The number of ranks.
        function: What they run.
        arguments: Its own.

    Raises:
        NotStarted: They had not joined in time.
        TimeoutError: They had not ended in time; both have their stacks.
    """
    from bench.gpu_steps import JOINED
    from bench.gpu_tests import abort_children
    from lockstep import launch
    from lockstep.errors import LockstepError

    late: type[TimeoutError] | None = None
    text, is_over = "", threading.Event()

    def watch() -> None:
        nonlocal late, text
        kind: type[TimeoutError] = NotStarted
        began, limit_s, what = time.time(), START_S, "the ranks had not started"
        while not is_over.wait(0.1):
            if kind is NotStarted and len(os.listdir(folder)) == devices:
                began, limit_s, kind, what = time.time(), seconds, TimeoutError, "it did not end"
            if time.time() > min(began + limit_s, end):
                late, text = kind, f"{what} within {time.time() - began:.0f} s"
                abort_children(os.getpid())
                if not is_over.wait(STACKS_S):
                    abort_children(os.getpid(), signal.SIGKILL)
                return

    with tempfile.TemporaryDirectory() as folder:
        os.environ[JOINED] = folder  # the ranks inherit it
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            return launch(function, *arguments, devices=devices)
        except LockstepError as error:
            if late is not None:
                raise late(f"{text}\n{error}") from None
            raise
        finally:
            del os.environ[JOINED]
            is_over.set()
            watcher.join()


def fail(found: Section, title: str, error: Exception | str) -> None:
    text = str(error) or type(error).__name__
    found["problems"].append(f"{title}: {text.splitlines()[0]}")
    found["reasons"][title] = text
    print(f"  {title}: {text}", flush=True)


SECTIONS: dict[str, Callable[[argparse.Namespace], None]] = {"tests": tests, "waits": waits, "benchmark": benchmark}


# --- the machine


def compile_library() -> str:
    """Compile the C library of CPU ranks where it is missing; return why it cannot be, or nothing."""
    if LIBRARY.exists() or sys.platform != "linux":
        return ""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return "ranks on the CPU, and compression, with the C library: there is no C compiler to make it with"
    try:
        import setuptools

        given: dict[str, Any] = {}
        setup, setuptools.setup = setuptools.setup, lambda **keywords: given.update(keywords)
        try:
            runpy.run_path(str(REPO / "setup.py"))
        finally:
            setuptools.setup = setup
        [extension] = given["ext_modules"]
        options = ["-shared", "-fPIC", *extension.extra_compile_args, "-o", str(LIBRARY)]
        subprocess.run([compiler, *options, *extension.sources], cwd=REPO, check=True, capture_output=True, text=True)
    except (ImportError, OSError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", "") or error).strip().splitlines()[-1]
        return f"ranks on the CPU, and compression, with the C library: it could not be compiled: {reason}"
    return ""


def machine(kind: str, count: int) -> dict[str, Any]:
    """Return what the GPUs are, and how they are connected."""
    import torch

    on_cuda = kind == "cuda"
    topology = nvidia_smi("topo", "-m") if on_cuda else ""
    return {
        "name": torch.cuda.get_device_name(0) if on_cuda else kind,
        "number": count,
        "driver": nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0] if on_cuda else "-",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_cuda else "-",
        "memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1) if on_cuda else 0,
        "mode": nvidia_smi("--query-gpu=compute_mode,mig.mode.current", "--format=csv,noheader") if on_cuda else "",
        "topology": topology,
        "nvlink": bool(re.search(r"\bNV\d+\b", topology)),
    }


def nvidia_smi(*arguments: str) -> str:
    """Return what nvidia-smi prints, or ``unknown`` where it cannot be asked."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return re.sub(r"\x1b\[\d*m", "", done.stdout).strip() or "unknown"


# --- what was found


def report(name: str, section: Section) -> None:
    counts = ", ".join(f"{number} {outcome.lower()}" for outcome, number in section.get("counts", {}).items())
    print(f"{name}: {section['status']} after {section['seconds']:g} s{'; ' + counts if counts else ''}")
    for problem in section["problems"]:
        print(f"  failed: {problem}")


def not_proved(run: dict[str, Any], kind: str) -> list[str]:
    """Return what the machine, the time, or what is installed left open."""
    gpus, sections, lines = run["gpus"], run["sections"], []
    if kind != "cuda":
        lines.append("Anything: no GPU took part; this was a trial of the script.")
    if gpus["number"] == 1:
        lines.append(
            "What several GPUs show and two ranks, or two replicas, on one do not: overlap with backward above all."
        )
    elif not gpus["nvlink"]:
        lines.append("Speed over NVLink: the GPUs are not connected by it, or nvidia-smi does not say so.")
    lines.append("Several machines; other GPUs than these; runs of hours.")
    for name in SHARES:
        section = sections.get(name)
        if section is None:
            lines.append(f"Section {name}: it was not run.")
        elif section["status"] == "stopped":
            lines.append(f"Section {name}: it was stopped after {section['seconds']:g} s.")
    ran = sections.get("tests", {})
    lines += [f"A test skipped itself: {line}" for line in ran.get("skipped", [])]
    lines += [f"A test passed only alone, without others beside it: {test}" for test in ran.get("only_alone", [])]
    lines += [f"A test did not run: {test}" for test in ran.get("left_out", [])]
    for name, key, what in (
        ("waits", "not_measured", "Where a step of fit waits"),
        ("waits", "left_out", "Steps of fit under set_sync_debug_mode"),
        ("benchmark", "left_out", "Speed"),
    ):
        for title in sections.get(name, {}).get(key, []):
            lines.append(f"{what}, {title}: there was no time left for it.")
    found = sections.get("benchmark", {})
    for title, figures in found.get("models", {}).items():
        lines += [f"Speed of {title}, {name}: {reason}." for name, reason in figures.get("missing", {}).items()]
    return lines


def stem(run: dict[str, Any]) -> str:
    """Return the name of the files with the results, without an ending."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", run["gpus"]["name"]).strip("-")
    return f"gpu-{name}x{run['gpus']['number']}"


def keep(run: dict[str, Any], kind: str, problem: str, folders: list[Path], log: Path | None) -> None:
    """Write the results of the sections so far; the log goes only where somebody asked for it."""
    run["not_proved"] = [*([problem] if problem else []), *not_proved(run, kind)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
        whole = folder / f"{stem(run)}.new"
        whole.write_text(json.dumps(run, indent=1) + "\n")
        whole.replace(whole.with_suffix(".json"))
    for folder in folders[1:] if log is not None and log.exists() else ():
        shutil.copyfile(log, folder / log.name)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # as Ctrl-C, also if whoever started this ignores that
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
