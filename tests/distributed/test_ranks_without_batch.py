"""Ranks without a batch take part in the SyncBatchNorm layers of the others: in fit, and under join()."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.comm.collectives import Join
from lockstep.errors import CollectiveError, ConfigurationError, DataError, LockstepError
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.batchnorm import values
from tests.models import soak
from tests.training import make_task, mean_loss, relative_error, samples, token_loss

# 50 samples in global batches of 24: the third holds 2, so that of 3 and 4 ranks some have none.
NUM_STEPS = 4


def network():
    torch.manual_seed(1)
    layers = [
        nn.Linear(6, 5, bias=False),
        nn.BatchNorm1d(5),
        nn.Tanh(),
        nn.Linear(5, 4),
        nn.BatchNorm1d(4, momentum=None),
    ]
    return nn.Sequential(*layers).double()


def synchronised_network():
    return lockstep.SyncBatchNorm.convert_sync_batchnorm(network())


def train(world, strategy, model=synchronised_network, loss=token_loss, **settings):
    task = make_task(model=model, loss=loss)
    loop = Trainer(task, Settings(**settings), world, strategy=strategy, devices=[torch.device("cpu")])
    records = [loop.step() for _ in range(NUM_STEPS)]
    assert [record.num_samples for record in records] == [24, 24, 2, 24]
    return [float(record.loss) for record in records], loop.model.state_dict()


def check(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1].keys() == expected[1].keys()
    for name, tensor in found[1].items():
        assert relative_error(tensor.double(), expected[1][name].double()) < 1e-12, name


@pytest.mark.parametrize(
    ("num_ranks", "loss"), [(2, token_loss), (3, mean_loss), *soak([(3, token_loss), (4, token_loss)])]
)
def test_fit_trains_as_on_one_device(ranks, num_ranks, loss):
    expected = train(None, "single", model=network, loss=loss)
    for found in ranks(num_ranks)(train, "ddp", synchronised_network, loss):
        check(found, expected)


@pytest.mark.parametrize("loss", [token_loss, *soak([mean_loss])])
def test_with_shares_the_first_rank_may_be_the_one_without(ranks, loss):
    def run(world):
        return train(world, "ddp", loss=loss, shares=(1, 10, 1))

    expected = train(None, "single", model=network, loss=loss)
    for found in ranks(3)(run):
        check(found, expected)


def by_hand(num_ranks, accumulate):
    """Train with micro-batches as wide as all ranks' together: batch norm sees one micro-batch at a time."""
    task = make_task(model=network)
    loop = Trainer(task, Settings(), None, strategy="single", devices=[torch.device("cpu")])
    optimizer = task.optimizer(list(loop.model.parameters()))
    for step in range(NUM_STEPS):
        batch = loop.plan.order.batch(step)
        shares = [batch.tensor_split(num_ranks)[rank].tensor_split(accumulate) for rank in range(num_ranks)]
        optimizer.zero_grad()
        for micro in range(accumulate):
            indices = torch.cat([share[micro] for share in shares])
            if len(indices):
                part = mean_loss(loop.model, tuple(tensor[indices] for tensor in loop.samples.tensors))
                (part * (len(indices) / len(batch))).backward()
        optimizer.step()
    return loop.model.state_dict()


@pytest.mark.parametrize("num_ranks", [3, *soak([2, 4])])
def test_in_accumulated_micro_batches_too(ranks, num_ranks):
    """In the third step some ranks have a first micro-batch, and none has a second."""

    def run(world):
        return train(world, "ddp", loss=mean_loss, accumulate=2)[1]

    expected = by_hand(num_ranks, 2)
    for state in ranks(num_ranks)(run):
        for name, tensor in state.items():
            assert relative_error(tensor.double(), expected[name].double()) < 1e-12, name


def test_steps_without_synchronisation_follow_too(ranks):
    def run(world):
        loop = Trainer(
            make_task(model=synchronised_network), Settings(), world, strategy="ddp", devices=[torch.device("cpu")]
        )
        with loop.without_sync():
            for _ in range(3):
                loop.step()
        return loop.model[1].running_mean, loop.model[1].num_batches_tracked.item()

    found = ranks(3)(run)
    assert all(count == 3 and torch.equal(mean, found[0][0]) for mean, count in found)


