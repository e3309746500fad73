"""Public training programs on two CPU ranks: by torchrun, with ``--adopt``, by ``verify``, with ``prepare``.

A program is taken from its repository at a named commit, by the person who runs this; nothing of it is in this
repository. It gets tiny data and arguments (bench/programs_list/table.py). Where it is written for CUDA or for old
packages only, the lines that are changed are counted. Cells of a program for several devices:

    torchrun    torchrun --nproc-per-node 2 SCRIPT ARGUMENTS
    adopt       lockstep run --adopt --devices 2 SCRIPT ARGUMENTS, compared with it
    verify      lockstep verify --devices 2 SCRIPT -- ARGUMENTS

Of a program for one device, the first is ``python SCRIPT``, the second the program with ``lockstep.prepare`` by
``lockstep run --devices 2``, and ``verify`` is of that. After every step of an optimizer, on every rank, a hash of its
parameters and the losses are recorded (bench/programs_list/recorder).

Usage: python -m bench.programs [--from FOLDER] [--only NAME] [--again] [--page]

Without flags it runs what is missing in bench/results/programs.json, then writes docs/works_with.md.
"""

import argparse
import difflib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.conformance import end
from bench.harness import progress
from bench.programs_list.table import ON_CPUS, PROGRAMS, Program
from bench.programs_page import write
from lockstep.telemetry.provenance import gather

REPO = Path(__file__).parent.parent
RESULTS = REPO / "bench" / "results" / "programs.json"
RECORDER = REPO / "bench" / "programs_list" / "recorder"
NUM_RANKS = 2
DEADLINE_S = 300
DIGITS = 1e-6
"""The relative difference of losses that are the same to 6 digits."""


# --- what is put in place ---------------------------------------------------------------------------------------------


class Missing(RuntimeError):
    """A program that cannot be had or run here."""


def repository(program: Program, given: Path | None, cache_folder: Path) -> Path:
    """Return a git folder that has the program's commit: one of the caller's, or one that is fetched.

    Raises:
        Missing: There is none.
    """
    owner, name = program.repository.split("/")
    if given is not None:
        places = (f"{owner}+{name}/repo", f"{owner}+{name}", program.repository, name, f"{name}.git")
        for folder in (given / place for place in places):
            if folder.is_dir() and git(folder, "cat-file", "-e", program.commit).returncode == 0:
                return folder
        raise Missing(f"no clone of {program.repository} with this commit in the folder that was given")
    folder = cache_folder / "repositories" / f"{owner}+{name}"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        git(folder, "init", "--quiet", "--bare")
    if git(folder, "cat-file", "-e", program.commit).returncode:
        address = f"https://github.com/{program.repository}"
        if git(folder, "fetch", "--quiet", "--depth", "1", address, program.commit).returncode:
            raise Missing(f"{address} could not be fetched")
    return folder


def git(folder: Path, *words: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, check=False)


@cache
def install(packages: tuple[str, ...], folder: Path) -> None:
    """Install ``packages`` beside the environment.

    Raises:
        Missing: One is not to be had.
    """
    for package in packages:
        marker = folder / f".{package.replace('/', '_')}"
        if marker.exists():
            continue
        words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), package]
        if subprocess.run(words, capture_output=True, check=False).returncode:
            raise Missing(f"pip does not find {package} here")
        marker.touch()


def lay_out(program: Program, source: Path, root: Path, *, prepared: bool) -> int:
    """Write a program with its data and changes below ``root``, and return the number of lines that are changed.

    With ``prepared``, these are the lines that bring in ``prepare``.
    """
    archive = git(source, "archive", program.commit, *program.paths)
    if archive.returncode:
        raise Missing(f"the clone lacks files: {archive.stderr.decode().strip()[-100:]}")
    subprocess.run(["tar", "-x", "-C", str(root)], input=archive.stdout, check=True)
    count = 0
    for name in program.on_cpus:
        text = (root / name).read_text()
        new = text
        for old, replacement in ON_CPUS:
            new = old.sub(replacement, new)
        count += changed(text, new)
        (root / name).write_text(new)
    count += sum(replaced(root, *edit) for edit in program.edits)
    if prepared:
        count = sum(replaced(root, *edit) for edit in program.prepare)
    program.place(root / program.folder)
    return count


def replaced(root: Path, name: str, old: str, new: str) -> int:
    """Replace a text in a file, wherever it is, and return the number of changed lines."""
    text = (root / name).read_text()
    if old not in text:
        raise RuntimeError(f"{name} has no {old!r}.")
    (root / name).write_text(text.replace(old, new))
    return changed(text, text.replace(old, new))


