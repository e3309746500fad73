"""DataParallel.backward: the loss in the replicas, the gradients of one process in the module."""

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp.replicas import sum_in_tree
from lockstep.parallel.dp.wrapper import DataParallel
from tests.models import FAMILIES, build, global_batch
from tests.unit.parallel.dp.test_wrapper import assert_same_gradients, gradients, wrap


def cut(batch, lengths):
    shards, start = [], 0
    for length in lengths:
        shards.append(tuple(part[start : start + length] for part in batch) if length else None)
        start += length
    return shards


def scales_of(lengths):
    return [length / sum(lengths) for length in lengths]


def squared_error(replica: nn.Module, shard: Any) -> torch.Tensor:
    return F.mse_loss(replica(shard[0]), shard[1])


@pytest.mark.parametrize(("kind", "lengths"), [("together", (0, 2, 3)), ("apart", (3, 3, 1))])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_gradients_are_those_of_one_process(family, kind, lengths):
    module, reference = build(family), build(family)
    model = wrap(kind, module, len(lengths))
    loss = FAMILIES[family].loss
    for step in range(3):  # the second accumulates into what the first left, the third starts from None
        if step == 2:
            module.zero_grad()
            reference.zero_grad()
        batch = global_batch(family, sum(lengths), seed=step)
        losses = model.backward(loss, cut(batch, lengths), scales_of(lengths))
        expected = loss(reference, batch)
        expected.backward()
        assert_same_gradients(module, reference)
        weights = [length / sum(lengths) for length in lengths if length]
        total = sum(weight * value for weight, value in zip(weights, losses, strict=True))
        assert total.item() == pytest.approx(expected.item(), rel=1e-12)
        assert not any(value.requires_grad for value in losses)


def test_the_losses_are_computed_in_one_thread_a_replica():
    model = DataParallel(build("mlp"), ["cpu", "cpu"])
    batch = global_batch("mlp", 4, 0)
    ran: list[tuple[int, str, int]] = []
    together = threading.Barrier(2, timeout=30)  # passes only if both are in their loss at the same time

    def loss(replica, shard):
        together.wait()
        ran.append((int(shard[0]), threading.current_thread().name, id(replica)))
        return squared_error(replica, shard[1])

    def backward():
        model.backward(loss, list(enumerate(cut(batch, (2, 2)))), [0.5, 0.5])

    backward()
    first = sorted(ran)
    assert [name for _, name, _ in first] == ["lockstep-replica-0", "lockstep-replica-1"]
    ran.clear()
    backward()
    assert sorted(ran) == first  # the same threads and the same replicas


def test_one_shard_runs_in_the_calling_thread():
    model = DataParallel(build("mlp"), ["cpu", "cpu"])
    threads = []

    def loss(replica, shard):
        threads.append(threading.current_thread())
        return squared_error(replica, shard)

    reference = build("mlp")
    batch = global_batch("mlp", 4, 0)
    model.backward(loss, [batch], [1.0])
    squared_error(reference, batch).backward()
    assert threads == [threading.current_thread()]
    assert_same_gradients(model.module, reference)


def test_nothing_to_do():
    model = DataParallel(build("mlp"), ["cpu", "cpu"])
    assert model.backward(squared_error, [], []) == []
    assert model.backward(squared_error, [None, None], [1.0, 1.0]) == []
    assert all(gradient is None for gradient in gradients(model.module).values())


def test_a_parameter_that_only_one_replica_uses():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(2, 1).double() for _ in range(4))

        def forward(self, x, which):
            return self.branches[which](x)

    module, x = Branches(), torch.randn(3, 2, dtype=torch.double)
    model = DataParallel(module, ["cpu"] * 3)
    kept = module.branches[3].weight.grad = torch.full((1, 2), 5.0, dtype=torch.double)
    model.backward(lambda replica, which: replica(x, which).sum(), [0, 1, 0], [1.0, 2.0, 3.0])
    total = x.sum(0, keepdim=True)
    torch.testing.assert_close(module.branches[0].weight.grad, 4 * total)
    torch.testing.assert_close(module.branches[1].weight.grad, 2 * total)
    assert module.branches[2].weight.grad is None
    assert module.branches[3].weight.grad is kept and kept.tolist() == [[5.0, 5.0]]


def test_a_computed_buffer_leads_on_to_what_it_was_computed_from():
    module = nn.Module()
    origin = torch.ones(2, dtype=torch.double, requires_grad=True)
    module.register_buffer("doubled", 2 * origin)
    DataParallel(module, ["cpu", "cpu"]).backward(
        lambda replica, x: (replica.doubled * x).sum(), [torch.ones(2), torch.ones(2)], [1.0, 3.0]
    )
    assert origin.grad.tolist() == [8.0, 8.0]


def test_an_existing_gradient_stays_the_same_tensor():
    model = DataParallel(build("mlp"), ["cpu", "cpu"])
    batch = global_batch("mlp", 4, 0)
    step = (squared_error, cut(batch, (2, 2)), [0.5, 0.5])
    model.backward(*step)
    first = model.module[0].weight.grad
    once = first.clone()
    model.backward(*step)
    assert model.module[0].weight.grad is first
    torch.testing.assert_close(first, 2 * once)