def test_torchs_engine_refuses_such_a_batch_on_every_rank(ranks):
    def plain_torch(world):
        from lockstep.train.step_parts import Objective
        from lockstep.train.strategies.strategy import Distributed

        def engine(module, process_group):  # torch's own refuses SyncBatchNorm on the CPU altogether
            return module

        task = make_task(model=synchronised_network)
        loop = Trainer(task, Settings(check_replicas=0), world, strategy="ddp", devices=[torch.device("cpu")])
        strategy = Distributed(loop.model, Objective(task, "fp32"), world.group, world.device, engine)
        strategy._module.no_sync = contextlib.nullcontext
        loop.strategy = strategy
        for _ in range(3):
            loop.step()

    for outcome in ranks(3).each(plain_torch):
        assert type(outcome.error) is ConfigurationError
        assert str(outcome.error) == (
            "A batch leaves ranks without samples, so the model's SyncBatchNorm layers would wait forever.\n"
            "Use strategy ddp, or omit the last batch of an epoch (drop_last=True in the task)."
        )


@pytest.mark.parametrize("strategy", ["dp", *soak(["single"])])
def test_strategies_of_one_process_wait_for_nobody(ranks, strategy):
    def run(world):
        return train(world, strategy, loss=mean_loss) if world.rank == 0 else None

    check(ranks(2)(run)[0], train(None, strategy, model=network, loss=mean_loss))


def test_torchs_engine_refuses_the_layers_on_the_cpu(ranks):
    def run(world):
        train(world, "torch-ddp")

    for outcome in ranks(2).each(run):
        assert type(outcome.error) is ConfigurationError
        assert str(outcome.error) == (
            "torch's DistributedDataParallel does not support SyncBatchNorm layers on the CPU.\n"
            "Use strategy ddp, and omit torch-ddp from a comparison (--strategies dp,ddp)."
        )


class Unreadable(Dataset):
    """The first global batch of 24 samples has its last 8 damaged, which are all that the third of three ranks has."""

    def __init__(self):
        self.samples = samples()
        order = Trainer(make_task(), Settings(), None, strategy="single", devices=[torch.device("cpu")]).plan.order
        self.bad = set(order.batch(0)[16:].tolist())

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index in self.bad:
            raise DataError(f"Record {index} is cut short.\nCopy it again.")
        return self.samples[index]


def fit(world, strategy, model, **settings):
    kept = {}
    task = make_task(
        model=model, dataset=Unreadable, loss=token_loss, after=lambda model: kept.update(model.state_dict())
    )
    lockstep.fit(task, strategy=strategy, epochs=1, quiet=True, **settings)
    return kept


def test_a_rank_that_can_read_none_of_its_samples_follows(ranks):
    expected = fit(None, "single", network, bad_samples="skip")
    found = ranks(3)(partial(fit, bad_samples="skip"), "ddp", synchronised_network)[0]
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert relative_error(tensor.double(), expected[name].double()) < 1e-12, name


def test_or_the_run_stops_on_every_rank(ranks):
    for outcome in ranks(3).each(fit, "ddp", synchronised_network):
        assert type(outcome.error) is DataError
        assert str(outcome.error).startswith("Sample ")


# Sizes of the batches of three ranks, step by step.
STEPS = [[3, 2, 2], [4, 2, 2], [3, 2, 0], [2, 2, 0], [2, 0, 0], [3, 0, 0]]


def batch(step, rank):
    size = STEPS[step][rank]
    return values((size, 6), torch.float64, 9 * step + rank), values((size, 4), torch.float64, 99 + step)


def total_error(model, data):
    return (model(data[0]) - data[1]).square().sum() / 10