def changed(old: str, new: str) -> int:
    """Return how many lines are changed, added or removed."""
    steps = difflib.SequenceMatcher(None, old.splitlines(), new.splitlines(), autojunk=False).get_opcodes()
    return sum(max(b - a, d - c) for kind, a, b, c, d in steps if kind != "equal")


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run of a program that has ended.

    Args:
        code: Its exit code; None if it was ended at the deadline.
        output: What it printed.
        steps: For each rank, what was recorded.
        seconds: How long it took.
    """

    code: int | None
    output: str
    steps: list[list[dict[str, Any]]]
    seconds: float

    @property
    def error(self) -> str:
        """Why it did not end well; empty if it did."""
        if self.code is None:
            return f"had not ended after {DEADLINE_S} s"
        if self.code == 0 or (self.steps and self.output.rstrip().endswith("exit code 0")):
            return ""
        named = re.findall(r"(?:^|\s)((?:\w+\.)*\w*(?:Error|Exception|Missing\w*)\b.*)", self.output)
        named = [line for line in named if "ChildFailedError" not in line]
        return shortened(named[-1] if named else f"exit code {self.code}")


def shortened(text: str) -> str:
    """Return the beginning of a message, without paths."""
    text = without_paths(" ".join(text.split()))
    return text if len(text) <= 200 else text[:197] + "..."


def without_paths(text: str) -> str:
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", text)


def start(program: Program, words: Sequence[str], root: Path, packages: Path, *, records: bool = True) -> Run:
    """Run a command in the folder of a program, to its end or the deadline."""
    with tempfile.TemporaryDirectory() as out, Path(out, "output").open("w+") as output:
        search = [RECORDER, packages, root, root / "src", REPO / "src", REPO]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join(map(str, search)),
            "PROGRAMS_SCRIPT": str(root / program.script),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            **({"PROGRAMS_RECORD": out} if records else {}),
            **({"PROGRAMS_TORCHVISION": "1"} if lacks_operators(packages) else {}),
            **dict(program.environment),
        }
        began = time.monotonic()
        started = subprocess.Popen(
            [sys.executable, *words], cwd=root / program.folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output,
        )  # fmt: skip
        try:
            code: int | None = started.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            code = None
            end(started.pid)
            started.wait()
        output.seek(0)
        steps = [
            [json.loads(line) for line in file.read_text().splitlines()] for file in sorted(Path(out).glob("*.jsonl"))
        ]
        return Run(code, output.read(), steps, time.monotonic() - began)


@cache
def lacks_operators(packages: Path) -> bool:
    """Whether torchvision is there, but cannot be imported beside a torch without CUDA."""
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(
        [sys.executable, "-c", "import torchvision"], env=environment, capture_output=True, text=True, check=False
    )
    return "torchvision::nms does not exist" in done.stderr


def trained(run: Run) -> dict[str, Any]:
    """Return the cell of a run by itself: its steps and losses."""
    if run.error or not run.steps:
        return {"text": "error", "note": run.error or "no step was recorded"}
    losses = [value for line in run.steps[0] for value in line["losses"]]
    last = f", last loss {losses[-1]:.6g}" if losses else ""
    return {"text": f"{len(run.steps[0])} steps{last}", "losses": [losses_of(rank) for rank in run.steps]}


def losses_of(rank: Sequence[Mapping[str, Any]]) -> list[float]:
    return [value for line in rank for value in line["losses"]]


def compared(run: Run, wanted: Run, *, parts: bool) -> dict[str, Any]:
    """Return the cell of a run beside that of torch: the same weights after every step?

    With ``parts``, ``wanted`` is one process, of whose losses each rank computes those of its part.
    """
    cell = trained(run)
    if cell["text"] == "error":
        return cell
    if wanted.error or not wanted.steps:
        return {**cell, "text": f"{cell['text']}; nothing to compare with"}
    ranks = [wanted.steps[0]] * len(run.steps) if parts else wanted.steps
    if [len(rank) for rank in run.steps] != [len(rank) for rank in ranks]:
        return {**cell, "text": f"{len(run.steps[0])} steps instead of {len(ranks[0])}"}
    pairs = [pair for mine, theirs in zip(run.steps, ranks, strict=True) for pair in zip(mine, theirs, strict=True)]
    if all(mine["weights"] == theirs["weights"] for mine, theirs in pairs):
        same = parts or all(mine["losses"] == theirs["losses"] for mine, theirs in pairs)
        return {
            **cell,
            "text": f"the same bits after each of {len(run.steps[0])} steps" + ("" if same else ", other losses"),
        }
    far = max(distance(mine["sums"], theirs["sums"]) for mine, theirs in pairs)
    return {**cell, "text": f"weights equal to {far:.0e}" if far <= DIGITS else f"weights off by {far:.1e}"}


def distance(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Return the largest difference of the sums of parameters over their norm."""
    if len(found) != len(wanted):
        return float("inf")
    norm = sum(value**2 for value in wanted) ** 0.5 or 1.0
    return max((abs(a - b) for a, b in zip(found, wanted, strict=True)), default=0.0) / norm


