"""Prove, or disprove, what Lockstep promises on the GPUs of this machine: `make gpu`.

    tests      tests/gpu
    waits      where the host waits for its GPU in a step of `lockstep.fit`: bench/gpu_waits.py
    benchmark  training steps, ours and torch's, interleaved: bench/gpu_steps.py

Each section is a process with a limit of its own, a share of --minutes; what it does not get to is listed as not
proved. What was found is kept in bench/results/gpu-<device>x<number>.json, also after Ctrl-C, and docs/speed.md shows
it. Needs no installation and no network: where the C library of CPU ranks is missing, it is compiled with cc.

Exit status: 0 if nothing failed, 1 if something did, 2 without a GPU, 130 after Ctrl-C.

Usage: PYTHONPATH=src python3 -m bench.gpu_proof [--minutes N] [--only SECTION]
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
if importlib.util.find_spec("lockstep") is None:
    sys.path.insert(0, str(REPO / "src"))

NEEDED = ("torch", "numpy", "click", "rich", "cloudpickle", "psutil", "safetensors")
LIBRARY = REPO / "src" / "lockstep" / "comm" / "shm" / "_native.so"
RESULTS, TRIALS = REPO / "bench" / "results", REPO / "runs" / "bench"
SHARES = {"tests": 0.4, "waits": 0.15, "benchmark": 0.45}
"""Of the time; what a section leaves over is for those after it."""
GRACE_S = 15.0
END_S, MODEL_S = 5.0, 5.0
"""What the end of a section needs, and what a model needs at least: ranks start, and each contender is made."""
# With the GPU's libraries come notices that are no failures of ours; a pytest older than ours will do.
PYTEST = ["-v", "--no-header", "-p", "no:cacheprovider", "-o", "minversion=7", "-o", "filterwarnings=default"]
OUTCOME = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
Section = dict[str, Any]
"""``status``: done, failed or cut off; ``seconds``; ``problems``; and what the section found."""


def main() -> int:
    options = parse()
    if absent := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(f"These Python packages are missing: {', '.join(absent)}. Python: {sys.executable}", file=sys.stderr)
        return 1
    if options.section is not None:
        try:
            SECTIONS[options.section](options)
        except KeyboardInterrupt:  # its time is over
            return 130
        return 0
    import torch

    count = torch.cuda.device_count() if options.device == "cuda" else 2
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA GPU on this machine, so there is nothing to prove here.")
        return 2
    return prove(options, count)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=9.0, help="for all sections together (9)")
    parser.add_argument(
        "--only", choices=SHARES, action="append", help="this section; may be repeated; kept in runs/bench"
    )
    # To try the script out without a GPU: tiny models on two CPU ranks or simulated devices; kept in runs/bench.
    parser.add_argument("--device", choices=["cuda", "cpu", "sim"], default="cuda", help=argparse.SUPPRESS)
    # Of a section, which is this script again.
    parser.add_argument("--section", choices=SHARES, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def prove(options: argparse.Namespace, count: int) -> int:
    """Run the sections one after the other; write what they found, whatever happens."""
    from dataclasses import asdict

    from lockstep.telemetry.provenance import gather

    end = time.monotonic() + 60 * options.minutes
    problem = compile_library()
    facts = machine(options.device, count)
    command = f"python -m bench.gpu_proof {shlex.join(sys.argv[1:])}".strip()
    run = {"command": command, "provenance": asdict(gather()), "gpus": facts, "sections": {}, "not_proved": []}
    sections: dict[str, Section] = run["sections"]
    wanted = {name: share for name, share in SHARES.items() if not options.only or name in options.only}
    status = 0
    print(
        f"{facts['number']} x {facts['name']}, driver {facts['driver']}, NCCL {facts['nccl']}; {options.minutes:g} min"
    )
    try:
        for name in wanted:
            share = wanted[name] / sum(wanted[each] for each in wanted if each not in sections)
            left_s = (end - time.monotonic()) * share
            print(f"\n{name}: at most {left_s:.0f} s", flush=True)
            run_section(options, name, count, left_s, sections)
            report(name, sections[name])
    except KeyboardInterrupt:
        print("\nStopped; what was found so far is kept.", file=sys.stderr)
        status = 130
    finally:
        run["not_proved"] = [*([problem] if problem else []), *not_proved(run, options.device)]
        keep(run, is_trial=options.device != "cuda" or bool(options.only))
    failed = [name for name, section in sections.items() if section["status"] == "failed" or section["problems"]]
    print("\nNot proved here:\n" + "".join(f"  - {line}\n" for line in run["not_proved"]))
    print(f"Failed: {', '.join(failed)}" if failed else "Nothing failed.")
    return status or int(bool(failed))


def run_section(
    options: argparse.Namespace, name: str, count: int, seconds: float, sections: dict[str, Section]
) -> None:
    """Run one in a process group of its own, which is ended when its time is over; what it wrote by then counts."""
    began, status = time.monotonic(), "failed"
    section: Section = {"status": status, "problems": []}
    sections[name] = section
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        given = ["--device", options.device, "--count", str(count), "--seconds", str(seconds), "--out", str(out)]
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPO / "src"), os.environ.get("PYTHONPATH", "")])}
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu_proof", "--section", name, *given],
            cwd=REPO,
            env=environ,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only this process, which ends the section in its own way
        )
        try:
            status = "failed" if process.wait(seconds) else "done"
        except subprocess.TimeoutExpired:
            status = "cut off"
        except KeyboardInterrupt:
            status = "cut off"
            raise
        finally:
            end_group(process)
            with contextlib.suppress(OSError, ValueError):
                section.update(json.loads(out.read_text()))
            if status == "done" and section["problems"]:
                status = "failed"
            section.update(status=status, seconds=round(time.monotonic() - began, 1))


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
    whole = options.out.with_suffix(".new")
    whole.write_text(json.dumps(found))
    whole.replace(options.out)


def tests(options: argparse.Namespace) -> None:
    """Run tests/gpu; on a machine that tries this script out they skip themselves."""
    if importlib.util.find_spec("pytest") is None:
        write(options, {"problems": ["pytest is not installed"], "counts": {}})
        return
    first = "tests/gpu/test_ranks_gpu.py"  # what needs several GPUs has the first claim to the time
    files = [first, *sorted(str(path.relative_to(REPO)) for path in (REPO / "tests/gpu").glob("test_*.py"))]
    files = list(dict.fromkeys(files)) if options.device == "cuda" else [first]
    # Without the plugin, the option with that name is unknown, and so is the marker.
    lenient = [] if importlib.util.find_spec("pytest_timeout") else ["-o", "addopts=--import-mode=importlib"]
    command = [sys.executable, "-m", "pytest", *PYTEST, *lenient, *files]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    text, outcomes = "", {}
    try:
        for line in process.stdout:
            text += line
            if found := OUTCOME.match(line):
                outcomes[found[1]] = found[2]
                write(options, {"problems": failures(outcomes), "counts": Counter(outcomes.values()), "skipped": []})
        process.wait()
    finally:
        print(text[-4000:] if process.returncode else text.splitlines()[-1], flush=True)
    problems = failures(outcomes)
    if process.returncode not in (0, 5) and not problems:
        problems = [f"pytest ended with {process.returncode}: {text.strip().splitlines()[-1]}"]
    skipped = [line for line in text.splitlines() if line.startswith("SKIPPED")]
    write(options, {"problems": problems, "counts": Counter(outcomes.values()), "skipped": skipped})


def failures(outcomes: dict[str, str]) -> list[str]:
    return [f"{test} {outcome}" for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR", "XPASS")]


def waits(options: argparse.Namespace) -> None:
    """Find where the host waits, then run whole steps in which torch raises if it does."""
    from bench import gpu_waits
    from lockstep import launch
    from lockstep.errors import LockstepError

    left = list(gpu_waits.SETTINGS)
    found: Section = {"problems": [], "waits": {}, "raised": {}, "passed": [], "left_out": left}
    write(options, found)
    with tempfile.TemporaryDirectory() as folder:
        try:
            launch(gpu_waits.measure, left, options.device, folder, devices=options.count)
        finally:
            files = {name: Path(folder, f"{name}.json") for name in left}
            found["waits"] = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
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
    while left:
        with tempfile.TemporaryDirectory() as folder:
            try:
                launch(gpu_waits.check, left, options.device, folder, devices=options.count)
            except LockstepError as error:
                passed = [name for name in left if Path(folder, name).exists()]
                broken, left = left[len(passed)], left[len(passed) + 1 :]
                found["raised"][broken] = str(error)
                found["problems"].append(f"{broken}: {str(error).splitlines()[0]}")
            else:
                passed, left = left, []
        found["passed"] += passed
        found["left_out"] = left
        write(options, found)


def benchmark(options: argparse.Namespace) -> None:
    """Measure the models, one after the other, each with its share of what time is left."""
    from bench import gpu_steps
    from bench.harness import show
    from lockstep import launch

    end = time.time() + options.seconds - END_S  # the clock that the ranks have, too
    names = list(gpu_steps.models_of(options.device))
    replicated = names[:2] if options.count > 1 else []
    jobs: list[tuple[str, Callable[..., Any], tuple[Any, ...], int]] = [
        (name, gpu_steps.measure, (), options.count) for name in names
    ]
    jobs += [(f"{name}, dp", gpu_steps.measure_replicas, (options.count,), 1) for name in replicated]
    found: Section = {"problems": [], "models": {}, "left_out": [title for title, *_ in jobs]}
    write(options, found)
    for number, (title, measure, arguments, devices) in enumerate(jobs):
        seconds = (end - time.time()) / (len(jobs) - number)
        if seconds < MODEL_S:
            break
        try:
            given = (title.removesuffix(", dp"), options.device, time.time() + seconds, *arguments)
            figures = launch(measure, *given, devices=devices, timeout_s=2 * seconds + 30)[0]
        except Exception as error:  # the other models may do better
            found["problems"].append(f"{title}: {str(error).splitlines()[0]}")
        else:
            found["models"][title] = figures
            if "rounds_s" in figures:
                show(title, figures["rounds_s"], ("none", "torch"))
        found["left_out"].remove(title)
        write(options, found)


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
            "Anything about several GPUs: gradients between ranks, overlap with backward, DataParallel, lost ranks."
        )
    elif not gpus["nvlink"]:
        lines.append("Speed over NVLink: the GPUs are not connected by it, or nvidia-smi does not say so.")
    lines.append("Several machines; other GPUs than these; runs of hours.")
    for name in SHARES:
        section = sections.get(name)
        if section is None:
            lines.append(f"Section {name}: it was not run.")
        elif section["status"] == "cut off":
            lines.append(
                f"Section {name}: it was cut off after {section['seconds']:g} s, with what it had found by then."
            )
    lines += [f"A test skipped itself: {line}" for line in sections.get("tests", {}).get("skipped", [])]
    for name, what in (("waits", "Steps of fit under set_sync_debug_mode"), ("benchmark", "Speed")):
        for title in sections.get(name, {}).get("left_out", []):
            lines.append(f"{what}, {title}: there was no time left for it.")
    found = sections.get("benchmark", {})
    for title, figures in found.get("models", {}).items():
        lines += [f"Speed of {title}, {name}: {reason}." for name, reason in figures.get("missing", {}).items()]
    return lines


def keep(run: dict[str, Any], *, is_trial: bool) -> None:
    """Write the results, and unless they are of a trial the page that shows them."""
    from bench.report import gpu

    folder = TRIALS if is_trial else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9]+", "-", run["gpus"]["name"]).strip("-")
    path = folder / f"gpu-{name}x{run['gpus']['number']}.json"
    path.write_text(json.dumps(run, indent=1) + "\n")
    print(f"\nkept as {os.path.relpath(path)}")
    if not is_trial:
        gpu.write()
        print("written: the GPU table in docs/speed.md")


if __name__ == "__main__":
    sys.exit(main())
