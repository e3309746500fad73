"""``reproducible``: the same bits on any number of devices, with any engine, through any number of interruptions."""

import random

import pytest
import torch

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.models import soak
from tests.reproducing import TASKS, Alone, bits, train
from tests.training import make_task, read_state, relative_error, token_loss, whole_batch
from tests.training import train as train_small

NUM_SHARDS = 4


@pytest.fixture(scope="module")
def alone():
    """Return what one process and one device make of each task."""
    return {name: train(Alone, name, "single", 1, reproducible=NUM_SHARDS) for name in TASKS}


def test_the_tasks_learn_and_differ_from_an_ordinary_run(alone):
    for name, (norms, _, _) in alone.items():
        ordinary = train(Alone, name, "single", 1, threads=1)
        assert len({loss for loss, _ in norms}) == len(norms)
        assert ordinary[0] != norms, f"{name} needs no virtual shards"


@pytest.mark.parametrize("num_devices", [*soak([2]), 3])
def test_dp_has_the_bits_of_one_device(alone, num_devices):
    for name, expected in alone.items():
        assert train(Alone, name, "dp", num_devices, reproducible=NUM_SHARDS) == expected, name


@pytest.mark.parametrize("num_ranks", [*soak([1]), 3])
def test_ddp_has_the_bits_of_one_device(ranks, alone, num_ranks):
    def all_tasks(world):
        return {name: train(world, name, "ddp", 1, reproducible=NUM_SHARDS) for name in TASKS}

    for results in ranks(num_ranks)(all_tasks):
        for name, expected in alone.items():
            assert results[name] == expected, name


def test_so_has_any_cut_of_the_virtual_shards(ranks):
    size = {"global_batch_size": 24}
    expected = train(Alone, "moody", "single", 1, reproducible=6, **size)
    uneven = {"reproducible": 6, "shares": (4, 1, 1), **size}
    assert train(Alone, "moody", "dp", 3, **uneven) == expected
    for result in ranks(3)(lambda world: train(world, "moody", "ddp", 1, **uneven)):
        assert result == expected
    assert train(Alone, "moody", "single", 1, reproducible=3, **size) != expected


def test_more_threads_are_part_of_the_setting(ranks):
    expected = train(Alone, "convolutions", "single", 1, reproducible=2, threads=2)
    assert train(Alone, "convolutions", "dp", 2, reproducible=2, threads=2) == expected
    before = torch.get_num_threads()
    assert ranks(2)(lambda world: train(world, "convolutions", "ddp", 1, reproducible=2, threads=2))[1] == expected
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("loss", [None, token_loss])
def test_the_gradient_is_that_of_the_whole_batch(ranks, loss):
    task = make_task() if loss is None else make_task(loss=loss)
    expected = whole_batch(task, 5, clip=0.3)
    for found in ranks(3)(lambda world: train_small(world, task, "ddp", 5, clip=0.3, reproducible=6)):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        for ours, theirs in zip(found["grads"], expected["grads"], strict=True):
            assert relative_error(ours, theirs) < 1e-12


