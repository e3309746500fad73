"""Who wants to know of each bucket when its gradients are the mean is told once, in order, also during backward."""

import pytest
import torch
from torch import nn

import lockstep
from tests.models import assert_gradients_equal, build, global_batch, share, squared_error


class Slow(torch.autograd.Function):
    """Passes gradients on when the buckets that have left are surely done."""

    @staticmethod
    def forward(ctx, x, reducer):
        ctx.reducer = reducer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        for _, future in ctx.reducer.departures._under_way:
            future.wait()
        return gradient, None


def told_of(world, eager, weighed):
    model = lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb=0.0001)
    oracle = build("mlp")
    reducer = model._reducer
    reducer.departures.eager = eager
    told = []

    def on_reduced(bucket):
        told.append((bucket.names, [parameter.grad.clone() for parameter in bucket.parameters], is_closing()))

    def is_closing():
        return reducer.departures.have_all_left

    reducer.on_reduced.append(on_reduced)
    model.module[2].register_forward_pre_hook(lambda _module, inputs: Slow.apply(inputs[0], reducer))
    for step in range(3):
        told.clear()
        model.zero_grad()
        oracle.zero_grad()
        batch = global_batch("mlp", 4 * world.world_size, step)
        if weighed:
            model.weight(4)
        squared_error(model, share(batch, world.rank, world.world_size)).backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle)
    assert [names for names, _, _ in told] == [bucket.names for bucket in reducer.row.buckets]
    named = dict(model.module.named_parameters())
    for names, gradients, _ in told:
        assert all(torch.equal(named[name].grad, grad) for name, grad in zip(names, gradients, strict=True))
    return [is_closing for _, _, is_closing in told]


@pytest.mark.parametrize(("eager", "weighed"), [(False, False), (True, False), (True, True)])
def test_each_bucket_is_told_of_once_in_order(ranks, eager, weighed):
    for during_close in ranks(2)(told_of, eager, weighed):
        assert len(during_close) > 2
        assert all(during_close) is not (eager and not weighed)


def failing_listener(world):
    model = lockstep.DistributedDataParallel(nn.Linear(2, 2))

    def fail(_bucket):
        raise ArithmeticError("planted")

    model._reducer.on_reduced.append(fail)
    with pytest.raises(ArithmeticError):
        model(torch.ones(1, 2)).sum().backward()
    model._reducer.on_reduced.clear()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    return model.module.bias.grad.tolist()


def test_training_goes_on_after_a_listener_that_failed(ranks):
    assert ranks(2)(failing_listener) == [[1.0, 1.0]] * 2
