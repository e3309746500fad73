"""Parameters that are frozen when the model is wrapped."""

import copy

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import LockstepError


def unfreeze_after_wrapping(world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    ddp = lockstep.DistributedDataParallel(model)
    ddp(torch.randn(3, 4)).sum().backward()  # fine while it stays frozen
    model[0].weight.requires_grad_(True)
    with pytest.raises(LockstepError) as caught:
        ddp(torch.randn(3, 4)).sum().backward()
    again = lockstep.DistributedDataParallel(ddp.module)
    again.zero_grad()
    again(torch.randn(3, 4)).sum().backward()  # with the old wrapper still alive
    return str(caught.value), model[0].weight.grad


def test_training_a_parameter_that_was_frozen_at_wrap_time_is_an_error_until_it_is_wrapped_again(ranks):
    (message, first), (_, second) = ranks(2)(unfreeze_after_wrapping)
    assert message == (
        "Parameter 0.weight is trained now, but was frozen when it was wrapped: its gradient would not be averaged "
        "over the ranks.\nReplace or unfreeze before wrapping, or wrap again: "
        "model = DistributedDataParallel(model.module)."
    )
    assert torch.equal(first, second)


def leave_frozen_parameters_alone(world):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model.register_parameter("table", nn.Parameter(torch.arange(3), requires_grad=False))
    model[0].weight.requires_grad_(False)
    model[0].bias.requires_grad_(False)
    lockstep.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.bias"])
    ddp = lockstep.DistributedDataParallel(model)
    copied = copy.deepcopy(ddp)
    model[0].bias.requires_grad_(True)  # ignored parameters are for the caller to look after
    ddp(torch.full((1, 4), float(world.rank))).sum().backward()
    copied(torch.ones(1, 4)).sum().backward()
    frozen = [name for name, parameter in ddp.module.named_parameters() if not parameter.requires_grad]
    return frozen, model[0].weight.grad, model[0].bias.grad is not None


def test_frozen_ignored_and_integer_parameters_stay_as_they_are(ranks):
    assert ranks(2)(leave_frozen_parameters_alone) == [(["table", "0.weight"], None, True)] * 2