@pytest.mark.parametrize(("first", "accumulate"), [(0, 2), (2, 1), *soak([(0, 1)])])
def test_ranks_that_have_joined_follow_the_others(ranks, first, accumulate):
    """From the third step on one rank has no data: if that is the first one, from the very beginning."""

    def run(world):
        model = lockstep.DistributedDataParallel(synchronised_network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step, sizes in enumerate(STEPS[first:], first):
                if sizes[world.rank] == 0:
                    break
                last = step % accumulate == accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    (total_error(model, batch(step, world.rank)) * world.world_size).backward()
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        return model.module.state_dict()

    oracle = network()
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for step in range(first, len(STEPS)):
        parts = [batch(step, rank) for rank in range(3)]
        total_error(oracle, [torch.cat(tensors) for tensors in zip(*parts, strict=True)]).backward()
        if step % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    for state in ranks(3)(run):
        for name, expected in oracle.state_dict().items():
            assert relative_error(state[name].double(), expected.double()) < 1e-12, name


@pytest.mark.parametrize("accumulate", [2, *soak([1])])
def test_ranks_that_have_joined_follow_weighed_micro_batches(ranks, accumulate):
    """Losses are plain means over a rank's samples, whose number is their weight."""

    def run(world):
        model = lockstep.DistributedDataParallel(synchronised_network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for step, sizes in enumerate(STEPS):
                if sizes[world.rank] == 0:
                    break
                last = step % accumulate == accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = total_error(model, batch(step, world.rank)) / sizes[world.rank]
                    lockstep.backward(loss, count=sizes[world.rank])
                if last:
                    optimizer.step()
                    optimizer.zero_grad()
        return model.module.state_dict()

    oracle = network()
    optimizer = torch.optim.SGD(oracle.parameters(), lr=0.1)
    for step in range(len(STEPS)):
        parts = [batch(step, rank) for rank in range(3)]
        window = STEPS[step // accumulate * accumulate :][:accumulate]
        loss = total_error(oracle, [torch.cat(tensors) for tensors in zip(*parts, strict=True)])
        (loss / sum(map(sum, window))).backward()
        if step % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    for state in ranks(3)(run):
        for name, expected in oracle.state_dict().items():
            assert relative_error(state[name].double(), expected.double()) < 1e-12, name


def test_a_second_participant_of_join_follows_as_well(ranks):
    def run(world):
        models = [lockstep.DistributedDataParallel(synchronised_network()) for _ in range(2)]
        with Join(models):
            for step in range(2 - world.rank):
                for model in models:
                    total_error(model, batch(step, world.rank)).backward()
        return [model.module[1].num_batches_tracked.item() for model in models]

    assert ranks(2)(run) == [[2, 2], [2, 2]]


def test_evaluation_under_join_needs_no_backward(ranks):
    """Without synchronised gradients, as nobody would expect a backward."""

    def run(world):
        model = lockstep.DistributedDataParallel(synchronised_network())
        with model.join(), model.no_sync(), torch.no_grad():
            for step in range(2 - world.rank):
                model(batch(step, world.rank)[0])
        return model.module[1].num_batches_tracked.item()

    assert ranks(2)(run) == [2, 2]


def joined_on_rank_1(work):
    def run(world):
        model = lockstep.DistributedDataParallel(synchronised_network())
        with model.join():
            if world.rank == 0:
                work(model, batch(0, 0))

    return run


def two_forwards(model, data):
    first = model(data[0])
    (model(data[0]) + first).sum().backward()


def two_backwards(model, data):
    loss = total_error(model, data)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (
            two_forwards,
            "Rank 0: a forward began before the backward of the last one was run, while other ranks have no batch.\n"
            "They can follow the SyncBatchNorm layers of one forward and its backward only: run backward after each "
            "forward, or skip steps on all ranks.",
        ),
        (
            two_backwards,
            "Rank 0: a second synchronised backward after one forward in join(), while other ranks have no data.\n"
            "Run all forwards and one backward, of the sum of the losses, in each step.",
        ),
    ],
)
def test_what_cannot_be_followed_is_an_error(ranks, work, text):
    first = ranks(2).each(joined_on_rank_1(work), timeout=10.0)[0].error
    assert isinstance(first, LockstepError) and str(first) == text


def test_a_backward_that_is_never_run_ends_in_an_error(ranks):
    outcomes = ranks(2).each(joined_on_rank_1(lambda model, data: model(data[0])), timeout=5.0)
    errors = {outcome.rank: outcome.error for outcome in outcomes}
    assert type(errors[1]) is CollectiveError
    assert str(errors[1]).startswith(
        "Rank 1: waiting for what the SyncBatchNorm layers of the other ranks do next failed: "
    )


def test_a_layer_over_another_group_cannot_be_followed(ranks):
    def run(world):
        group = torch.distributed.new_group([0, 1])
        model = lockstep.SyncBatchNorm.convert_sync_batchnorm(network(), process_group=group)
        model = lockstep.DistributedDataParallel(model)
        with model.join():
            if world.rank == 0:
                total_error(model, batch(0, 0)).backward()

    for outcome in ranks(2).each(run):
        assert type(outcome.error) is ConfigurationError
        assert str(outcome.error) == (
            "1 uses another process group than the gradients, so ranks without a batch cannot take part in "
            "it.\nGive the layer and the wrapper the same process_group, or leave incomplete batches out (drop_last)."
        )


def test_ranks_with_a_batch_that_do_different_things_are_named_on_every_rank(ranks):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = synchronised_network()

        def forward(self, x, rank):
            hidden = self.layers[0](x)
            return self.layers[1](hidden) if rank == 0 else hidden

    def run(world):
        model = lockstep.DistributedDataParallel(Branching())
        with model.join():
            if world.rank < 2:
                model(batch(0, world.rank)[0], world.rank).sum().backward()

    for outcome in ranks(3).each(run):
        assert type(outcome.error) is CollectiveError
        assert str(outcome.error) == (
            "The ranks run different code: rank 0 comes to the forward of SyncBatchNorm layers.1, rank 1 to the end "
            "of a forward that a backward follows.\n"
            "Every rank with a batch must run the same SyncBatchNorm layers in the same order."
        )
