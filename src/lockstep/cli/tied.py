"""Run a ``lockstep`` command that ends when the process ends that started it, however that happens.

Started as ``python -m lockstep.cli.tied PARENT_PID COMMAND [ARGUMENTS]``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lockstep.cli import main
from lockstep.launcher.bootstrap import die_with


def tied(argv: Sequence[str]) -> int:
    """Tie this process to the one that ``argv`` begins with, and run the rest."""
    die_with(int(argv[0]))
    return main(list(argv[1:]))


if __name__ == "__main__":
    sys.exit(tied(sys.argv[1:]))
