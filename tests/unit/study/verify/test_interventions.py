"""What is turned off is off within, and as it was afterwards."""

import pickle
import random

import numpy as np
import pytest
import torch
from sklearn.utils import check_random_state
from torch import nn
from torch.nn import functional as F

from lockstep.study.verify.interventions import Given, NoBatchStatistics, RecordedSamples, SampleRecorder, Watch, digest

PRIVATE = torch.Generator().manual_seed(0)
DRAWS = {
    "dropout": lambda n: F.dropout(torch.ones(n), 0.3),
    "rand": lambda n: torch.rand(n),
    "randn_like": lambda n: torch.randn_like(torch.ones(n)),
    "uniform_": lambda n: torch.empty(n).uniform_(2, 3),
    "normal_": lambda n: torch.empty(n).normal_(1, 2),
    "private": lambda n: torch.rand(n, generator=PRIVATE),
    "randint": lambda n: torch.randint(5, (n,)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.3)),
    "attention": lambda n: F.scaled_dot_product_attention(*[torch.ones(1, 1, n, 4)] * 3, dropout_p=0.5).flatten()[:n],
    "python": lambda n: torch.tensor([random.random() for _ in range(n)]),
    "numpy": lambda n: torch.from_numpy(np.random.randn(n)),
}

NAMES = {
    "dropout": "dropout of 0.3",
    "attention": "dropout of 0.5",
    "private": "torch generator.rand",
    "python": "random.random",
    "numpy": "numpy.random.randn",
}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_become_constants_that_are_not_zero(name):
    watch = Watch(frozenset({"random"}))
    with watch, watch.generators():
        watch.active = True
        values = [DRAWS[name](n) for n in (3, 8, 8)]
    assert len({float(value) for part in values for value in part}) == 1
    assert watch.seen["random"]
    if name != "randint":
        assert float(values[0][0]) != 0


@pytest.mark.flaky("the draws of all threads are seen, so also those of a thread that another test has left behind")
@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_left_alone_unless_turned_off(name):
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    PRIVATE.manual_seed(1)
    expected = DRAWS[name](50)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    PRIVATE.manual_seed(1)
    watch = Watch(frozenset())
    with watch, watch.generators():
        watch.active = True
        found = DRAWS[name](50)
    assert torch.equal(found, expected)
    assert watch.seen["random"] == {NAMES.get(name, f"torch {name.strip('_')}")}


def test_private_generators_of_python_and_numpy_are_constant_while_active():
    watch = Watch(frozenset({"random"}))
    with watch, watch.generators():
        python, numpy = random.Random(7), np.random.default_rng(7)
        assert python.random() == random.Random(7).random() != python.random()
        watch.active = True
        assert len({python.random() for _ in range(3)}) == len(set(numpy.random(9))) == 1
    assert watch.seen["random"] == {"random.Random", "numpy generator.random"}


def test_generators_are_passed_on_as_scipy_and_scikit_learn_do():
    plain, kept = np.random.default_rng(3), np.random.mtrand._rand
    expected = np.random.default_rng(3).random(), np.random.RandomState(3).rand(), random.Random(3).random()
    with (watch := Watch(frozenset({"random"}))), watch.generators():
        generator = np.random.default_rng(np.random.default_rng(3))
        assert isinstance(generator, type(plain)) and isinstance(plain, np.random.Generator)
        assert isinstance(np.random.RandomState(np.random.PCG64()), type(kept))
        assert isinstance(kept, np.random.RandomState)
        assert (generator.random(), np.random.RandomState(3).rand(), random.Random(3).random()) == expected
        assert np.random.default_rng(plain) is plain
        copied = pickle.loads(pickle.dumps((generator, random.Random(3))))[1]
        watch.active = True
        assert generator.spawn(1)[0].random(3).std() == check_random_state(None).rand(3).std() == 0
        assert len(set(copied.sample(range(9), 3))) == 3  # without waiting for another constant
    assert watch.seen["random"] == {"numpy generator.random", "numpy.random.rand", "random.Random"}
    np.random.seed(5)
    expected = np.random.rand()
    with Watch(frozenset()).generators():
        np.random.seed(5)
        assert check_random_state(None).rand() == expected


