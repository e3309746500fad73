"""The loop a step at a time: random numbers, steps without synchronisation, phases, and runs side by side."""

import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.training import make_task, mean_loss, relative_error, samples, token_loss, train, whole_batch


def make_loop(world, strategy="ddp", task=None, **settings):
    devices = [torch.device("cpu")] * (2 if strategy == "dp" else 1)
    return Trainer(task or make_task(), Settings(**settings), world, strategy=strategy, devices=devices)


def weights(loop):
    return torch.cat([parameter.detach().flatten() for parameter in loop.model.parameters()])


def test_all_ranks_start_from_the_weights_of_the_seed_and_drop_different_units(ranks):
    seen = []

    def loss(model, batch):
        dropped = nn.functional.dropout(torch.ones(64), 0.5)
        seen.append((tuple(dropped.tolist()), random.random(), np.random.rand()))
        return mean_loss(model, batch)

    def run(world):
        loop = make_loop(world, task=make_task(loss=loss), accumulate=2, seed=3)
        before = weights(loop)
        for _ in range(2):
            loop.step()
        return before, seen

    results = ranks(2)(run)
    single = weights(make_loop(None, "single", seed=3))
    assert all(torch.equal(before, single) for before, _ in results)
    assert not torch.equal(single, weights(make_loop(None, "single", seed=4)))
    drawn = [values for _, seen in results for values in seen]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 8, "two ranks, two steps, two micro-batches"


@pytest.mark.parametrize("accumulate", [1, 4])
def test_gradients_are_exchanged_once_a_step(ranks, accumulate):
    def run(world):
        loop = make_loop(world, accumulate=accumulate, check_replicas=0)  # the hook lets them drift apart
        exchanged = []

        def hook(state, bucket):
            exchanged.append(loop.num_steps_done)
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        loop.strategy._module.register_comm_hook(None, hook)
        for _ in range(3):
            loop.step()
        return exchanged

    assert ranks(2)(run) == [[0, 1, 2], [0, 1, 2]]


def test_steps_without_synchronisation_change_nothing(ranks):
    def run(world, strategy):
        loop = make_loop(world, strategy)
        loop.step()
        before = weights(loop)
        with loop.without_sync():
            record = loop.step()
            assert (record.updated, record.step) == (False, 1)
            grads = torch.cat([parameter.grad.flatten() for parameter in loop.model.parameters()]).clone()
        assert torch.equal(before, weights(loop))
        loop.step()
        loop.step()
        return grads, float(record.loss), weights(loop)

    for strategy in ("ddp", "torch-ddp"):
        (one, one_loss, one_end), (two, two_loss, two_end) = ranks(2)(run, strategy)
        assert not torch.equal(one, two), "gradients were communicated"
        assert one_loss != two_loss, "losses were communicated"
        assert torch.equal(one_end, two_end)


def test_phases_sum_to_the_step_and_hold_what_happened_in_them(ranks):
    def run(world, strategy):
        task = make_task(dataset=lambda: Slow(0.02))
        loop = make_loop(world, strategy, task=task, global_batch_size=4)
        loop.step()
        times = loop.step().times
        assert times.total_s == pytest.approx(sum(times.parts().values())) and times.other_s < 1e-6
        assert times.data_wait_s >= 0.02 * (4 if world is None else 2)
        # On a busy machine, all of a short phase may be waiting for a core.
        assert min(times.part(phase) + times.core_wait_s for phase in ("forward", "backward", "optimizer")) > 0
        return loop.step().times.total_s

    for strategy in ("single", "dp"):
        assert run(None, strategy) > 0.08
    assert min(ranks(2)(run, "ddp")) > 0.04


class Slow(TensorDataset):
    """Takes its time for each sample."""

    def __init__(self, seconds):
        super().__init__(*samples().tensors)
        self.seconds = seconds

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return super().__getitem__(index)


def test_runs_side_by_side_in_one_process_do_not_disturb_each_other():
    task = make_task(loss=lambda model, batch: mean_loss(nn.Sequential(model, nn.Dropout(0.5)), batch))
    alone = [train(None, task, "single", 4, seed=seed)["losses"] for seed in (0, 1)]
    loops = [make_loop(None, "single", task=task, seed=seed) for seed in (0, 1)]
    together = [[float(loop.step().loss) for loop in loops] for _ in range(4)]
    assert [list(losses) for losses in zip(*together, strict=True)] == alone
    assert alone[0] != alone[1]


def test_a_step_in_which_nothing_counts_is_no_step_into_nothing(ranks):
    def nothing(model, batch):
        loss = token_loss(model, batch)
        return lockstep.Loss(loss.total * 0, loss.count * 0)

    def run(world, strategy):
        found = train(world, make_task(loss=nothing), strategy, 2)
        return found["losses"], found["grads"]

    for losses, grads in [run(None, "single"), *ranks(2)(run, "ddp")]:
        assert losses == [0.0, 0.0]
        assert all(not grad.any() for grad in grads)


def test_a_stream_trains_as_its_samples_would(ranks):
    class Stream(torch.utils.data.IterableDataset):
        """The samples in the order of a run that has them with an index."""

        def __init__(self, order):
            self.order = order

        def __iter__(self):
            rows = samples()
            for step in range(self.order.steps_per_epoch):
                for index in self.order.batch(step).tolist():
                    yield rows[index]

    task = make_task()
    expected = whole_batch(task, 3, steps=3)
    order = make_loop(None, "single").plan.order

    def run(world):
        return train(world, make_task(dataset=lambda: Stream(order)), "ddp", 3, steps=3)

    for found in ranks(3)(run):
        assert found["counts"] == [24, 24, 2]
        assert relative_error(found["weights"], expected["weights"]) < 1e-12
