"""Nothing that is committed names a place that exists on one machine only, or a package registry."""

import re
import subprocess

import pytest

from tests.contract.tree import REPO

SUSPICIOUS = re.compile(
    r"(?<![\w.])/(home|root|Users|work)/\w"  # a person's own folders
    r"|\b(pypi\.org|files\.pythonhosted\.org|download\.pytorch\.org)\b"  # pip's own settings decide this
)
EXEMPT = {"tests/contract/test_machine_paths.py"}


def committed_files():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, timeout=30)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    return [name for name in listed.stdout.split("\0") if name and name not in EXEMPT and (REPO / name).is_file()]


def test_no_machine_path_is_committed():
    found = []
    for name in committed_files():
        lines = (REPO / name).read_text(errors="replace").splitlines()
        found += [f"{name}:{number}: {line.strip()}" for number, line in enumerate(lines, 1) if SUSPICIOUS.search(line)]
    assert found == []


@pytest.mark.parametrize(
    ("line", "suspicious"),
    [
        ("see /home/somebody/data", True),
        ("--index-url https://download.pytorch.org/whl/cpu", True),
        ("measured in /root/repo", True),
        ("src/work/home/x", False),
        ("under /usr/bin/python3", False),
    ],
)
def test_what_is_suspicious(line, suspicious):
    assert bool(SUSPICIOUS.search(line)) is suspicious
