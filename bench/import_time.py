"""What `import lockstep` adds to `import torch`, in fresh interpreters.

    torch      import torch
    lockstep   import torch, then lockstep, whose names are loaded on first use
    engines    the same, and lockstep's init, DistributedDataParallel and DataParallel loaded
    torch's    import torch, and what init and DistributedDataParallel are in torch: torch.distributed and the class

A round starts each once, in an order that rotates. The median of the seconds that the interpreter's process takes, and
the time divided by that of "torch", from the rounds' ratios, with the range that holds it with 90% certainty.

Usage: python -m bench.import_time [--quick] [--rounds N] [--json FILE]
"""

import functools
import subprocess
import sys
from typing import Any

from bench.harness import parser, record, run_rounds, show, summarize, timed
from bench.launch import compile_lockstep

TIMEOUT_S = 120
PROGRAMS = {
    "torch": "import torch",
    "lockstep": "import torch, lockstep",
    "engines": "import torch, lockstep; lockstep.init, lockstep.DistributedDataParallel, lockstep.DataParallel",
    "torch's": "import torch, torch.distributed; from torch.nn.parallel import DistributedDataParallel",
}


def start(program: str) -> float:
    """Return the seconds that a fresh interpreter takes for ``program``."""
    command = [sys.executable, "-c", program]
    return timed(lambda: subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S), 1)


def main() -> None:
    options = parser(__doc__, rounds=14).parse_args()
    compile_lockstep()

    def measure() -> dict[str, Any]:
        turns = {name: functools.partial(start, program) for name, program in PROGRAMS.items()}
        for turn in turns.values():
            turn()  # files come from the page cache from now on
        seconds = run_rounds(turns, 2 if options.quick else options.rounds, "interpreters")
        show("a fresh interpreter that imports", seconds, ("torch",))
        return {"imports": summarize(seconds)}

    record(options.json, measure)


if __name__ == "__main__":
    main()
