"""Strategy fsdp trains as one process on the whole batch does, and its checkpoints are everybody's."""

import pytest
import safetensors.torch
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigurationError, ModelMismatch, ReplicasDiffer
from lockstep.train.settings import Settings
from lockstep.train.strategies.strategy import find_units
from lockstep.train.task import initialize
from lockstep.train.trainer import Trainer
from tests.models import soak
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
    [
        (2, {}, token_loss),
        (3, TWICE, token_loss),
        *soak([(1, {}, token_loss), (2, TWICE, mean_loss), (3, {}, mean_loss)]),
    ],
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
            "A batch leaves ranks without samples, which would not take part in fsdp's collectives.\n"
            "Omit the last batch of an epoch (drop_last=True in the task), or use strategy ddp-zero1."
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


def on_meta():
    """Two layers share a weight; a bias is smaller than three ranks; a buffer has an initial value, another its own."""
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        model = nn.Sequential(
            nn.Linear(6, 8), block, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2)
        )
        model[4].weight = model[2].weight
    model.register_buffer("factor", torch.tensor(0.5))
    return model.double()


def train_in_another_order(world):
    def network():
        names = ["left", "right"] if world.rank == 0 else ["right", "left"]
        torch.manual_seed(0)
        return nn.ModuleDict({name: nn.Linear(6, 4, dtype=torch.float64) for name in names})

    task = make_task(model=network)
    texts = []
    for strategy in ("fsdp", "torch-ddp"):
        with pytest.raises(ModelMismatch) as error:
            Trainer(task, Settings(), world, strategy=strategy, devices=[torch.device("cpu")])
        texts.append(str(error.value))
    return texts


def test_layers_in_another_order_are_refused_on_all(ranks):
    """Their values by position are equal, since they come from the same seed; torch's engines compare no names."""
    for texts in ranks(2)(train_in_another_order):
        assert len(texts) == 2
        for text in texts:
            assert "left.weight of" in text.partition(", where rank 1 has ")[0] and "the order of a set or" in text


def train_on_meta(world, strategy="fsdp"):
    def loss(model, batch):
        return (model(batch[0]) * model.factor).square().mean()

    task = make_task(model=on_meta, loss=loss, optimizer=adamw, drop_last=True)
    loop = Trainer(task, Settings(), world, strategy=strategy, devices=[torch.device("cpu")])
    first = {name: value.clone() for name, value in loop.model.state_dict().items()}
    assert all(not part.is_meta for part in loop.model.buffers())
    return first, [float(loop.step().loss) for _ in range(3)], loop.model


def test_a_model_of_the_meta_device_has_the_same_weights_on_any_number_of_ranks(ranks):
    ((expected, losses, _),) = ranks(1)(train_on_meta, "single")
    for num_ranks in (1, 3):
        for first, found, model in ranks(num_ranks)(train_on_meta):
            assert [name for name in first if not torch.equal(first[name], expected[name])] == []
            assert model[4].weight is model[2].weight
            assert num_ranks > 1 or found == pytest.approx(losses, rel=1e-12)  # else batch norm sees parts of the batch
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    torch.manual_seed(0)
    with torch.device("meta"):
        block = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    state = initialize(block, "cpu").state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_a_module_that_cannot_be_initialized_is_named(ranks):
    def run(world):
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.factor = nn.Parameter(torch.ones(4, device="meta"))

        train(world, make_task(model=lambda: nn.Sequential(nn.Linear(6, 4, device="meta"), Scale())))

    for outcome in ranks(2).each(run):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error) == (
            "The model is on the meta device, but 1 (Scale), which holds factor, has no reset_parameters.\n"
            "Define it: it must give them their initial values."
        )


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