PLACES = [("single", 1, 0), ("dp", 2, 1), ("dp", 4, 0), ("ddp", 2, 0), ("ddp", 3, 1), ("ddp", 4, 0)]


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", ["moody", "language"])
def test_a_run_interrupted_anywhere_and_continued_elsewhere_has_the_bits_of_one_that_was_not(
    ranks, tmp_path, name, seed
):
    task, own = TASKS[name]
    num_steps = 8

    def fit(folder, strategy, devices, workers, steps, stop_after):
        from lockstep.train.run import Run

        step, done = Run.step, []

        def counted(run):
            if len(done) == stop_after:
                raise InterruptedError
            done.append(run)
            step(run)

        Run.step = counted
        settings = {"schedule": "linear", "eval_every": 3, **own}
        try:
            result = lockstep.fit(
                task,
                strategy=strategy,
                devices=devices,
                workers=workers,
                steps=steps,
                checkpoint=folder,
                checkpoint_every=1,
                reproducible=NUM_SHARDS,
                quiet=True,
                **settings,
            )
        except InterruptedError:
            return None
        finally:
            Run.step = step
        state = read_state(result.checkpoint)
        return bits(state), result.evaluations

    expected, evaluations = fit(tmp_path / "whole", "single", 1, 0, num_steps, None)
    choose = random.Random(seed)
    outcome = None
    while outcome is None:
        strategy, devices, workers = choose.choice(PLACES)
        num_steps_here = choose.choice([1, 2, 3])
        arguments = (tmp_path / "broken", strategy, devices, workers, num_steps, num_steps_here)
        if strategy == "ddp":
            outcomes = ranks(devices)(lambda world, *arguments: fit(*arguments), *arguments)
            assert all(other == outcomes[0] for other in outcomes)
            outcome = outcomes[0]
        else:
            outcome = fit(*arguments)
    assert outcome[0] == expected
    assert outcome[1] == evaluations[-len(outcome[1]) :]


def test_an_operation_without_a_deterministic_kernel_is_refused_by_name():
    def loss(model, batch):
        counts = torch.zeros(4, dtype=torch.float64).put_(torch.tensor([0, 1]), batch[0][0, :2].double())
        return model(batch[0]).square().mean() + counts.sum()

    loop = Trainer(
        make_task(loss=loss), Settings(reproducible=2), Alone, strategy="single", devices=[torch.device("cpu")]
    )
    with pytest.raises(ConfigurationError) as caught:
        loop.step()
    assert str(caught.value) == (
        "reproducible: put_ does not have a deterministic implementation on this device, so each run would have other "
        "bits.\nUse another operation, or omit reproducible."
    )
    loop.close()
    assert not torch.are_deterministic_algorithms_enabled()


def test_it_says_that_ranks_or_a_checkpoint_are_from_other_hardware(ranks, monkeypatch):
    def other_device(world):
        from lockstep.train.strategies import reproducible as module

        describe = module.describe_machine
        name = "Abacus" if world.rank else "Slide rule"
        module.describe_machine = lambda device: name
        try:
            loop = Trainer(make_task(), Settings(reproducible=2), world, strategy="ddp", devices=[world.device])
            state = loop.state_dict()
            loop.caveats.clear()
            module.describe_machine = lambda device: "Quipu"
            before = list(loop.caveats)
            loop.load_state_dict(state)
            return before, loop.caveats
        finally:
            module.describe_machine = describe

    def told(world):
        from lockstep.train.strategies import reproducible as module

        describe = module.describe_machine
        name = "Abacus" if world.rank else "Slide rule"
        module.describe_machine = lambda device: name
        try:
            return Trainer(make_task(), Settings(reproducible=2), world, strategy="ddp", devices=[world.device]).caveats
        finally:
            module.describe_machine = describe

    for caveats in ranks(2)(told):
        assert caveats == ["rank 1 has another machine than rank 0: Abacus, not Slide rule"]
    for rank, (_, caveats) in enumerate(ranks(2)(other_device)):
        name = "Abacus" if rank else "Slide rule"
        assert caveats == [f"the run was started on another machine: {name}, not Quipu"]


def test_loader_processes_use_the_threads_of_the_mode():
    class Threads(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.get_num_threads()

    seen = []

    def loss(model, batch):
        seen.extend(batch.tolist())
        return model(torch.ones(1, 2)).sum()

    task = make_task(
        model=lambda: torch.nn.Linear(2, 1), dataset=Threads, eval_dataset=Threads, loss=loss, global_batch_size=8
    )
    for threads, workers in ((2, 0), (2, 1), (3, 1)):
        lockstep.fit(task, strategy="single", steps=1, reproducible=2, threads=threads, workers=workers, quiet=True)
        assert seen == [threads] * 20  # the trial of the evaluation has a batch of 4
        seen.clear()
