"""Run the scripts in bench/ and keep what each prints in bench/results/, with the command, the commit and the machine.

Usage: python tools/bench.py [NAME ...]
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import psutil
import torch

REPO = Path(__file__).parents[1]
RESULTS = REPO / "bench" / "results"
TIMEOUT_S = 1800


def commit() -> str:
    """Return the commit, marked where the working tree differs from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=REPO, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def cpu_name() -> str:
    """Return the processor's name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def header(script: Path) -> str:
    """Return the lines that say what was measured, and on what."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return (
        f"command  python {script.relative_to(REPO)}\n"
        f"commit   {commit()}\n"
        f"machine  {cpu_name()}, {os.cpu_count()} logical CPUs, {psutil.virtual_memory().total / 2**30:.0f} GiB\n"
        f"devices  {', '.join(gpus) or 'no GPU'}\n"
        f"versions Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}\n"
    )


def run(script: Path) -> bool:
    """Run one script; keep its output if it succeeds. Its errors go to the terminal."""
    print(f"== {script.name}", flush=True)
    head = header(script)
    try:
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=REPO,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        print(f"{script.name} did not finish within {TIMEOUT_S} s", file=sys.stderr)
        return False
    print(done.stdout, flush=True)
    if done.returncode == 0:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{script.stem}.txt").write_text(f"{head}\n{done.stdout}")
    return done.returncode == 0


def main(names: list[str]) -> int:
    """Run the named scripts, or all; return the exit status."""
    scripts = {path.stem: path for path in sorted((REPO / "bench").glob("*.py"))}
    unknown = [name for name in names if name not in scripts]
    if unknown:
        print(f"No such benchmark: {', '.join(unknown)}\nThere are: {', '.join(scripts) or 'none'}", file=sys.stderr)
        return 1
    failed = [name for name in names or scripts if not run(scripts[name])]
    if failed:
        print(f"Failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
