"""`lockstep.monitor` on CUDA: times are those of the device, nothing waits for it. Skips itself without a GPU."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.study.report.view import view_run

CUDA = torch.device("cuda", 0)
NUM_STEPS = 40


def train(world, wrap, folder):
    """Train; return the weights. With a folder, any synchronisation with the device in a step is an error."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 8)).to(CUDA))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(NUM_STEPS * 32, 64, generator=generator)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :8].sin()), 32, pin_memory=True)
    watch = None if folder is None else lockstep.monitor(model, optimizer, loader, run_dir=folder)
    for number, (batch, targets) in enumerate(loader):
        batch, targets = batch.to(CUDA, non_blocking=True), targets.to(CUDA, non_blocking=True)
        torch.cuda.set_sync_debug_mode("error" if watch is not None and number > 5 else "default")
        try:
            loss = nn.functional.mse_loss(model(batch), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if watch is not None:
                watch.loss(loss)
                watch.grad_norm(loss.detach() * 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    if watch is not None:
        watch.close()
    return [parameter.detach().cpu() for parameter in model.parameters()], loss.item()


@pytest.mark.parametrize("engine", ["single", "ddp", "torch-ddp"])
def test_times_are_those_of_the_device_and_nothing_waits_for_it(tmp_path, engine):
    wraps = {"ddp": lockstep.DistributedDataParallel, "torch-ddp": TorchDistributedDataParallel}
    wrap = wraps.get(engine, lambda model: model)
    with lockstep.init(device=CUDA) as world:
        plain, _ = train(world, wrap, None)
        watched, last_loss = train(world, wrap, tmp_path)
    assert all(torch.equal(one, other) for one, other in zip(plain, watched, strict=True))
    view = view_run(tmp_path)
    assert view.run.gaps == []
    record = view.run.ranks[0]
    assert record.device == "cuda:0"
    assert [event.text for event in record.events if event.event == "remark"] == []
    assert [step.samples for step in record.steps] == [32] * NUM_STEPS
    assert record.steps[-1].loss == pytest.approx(last_loss)
    assert record.steps[-1].grad_norm == pytest.approx(2 * last_loss)
    for step in record.steps:
        assert min(map(step.times.part, ("forward", "backward", "optimizer"))) > 0
        assert sum(step.times.parts().values()) <= step.times.total_s * 1.001
    begins = [step.time for step in record.steps]
    assert begins == sorted(begins)
    assert all(line.figures["memory_peak_bytes"] > 2**20 for line in record.machine)
