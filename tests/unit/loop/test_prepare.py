"""`prepare` on one rank: what it returns, the errors, and the random state."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler, TensorDataset

import lockstep
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.loop.prepare import PreparedLoader


@pytest.fixture
def world():
    with lockstep.init(device="cpu") as world:
        yield world


def loader_of(size, batch_size=4, **settings):
    return DataLoader(TensorDataset(torch.arange(float(size))), batch_size, **settings)


def batches(loader):
    return [x.tolist() for (x,) in loader]


def test_without_a_world_it_opens_one():
    assert World.opened is None
    try:
        model = lockstep.prepare(nn.Linear(1, 1))
        assert (World.opened.rank, World.opened.world_size) == (0, 1)
        assert isinstance(model, lockstep.DistributedDataParallel)
    finally:
        if World.opened is not None:
            World.opened.close()


def test_what_it_returns(world):
    model, frozen = nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler, loader = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), loader_of(10)
    made = lockstep.prepare(loader, scheduler, frozen, optimizer, model)
    assert made[1:4] == (scheduler, frozen, optimizer)
    assert isinstance(made[4], lockstep.DistributedDataParallel)
    assert made[4].module is model
    assert isinstance(made[0], PreparedLoader)
    assert lockstep.prepare(made[4]) is made[4]  # as it is
    assert lockstep.prepare(made[0]) is made[0]


def test_a_loader_has_the_attributes_of_the_one_that_was_prepared(world):
    plain = loader_of(10, shuffle=True)
    loader = lockstep.prepare(plain)
    assert len(loader) == 3
    for name in ("dataset", "batch_size", "sampler", "batch_sampler", "num_workers", "drop_last"):
        assert getattr(loader, name) is getattr(plain, name)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: [nn.Linear(1, 1)],
            "prepare() cannot prepare a list.\n"
            "It accepts models (torch.nn.Module), optimizers, learning-rate schedulers and DataLoaders.",
        ),
        (
            lambda: nn.parallel.DistributedDataParallel(nn.Linear(1, 1)),
            "A model is wrapped in torch's DistributedDataParallel.\nPass the model itself: prepare() wraps it.",
        ),
        (
            lambda: loader_of(4, sampler=lockstep.DistributedSampler(range(4))),
            "A DataLoader has a DistributedSampler, but prepare() divides each batch among the ranks.\n"
            "Leave the sampler out (shuffle=True shuffles), and give the batch size of all ranks together.",
        ),
        (
            lambda: loader_of(4, batch_size=None),
            "A DataLoader has batch_size=None, so prepare() cannot divide its batches.\n"
            "Return single samples from the data set, and give batch_size or batch_sampler.",
        ),
    ],
)
def test_what_cannot_be_prepared(world, make, text):
    with pytest.raises(ConfigurationError) as caught:
        lockstep.prepare(make())
    assert str(caught.value) == text


def test_several_loaders_have_the_order_of_the_plain_script(world):
    def run(use):
        torch.manual_seed(7)
        first, second, held = (use(loader_of(20, shuffle=shuffle)) for shuffle in (True, True, False))
        seen = []
        for _ in range(2):
            seen += [[a.tolist(), b.tolist()] for (a,), (b,) in zip(first, second, strict=True)] + batches(held)
        return seen

    assert run(lockstep.prepare) == run(lambda loader: loader)


def test_a_pass_that_was_left_counts_as_in_the_plain_script(world):
    def run(use):
        torch.manual_seed(7)
        loader = use(loader_of(20, shuffle=True))
        for number, _ in enumerate(loader):
            if number == 1:
                break
        return batches(loader)

    assert run(lockstep.prepare) == run(lambda loader: loader)


def test_a_pass_that_is_held_after_one_batch_counts_as_in_the_plain_script(world):
    def run(use):
        torch.manual_seed(7)
        loader = use(loader_of(20, shuffle=True))
        held = iter(loader)
        next(held)
        return batches(loader)

    assert run(lockstep.prepare) == run(lambda loader: loader)


def test_a_loader_beside_itself_is_two_passes_as_in_the_plain_script(world):
    def run(use):
        torch.manual_seed(7)
        loader = use(loader_of(20, shuffle=True))
        return [[a.tolist(), b.tolist()] for (a,), (b,) in zip(loader, loader, strict=True)]

    assert run(lockstep.prepare) == run(lambda loader: loader)


def test_a_copy(world):
    loader = lockstep.prepare(loader_of(20))
    assert batches(copy.copy(loader)) == batches(loader)


class Noise(TensorDataset):
    def __getitem__(self, index):
        return torch.rand(())


def test_loaders_have_random_numbers_of_their_own(world):
    made = lockstep.prepare(*(torch.utils.data.DataLoader(Noise(torch.arange(8)), 4) for _ in range(2)))
    first, second = ({number for x in loader for number in x.tolist()} for loader in made)
    assert len(first | second) == 16


class NoiseStream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (torch.rand(()) for _ in range(8))


def test_a_process_that_stays_reads_a_stream_as_in_the_plain_script(world):
    def run(use):
        torch.manual_seed(7)
        loader = use(DataLoader(NoiseStream(), 4, num_workers=1, persistent_workers=True))
        return [[x.tolist() for x in loader] for _ in range(2)]

    epochs = run(lockstep.prepare)
    assert epochs == run(lambda loader: loader)
    assert epochs[0] != epochs[1]


def test_prepared_again_each_epoch_has_other_orders(world):
    torch.manual_seed(7)
    first, second = (batches(lockstep.prepare(loader_of(20, shuffle=True))) for _ in range(2))
    assert first != second
    assert all(sorted(each for batch in found for each in batch) == list(range(20)) for found in (first, second))


class Own(Sampler):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __iter__(self):
        for _ in range(self.size):
            yield random.randrange(self.size) + int(np.random.randint(2)) * 0


def states():
    return torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())


@pytest.mark.parametrize("in_batches", [False, True])
def test_one_rank_draws_what_the_plain_script_draws(world, in_batches):
    class Draws(TensorDataset):
        def __getitem__(self, index):
            return super().__getitem__(index)[0] + torch.rand(1) + random.random() + np.random.rand()

    def run(use):
        torch.manual_seed(3)
        random.seed(4)
        np.random.seed(5)
        sampler = {"batch_sampler": BatchSampler(Own(12), 4, drop_last=False)} if in_batches else {"sampler": Own(12)}
        settings = sampler if in_batches else sampler | {"batch_size": 4}
        model, loader = nn.Dropout(0.5), use(DataLoader(Draws(torch.arange(12)), **settings))
        seen = [[model(batch).tolist(), random.random()] for _ in range(2) for batch in loader]
        return seen, states()

    found, plain = run(lockstep.prepare), run(lambda loader: loader)
    assert found == plain
    assert len({str(batch) for batch in found[0]}) == 6


def test_prepare_draws_nothing_on_one_rank(world):
    before = states()
    lockstep.prepare(nn.Linear(1, 1).requires_grad_(False), loader_of(8, shuffle=True))
    after = states()
    assert after[1:] == before[1:]


def test_keys_that_are_no_numbers(world):
    texts = {"a": 1.0, "b": 2.0, "c": 3.0}
    loader = lockstep.prepare(DataLoader(texts, batch_sampler=[["a", "b"], ["c", "c"]]))
    assert [batch.tolist() for batch in loader] == [[1, 2], [3, 3]]


def test_the_same_sample_twice_in_a_batch_has_other_random_numbers(world):
    class Draws(TensorDataset):
        def __getitem__(self, index):
            return torch.rand(1)

    (batch,) = lockstep.prepare(DataLoader(Draws(torch.arange(2)), batch_sampler=[[0, 0, 1]]))
    assert len({*batch.flatten().tolist()}) == 3


def test_settings_of_the_loader_are_kept(world):
    settings = {"collate_fn": sum, "drop_last": True, "sampler": SequentialSampler(range(7))}
    loader = lockstep.prepare(DataLoader(range(7), 3, **settings))
    assert list(loader) == [3, 12]


def test_state_between_passes(world):
    torch.manual_seed(1)
    loader = lockstep.prepare(loader_of(10, shuffle=True))
    batches(loader)
    state = loader.state_dict()
    assert (state["epoch"], state["batch"]) == (1, 0)
    second = batches(loader)
    loader.load_state_dict(state)
    assert batches(loader) == second
    assert loader.epoch == 2


def test_a_look_at_a_resumed_pass(world):
    torch.manual_seed(1)
    loader = lockstep.prepare(loader_of(20, shuffle=True))
    iterator = iter(loader)
    next(iterator), next(iterator)
    state = loader.state_dict()
    rest = batches(iterator)
    loader.load_state_dict(state)
    next(iter(loader))
    assert batches(loader) == rest


def test_one_rank_gives_no_weights(world):
    model, loader = lockstep.prepare(nn.Linear(1, 1), loader_of(10))
    for (x,) in loader:
        F.mse_loss(model(x[:, None]), x[:, None]).backward()
    assert model.reducer.weights.window is None


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_of_torchdata(world, num_workers):
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make(use=lambda loader: loader):
        torch.manual_seed(7)
        numbers = TensorDataset(torch.arange(20.0))
        return use(torchdata.StatefulDataLoader(numbers, 4, shuffle=True, num_workers=num_workers))

    plain = make()
    whole = [batches(plain), batches(plain)]
    loader = make(lockstep.prepare)
    assert [batches(loader), batches(loader)] == whole
    iterator = iter(loader := make(lockstep.prepare))
    next(iterator), next(iterator)
    state = loader.state_dict()
    resumed = make(lockstep.prepare)
    resumed.load_state_dict(state)
    assert [batches(resumed), batches(resumed)] == [whole[0][2:], whole[1]]
