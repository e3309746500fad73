"""Observers are told of the moments of a step, and of each bucket once and in order, also during backward."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.parallel.ddp.bucket_events import Event
from tests.models import assert_gradients_equal, build, global_batch, share, squared_error


class Slow(torch.autograd.Function):
    """Passes gradients on when the buckets that have left are surely done."""

    @staticmethod
    def forward(ctx, x, reducer):
        ctx.reducer = reducer
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        for bucket in ctx.reducer._step.in_flight:
            if bucket.future is not None:
                bucket.future.wait()
        return gradient, None


class Observer:
    def __init__(self):
        self.events, self.gradients = [], []

    def on_event(self, kind, bucket):
        self.events.append((kind, None if bucket is None else bucket.position))
        if kind is Event.REDUCED:
            self.gradients += [(name, p.grad.clone()) for name, p in zip(bucket.names, bucket.parameters, strict=True)]


def observed(world, eager, weighed):
    model = lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb=0.0001)
    oracle = build("mlp")
    reducer, observer = model.reducer, Observer()
    reducer.finishes_early = eager
    reducer.observers.append(observer)
    model.module[2].register_forward_pre_hook(lambda _module, inputs: Slow.apply(inputs[0], reducer))
    for step in range(3):
        observer.events.clear()
        observer.gradients.clear()
        model.zero_grad()
        oracle.zero_grad()
        batch = global_batch("mlp", 4 * world.world_size, step)
        if weighed:
            model.mean_over(4)
        squared_error(model, share(batch, world.rank, world.world_size)).backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle)
    named = dict(model.module.named_parameters())
    assert len(observer.gradients) == len(named)
    assert all(torch.equal(named[name].grad, gradient) for name, gradient in observer.gradients)
    num_buckets = len(reducer.bucket_set.buckets)
    for kind in (Event.READY, Event.GATHERED, Event.LAUNCHED, Event.REDUCED):
        assert [place for each, place in observer.events if each is kind] == list(range(num_buckets))
    kinds = [kind for kind, _ in observer.events]
    assert kinds[0] is Event.BACKWARD and kinds[-1] is Event.CLOSED
    return [kind for kind in kinds if kind in (Event.REDUCED, Event.BACKWARD_END)]


@pytest.mark.parametrize(("eager", "weighed"), [(False, False), (True, False), (True, True)])
def test_each_bucket_is_told_of_once_in_order(ranks, eager, weighed):
    for kinds in ranks(2)(observed, eager, weighed):
        assert (kinds[0] is Event.REDUCED) is (eager and not weighed)


class Failing:
    def on_event(self, kind, bucket):
        if kind is Event.REDUCED:
            raise ArithmeticError("planted")


def failing_observer(world):
    model = lockstep.DistributedDataParallel(nn.Linear(2, 2))
    model.reducer.observers.append(Failing())
    with pytest.raises(ArithmeticError):
        model(torch.ones(1, 2)).sum().backward()
    model.reducer.observers.clear()
    model.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    return model.module.bias.grad.tolist()


def test_training_goes_on_after_an_observer_that_failed(ranks):
    assert ranks(2)(failing_observer) == [[1.0, 1.0]] * 2
