"""What the ranks of ``lockstep tune`` do: find the largest micro-batch that fits, and take turns."""

import json
import time

import pytest

from lockstep.errors import RankFailed
from lockstep.launcher.api import launch_with
from lockstep.study.tune import NOW, Request, probe, ratio_of, run_rounds

pytestmark = pytest.mark.timeout(120)

TASK = """
import time
import torch
from torch import nn
import lockstep

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        time.sleep(0.002)
        return torch.full((6,), number / 64, dtype=torch.float64)

def loss(model, batch):
    if len(batch) > 4:
        torch.empty(2**40)
    return model(batch).square().mean()

task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(),
    dataset=Slow,
    eval_dataset=lambda: 1 / 0,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    global_batch_size=16,
    after=lambda model: 1 / 0,
)
"""


@pytest.fixture
def request_for(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "slow.py").write_text(TASK)
    task = str(tmp_path / "slow.py")
    return lambda batch: Request(task, 2, False, 2, batch, ("ddp",), 60.0, time.time(), 2**32)


def test_the_largest_micro_batch_is_found_in_processes_that_may_die_of_it(request_for, tmp_path):
    file = tmp_path / "probe.json"
    # What the host does not have is an error, as it is on a GPU: nobody is killed.
    with pytest.raises(RankFailed):
        launch_with(probe, (request_for(16), {}, [2, 4, 8], str(file)), devices=2, timeout_s=60)
    facts = json.loads(file.read_text())
    assert list(facts["peaks"]) == ["2", "4"]
    assert facts["bytes"] == 8 * (6 * 8 + 8 + 8 * 3 + 3)
    assert facts["wait"] > 0.3


def test_contenders_take_turns_and_loading_ahead_is_seen(request_for, tmp_path):
    small = {"global_batch_size": 8}
    contenders = {NOW: small, "workers 2": {**small, "workers": 2}}
    args = (request_for(8), contenders, time.time() + 8, str(tmp_path / "mark"))
    first, second = launch_with(run_rounds, args, devices=2, timeout_s=90)
    assert [set(each) for each in first] == [set(each) for each in second]
    assert set(first[0]) == set(contenders)
    assert all(each[NOW] > 0.9e-3 for each in first)  # 4 samples of 2 ms each on both ranks: 1 ms for each
    assert ratio_of("workers 2", first).median > 1
