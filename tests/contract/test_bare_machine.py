"""What trains, and the proof on GPUs, where nothing is installed but torch, numpy and what `bench.gpu_proof` names."""

import json
import os
import subprocess

import pytest

from bench import gpu_proof, gpu_tests
from tests.contract.environment import environment_with
from tests.contract.tree import REPO
from tests.models import soak

pytestmark = pytest.mark.timeout(300)

TASK = """
import torch, lockstep
from torch import nn

data = torch.utils.data.TensorDataset(torch.ones(16, 4), torch.ones(16, 1))
task = lockstep.Task(
    model=lambda: nn.Linear(4, 1),
    dataset=lambda: data,
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    global_batch_size=8,
)
"""
LAUNCH = """
import lockstep

def add(number):
    with lockstep.init(device="cpu") as world:
        return world.rank + number

if __name__ == "__main__":
    assert lockstep.launch(add, 1, devices=2) == [1, 2]
"""
RANK = """
import lockstep

with lockstep.init(device="cpu") as world:
    world.print(world.world_size, "ranks")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """Give ``bare(*words)``: run Python there, and return what it wrote. All processes that it starts are there, too.

    It is an environment of its own, with links to what is installed here.
    """
    programs = environment_with(tmp_path_factory.mktemp("bare"), *gpu_proof.NEEDED, gpu_proof.FOR_TESTS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def run(*words, status=0):
        done = subprocess.run(
            [programs / "python", *words],
            cwd=REPO,
            env={**environ, "PYTHONPATH": str(REPO / "src")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == status, done.stdout
        return done.stdout

    return run


def test_what_is_not_named_is_missing(bare):
    assert "No module named 'setproctitle'" in bare("-c", "import setproctitle", status=1)
    assert "No module named 'xdist'" in bare("-c", "import xdist", status=1)


def test_functions_scripts_and_tasks_run(bare, tmp_path):
    for name, text in (("task", TASK), ("launch", LAUNCH), ("rank", RANK)):
        (tmp_path / f"{name}.py").write_text(text)
    bare(str(tmp_path / "launch.py"))
    assert "2 ranks" in bare("-m", "lockstep", "run", "--devices", "2", str(tmp_path / "rank.py"))
    train = ("-m", "lockstep", "train", str(tmp_path / "task.py"), "--steps", "2", "--devices", "2")
    bare(*train, "--checkpoint", str(tmp_path / "run"))
    assert list((tmp_path / "run").glob("step-*"))


@pytest.mark.parametrize(("name", "minutes"), [("waits", 2), *soak([("tests", 1), ("benchmark", 1)])])
def test_the_proof_runs(bare, tmp_path, name, minutes):
    bare("-m", "bench.gpu_proof", "--device", "cpu", "--only", name, "--minutes", str(minutes), "--out", str(tmp_path))
    [kept] = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    section = kept["sections"][name]
    assert section["status"] == "done"
    assert section["counts"] if name == "tests" else section["waits"] if name == "waits" else section["models"]


def test_the_tests_on_gpus_can_be_imported(bare):
    bare("-m", "pytest", "-q", "--collect-only", *gpu_tests.OPTIONS, "tests/gpu")