def test_gradients_that_share_memory_are_not_added_twice():
    """Autograd gives two parameters views of one gradient when their views were added."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3, 2))

        def forward(self, x):
            return ((self.a.view(-1) + self.b.view(-1)) * x).sum()

    module = Net()
    module(torch.arange(6.0)).backward()
    assert module.a.grad.untyped_storage().data_ptr() == module.b.grad.untyped_storage().data_ptr()
    module.zero_grad()
    x = torch.arange(6.0)
    DataParallel(module, ["cpu"] * 3).backward(lambda replica, part: replica(part), [x, 10 * x, 100 * x], [1.0] * 3)
    assert module.a.grad.flatten().tolist() == module.b.grad.flatten().tolist() == (111 * x).tolist()


def test_the_sum_has_one_order():
    one, tiny = torch.tensor([1.0]), torch.tensor([2.0**-24])  # 1 + tiny rounds to 1, tiny + tiny does not vanish
    cpu = torch.device("cpu")
    rows = [[one], [tiny], [tiny], [tiny]]
    (total,) = sum_in_tree(rows, [cpu] * 4, in_place=False)
    assert total.item() == 1.0 + 2.0**-23
    assert rows[0][0].item() == 1.0  # not ours to write to
    (total,) = sum_in_tree([[tiny.clone()], [tiny.clone()], [one]], [cpu] * 3, in_place=True)
    assert total.item() == 1.0 + 2.0**-23
    assert sum_in_tree([[None], [None]], [cpu] * 2, in_place=True) == [None]


def test_the_same_step_gives_the_same_bits():
    def run():
        module = build("transformer")
        model = DataParallel(module, ["cpu"] * 4)
        batch = global_batch("transformer", 8, 0)
        for _ in range(3):
            model.backward(FAMILIES["transformer"].loss, cut(batch, (2, 2, 2, 2)), [0.25] * 4)
        return gradients(module)

    first, second = run(), run()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_autocast_holds_for_the_loss_only():
    module = nn.Linear(4, 4)
    model = DataParallel(module, ["cpu", "cpu"])
    seen = []

    def loss(replica, x):
        y = replica(x)
        y.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
        assert y.dtype is torch.bfloat16
        return y.float().sum()

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        model.backward(loss, [torch.randn(2, 4), torch.randn(2, 4)], [1.0, 1.0])
    assert seen == [False, False]
    assert module.weight.grad.dtype is torch.float32


def test_a_scale_may_be_a_tensor():
    model, reference = DataParallel(build("mlp"), ["cpu", "cpu"]), build("mlp")
    batch = global_batch("mlp", 4, 0)
    model.backward(squared_error, cut(batch, (2, 2)), [torch.tensor(2.0), torch.tensor(2.0)])
    (4 * squared_error(reference, batch)).backward()
    assert_same_gradients(model.module, reference)


def test_an_optimizer_step_is_seen_by_the_next_backward():
    module, reference = build("mlp"), build("mlp")
    model = DataParallel(module, ["cpu", "cpu"])
    optimizers = [torch.optim.AdamW(network.parameters(), lr=0.01) for network in (module, reference)]
    for step in range(5):
        batch = global_batch("mlp", 4, seed=step)
        model.backward(squared_error, cut(batch, (3, 1)), [0.75, 0.25])
        squared_error(reference, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for got, wanted in zip(module.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)


def test_time_beside_the_replicas_is_taken():
    model = DataParallel(build("mlp"), ["cpu", "cpu"])
    assert model.overhead_s == 0
    model.backward(squared_error, cut(global_batch("mlp", 4, 0), (2, 2)), [0.5, 0.5])
    assert 0 < model.overhead_s < 60


def test_wrong_calls():
    model = DataParallel(build("mlp"), ["cpu", "cpu"])
    with pytest.raises(ConfigurationError) as caught:
        model.backward(squared_error, [None] * 3, [1.0] * 3)
    assert str(caught.value) == (
        "DataParallel.backward got 3 shards and 3 scales for 2 devices.\n"
        "Give at most one shard a device, and one scale for each shard."
    )
    with pytest.raises(ConfigurationError):
        model.backward(squared_error, [None], [])
    shards = cut(global_batch("mlp", 4, 0), (2, 2))
    with pytest.raises(ConfigurationError) as caught:
        model.backward(lambda replica, shard: 3.0, shards, [0.5, 0.5])
    lines = str(caught.value).splitlines()
    assert lines[0] == "Caught ConfigurationError in replica 0 on device cpu."
    assert lines[-2].endswith("The loss function returned a float; DataParallel.backward needs a tensor.")


def test_a_failure_leaves_the_gradients_as_they_were():
    model, reference = DataParallel(build("mlp"), ["cpu", "cpu"]), build("mlp")
    batch = global_batch("mlp", 4, 0)
    shards = cut(batch, (2, 2))

    def loss(replica, shard):
        if shard is shards[1]:
            raise ValueError("broken")
        return squared_error(replica, shard)

    with pytest.raises(ValueError):
        model.backward(loss, shards, [0.5, 0.5])
    assert all(gradient is None for gradient in gradients(model.module).values())
    model.backward(squared_error, shards, [0.5, 0.5])
    squared_error(reference, batch).backward()
    assert_same_gradients(model.module, reference)
