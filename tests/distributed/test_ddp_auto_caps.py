"""``bucket_cap_mb="auto"``: gradients stay right through all phases, and ranks agree on buckets and words."""

import copy
import re
from unittest import mock

import pytest
import torch

import lockstep
from lockstep.parallel.ddp import cap_search
from lockstep.parallel.ddp.pipeline import Costs
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.models import FAMILIES, assert_gradients_equal, build, global_batch, share
from tests.training import make_task

NUM_STEPS = 1 + 3 + 2 * (20 + 8)
ONE_BUCKET = Costs(latency_s=1.0, bytes_per_s=1e12, launch_s=0.0, hidden=0.0)
MANY_BUCKETS = Costs(latency_s=0.0, bytes_per_s=1e7, launch_s=0.0, hidden=1.0)
MEASURED = re.compile(r"Measured: backward takes [\d.]+ ms instead of [\d.]+ ms, medians of 8 steps\.")
WAIT = "The sizes of buckets are being found"


def search(world, name, costs, too_slow, usual_cap_bytes=900):
    """Train beside the oracle with made-up costs; return the sizes of the buckets at the end and the report."""
    made_up = {
        "measure_costs": lambda *, group, device: costs,
        "candidate_caps": lambda total_bytes, first_cap_bytes: [(total_bytes,), (1200,), (600,)],
        "_TOO_SLOW": too_slow,
    }
    with mock.patch.multiple(cap_search, **made_up):
        return train_through(world, name, usual_cap_bytes)


def train_through(world, name, usual_cap_bytes):
    family = FAMILIES[name]
    oracle, model = build(name), lockstep.DistributedDataParallel(build(name), bucket_cap_mb="auto")
    model._cap_search._usual_caps_bytes = model._reducer.row._caps_bytes = (usual_cap_bytes,)
    for step in range(NUM_STEPS):
        assert model.bucket_report.startswith(WAIT)
        assert not model._cap_search.is_done
        batch = global_batch(name, 4 * world.world_size, seed=step)
        model.zero_grad()
        oracle.zero_grad()
        family.loss(model, share(batch, world.rank, world.world_size)).backward()
        family.loss(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle)
    assert model._cap_search.is_done
    assert model._reducer.on_closed == []
    assert model._reducer.at_end is None
    return [bucket.spec.size_bytes for bucket in model._reducer.row.buckets], model.bucket_report


def costs_in_words(costs):
    return (
        f"(measured: {costs.latency_s * 1e6:.0f} us and {costs.bytes_per_s / 1e9:.2g} GB/s an all-reduce, "
        f"which beside backward costs {1 - costs.hidden:.0%} of its time)"
    )


@pytest.mark.parametrize("name", ["mlp", "lstm"])
def test_one_bucket_where_each_costs_much(ranks, name):
    (sizes, report), other = ranks(2)(search, name, ONE_BUCKET, 1e9)
    total = sum(parameter.nbytes for parameter in build(name).parameters())
    assert sizes == [total]
    assert other == (sizes, report)
    assert report.startswith(f"1 bucket of {total / 2**20:.3g} MiB instead of ")
    assert costs_in_words(ONE_BUCKET) in report
    assert MEASURED.search(report)


def test_small_buckets_where_only_bytes_cost(ranks):
    (sizes, report), other = ranks(3)(search, "mlp", MANY_BUCKETS, 1e9, 2**20)[:2]
    assert len(sizes) > 1
    assert other == (sizes, report)
    assert report.startswith(f"{len(sizes)} buckets of ")


def test_what_is_measured_to_be_slower_goes(ranks):
    (sizes, report), other = ranks(2)(search, "mlp", ONE_BUCKET, 0.0)
    assert len(sizes) > 1
    assert other == (sizes, report)
    assert report.startswith("The usual buckets are back, after 1 bucket of ")


def with_real_costs(world):
    model = lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb="auto")
    assert model.bucket_report == f"{WAIT}: ready times are measured in the first steps."
    batch = share(global_batch("mlp", 8, seed=0), world.rank, world.world_size)
    for _ in range(4):
        FAMILIES["mlp"].loss(model, batch).backward()
    return model.bucket_report


def test_one_small_bucket_stays_as_it_is(ranks):
    """A model of a few kilobytes has one bucket anyway; the costs are measured all the same."""
    first, second = ranks(2)(with_real_costs)
    assert first == second
    assert re.fullmatch(
        r"The usual 1 bucket of 0\.00332 MiB stay: none promised to save 2% \(measured: \d+ us and [\d.e+]+ GB/s an "
        r"all-reduce, which beside backward costs \d+% of its time\)\.",
        first,
    )


def alone_hooked_and_copied(world):
    alone = lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb="auto", process_group=world.group)
    copied = copy.deepcopy(alone)
    plain = lockstep.DistributedDataParallel(build("mlp"))
    return alone.bucket_report, copied.bucket_report, plain.bucket_report


def test_reports_of_others(ranks):
    alone = "The sizes of buckets do not matter: one rank alone reduces nothing."
    assert ranks(1)(alone_hooked_and_copied) == [(alone, alone, "1 bucket of 0.00332 MiB.")]


def with_a_hook(world):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb="auto")
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    return model.bucket_report


def test_a_hook_ends_the_search(ranks):
    expected = "The sizes of buckets stay as they are: something else than an all-reduce carries them."
    assert ranks(2)(with_a_hook) == [expected] * 2


def wrong(world, cap):
    lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb=cap)


def test_other_words_are_refused(ranks):
    with pytest.raises(ValueError) as caught:
        ranks(1)(wrong, "big")
    assert str(caught.value) == "bucket_cap_mb='big' is no size.\nGive a number of MiB, or 'auto'."


def uneven(world):
    """Rank 1 runs out of data within the search; it counts the steps that it sits out."""
    model = lockstep.DistributedDataParallel(build("mlp"), bucket_cap_mb="auto")
    with model.join():
        for step in range(NUM_STEPS if world.rank == 0 else 3):
            model.zero_grad()
            FAMILIES["mlp"].loss(model, share(global_batch("mlp", 8, seed=step), world.rank, 2)).backward()
    return model.bucket_report


def test_a_rank_without_data_takes_part(ranks):
    first, second = ranks(2)(uneven)
    assert first == second
    assert first.startswith("The usual 1 bucket of ")


def train(world):
    loop = Trainer(make_task(), Settings(bucket_cap_mb="auto"), world, strategy="ddp", devices=[torch.device("cpu")])
    remarks = []
    for _ in range(6):
        loop.step()
        remarks += loop.remarks
        loop.remarks.clear()
    return remarks


def test_fit_tells_what_was_found_once(ranks):
    for remarks in ranks(2)(train):
        assert [remark[:40] for remark in remarks] == ["The usual 1 bucket of 0.00125 MiB stay: "]
