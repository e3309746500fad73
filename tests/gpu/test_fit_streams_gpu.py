"""Streams on CUDA: their state comes through page-locking and the prefetch. Skips itself without a GPU."""

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import lockstep
from tests.training import read_state

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


class Counting(IterableDataset):
    """Ten numbers an epoch; says where it is."""

    def __init__(self):
        self.position, self.start = 0, 0

    def state_dict(self):
        return {"position": self.position, "generator": torch.zeros(3)}

    def load_state_dict(self, state):
        self.start = state["position"]

    def __iter__(self):
        start, self.start = self.start, 0
        for number in range(start, 10):
            self.position = number + 1
            yield float(number)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_where_it_was(tmp_path, strategy, workers):
    seen = []

    def loss(model, batch):
        assert batch.is_cuda
        seen.append(batch.tolist())
        return model(batch.float().unsqueeze(1)).mean()

    task = lockstep.Task(
        model=lambda: nn.Linear(1, 1),
        dataset=Counting,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        global_batch_size=4,
    )
    for steps in (5, 12):
        result = lockstep.fit(
            task, strategy=strategy, devices=1, steps=steps, workers=workers, checkpoint=tmp_path, quiet=True
        )
    state = read_state(result.checkpoint)["stream"]
    assert (state["epoch"], state["stream"]["position"]) == (3, 10)
    epoch = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
    assert seen == epoch * 4
