"""Recorded steps of DataParallel, with a recorder that stands in for CUDA graphs: what is recorded, when, and how."""

import warnings

import pytest
import torch
from torch import nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.dp import threads as engines
from lockstep.parallel.dp.capture import WARM_UP_STEPS, Outcome, Recorder, make_key
from tests.models import FAMILIES, build, global_batch
from tests.unit.data_parallel_cases import assert_same_gradients, gradients, wrap

CPU = torch.device("cpu")
LOSS = FAMILIES["mlp"].loss


class Memory(Recorder):
    """Replays by running the work again, into the memory that the first run left, as a graph does."""

    def __init__(self, log):
        self.log = log

    def record(self, work):
        self.log.append("record")
        outcome = work()
        blank(outcome)  # recording computes nothing

        def replay():
            self.log.append("replay")
            with torch.enable_grad():
                again = work()
            with torch.no_grad():
                outcome.loss.copy_(again.loss)
                for kept, gradient in zip(outcome.gradients, again.gradients, strict=True):
                    if kept is not None:
                        kept.copy_(gradient)

        return outcome, replay


def blank(outcome: Outcome) -> None:
    for tensor in (outcome.loss, *outcome.gradients):
        if tensor is not None:
            tensor.fill_(float("nan"))


@pytest.fixture
def log(monkeypatch):
    made = []
    monkeypatch.setattr(engines, "make_recorder", lambda device: Memory(made))
    return made


def shards_of(family, count, seed, samples=2):
    batch = global_batch(family, samples * count, seed)
    return batch, list(zip(*(part.chunk(count) for part in batch), strict=True))


@pytest.mark.parametrize("kind", ["shared", "apart"])
@pytest.mark.parametrize("family", ["mlp", "transformer", "frozen", "reused"])
def test_replayed_steps_are_those_of_one_process(family, kind, log, monkeypatch):
    module, reference = build(family), build(family)
    model = wrap(kind, module, 3, monkeypatch)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, reference)]
    loss = FAMILIES[family].loss
    for step in range(WARM_UP_STEPS + 5):
        batch, shards = shards_of(family, 3, step)
        losses = model.backward(loss, shards, [1 / 3] * 3, capture=True)
        expected = loss(reference, batch)
        expected.backward()
        assert sum(float(each) for each in losses) / 3 == pytest.approx(expected.item(), rel=1e-12)
        assert_same_gradients(module, reference)
        if step % 2:  # in between gradients accumulate
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert log == ["record"] * 3 + ["replay"] * 15


def test_results_outlive_the_next_replay(log):
    model = wrap("shared", build("mlp"), 2, None)
    kept = []
    for step in range(WARM_UP_STEPS + 4):
        model.module.zero_grad()
        losses = model.backward(LOSS, shards_of("mlp", 2, step)[1], [0.5, 0.5], capture=True)
        grads = [parameter.grad for parameter in model.module.parameters()]
        kept.append((losses, [each.clone() for each in losses], grads, [each.clone() for each in grads]))
    for losses, loss_values, grads, values in kept:
        assert all(map(torch.equal, losses, loss_values))
        assert all(map(torch.equal, grads, values))


def test_one_shard_alone_leaves_gradients_of_its_own(log):
    model = wrap("shared", build("mlp"), 2, None)
    for _ in range(WARM_UP_STEPS + 1):
        model.module.zero_grad()
        model.backward(LOSS, [shards_of("mlp", 1, 0)[1][0]], [1.0], capture=True)
    first = [parameter.grad for parameter in model.module.parameters()]
    values = [each.clone() for each in first]
    model.module.zero_grad()
    model.backward(LOSS, [shards_of("mlp", 1, 7)[1][0]], [1.0], capture=True)
    assert all(map(torch.equal, first, values))


def test_another_shape_runs_as_written_and_says_so_once(log):
    module, reference = build("mlp"), build("mlp")
    model = wrap("shared", module, 2, None)

    def step(samples, seed):
        batch, shards = shards_of("mlp", 2, seed, samples)
        module.zero_grad()
        reference.zero_grad()
        model.backward(LOSS, shards, [0.5, 0.5], capture=True)
        LOSS(reference, batch).backward()
        assert_same_gradients(module, reference)

    for seed in range(WARM_UP_STEPS + 1):
        step(2, seed)
    log.clear()
    with pytest.warns(UserWarning, match="differs") as caught:
        step(3, 9)
    assert [str(each.message) for each in caught] == [
        f"Replica {index} of DataParallel got a step that differs from the recorded one (shapes, loss function, modes, "
        "or where weights lie). Such steps run as written, without a CUDA graph."
        for index in (0, 1)
    ]
    assert log == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(2, 10)
        step(3, 11)
        assert log == ["replay"] * 2
        for seed in range(WARM_UP_STEPS):  # it has become the usual one
            step(3, seed)
    assert log == ["replay"] * 2 + ["record"] * 2 + ["replay"] * 2


