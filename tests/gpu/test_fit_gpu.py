"""`fit` on CUDA: the prefetch, the phases on the device's clock, and low precision. Skips itself without a GPU."""

import pytest
import torch

import lockstep
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task, relative_error, train, whole_batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

CUDA = torch.device("cuda", 0)


def weights(loop):
    return torch.cat([parameter.detach().flatten().cpu() for parameter in loop.model.parameters()])


@pytest.mark.parametrize("strategy", ["single", "dp", "ddp", "torch-ddp"])
def test_it_trains_as_on_the_cpu(strategy):
    task = make_task()
    expected = whole_batch(task, 6)["weights"]
    devices = [CUDA, CUDA] if strategy == "dp" else [CUDA]
    with lockstep.init(device=CUDA) as world:
        loop = Trainer(task, Settings(workers=1), world, strategy=strategy, devices=devices)
        records = [loop.step() for _ in range(6)]
        loop.close()
        assert relative_error(weights(loop), expected) < 1e-10
        for record in records:
            times = record.times
            assert min(times.forward_s, times.backward_s, times.optimizer_s) > 0
            assert record.loss.is_cuda


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision(precision):
    def loss(model, batch):
        return (model(batch[0].float()).float() - batch[1]).square().mean()

    task = make_task(model=lambda: torch.nn.Linear(6, 4), loss=loss)
    result = lockstep.fit(task, strategy="ddp", steps=4, precision=precision, clip=1.0, quiet=True)
    exact = train(None, task, "single", 4, clip=1.0)["losses"]
    assert result.losses == pytest.approx(exact, rel=0.05)
