"""Norms and factors on whole buckets: what they are on one process, whatever the buckets."""

import math

import pytest
import torch

import lockstep
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.models import FAMILIES, assert_gradients_equal, build, global_batch, share, soak
from tests.training import make_task

CAPS_MB = [0.002, *soak([None, 0.0001])]


def clip_beside_oracle(world, name, cap_mb, norm_type):
    """Clip ours on a share and the oracle on the whole batch; return how many pieces the gradients were."""
    family = FAMILIES[name]
    oracle, model = build(name), lockstep.DistributedDataParallel(build(name), bucket_cap_mb=cap_mb)
    sizes = []
    for step in range(3):
        batch = global_batch(name, 4 * world.world_size, seed=step)
        model.zero_grad()
        oracle.zero_grad()
        family.loss(model, share(batch, world.rank, world.world_size)).backward()
        family.loss(oracle, batch).backward()
        sizes.append(len(model.flat_gradients.tensors()))
        for max_norm in (0.5, 0.01, 1e3):  # twice shorter, then as it is
            expected = torch.nn.utils.clip_grad_norm_(oracle.parameters(), max_norm, norm_type)
            norm = model.clip_grad_norm_(max_norm, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            assert_gradients_equal(model.module, oracle)
    return sizes


@pytest.mark.parametrize("name", ["channels_last", "complex", *soak(["mlp", "cnn"])])
def test_clipping_is_that_of_one_process(ranks, name):
    assert ranks(2)(clip_beside_oracle, name, None, 2.0) == [[1] * 3] * 2
    ranks(2)(clip_beside_oracle, name, 0.0001, 2.0)


def test_parameters_nobody_used_leave_their_bucket_to_the_others(ranks):
    sizes = ranks(2)(clip_beside_oracle, "reused", None, 2.0)[0]
    assert sizes == [6] * 3  # one bucket, with an unused layer of two parameters


@pytest.mark.parametrize("norm_type", [3.0, math.inf, 0.0])
def test_other_norms(ranks, norm_type):
    ranks(2)(clip_beside_oracle, "mlp", 0.002, norm_type)


def test_one_rank_alone_has_no_buckets(ranks):
    assert ranks(1)(clip_beside_oracle, "mlp", None, 2.0)[0] == [6] * 3


def changed_by_hand(world):
    """A gradient that was removed or replaced after backward is not in its bucket any more."""
    model = lockstep.DistributedDataParallel(build("mlp"))
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    first, second, *_ = model.module.parameters()
    first.grad = None
    second.grad = torch.full_like(second, 3.0)
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(model.clip_grad_norm_(math.inf), expected, rtol=1e-12, atol=0)


def test_gradients_that_were_changed_by_hand_count_as_they_are(ranks):
    ranks(2)(changed_by_hand)


def sparse_gradients(world):
    model = lockstep.DistributedDataParallel(build("sparse"))
    batch = global_batch("sparse", 4, seed=0)
    FAMILIES["sparse"].loss(model, batch).backward()
    dense = [p.grad.to_dense() if p.grad.is_sparse else p.grad.clone() for p in model.parameters()]
    norm = torch.nn.utils.get_total_norm(dense)
    torch.testing.assert_close(model.clip_grad_norm_(norm.item() / 2), norm, rtol=1e-12, atol=0)
    for parameter, before in zip(model.parameters(), dense, strict=True):
        torch.testing.assert_close(parameter.grad.to_dense(), before / 2, rtol=1e-5, atol=0)


def test_sparse_gradients_count_too(ranks):
    ranks(2)(sparse_gradients)


def train(world, strategy, settings, num_steps=3):
    loop = Trainer(make_task(), settings, world, strategy=strategy, devices=[torch.device("cpu")])
    norms = [loop.step().grad_norm.item() for _ in range(num_steps)]
    return norms, torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])


@pytest.mark.parametrize("cap_mb", CAPS_MB)
def test_fit_clips_by_the_same_norm_whatever_the_buckets(ranks, cap_mb):
    exact_norms, exact = train(None, "single", Settings(clip=0.1))
    results = ranks(2)(train, "ddp", Settings(clip=0.1, bucket_cap_mb=cap_mb))
    for norms, weights in results:
        assert norms == pytest.approx(exact_norms, rel=1e-12)
        torch.testing.assert_close(weights, exact, rtol=1e-12, atol=1e-15)
        assert torch.equal(weights, results[0][1])


def ask_on_one_rank(world, strategy, settings):
    """Only rank 0 looks whether gradients are finite; were that a collective, it would wait forever."""
    loop = Trainer(make_task(), settings, world, strategy=strategy, devices=[torch.device("cpu")])
    loop.step()
    gradients = loop.updater.gradients
    verdict = gradients.is_finite(gradients.norm()) if world.is_rank_zero else None
    loop.step()
    return verdict


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [
        ("ddp", Settings(precision="fp16", clip=0.1)),
        ("torch-ddp", Settings()),
        ("ddp", Settings(reproducible=2)),
    ],
)
def test_ranks_with_the_same_gradients_need_not_ask_each_other(ranks, strategy, settings):
    assert ranks(2)(ask_on_one_rank, strategy, settings, timeout=30.0) == [True, None]
