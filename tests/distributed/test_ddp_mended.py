"""What a script does beside the wrapper: gradients stay right and held ones unchanged, or an error comes."""

import pytest
import torch
from torch import nn

import lockstep
from tests.models import assert_gradients_equal


class Hidden:
    """An output that the wrapper cannot look into."""

    held = None

    def __init__(self, value):
        Hidden.held = value

    @property
    def value(self):
        return Hidden.held


class HidesItsOutput(nn.Module):
    def __init__(self, num_layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(6, 6, dtype=torch.float64) for _ in range(num_layers)))

    def forward(self, x):
        return Hidden(self.layers(x))


def inputs(world, step):
    whole = torch.randn(4 * world.world_size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return whole, whole.chunk(world.world_size)[world.rank]


def changed_by_a_late_hook(world, registered_before_forward):
    """The script's hook runs behind ours; the gradient of the last layer is the first of the step."""
    model, oracle = lockstep.DistributedDataParallel(HidesItsOutput(), bucket_cap_mb=0.00001), HidesItsOutput()

    def triple(parameter):
        parameter.grad.mul_(3.0)

    for step in range(6):
        model.zero_grad()
        whole, mine = inputs(world, step)
        handles = []
        if registered_before_forward:
            handles = [each.register_post_accumulate_grad_hook(triple) for each in model.parameters()]
        output = model(mine)
        if not registered_before_forward:
            handles = [each.register_post_accumulate_grad_hook(triple) for each in model.parameters()]
        output.value.square().mean().backward()
        for handle in handles:
            handle.remove()
        oracle.zero_grad()
        (3.0 * oracle(whole).value.square().mean()).backward()
        assert_gradients_equal(model.module, oracle)


@pytest.mark.parametrize("registered_before_forward", [True, False])
def test_gradients_that_a_hook_of_the_script_changes_behind_ours(ranks, registered_before_forward):
    ranks(2)(changed_by_a_late_hook, registered_before_forward)


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.always, self.sometimes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, both):
        x = self.always(x)
        return self.sometimes(x) if both else x


def held_without_a_gradient(world, who_skips):
    model = lockstep.DistributedDataParallel(Branches())
    x = torch.ones(2, 4) * (1 + world.rank)
    for _ in range(3):
        model.zero_grad()
        model(x, both=True).sum().backward()
    held = [parameter.grad for parameter in model.module.sometimes.parameters()]
    copies = [gradient.clone() for gradient in held]
    model.zero_grad()
    model(x, both=world.rank not in who_skips).sum().backward()
    return all(torch.equal(*each) for each in zip(held, copies, strict=True))


@pytest.mark.parametrize("who_skips", [(0, 1), (1,)])
def test_held_gradients_of_parameters_that_receive_none_do_not_change(ranks, who_skips):
    assert ranks(2)(held_without_a_gradient, who_skips) == [True, True]


def replaced(world, what):
    model = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    model(torch.ones(1, 2)).sum().backward()
    if what == "parameter":
        model.module[1].weight = nn.Parameter(torch.zeros(2, 2))
    else:
        model.module[1] = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("what", ["parameter", "layer"])
def test_a_replaced_parameter_is_an_error_at_the_next_forward(ranks, what):
    errors = [outcome.error for outcome in ranks(2).each(replaced, what)]
    assert all(isinstance(error, lockstep.errors.LockstepError) for error in errors)
    assert {str(error) for error in errors} == {
        "Parameter 1.weight was not in the model when it was wrapped: its gradient would not be averaged over the "
        "ranks.\nReplace before wrapping, or wrap again: "
        "model = DistributedDataParallel(model.module)."
    }


def replaced_without_harm(world):
    """Frozen parameters, layers without parameters, and a layer that is taken out and put back."""
    model = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    model.module[1] = nn.ReLU()
    model(torch.ones(1, 2)).sum().backward()
    taken, model.module[2] = model.module[2], nn.Identity()
    model(torch.ones(1, 2)).sum().backward()
    model.module[2] = taken
    model.module[0].bias = nn.Parameter(torch.zeros(2), requires_grad=False)
    model(torch.ones(1, 2)).sum().backward()


def test_replacing_what_is_not_trained_is_no_error(ranks):
    ranks(2)(replaced_without_harm)


def functional_call(world):
    """Of parameters that are not the model's: autograd gives them this rank's gradients, as with torch's class."""
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1))
    borrowed = {
        f"module.{name}": torch.ones_like(each).requires_grad_() for name, each in model.module.named_parameters()
    }
    torch.func.functional_call(model, borrowed, torch.full((1, 1), 2.0)).sum().backward()
    assert [each.grad.item() for each in borrowed.values()] == [2.0, 1.0]
    assert model.module.weight.grad is None
    model(torch.full((1, 1), 1.0 + world.rank)).sum().backward()
    return model.module.weight.grad.item()


def test_functional_call_may_borrow_parameters(ranks):
    assert ranks(2)(functional_call) == [1.5, 1.5]


def test_broadcast_buffers_is_deprecated_as_with_torch(ranks):
    def wrap(world):
        with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead"):
            model = lockstep.DistributedDataParallel(nn.BatchNorm1d(2), broadcast_buffers=False)
        return model.broadcast_buffers, model.forward_sync_buffers

    assert ranks(1)(wrap) == [(False, False)]


def test_delayed_parameters_are_refused(ranks):
    def wrap(world):
        module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        with pytest.raises(lockstep.errors.ConfigurationError) as caught:
            lockstep.DistributedDataParallel(
                module,
                delay_all_reduce_named_params=[("1.weight", module[1].weight)],
                param_to_hook_all_reduce=module[0].weight,
            )
        return str(caught.value)

    assert ranks(1)(wrap) == [
        "delay_all_reduce_named_params and param_to_hook_all_reduce are not supported by "
        "lockstep.DistributedDataParallel.\nLeave both out: these gradients are then reduced with the others."
    ]
