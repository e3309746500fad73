"""What tools/test.py makes of tests that fail beside others and pass alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
from pathlib import Path
import pytest

def fail_once(name):
    if not Path(name).exists():
        Path(name).touch()
        raise AssertionError("beside others")

def test_one():
    fail_once("one")

@pytest.mark.flaky("waits for a core")
def test_two():
    fail_once("two")

def test_three():
    assert Path("sound").exists()
"""
ONE, TWO = "test_some.py::test_one", "test_some.py::test_two"
ALL = f"2 failed and passed only alone: {ONE}, {TWO}."


@pytest.mark.parametrize(
    ("files", "ci", "code", "last"),
    [
        ("sound", "", 1, f'{ALL} The run fails: find out why, or mark them @pytest.mark.flaky("the reason"): {ONE}.'),
        ("sound", "true", 0, f"{ALL} CI forgives this; elsewhere the run fails."),
        ("sound one", "", 0, f"1 failed and passed only alone: {TWO}. All are known to (marker flaky)."),
    ],
)
def test_a_run_says_which_pass_only_alone(tmp_path, files, ci, code, last):
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = flaky: reason\n")
    for name in files.split():
        (tmp_path / name).touch()
    # One file at a time: there is one.
    code_of_run = "import sys; from tools import test; test.SIDE_BY_SIDE[1] = '1'; sys.exit(test.main([]))"
    environ = {**os.environ, "CI": ci, "PYTHONPATH": str(Path(__file__).parents[3])}
    given = {"cwd": tmp_path, "env": environ, "capture_output": True, "text": True, "timeout": 100}
    done = subprocess.run([sys.executable, "-u", "-c", code_of_run], check=False, **given)
    assert done.returncode == code, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == last
