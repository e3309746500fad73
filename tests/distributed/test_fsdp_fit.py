"""Strategy fsdp trains as one process on the whole batch does, and its checkpoints are everybody's."""

import pytest
import safetensors.torch
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigurationError, ReplicasDiffer
from lockstep.train.settings import Settings
from lockstep.train.strategies.fsdp import find_units
from lockstep.train.trainer import Trainer
from tests.training import make_task, mean_loss, read_state, relative_error, samples, token_loss, whole_batch

NUM_STEPS = 5
TWICE = {"accumulate": 2, "clip": 0.3}


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01)


def train(world, task, num_steps=NUM_STEPS, **settings):
    loop = Trainer(task, Settings(**settings), world, strategy="fsdp", devices=[torch.device("cpu")])
    records = [loop.step() for _ in range(num_steps)]
    loop.close()
    weights = torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])
    held = sum(parameter.to_local().numel() for parameter in loop._model.parameters())
    return weights, [float(record.loss) for record in records], held


@pytest.mark.parametrize(
    ("num_ranks", "settings", "loss"),
    [(1, {}, token_loss), (2, {}, token_loss), (2, TWICE, mean_loss), (3, {}, mean_loss), (3, TWICE, token_loss)],
)
def test_steps_are_those_of_the_whole_batch(ranks, num_ranks, settings, loss):
    """Also where the parts of a batch are not equally large: the last of each epoch has two samples of which one rank
    has one; three ranks leave it out."""
    drop_last = num_ranks == 3 or "accumulate" in settings
    task = make_task(loss=loss, optimizer=adamw, drop_last=drop_last)
    expected = whole_batch(task, NUM_STEPS, **settings)
    for weights, losses, held in ranks(num_ranks)(lambda world: train(world, task, **settings)):
        assert relative_error(weights, expected["weights"]) < 1e-12
        assert losses == pytest.approx(expected["losses"], rel=1e-11)
        assert held <= weights.numel() / num_ranks + 40  # rows are not cut


def test_ranks_without_samples_are_refused_on_all(ranks):
    for outcome in ranks(3).each(train, make_task(optimizer=adamw)):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error) == (
            "A batch leaves ranks without samples, who would not take part in fsdp's collectives.\n"
            "Leave the last batch of an epoch out (drop_last=True in the task), or use strategy ddp-zero1."
        )


def test_checkpoints_evaluation_and_export_are_whole(ranks, tmp_path):
    """Two steps with fsdp on two ranks, one with ddp-zero1 on three, two more with fsdp, one in one process."""
    seen = []
    task = make_task(
        optimizer=adamw,
        drop_last=True,
        eval_dataset=lambda: samples(7),
        after=lambda model: seen.append({name: value.clone() for name, value in model.state_dict().items()}),
    )

    def fit(world, strategy, steps):
        result = lockstep.fit(
            task,
            strategy=strategy,
            steps=steps,
            checkpoint=str(tmp_path / "run"),
            export=str(tmp_path / "weights.safetensors"),
            quiet=True,
        )
        return result.evaluations[-1].metrics["loss"], read_state(result.checkpoint), seen

    ranks(2)(fit, "fsdp", 2)
    ranks(3)(fit, "ddp-zero1", 3)
    outcomes = ranks(2)(fit, "fsdp", 5)
    for loss, state, after in outcomes:
        assert loss == outcomes[0][0]
        for each in after[-1:]:
            assert each.keys() == state["model"].keys()
            assert all(torch.equal(each[name], state["model"][name]) for name in each)
    exported = safetensors.torch.load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(value, outcomes[0][1]["model"][name]) for name, value in exported.items())
    assert len(exported) == 6
    (loss, state, _), *_ = ranks(1)(fit, "single", 6)
    model = task.model()
    model.load_state_dict(state["model"])
    found = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    assert relative_error(found, whole_batch(task, 6)["weights"]) < 1e-12
    assert loss == pytest.approx(mean_loss(model, samples(7).tensors).item(), rel=1e-12)


def test_models_that_differ_are_refused_on_all(ranks):
    def run(world):
        def network():
            torch.manual_seed(world.rank)
            return nn.Linear(6, 4, dtype=torch.float64)

        train(world, make_task(model=network))

    for outcome in ranks(2).each(run):
        assert isinstance(outcome.error, ReplicasDiffer)
        assert "parameter weight differs between rank 0 and rank 1" in str(outcome.error)
        assert "Under fsdp the model must depend on the seed alone, not on the rank." in str(outcome.error)


def test_units_are_the_blocks_of_the_outermost_lists():
    def block():
        return nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(5, 3)
            self.body = nn.ModuleDict({"blocks": nn.ModuleList([block(), block()])})
            self.head = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 5))
            self.head[2].weight = self.embedding.weight

    model = Net()
    assert find_units(model) == [model.body["blocks"][0], model.body["blocks"][1], model.head[0]]
    tied = nn.Linear(3, 3)
    assert find_units(nn.Sequential(tied, nn.ReLU(), tied)) == [tied]


def test_the_task_names_its_units(ranks):
    def run(world):
        task = make_task(optimizer=adamw, drop_last=True, shard=lambda model: [model[2], model])
        return train(world, task)

    expected = whole_batch(make_task(optimizer=adamw, drop_last=True), NUM_STEPS)
    for weights, *_ in ranks(2)(run):
        assert relative_error(weights, expected["weights"]) < 1e-12
