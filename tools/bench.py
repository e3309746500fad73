"""Run the benchmark, or parts of it: see bench/session.py.

Usage: python tools/bench.py [--quick] [--report] [NAME ...]
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # else `bench` would be this file

from bench.session import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
