"""A rank that runs out of memory has all ranks do the step again in smaller micro-batches: the same training."""

import re

import psutil
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import ConfigurationError, OutOfMemory
from lockstep.train.checkpoint import read_state
from lockstep.train.memory import is_out_of_memory
from tests.training import make_task, mean_loss, samples

pytestmark = pytest.mark.timeout(120)


class FailsBackward(torch.autograd.Function):
    """Is the identity, but has no memory for backward."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nMore of it.")


class Middle(nn.Module):
    """Two layers with a dropout, a batch norm, and between them what may have no memory."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 4, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.dropout = nn.Dropout(0.3)
        self.fail = None

    def forward(self, inputs):
        hidden = self.norm(self.dropout(self.first(inputs)))
        if self.fail is not None:
            hidden = self.fail(hidden)
        return self.last(hidden)


def make(rank, failing, where, limit, *, since=0):
    """A task in which rank ``failing`` has memory for ``limit`` samples at once, from a step on."""
    calls = []

    def loss(model, batch):
        too_much = rank == failing and model.training and len(batch[0]) > limit and len(calls) >= since
        calls.append(None)
        model.fail = FailsBackward.apply if too_much and where == "backward" else None
        if too_much and where == "forward":
            torch.empty(1 << 50, dtype=torch.float64)  # the allocator's own error
        if too_much and where == "host":
            raise MemoryError
        return mean_loss(model, batch)

    return make_task(model=Middle, loss=loss, drop_last=True)


def fit(task, **settings):
    kept = {}
    task = make_task(**{**vars(task), "after": lambda model: kept.update(model.state_dict())})
    how = {"strategy": "ddp", "steps": 4, "quiet": True, "precision": "fp32"}
    result = lockstep.fit(task, **{**how, **settings})
    return result.losses, kept


def same(ours, theirs):
    return ours[0] == theirs[0] and all(torch.equal(value, theirs[1][name]) for name, value in ours[1].items())


@pytest.mark.parametrize("where", ["forward", "backward", "host"])
@pytest.mark.parametrize("failing", [0, 1])
def test_the_same_bits_as_if_it_had_been_started_so(ranks, where, failing):
    def run(world):
        expected = fit(make(world.rank, None, where, 0), accumulate=4)
        found = fit(make(world.rank, failing, where, 5), micro_batch="auto")  # shares of 12: 12, 6, 3
        untouched = fit(make(world.rank, None, where, 0), micro_batch="auto")
        plain = fit(make(world.rank, None, where, 0))
        return same(found, expected), same(untouched, plain), same(found, plain), len(found[0])

    assert ranks(2)(run) == [(True, True, False, 4)] * 2


@pytest.mark.parametrize("strategy", ["torch-ddp", "ddp-zero1"])
def test_other_engines_come_to_the_same_bits_too(ranks, strategy):
    """Within an accumulated step as well: the second time it is the first of two micro-batches that is too large."""

    def run(world):
        expected = fit(make(world.rank, None, "", 0), strategy=strategy, accumulate=4)
        found = {}
        for failing, where, since in ((1, "forward", 0), (0, "backward", 0), (1, "backward", 2)):
            task = make(world.rank, failing, where, 5, since=since)
            found[failing, where, since] = fit(task, strategy=strategy, micro_batch="auto")
        late = found.pop((1, "backward", 2))
        return [same(each, expected) for each in found.values()], same(late, expected), late[0][-1]

    (firsts, late, loss), (others, also, other_loss) = ranks(2, warnings="ignore")(run)
    assert firsts == others == [True, True]
    assert (late, also, loss) == (False, False, other_loss)


@pytest.mark.parametrize("strategy", ["dp", "dp-zero1"])
def test_threads_come_to_the_same_result(strategy):
    """Replicas of one process draw the same random numbers in any order: so without dropout."""

    def run(failing, where="", **how):
        task = make_task(**{**vars(make(0, failing, where, 5)), "model": plain})
        return fit(task, strategy=strategy, devices=2, **how)

    expected = run(None, accumulate=4)
    for where in ("forward", "backward"):
        losses, weights = run(0, where, micro_batch="auto")
        assert losses == expected[0]
        assert all(torch.equal(value, expected[1][name]) for name, value in weights.items())


