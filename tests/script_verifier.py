"""A process that verifies scripts as the command does: it has imported what ranks need, and forks the runs."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

from lockstep.launcher import fork_server

ROOT = Path(__file__).parents[1]


class Verifier:
    """The tests' side; a process for each is slow to start, so they share one."""

    def __init__(self):
        path = os.pathsep.join(map(str, (ROOT / "src", ROOT)))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.script_verifier"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},  # more threads only wait for each other
        )

    def verify(self, command, **options):
        """Return the verification of a script, or raise what `verify_script` raises; also what it has reported."""
        return self._ask(command, options)

    def run(self, command, *, home, times):
        """Return what so many runs on one rank end with, where ``home`` is the home folder."""
        return self._ask(command, {"home": str(home), "times": times})[0]

    def _ask(self, command, options):
        pickle.dump(([str(word) for word in command], options, os.getcwd()), self._process.stdin)
        self._process.stdin.flush()
        result, error, reported = pickle.load(self._process.stdout)
        if error is not None:
            raise error
        return result, reported

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def main():
    from lockstep.study.verify.script import runs, verify_script

    # What a script prints must not reach the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.argv = ["lockstep", "verify"]  # ranks are forked in the command only
    fork_server.import_modules([*runs.MODULES, "sklearn.datasets"])
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            command, options, folder = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        os.chdir(folder)
        reported, result, error = [], None, None
        try:
            if "times" in options:
                os.environ["HOME"] = options["home"]
                script = runs.Runs(command, 2, reported.append)
                result = [script.run(1) for _ in range(options["times"])]
            else:
                result = verify_script.verify_script(command, report=reported.append, **options)
        except Exception as raised:
            error = raised
        pickle.dump((result, error, reported), answers)
        answers.flush()


if __name__ == "__main__":
    main()
