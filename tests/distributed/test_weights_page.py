"""The script of docs/weights.md does what the page says: the same training on any number of devices."""

import os
import re

from tests.contract.tree import REPO
from tests.distributed.commands import lockstep

(SCRIPT,) = re.findall(r"^```python\n(.*?)^```$", (REPO / "docs" / "weights.md").read_text(), re.DOTALL | re.MULTILINE)


def run(folder, num_devices):
    script = folder / "train.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = lockstep("run", "--devices", str(num_devices), str(script), cwd=folder, env=env)
    assert done.code == 0, done.err
    (norm,) = re.findall(r"norm of the weights: ([\d.]+)", done.out)
    return norm


def test_the_page_prints_the_same_norm_on_any_number_of_devices(tmp_path):
    assert run(tmp_path, 1) == run(tmp_path, 3)