def test_in_the_middle_of_a_run_and_after_it_is_resumed(ranks, tmp_path, capfd):
    def run(world):
        def part(steps, **how):
            task = make(world.rank, 1, "backward", 6, since=2)
            return fit(task, steps=steps, checkpoint=tmp_path / "run", checkpoint_every=2, **how)

        first = part(5, micro_batch="auto")
        again = fit(make(world.rank, 1, "backward", 6), steps=8, checkpoint=tmp_path / "run", micro_batch="auto")
        whole = fit(make(world.rank, 1, "backward", 6, since=2), steps=8, micro_batch="auto")
        return first[0] + again[0] == whole[0], len(again[0])

    assert ranks(2)(run) == [(True, 3)] * 2
    assert read_state(tmp_path / "run" / "step-0000000008")["accumulate"] == 2


def test_in_one_process_with_loader_processes_it_says_what_it_does(capfd):
    expected = fit(make(0, None, "forward", 0), strategy="single", accumulate=2, workers=1)
    capfd.readouterr()
    found = fit(make(0, 0, "forward", 12), strategy="single", micro_batch="auto", workers=1, quiet=False)
    assert same(found, expected)
    assert (
        "\nRank 0 ran out of memory in step 1: from here on 2 micro-batches instead of 1, at the same global batch\n"
    ) in capfd.readouterr().out


def plain():
    """A network that can be trained with one sample at a time."""
    model = Middle()
    model.norm, model.dropout = nn.Identity(), nn.Identity()
    return model


def test_when_a_single_sample_is_too_much_all_ranks_say_so_with_their_memory(ranks):
    def run(world):
        with pytest.raises(OutOfMemory) as error:
            task = make(world.rank, 1, "backward", 0)
            fit(make_task(**{**vars(task), "model": plain}), micro_batch="auto")
        return str(error.value)

    text, other = ranks(2)(run)
    assert text == other
    first, *figures, advice = text.splitlines()
    assert first == (
        "Rank 1 ran out of memory in step 1, though its micro-batches cannot be smaller: "
        "CUDA out of memory. Tried to allocate 20.00 GiB."
    )
    total = f"{psutil.virtual_memory().total / 2**30:.1f}"
    for rank, figure in enumerate(figures):
        pattern = rf"rank {rank}: \d+\.\d GiB of the host's {re.escape(total)} GiB, of which \d+\.\d GiB are free"
        assert re.fullmatch(pattern, figure)
    assert len(figures) == 2
    assert advice.startswith("Use a smaller model, ")


def test_without_it_the_error_says_what_helps():
    with pytest.raises(RuntimeError, match="can't allocate memory") as error:
        fit(make(0, 0, "forward", 12), strategy="single")
    (note,) = error.value.__notes__
    assert re.fullmatch(
        r"This rank has \d+\.\d GiB of the host's \d+\.\d GiB, of which \d+\.\d GiB are free\.\n"
        r"Cut its part of a global batch into more micro-batches \(accumulate=2\), or have that done when it is needed "
        r'\(micro_batch="auto", --micro-batch auto\): the training stays the same\.',
        note,
    )


def test_other_errors_are_not_taken_for_it():
    def broken(model, batch):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        fit(make_task(loss=broken), strategy="single", micro_batch="auto")
    assert not is_out_of_memory(RuntimeError("shapes do not match"))


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(samples())


@pytest.mark.parametrize(
    ("task", "settings", "text"),
    [
        ({}, {"strategy": "fsdp"}, "micro_batch=auto cannot be had with fsdp, whose ranks exchange parameters in each"),
        (
            {},
            {"reproducible": 2},
            "With reproducible each virtual shard is a micro-batch, which micro_batch=auto cannot",
        ),
        (
            {},
            {"overlap_optimizer": True},
            "With micro_batch=auto no parameter can be stepped before all ranks are known",
        ),
        ({"dataset": Stream}, {}, "micro_batch=auto reads the samples of a step again, which a stream cannot give."),
        (
            {"model": lambda: nn.Sequential(nn.Linear(6, 4), lockstep.SyncBatchNorm(4)), "dataset": lambda: _floats()},
            {"strategy": "ddp"},
            "micro_batch=auto cannot be had with SyncBatchNorm, whose layers exchange data in forward",
        ),
    ],
)
def test_what_it_cannot_be_had_with(task, settings, text):
    with pytest.raises(ConfigurationError) as error:
        lockstep.fit(make_task(**task), **{"strategy": "single", "steps": 1, "micro_batch": "auto", **settings})
    assert str(error.value).startswith(text)


def _floats():
    return TensorDataset(*(tensor.float() for tensor in samples().tensors))