@pytest.mark.filterwarnings("ignore:Replica")
@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.eval(),
        lambda module: setattr(module[0].weight, "data", module[0].weight.data.clone()),
        lambda module: module.__setitem__(1, nn.ReLU()),
        lambda module: module[0].weight.requires_grad_(False),
    ],
    ids=["mode", "memory", "layer", "frozen"],
)
def test_a_change_of_the_module_is_no_recorded_step(change, log):
    module = build("mlp")
    model = wrap("shared", module, 2, None)
    shards = shards_of("mlp", 2, 0)[1]
    for _ in range(WARM_UP_STEPS + 1):
        model.backward(LOSS, shards, [0.5, 0.5], capture=True)
    log.clear()
    change(module)
    module.zero_grad()
    model.backward(LOSS, shards, [0.5, 0.5], capture=True)
    assert log == []
    found = gradients(module)
    module.zero_grad()
    model.backward(LOSS, shards, [0.5, 0.5])
    plain = gradients(module)
    for name, gradient in plain.items():
        assert (found[name] is None) == (gradient is None)
        assert gradient is None or torch.equal(found[name], gradient)


def test_buffers_and_tensor_scales_are_inputs(log, monkeypatch):
    module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    module.register_buffer("factor", torch.ones(()).double())
    reference = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).double()
    reference.load_state_dict({name: value for name, value in module.state_dict().items() if name != "factor"})
    model = wrap("apart", module, 2, monkeypatch)

    def loss(replica, x):
        return (replica(x) * replica.factor).square().mean()

    x = torch.randn(4, 6).double()
    for step in range(WARM_UP_STEPS + 3):
        module.zero_grad()
        reference.zero_grad()
        module.factor.fill_(step + 1.0)
        model.backward(loss, [x, x], [torch.tensor(step + 0.5)] * 2, capture=True)
        (2 * (step + 0.5) * (reference(x) * (step + 1.0)).square().mean()).backward()
        for got, wanted in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-12, atol=1e-12)
    assert log == ["record"] * 2 + ["replay"] * 6


def test_what_cannot_be_recorded_runs_as_written(log, monkeypatch):
    def refuse(self, work):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Memory, "record", refuse)
    module, reference = build("mlp"), build("mlp")
    model = wrap("shared", module, 2, None)
    batch, shards = shards_of("mlp", 2, 0)
    for _ in range(WARM_UP_STEPS):
        model.backward(LOSS, shards, [0.5, 0.5], capture=True)
    module.zero_grad()
    with pytest.warns(UserWarning, match="cannot record") as caught:
        model.backward(LOSS, shards, [0.5, 0.5], capture=True)
    assert [str(each.message) for each in caught] == [
        f"DataParallel cannot record the steps of replica {index}: operation not permitted when stream is capturing. "
        "They run as written."
        for index in (0, 1)
    ]
    LOSS(reference, batch).backward()
    assert_same_gradients(module, reference)
    model.backward(LOSS, shards, [0.5, 0.5], capture=True)  # and no more is said


def test_on_the_cpu_there_is_nothing_to_record():
    model = wrap("shared", build("mlp"), 2, None)
    with pytest.warns(UserWarning, match="cannot record") as caught:
        model.backward(LOSS, shards_of("mlp", 2, 0)[1], [0.5, 0.5], capture=True)
    assert str(caught[0].message) == (
        "DataParallel cannot record the steps of replica 0: only CUDA devices have graphs. They run as written."
    )


def test_keys():
    x = torch.zeros(2, 3)
    key = make_key("same", (x, 1, "a"), 0.5, CPU)
    assert key == make_key("same", (torch.ones(2, 3), 1, "a"), 0.5, CPU)
    others = [
        ("other", (x, 1, "a"), 0.5),
        ("same", [x, 1, "a"], 0.5),
        ("same", (x, 1, "b"), 0.5),
        ("same", (x, True, "a"), 0.5),
        ("same", (x.t(), 1, "a"), 0.5),
        ("same", (x.double(), 1, "a"), 0.5),
        ("same", (x, 1, "a"), 0.25),
        ("same", (x, 1, "a"), torch.tensor(0.5)),
    ]
    assert all(make_key(*other, CPU) != key for other in others)
    with pytest.raises(ConfigurationError) as error:
        make_key("same", {"x": object()}, 1.0, CPU)
    assert str(error.value) == "a shard holds something of type object, in which tensors would be overlooked"
    with pytest.raises(ConfigurationError) as error:
        make_key("same", x, 1.0, torch.device("cuda", 0))
    assert str(error.value) == "a shard holds a tensor on cpu, which a graph would not read again"
