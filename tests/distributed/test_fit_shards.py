"""Training on shards: the same run on any number of ranks and loader processes, each of which reads its own parts."""

import itertools
import os
import threading

import pytest
import torch
from torch import nn

import lockstep
from lockstep.data import shards
from lockstep.errors import ConfigurationError
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.shards import counting_store, number_of, ranges_read, write_shards
from tests.training import relative_error
from tests.verifying import verify_on


def decode(sample):
    number = number_of(sample)
    return torch.tensor(number), torch.linspace(0, number / 10, 6, dtype=torch.float64) + torch.rand(6) / 9


def network():
    return nn.Linear(6, 2, dtype=torch.float64)


def train(world, strategy, folder, kind, settings, num_steps, state=None):
    """Return the numbers that this rank computed on, by step, and the state at the end."""
    seen = []

    def loss(model, batch):
        seen[-1].extend(batch[0].tolist())
        return model(batch[1]).square().mean()

    url = f"{counting_store(folder, folder / 'log')}/*.tar" if kind == "counted" else f"{folder}/*.{kind}"
    task = lockstep.Task(
        model=network,
        dataset=lambda: lockstep.ShardedDataset(
            url, decode=decode, window=5, lanes=12, cache_dir=folder / f"cache-{0 if world is None else world.rank}"
        ),
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        global_batch_size=9,
    )
    loop = Trainer(task, Settings(**settings), world, strategy=strategy, devices=[torch.device("cpu")])
    if state is not None:
        loop.load_state_dict(state)
    for _ in range(num_steps):
        seen.append([])
        loop.step()
    loop.close()
    return seen, loop.state_dict()


def weights(state):
    return torch.cat([value.flatten() for value in state["model"].values()])


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_run_on_shards_is_the_same_on_any_number_of_ranks(ranks, tmp_path, kind):
    write_shards(tmp_path, kind)
    whole, expected = train(None, "single", tmp_path, kind, {}, 8)
    assert sorted(itertools.chain(*whole[:5])) == list(range(41))
    for num_ranks, settings in ((2, {"workers": 2}), (3, {"accumulate": 2}), (2, {"shares": (2, 1), "workers": 1})):
        found = ranks(num_ranks)(train, "ddp", tmp_path, kind, settings, 6)
        again = ranks(2)(train, "ddp", tmp_path, kind, {}, 2, found[0][1])  # resumed in the second epoch
        for step in range(8):
            results = found if step < 6 else again
            parts = [seen[step if step < 6 else step - 6] for seen, _ in results]
            assert list(itertools.chain(*parts)) == whole[step]
        assert relative_error(weights(again[0][1]), weights(expected)) < 1e-12
        assert torch.equal(weights(again[0][1]), weights(again[1][1]))


def test_virtual_shards_give_the_same_bits(ranks, tmp_path):
    write_shards(tmp_path, "tar")
    settings = {"reproducible": 3}
    _, one = train(None, "single", tmp_path, "tar", settings, 6)
    for _, found in ranks(2)(train, "ddp", tmp_path, "tar", settings, 6):
        assert torch.equal(weights(found), weights(one))


@pytest.mark.parametrize("workers", [0, 2])
def test_each_rank_reads_only_its_part(ranks, tmp_path, workers):
    write_shards(tmp_path, "tar", [40, 50, 60])

    def run(world):
        shards._PIECE_BYTES = 5000
        try:
            os.environ["RANK"] = str(world.rank)
            # In the last window of a lane, the next epoch is fetched ahead.
            return train(world, "ddp", tmp_path, "counted", {"workers": workers, "prefetch": 1}, 8)[0]
        finally:
            for thread in threading.enumerate():
                if thread.name == shards._AHEAD:
                    thread.join()  # with another size it would read other pieces
            shards._PIECE_BYTES = 8 << 20
            del os.environ["RANK"]

    numbers = [set(itertools.chain(*seen)) for seen in ranks(2)(run)]
    assert not numbers[0] & numbers[1]
    read = sorted(ranges_read(tmp_path / "log"))
    assert {rank for *_, rank in read} == {0, 1}
    for one, other in itertools.pairwise(read):
        assert one[0] != other[0] or one[2] <= other[1], "no byte is read twice"


def test_shards_with_another_order_cannot_be_resumed(tmp_path):
    write_shards(tmp_path, "tar")
    _, state = train(None, "single", tmp_path, "tar", {}, 2)
    state["run"]["window"] = 6
    with pytest.raises(ConfigurationError) as error:
        train(None, "single", tmp_path, "tar", {}, 1, state)
    assert str(error.value) == (
        "The checkpoint is of a run with window 6, this one has 5.\n"
        "Resume with the same settings, or start a new run with resume=False (--no-resume)."
    )


def test_more_ranks_than_lanes_are_refused_on_all_ranks(ranks, tmp_path):
    write_shards(tmp_path, "tar")

    def run(world):
        task = lockstep.Task(
            model=network,
            dataset=lambda: lockstep.ShardedDataset(f"{tmp_path}/*.tar", lanes=1, cache_dir=tmp_path / "cache"),
            loss=lambda model, batch: model(batch).mean(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
            global_batch_size=9,
        )
        with pytest.raises(ConfigurationError) as error:
            Trainer(task, Settings(), world, strategy="ddp", devices=[torch.device("cpu")])
        return str(error.value).splitlines()[0]

    text = "The 1 lanes of the ShardedDataset leave 1 of 2 shares of a global batch of 9 without one."
    assert ranks(2)(run) == [text] * 2


TASK = """
import torch
from torch import nn
import lockstep
from tests.shards import number_of

def decode(row):
    return torch.full((6,), number_of(row) / 10, dtype=torch.float64)

task = lockstep.Task(
    model=lambda: nn.Linear(6, 2, dtype=torch.float64),
    dataset=lambda: lockstep.ShardedDataset({pattern!r}, decode=decode, window=5, cache_dir={cache!r}),
    loss=lambda model, batch: {loss},
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    global_batch_size=9,
)
"""


@pytest.mark.parametrize(("loss", "causes"), [("mean", []), ("sum", ["a loss that sums instead of averages"])])
def test_a_task_on_shards_can_be_verified(ranks, tmp_path, loss, causes):
    pattern = write_shards(tmp_path / "data", "parquet")
    loss = f"model(batch).square().{loss}()"
    text = TASK.format(pattern=pattern, cache=str(tmp_path / "cache"), loss=loss)
    (tmp_path / "task.py").write_text(text)
    verification, _ = verify_on(ranks, tmp_path / "task.py")
    assert verification.same == (not causes)
    assert [finding.cause for finding in verification.findings] == causes
