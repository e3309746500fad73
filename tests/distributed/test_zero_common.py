"""Ranks of one machine have one copy of the parameters that ZeroRedundancyOptimizer trains; scripts notice nothing."""

import copy
import time

import pytest
import torch

from lockstep import ZeroRedundancyOptimizer
from tests.shm import shm_group

WIDTH = 120  # of matrices that take a dozen pages, and end within one


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 3))


def give_gradients(model, step):
    torch.manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)


def train(model, optimizer, steps, between=lambda model, step: None):
    for step in steps:
        between(model, step)
        give_gradients(model, step)
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def halve_data(model, step):
    for parameter in model.parameters():
        parameter.data.mul_(0.5)


def halve_bias(model, step):
    with torch.no_grad():
        model[0].bias *= 0.5


def load(model, step):
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})


def load_assigned(model, step):
    model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()}, assign=True)


def through_numpy(model, step):
    model[2].weight.detach().numpy()[1] *= 0.5


@pytest.mark.parametrize("write", [halve_data, halve_bias, load, load_assigned, through_numpy])
def test_what_every_rank_writes_counts_once(ranks, write):
    def body(world):
        model, bare = make_model(), make_model()
        with shm_group() as group:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=0.1)
            assert all(buffer.common is not None for buffer in optimizer._buffers)
            result = train(model, optimizer, range(4), write)
            kept = [buffer.common._own_pages() for buffer in optimizer._buffers]
        return kept, torch.equal(result, train(bare, torch.optim.AdamW(bare.parameters(), lr=0.1), range(4), write))

    assert ranks(2)(body) == [([[]], True)] * 2


def test_a_rank_sees_its_own_write_alone_until_the_step(ranks):
    """Then each element is what the rank made of it that updates it, as when every rank had a copy."""

    def body(world):
        model = make_model()
        with shm_group() as group:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=1.0)
            train(model, optimizer, range(1))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(world.rank + 1)
            world.barrier()
            before = {float(each) for parameter in model.parameters() for each in parameter.detach().unique()}
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        first = 7444  # of 14,883 elements: half of them, up to a multiple of 16 bytes
        return before, flat[:first].unique().tolist(), flat[first:].unique().tolist()

    assert ranks(2)(body) == [({1.0}, [1.0], [2.0]), ({2.0}, [1.0], [2.0])]


def test_a_rank_that_is_late_still_reads_the_parameters_of_before(ranks):
    def body(world):
        model = make_model()
        with shm_group() as group:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=1.0)
            seen = []
            for step in range(3):
                before = model[0].weight.sum().item()
                if world.rank == step % 2:
                    time.sleep(0.2)
                seen.append(model[0].weight.sum().item() == before)
                give_gradients(model, step)
                optimizer.step()
                seen.append(model[0].weight.sum().item() != before)
        return all(seen)

    assert ranks(2)(body) == [True, True]


def test_copies_and_frozen_parameters_are_each_ranks_own(ranks):
    def body(world):
        model = make_model()
        model[0].weight.requires_grad_(False).fill_(world.rank)
        with shm_group() as group:
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, process_group=group, lr=0.1)
            train(model, optimizer, range(1))
            copied = copy.deepcopy(model)
            expected = [parameter.clone() for parameter in copied.parameters()]
            train(model, optimizer, range(1, 3))
            is_kept = all(map(torch.equal, copied.parameters(), expected))
            return model[0].weight.unique().tolist(), is_kept, torch.equal(model[2].weight, expected[2])

    assert ranks(2)(body) == [([0.0], True, False), ([1.0], True, False)]