def test_attention_without_dropout_draws_nothing():
    watch = Watch(frozenset())
    with watch:
        watch.active = True
        F.scaled_dot_product_attention(*[torch.ones(1, 1, 3, 4)] * 3)
    assert watch.seen["random"] == set()


def test_modules_are_as_they_were_afterwards():
    kept = random.random, random.Random, np.random.rand, np.random.default_rng, np.random.mtrand._rand
    watch = Watch(frozenset({"random"}))
    with pytest.raises(KeyError), watch.generators():
        raise KeyError
    assert kept == (random.random, random.Random, np.random.rand, np.random.default_rng, np.random.mtrand._rand)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, track_running_stats=False),
        lambda x: F.batch_norm(x, None, None, training=True),
    ],
)
def test_batch_norm_no_longer_looks_at_other_samples(norm):
    x = torch.randn(6, 4)
    with NoBatchStatistics():
        together, apart = norm(x), torch.cat([norm(x[:2]), norm(x[2:])])
    torch.testing.assert_close(together, apart)
    assert not torch.allclose(norm(x), torch.cat([norm(x[:2]), norm(x[2:])]))


def test_what_forward_writes_is_undone():
    model = nn.Linear(2, 2)
    model.register_buffer("written", torch.zeros(3))
    model.register_buffer("replaced", torch.zeros(3))
    watch = Watch(frozenset({"state"}))
    with watch:
        with watch.forward(model):
            model.written.add_(1)
            model.written[1:].mul_(2).add_(3)
            model.replaced = model.replaced + 1
            with torch.no_grad():
                model.weight.data.zero_()
        model.bias.data.zero_()  # the optimizer's work, say
    assert not model.written.any()
    assert not model.replaced.any()
    assert model.weight.abs().min() > 0
    assert not model.bias.any()
    assert watch.seen == {"random": set(), "state": {"written", "replaced", "weight"}, "batchnorm": set()}


@pytest.mark.parametrize(
    ("live", "forward"),
    [
        (set(), lambda model, x: model(x)),
        ({"random"}, lambda model, x: F.dropout(model(x), 0.5)),
        ({"state"}, lambda model, x: model.written.data.add_(1)),
        ({"state"}, lambda model, x: setattr(model, "written", model.written + 1)),
        ({"batchnorm"}, lambda model, x: F.batch_norm(model(x), None, None, training=True)),
    ],
)
def test_what_could_be_turned_off_is_seen(live, forward):
    model = nn.Linear(4, 4)
    model.register_buffer("written", torch.zeros(3))
    x = torch.randn(6, 4)
    with (watch := Watch(frozenset())), watch.forward(model):
        watch.active = True
        forward(model, x)
    assert {switch for switch, names in watch.seen.items() if names} == live


def test_samples_are_recorded_and_replaced():
    recorder = SampleRecorder(None)
    samples = RecordedSamples([10, 11, 12], recorder)
    assert [samples[2], samples[0]] == [12, 10]
    recorder.mark_used()
    assert [(index, value) for index, value, _ in recorder.end_step()] == [(2, 12), (0, 10)]
    given = Given(samples={0: [(2, 5), (0, 6)]}, sizes={"samples of the data set": 2})
    replaced = RecordedSamples([10, 11, 12], SampleRecorder(given))
    assert len(replaced) == 2
    assert [replaced[0], replaced[2]] == [6, 5]


def test_what_is_loaded_ahead_belongs_to_the_next_step():
    recorder = SampleRecorder(None)
    samples = RecordedSamples([10, 11], recorder)
    assert samples[0] == 10
    recorder.mark_used()
    assert samples[1] == 11
    assert [index for index, _, _ in recorder.end_step()] == [0]
    recorder.mark_used()
    assert [index for index, _, _ in recorder.end_step()] == [1]


@pytest.mark.parametrize(
    "sample",
    [
        (torch.ones(2), 3),
        {"x": np.arange(3), "y": ["a", b"b", None]},
        torch.tensor([1 + 1j]),
        [True, 1.5, {"deep": (1, 2)}],
    ],
)
def test_digests_are_of_values(sample):
    import copy

    assert digest(sample) == digest(copy.deepcopy(sample))
    assert digest(sample) != digest([sample, 0])