def verified(run: Run, file: Path) -> dict[str, Any]:
    """Return the cell of ``verify``."""
    if not file.exists():
        lines = [line for line in run.output.splitlines() if line.strip()]
        return {"text": "error", "note": run.error if run.code is None else shortened(" ".join(lines[-4:]))}
    found = json.loads(file.read_text())
    if found["same"]:
        text = "the same run"
    elif found["apart_from"]:
        text = f"the same run, apart from {', '.join(found['apart_from'])}"
    else:
        text = "not the same run: " + (", ".join(each["cause"] for each in found["causes"]) or "cause not found")
    verdict = found["verdict"]
    return {"text": text, "verdict": [without_paths(line) for line in verdict]}


def cells(program: Program, source: Path, packages: Path) -> dict[str, Any]:
    """Run a program in all ways, each in a folder of its own."""
    found: dict[str, Any] = {}
    is_single = bool(program.prepare)

    def go(
        key: str, words: Sequence[str], *, prepared: bool = False, records: bool = True, adopts: bool = False
    ) -> Run:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder, "program")
            root.mkdir()
            lines = lay_out(program, source, root, prepared=prepared)
            found["prepare_lines" if prepared else "lines"] = lines
            if adopts:
                file = root / program.script
                file.write_text("import lockstep; lockstep.adopt()\n" + file.read_text())
            script = [os.path.relpath(program.script, program.folder or ".")]
            words = [word for each in words for word in (script if each == "SCRIPT" else [each])]
            run = start(program, words, root, packages, records=records)
            print(f"{program.name}: {key} took {run.seconds:.0f} s", flush=True)
            if os.environ.get("PROGRAMS_SHOW"):
                print(run.output[-6000:])
            return run

    arguments = shlex.split(program.arguments)
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"]
    ours = ["-m", "lockstep", "run", "--devices", str(NUM_RANKS)]
    if is_single:
        wanted = go("python", ["SCRIPT", *arguments])
        found["plain"] = trained(wanted)
        found["prepare"] = compared(go("prepare", [*ours, "SCRIPT", *arguments], prepared=True), wanted, parts=True)
    else:
        wanted = go("torchrun", [*torchrun, "SCRIPT", *arguments])
        found["plain"] = trained(wanted)
        found["adopt"] = compared(go("adopt", [*ours, "--adopt", "SCRIPT", *arguments]), wanted, parts=False)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "verify.json")
        words = [
            "-m",
            "lockstep",
            "verify",
            "--devices",
            str(NUM_RANKS),
            "--minutes",
            "4",
            "--json",
            str(file),
            "SCRIPT",
            "--",
            *arguments,
        ]
        found["verify"] = verified(go("verify", words, prepared=is_single, records=False, adopts=program.adopts), file)
    return found


def row(program: Program, given: Path | None, cache_folder: Path) -> dict[str, Any]:
    """Return all that is filed of a program."""
    about = {"repository": program.repository, "commit": program.commit, "script": program.script}
    about["note"] = program.note
    try:
        source = repository(program, given, cache_folder)
        packages = cache_folder / "packages"
        install(program.packages, packages)
        found = cells(program, source, packages)
    except Missing as error:
        return {**about, "missing": str(error)}
    return {**about, **found, "provenance": asdict(gather())}


def read() -> dict[str, Any]:
    """Return the results on file."""
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {"version": 1, "programs": {}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [options]", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--from", dest="given", type=Path, help="a folder with clones; default: github.com")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir(), "programs"), help="for what is fetched"
    )
    parser.add_argument("--only", action="append", default=[], choices=[each.name for each in PROGRAMS], metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also what is on file")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args()
    results = read()
    wanted = [each for each in PROGRAMS if not options.only or each.name in options.only]
    todo = [each for each in wanted if options.again or each.name not in results["programs"]]
    for program in progress([] if options.page else todo, "programs"):
        results["programs"][program.name] = row(program, options.given, options.cache.resolve())
        order = {each.name: index for index, each in enumerate(PROGRAMS)}
        results["programs"] = dict(sorted(results["programs"].items(), key=lambda item: order.get(item[0], len(order))))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write(results)


if __name__ == "__main__":
    main()
