"""The README's Python runs as it stands, and its links lead somewhere."""

import re
import subprocess
import sys

import pytest

from tests.contract.tree import REPO

README = (REPO / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_readme_has_python():
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("index", range(len(BLOCKS)))
def test_block_runs(index, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(BLOCKS[index])
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout


def test_links_lead_somewhere():
    targets = [target for target in re.findall(r"\]\(([^)#]+)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (REPO / target).exists()] == []
