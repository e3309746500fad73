"""Parameters that are frozen when the model is wrapped, or frozen and unfrozen later."""

import contextlib
import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import lockstep
from lockstep.errors import ConfigurationError

# Before which update which layers are trained from then on, and which are frozen.
CHANGES = {1: ("2", ""), 3: ("1", ""), 4: ("0", "2"), 6: ("2", "1"), 7: ("1", ""), 9: ("", "0"), 10: ("0", "")}


def frozen_network():
    torch.manual_seed(5)
    layers = nn.Linear(3, 6), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)
    model = nn.Sequential(*layers[:2], nn.Sequential(*layers[2:])).double()
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    return model


def change(model, step):
    thawed, frozen = CHANGES.get(step, ("", ""))
    for layers, trains in ((thawed, True), (frozen, False)):
        for layer in layers:
            model[int(layer)].requires_grad_(trains)


def batch_of(step, micro):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + micro), dtype=torch.float64)


def expected_weights(momentum=0.9):
    model = frozen_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum, weight_decay=0.01)
    for step in range(12):
        change(model, step)
        optimizer.zero_grad()
        model(torch.cat([batch_of(step, 0), batch_of(step, 1)])).square().sum(1).mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train_by_turns(world, *, zero=None, hook=None, weights=False, micro=False, compiles=False, late=False, **options):
    """Train on parts of 2 and 3 samples of two micro-batches; the ranks have other parts in each step."""
    ddp = lockstep.DistributedDataParallel(torch.compile(frozen_network()) if compiles else frozen_network(), **options)
    model = getattr(ddp.module, "_orig_mod", ddp.module)
    if hook is not None:
        ddp.register_comm_hook(world.group, hook)
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}
    groups = model[2].parameters() if late else model.parameters()
    if zero is None:
        optimizer = torch.optim.SGD(groups, **settings)
    else:
        optimizer = lockstep.ZeroRedundancyOptimizer(
            groups, torch.optim.SGD, shard_gradients=zero == "slices", **settings
        )
    for step in range(12):
        change(model, step)
        if late and step in (3, 4):
            optimizer.add_param_group({"params": list(model[4 - step].parameters())})
        optimizer.zero_grad()
        batches = [batch_of(step, 0), batch_of(step, 1)]
        if not micro:
            batches = [torch.cat(batches)]
        for number, batch in enumerate(batches):
            cut = len(batch) * 2 // 5 if weights else len(batch) // 2
            part = batch[:cut] if (world.rank + step) % 2 else batch[cut:]
            last = number == len(batches) - 1
            with contextlib.nullcontext() if last else ddp.no_sync():
                loss = ddp(part).square().sum(1).mean()
                lockstep.backward(loss, mean_over=len(part)) if weights else (loss / len(batches)).backward()
        optimizer.step()
    ddp.check_replicas()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": True, "micro": True},
        {"bucket_cap_mb": 1e-6, "gradient_as_bucket_view": True, "find_unused_parameters": True},
        {"static_graph": True, "micro": True, "weights": True, "bucket_cap_mb": 1e-6},
        {"hook": default_hooks.allreduce_hook, "weights": True},
        {"compression": "powersgd:9", "static_graph": True},
        {"zero": "slices", "weights": True, "micro": True},
        {"zero": "whole", "bucket_cap_mb": 1e-6},
        {"zero": "whole", "late": True, "hook": default_hooks.allreduce_hook},
        {"late": True},
        pytest.param({"compiles": True, "weights": True}, marks=pytest.mark.soak),
    ],
    ids=lambda options: "-".join(options),
)
def test_layers_that_are_frozen_and_unfrozen_while_training(ranks, options):
    expected = expected_weights()
    warns = "ignore" if "compiles" in options else "error"  # of torch itself, about what its compiler imports
    for weights in ranks(2, warnings=warns)(partial(train_by_turns, **options)):
        tolerance = 1e-5 if "compression" in options else 1e-12
        torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance)


def unfreeze_on_one_rank(world, layers_of_rank):
    ddp = lockstep.DistributedDataParallel(frozen_network())
    for step in range(6):
        if step == 4:  # no step in which the ranks compare what they train
            for layer in layers_of_rank[world.rank]:
                ddp.module[layer].requires_grad_(True)
        ddp(batch_of(step, world.rank)).sum().backward()


@pytest.mark.parametrize(
    ("layers_of_rank", "expected"),
    [
        (
            ([1], []),
            "Parameters that were frozen are trained now on rank 0, but not on the others.\n"
            "Set requires_grad alike on all ranks, before the same step: not by rank, nor by what one rank has "
            "measured.",
        ),
        (
            ([1], [1, 0]),
            "Parameter 0.weight was frozen, and is trained now, but not on all ranks since the same forward.\n"
            "Set requires_grad alike on all ranks, before the same step.",
        ),
    ],
)
def test_other_layers_unfrozen_on_one_rank_are_an_error_on_all(ranks, layers_of_rank, expected):
    errors = [outcome.error for outcome in ranks(2).each(unfreeze_on_one_rank, layers_of_rank)]
    assert [type(error) for error in errors] == [ConfigurationError] * 2
    assert {str(error) for error in errors} == {expected}


def unfreeze_in_join(world):
    """Rank 1 has two batches, rank 0 four, between which layers are unfrozen."""
    ddp = lockstep.DistributedDataParallel(frozen_network())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    with ddp.join(divide_by_initial_world_size=False):
        for step in range(2 if world.rank else 4):
            change(ddp.module, step)
            optimizer.zero_grad()
            ddp(batch_of(step, world.rank)).square().sum(1).mean().backward()
            optimizer.step()
    return torch.cat([parameter.detach().reshape(-1) for parameter in ddp.module.parameters()])


def test_a_rank_without_data_takes_part_when_layers_are_unfrozen(ranks):
    model = frozen_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    for step in range(4):
        change(model, step)
        optimizer.zero_grad()
        parts = [batch_of(step, 0), batch_of(step, 1)] if step < 2 else [batch_of(step, 0)]
        model(torch.cat(parts)).square().sum(1).mean().backward()
        optimizer.step()
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    for weights in ranks(2)(unfreeze_in_join):
        torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


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
