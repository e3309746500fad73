"""How gradients get into a bucket, divided by the number of ranks on the way."""

import pytest
import torch
from torch import nn

from lockstep.errors import LockstepError
from lockstep.parallel.ddp.buckets import DenseBucket, GradientScale, ParameterSpec, plan_buckets

SMALL, LARGE = (3, 4), (256, 256)
MESSAGE = [0.0, 0.0, 1.0]


def divided_by(divisor):
    return GradientScale(1.0 / divisor, 1.0 / divisor)


def make_bucket(*shapes):
    """Return a bucket for parameters of these shapes, which have gradients of their own."""
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    specs = [ParameterSpec(parameter.numel(), parameter.dtype, parameter.device) for parameter in parameters]
    (spec,) = plan_buckets(specs, range(len(specs)), (2**30,))
    names = [str(index) for index in range(len(specs))]
    return parameters, DenseBucket(spec, parameters, names, keep_held_gradients=False, message=MESSAGE)


@pytest.mark.parametrize("shapes", [[SMALL, SMALL], [LARGE], [SMALL, LARGE, SMALL, LARGE]])
@pytest.mark.parametrize("divisor", [1.0, 3.0])
def test_every_gradient_is_divided_once_and_becomes_a_view(shapes, divisor):
    parameters, bucket = make_bucket(*shapes)
    expected = [parameter.grad * (1 / divisor) for parameter in parameters]
    bucket.gather(None, divided_by(divisor))
    for parameter, view, gradient in zip(parameters, bucket.gradient_views(), expected, strict=True):
        assert parameter.grad.is_set_to(view)
        assert torch.equal(view, gradient)
    assert bucket.payload[-len(shapes) - 3 :].tolist() == [1.0] * len(shapes) + MESSAGE
    assert bucket.missing == {}


def test_gradients_that_are_in_the_bucket_already_are_divided_as_those_that_come_in():
    parameters, bucket = make_bucket(LARGE, SMALL, LARGE)
    bucket.gather(None, divided_by(1.0))
    parameters[2].grad = torch.full(LARGE, 6.0)
    expected = [parameters[0].grad / 2, parameters[1].grad / 2, torch.full(LARGE, 3.0)]
    bucket.gather(None, divided_by(2.0))
    assert all(torch.equal(view, gradient) for view, gradient in zip(bucket.gradient_views(), expected, strict=True))


def test_a_gradient_that_never_came_counts_as_zero():
    parameters, bucket = make_bucket(LARGE, SMALL)
    parameters[1].grad = None
    bucket.gather({0}, divided_by(2.0))
    assert bucket.gradient_views()[1].count_nonzero() == 0
    assert bucket.payload[-5:].tolist() == [1.0, 0.0, *MESSAGE]
    bucket.settle([1, 0])
    assert parameters[1].grad is None


@pytest.mark.parametrize("divisor", [1.0, 2.0])
@pytest.mark.parametrize("shape", [SMALL, LARGE])
def test_an_unexpected_sparse_gradient_is_named(shape, divisor):
    (parameter,), bucket = make_bucket(shape)
    parameter.grad = parameter.grad.to_sparse(1)
    with pytest.raises(LockstepError) as caught:
        bucket.gather(None, divided_by(divisor))
    assert str(caught.value) == (
        "Parameter 0 received a sparse gradient, which was not expected.\n"
        "Only nn.Embedding and nn.EmbeddingBag with sparse=True may produce sparse gradients."
    )


def test_the_scale_tells_gradients_of_this_step_from_those_before_and_casts_the_message():
    parameters, bucket = make_bucket(SMALL, SMALL)
    fresh, before = (parameter.grad.clone() for parameter in parameters)
    bucket.gather({0}, GradientScale(factor=0.5, unused_factor=2.0, message=torch.tensor([3.0, 1.0, 0.0])))
    first, second = bucket.gradient_views()
    assert torch.equal(first, fresh * 0.5) and torch.equal(second, before * 2.0)
    assert bucket.payload[-5:].tolist() == [1.0, 0.0, 3.0, 1.0, 0.0]
    assert bucket.weight_message.tolist() == [3.0, 1.0, 0.0]
    bucket.scale(4.0)
    bucket.settle(None)
    assert torch.equal(parameters[0].grad, fresh * 2.0) and torch.equal(parameters[1].grad, before)
