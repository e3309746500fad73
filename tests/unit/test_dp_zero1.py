"""Strategy dp-zero1 trains as single does, and takes turns with it."""

import pytest
import torch

import lockstep
from lockstep.train.checkpoint import read_state
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task, mean_loss, relative_error, token_loss, whole_batch

OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
    "groups": lambda params: torch.optim.Adam([{"params": params[::2]}, {"params": params[1::2], "lr": 0.003}]),
}


@pytest.mark.parametrize("loss", [mean_loss, token_loss])
@pytest.mark.parametrize("settings", [{}, {"accumulate": 2, "clip": 0.3}, {"shares": (2, 1, 1)}])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_steps_are_those_of_the_whole_batch(optimizer, settings, loss):
    task = make_task(loss=loss, optimizer=optimizer)
    loop = Trainer(task, Settings(**settings), None, strategy="dp-zero1", devices=[torch.device("cpu")] * 3)
    losses = [float(loop.step().loss) for _ in range(6)]
    weights = torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])
    loop.close()
    expected = whole_batch(task, 6, **{name: value for name, value in settings.items() if name != "shares"})
    assert relative_error(weights, expected["weights"]) < 1e-12
    assert losses == pytest.approx(expected["losses"], rel=1e-11)


def test_it_goes_on_from_the_checkpoint_of_another_strategy_and_the_other_way_round(tmp_path):
    task = make_task(optimizer=OPTIMIZERS["adamw"])
    for index, (strategy, devices) in enumerate((("single", None), ("dp-zero1", 3), ("dp-zero1", 2), ("single", None))):
        where = {"checkpoint": str(tmp_path / "run"), "quiet": True, "steps": 2 * index + 2, "devices": devices}
        result = lockstep.fit(task, strategy=strategy, **where)
        assert result.first_step == 2 * index
    model = read_state(result.checkpoint)["model"]
    weights = torch.cat([model[name].flatten() for name in ("0.weight", "0.bias", "2.weight", "2.bias")])
    assert relative_error(weights, whole_batch(task, 8)["weights"][: weights.numel()]) < 1e-12
