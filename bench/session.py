"""The whole benchmark in one session: every part after the other, then the record, the page and the tables.

    python tools/bench.py             all parts of the session; about an hour on two cores
    python tools/bench.py --quick     the same with few short rounds, to see that it runs; kept in runs/bench
    python tools/bench.py --parts F   a session in several runs: the parts in the folder F are not measured again
    python tools/bench.py NAME ...    these scripts of bench/ alone; what each prints is kept in bench/results/NAME.txt
    python tools/bench.py --since X   is this checkout slower than commit X? Kept in bench/results/versions.txt
    python tools/bench.py --report    the page and the tables once more, from the newest run

A session is kept as bench/results/run-<time>.json; bench/results/index.html, README.md and docs/speed.md show the
newest.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report import page, table
from bench.report.goals import judge
from bench.report.run import RESULTS, Run, newest
from lockstep.telemetry.provenance import Provenance, gather

REPO = Path(__file__).parents[1]
QUICK_RESULTS = REPO / "runs" / "bench"
FUSED = ("none", "torch-shm", "torch-zero", "ours", "ours-zero", "dp")
PARTS = {
    "all_reduce": ["all_reduce"],
    "steps": ["steps"],
    "steps_fused": ["steps", "--fused", "--large", *(word for name in FUSED for word in ("--contender", name))],
    "ranks": ["ranks"],
    "one_rank": ["one_rank"],
    "memory": ["memory"],
    "launch": ["launch"],
    "import_time": ["import_time"],
    "trainers": ["trainers"],
}
"""What is measured, by the name that it is kept under: a script of bench/ and its options."""
TIMEOUT_S = 3600.0
GRACE_S = 20.0
NO_SCRIPTS = {
    "session",
    "harness",
    "models",
    "contenders",
    "gpu_proof",
    "gpu_steps",
    "gpu_waits",
    "recovery_jobs",
    "recovery_loops",
    "trainer_loops",
    "versions",
}


def main(arguments: Sequence[str]) -> int:
    """Run what was asked for; return the exit status."""
    options = parse(arguments)
    if options.report:
        run = newest()
        if run is None:
            print("There is no run in bench/results yet: run `make bench`.", file=sys.stderr)
            return 1
        return report(run)
    scripts = {path.stem for path in (REPO / "bench").glob("*.py")} - NO_SCRIPTS
    unknown = sorted(set(options.names) - scripts)
    if unknown:
        print(f"No such benchmark: {', '.join(unknown)}\nThere are: {', '.join(sorted(scripts))}", file=sys.stderr)
        return 1
    try:
        if options.since:
            return since(options.since, options.quick)
        if options.names:
            return alone(options.names, options.quick)
        command = "python tools/bench.py" + " --quick" * options.quick + " --parts FOLDER" * bool(options.parts)
        return whole(options.quick, command, options.parts)
    except KeyboardInterrupt:
        print("Stopped; nothing was kept.", file=sys.stderr)
        return 130


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a script of bench/")
    parser.add_argument("--quick", action="store_true", help="few short rounds; figures mean nothing")
    parser.add_argument("--parts", type=Path, metavar="FOLDER", help="keep each part there; measure what is missing")
    parser.add_argument("--since", metavar="COMMIT", help="is this checkout slower than that commit? Status 1 if it is")
    parser.add_argument("--report", action="store_true", help="write the page and the tables from the newest run")
    return parser.parse_args(arguments)


def whole(quick: bool, command: str, folder: Path | None) -> int:
    """Run all parts, but those in ``folder``, and keep them as one run, if all succeeded."""
    provenance, start = gather(), time.monotonic()
    with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory() as place:
        Path(place).mkdir(parents=True, exist_ok=True)
        parts = measure(list(PARTS), quick, Path(place))
    if parts is None:
        return 1
    run: Run = {
        "command": command,
        "provenance": asdict(provenance),
        "quick": quick,
        "seconds": round(time.monotonic() - start, 1),
        "parts": parts,
    }
    run["verdict"] = [asdict(judgement) for judgement in judge(run)]
    stamp = provenance.when[:19].replace("-", "").replace(":", "")
    folder_of_run = QUICK_RESULTS if quick else RESULTS
    folder_of_run.mkdir(parents=True, exist_ok=True)
    path = folder_of_run / f"run-{stamp}.json"
    path.write_text(json.dumps(run) + "\n")
    print(f"\nkept as {path.relative_to(REPO)}")
    return report(run)


def measure(names: Sequence[str], quick: bool, folder: Path) -> dict[str, Any] | None:
    """Run those of these parts that are not in ``folder``; return what all recorded, or None if one failed."""
    parts: dict[str, Any] = {}
    start = time.monotonic()
    for number, name in enumerate(names, 1):
        head(f"{number}/{len(names)} {name}, {(time.monotonic() - start) / 60:.0f} minutes so far")
        kept = folder / f"{name}.json"
        arguments = [*PARTS[name], "--json", str(kept.absolute()), *(["--quick"] if quick else [])]
        if not kept.exists() and run_script(arguments, None):
            print(f"{name} failed, so there is no run to keep.", file=sys.stderr)
            return None
        parts[name] = json.loads(kept.read_text())
    return parts


def report(run: Run) -> int:
    """Print the verdict, and write the page; of a run that was not quick also the tables."""
    for judgement in judge(run):
        print(f"  {judgement.word:<12} {judgement.text}: {judgement.measured or '-'}; {judgement.limit}")
    path = (QUICK_RESULTS if run["quick"] else RESULTS) / "index.html"
    path.write_text(page.render(run))
    print(f"\nwritten: {path.relative_to(REPO)}")
    if not run["quick"]:
        table.write(run)
        print("written: the tables in README.md and docs/speed.md")
    return 0


def alone(names: Sequence[str], quick: bool) -> int:
    """Run single scripts; keep what they print, unless the run was a quick one."""
    failed = []
    for name in names:
        head(name)
        provenance = gather()
        printed: list[str] = []
        if run_script([name, *(["--quick"] if quick else [])], printed):
            failed.append(name)
        elif not quick:
            RESULTS.mkdir(exist_ok=True)
            (RESULTS / f"{name}.txt").write_text(f"{facts(name, provenance)}\n{''.join(printed)}")
    if failed:
        print(f"Failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def since(commit: str, quick: bool) -> int:
    """Compare this checkout with a commit, and keep what was printed; return the exit status."""
    provenance = gather()
    printed: list[str] = []
    status = run_script(["versions", commit, *(["--quick"] if quick else [])], printed)
    if printed and not quick:
        (RESULTS / "versions.txt").write_text(f"{facts(f'--since {commit}', provenance)}\n{''.join(printed)}")
    return status


def run_script(arguments: Sequence[str], printed: list[str] | None) -> int:
    """Run a script of bench/ and return its exit status; pass on what it prints, into ``printed`` as well.

    Ctrl-C reaches the script too, which ends its ranks; it is given time for that.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the script has ended.
    """
    command = [sys.executable, "-m", f"bench.{arguments[0]}", *arguments[1:]]
    output = None if printed is None else subprocess.PIPE
    process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.DEVNULL, stdout=output, text=True)
    deadline = time.monotonic() + TIMEOUT_S
    try:
        if printed is not None and process.stdout is not None:
            for line in process.stdout:
                print(line, end="", flush=True)
                printed.append(line)
        return process.wait(max(deadline - time.monotonic(), 1))
    except subprocess.TimeoutExpired:
        print(f"{arguments[0]} did not finish within {TIMEOUT_S:g} s", file=sys.stderr)
        return 1
    finally:
        end(process)


def end(process: subprocess.Popen[str]) -> None:
    """See that a script has ended: wait for one that was interrupted, ask one that goes on to stop, else kill it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    if process.poll() is None:
        process.kill()
        process.wait()


def facts(name: str, provenance: Provenance) -> str:
    """Return the lines that say what was measured, and on what."""
    return f"command  python tools/bench.py {name}\n" + "".join(
        f"{key:<16} {text}\n" for key, text in provenance.facts()
    )


def head(text: str) -> None:
    Console().rule(text, align="left")
