"""How long `lockstep run` takes to start two ranks, against torchrun.

Every round runs both once, in an order that alternates. "script" is from the command to the first line of the slowest
rank's script, "end" from the command to its return; the script itself does nothing. Median and quartiles, in seconds.

Usage: python bench/launch.py [--rounds N]
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NUM_RANKS = 2
SCRIPT = "import os, sys, time; open(f\"{sys.argv[1]}/{os.environ['RANK']}\", 'w').write(str(time.time()))"
COMMANDS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", str(NUM_RANKS)],
    "lockstep run": ["lockstep", "run", "--devices", str(NUM_RANKS)],
}


def once(command: list[str], script: Path, folder: Path) -> tuple[float, float]:
    """Return the seconds until the scripts ran and until the command returned."""
    start = time.time()
    subprocess.run(
        [sys.executable, "-m", *command, str(script), str(folder)], check=True, capture_output=True, timeout=120
    )
    end = time.time()
    return max(float((folder / str(rank)).read_text()) for rank in range(NUM_RANKS)) - start, end - start


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=8)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as name:
        script = Path(name, "nothing.py")
        script.write_text(SCRIPT)
        for number in range(rounds):
            for contender in list(COMMANDS) if number % 2 else reversed(COMMANDS):
                seconds[contender].append(once(COMMANDS[contender], script, Path(name)))
    print(f"{'':14}{'script':>24}{'end':>24}")
    for contender, measured in seconds.items():
        cells = ""
        for values in zip(*measured, strict=True):
            low, middle, high = statistics.quantiles(values, n=4)
            cells += f"{middle:10.2f} ({low:.2f} to {high:.2f})"
        print(f"{contender:14}{cells}")


if __name__ == "__main__":
    main()
