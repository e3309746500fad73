"""Run the tests three files at a time; those that fail, once more, alone: on a busy machine some wait for a core.

A test that passes only alone fails the run: unless it has the marker `flaky`, which gives the reason, or the run is one
of CI (CI=true), where nobody can look into it. The last line names such tests.

    python tools/test.py [ARGUMENTS OF PYTEST]
"""

import json
import os
import subprocess
import sys
from pathlib import Path

FAILED = Path(".pytest_cache/v/cache/lastfailed")
SOME_FAILED = 1  # pytest's exit status
SIDE_BY_SIDE = ["-n", "3", "--dist", "loadfile", "--no-loadscope-reorder"]
ALONE = ["--last-failed", "--last-failed-no-failures", "none", "--maxfail", "5"]


def pytest(*words: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run pytest."""
    return subprocess.run([sys.executable, "-m", "pytest", *words], text=True, check=False, **options)  # type: ignore[call-overload]


def main(words: list[str]) -> int:
    """Run the tests with further arguments for pytest; return the exit status."""
    FAILED.unlink(missing_ok=True)
    code = pytest(*words, *SIDE_BY_SIDE).returncode
    if code != SOME_FAILED or not FAILED.exists():
        return code
    failed = sorted(json.loads(FAILED.read_text()))
    print("Those that failed run again, alone.", flush=True)
    if code := pytest(*words, *ALONE).returncode:
        return code
    known = pytest("--collect-only", "-q", "-m", "flaky", *failed, capture_output=True).stdout.splitlines()
    unknown = [name for name in failed if name not in known]
    text = f"{len(failed)} failed and passed only alone: {', '.join(failed)}."
    if not unknown:
        print(f"{text} All are known to (marker flaky).")
    elif os.environ.get("CI") == "true":
        print(f"{text} CI forgives this; elsewhere the run fails.")
    else:
        print(
            f'{text} The run fails: find out why, or mark them @pytest.mark.flaky("the reason"): {", ".join(unknown)}.'
        )
        return SOME_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
