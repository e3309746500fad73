"""Loader processes of a script of one's own, in a folder for temporary files whose name is too long for sockets."""

import pytest

from tests.distributed.commands import lockstep

SCRIPT = """\
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    print([float(value) for (value,) in DataLoader(TensorDataset(torch.arange(3.0)), batch_size=None, num_workers=1)])
"""


@pytest.mark.timeout(60)
def test_they_hand_tensors_over_all_the_same(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 90)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    (tmp_path / "train.py").write_text(SCRIPT)
    done = lockstep("run", "--devices", "1", str(tmp_path / "train.py"))
    assert (done.code, done.out) == (0, "[0.0, 1.0, 2.0]\n"), done.err
    assert [path.name for path in folder.iterdir() if path.name.startswith("pymp-")] == []
