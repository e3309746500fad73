"""Libraries on top of torch's DistributedDataParallel train on the backend shm."""

import pytest

from tests.distributed.commands import lockstep

SCRIPT = """\
import warnings
warnings.simplefilter("ignore")  # of these libraries
import lockstep, torch, torch.distributed as dist
dist.init_process_group("shm")
rank, size = dist.get_rank(), dist.get_world_size()
data = torch.Generator().manual_seed(0)
inputs, targets = torch.randn(32, 6, generator=data).double(), torch.randn(32, 2, generator=data).double()
def make():
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
def train(model, optimizer, inputs, targets, backward=torch.Tensor.backward):
    for _ in range(5):
        optimizer.zero_grad()
        backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
model, optimizer = make()
PREPARE
assert isinstance(wrapped, torch.nn.Module) and dist.get_backend() == "shm"
train(wrapped, optimizer, inputs[rank::size], targets[rank::size], backward)
oracle, its_optimizer = make()
train(oracle, its_optimizer, inputs, targets)
for mine, theirs in zip(model.parameters(), oracle.parameters()):
    torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)
print(f"rank {rank} trained")
"""
PREPARE = {
    "accelerate": """\
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
wrapped, optimizer = accelerator.prepare(model, optimizer)
backward = accelerator.backward
""",
    "lightning_fabric": """\
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
fabric = Fabric(accelerator="cpu", devices=size, strategy=DDPStrategy(process_group_backend="shm"))
fabric.launch()
wrapped, optimizer = fabric.setup(model, optimizer)
backward = fabric.backward
""",
}


@pytest.mark.parametrize("library", PREPARE)
def test_it_trains_as_one_process(tmp_path, library):
    pytest.importorskip(library)
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("PREPARE\n", PREPARE[library]))
    done = lockstep("run", "--devices", "2", path)
    assert done.code == 0, done.err
    assert all(f"rank {rank} trained" in done.out for rank in range(2))
