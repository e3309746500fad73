"""What the reproducible mode cannot do, and says."""

import pytest
import torch
from torch import nn

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.train.plan import place_shards
from lockstep.train.settings import Settings
from lockstep.train.strategies.reproducible import Arithmetic, find_late_cublas
from lockstep.train.trainer import Trainer
from tests.reproducing import Alone
from tests.training import make_task


def run_steps(model, num_steps=2, strategy="single", **changes):
    loop = Trainer(
        make_task(model=model, **changes),
        Settings(reproducible=2),
        Alone,
        strategy=strategy,
        devices=[torch.device("cpu")] * (2 if strategy == "dp" else 1),
    )
    for _ in range(num_steps):
        loop.step()
    loop.close()
    return loop.model


class WithBuffer(nn.Module):
    """Does something to a buffer in forward."""

    def __init__(self, change, buffer):
        super().__init__()
        self.layer, self.change = nn.Linear(6, 4, dtype=torch.float64), change
        self.register_buffer("state", buffer)

    def forward(self, inputs):
        self.change(self)
        return self.layer(inputs)


def message(run):
    with pytest.raises(ConfigurationError) as error:
        run()
    return str(error.value)


@pytest.mark.parametrize("layer", [nn.SyncBatchNorm, lockstep.SyncBatchNorm])
def test_layers_that_need_the_whole_batch_are_refused(layer):
    network = nn.Sequential(nn.Linear(6, 4, dtype=torch.float64), layer(4, dtype=torch.float64))
    assert message(lambda: run_steps(lambda: network)) == (
        "The layer 1 is a SyncBatchNorm, which needs all samples of a batch at once.\n"
        "With reproducible, virtual shards run one after the other. Use BatchNorm, which then normalises over "
        "a virtual shard on any number of devices, or omit reproducible."
    )


def test_sparse_gradients_are_refused():
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 4, sparse=True, dtype=torch.float64)

        def forward(self, inputs):
            return self.table(inputs.argmax(1) % 5)

    assert message(lambda: run_steps(Sparse)) == (
        "The gradient of table.weight is sparse, which reproducible does not support.\n"
        "Create the embedding with sparse=False, and use an optimizer for dense gradients."
    )


@pytest.mark.parametrize("strategy", ["single", "dp"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda module: module.register_buffer("state", torch.zeros(3)),
            "The buffer state changed from (2,) float32 to (3,) float32 in forward.\n"
            "With reproducible, buffers must keep their shape and dtype. Store it in a plain attribute.",
        ),
        (
            lambda module: module.register_buffer("state", None),
            "The buffer state became None in forward.\nStore it in a plain attribute.",
        ),
    ],
)
def test_buffers_keep_their_shape(strategy, change, text):
    assert message(lambda: run_steps(lambda: WithBuffer(change, torch.zeros(2)), strategy=strategy)) == text


def test_buffers_with_a_gradient_are_refused():
    text = message(lambda: run_steps(lambda: WithBuffer(lambda _: None, torch.zeros(2, requires_grad=True))))
    assert text == (
        "The buffer state requires a gradient, but reproducible sums gradients of parameters only.\n"
        "Make it a parameter."
    )


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_buffer_becomes_the_mean_of_what_the_shards_left(strategy):
    def add_up(module):
        module.state.data += module.seen  # each shard adds the number of its samples

    class Counting(WithBuffer):
        def forward(self, inputs):
            self.seen = len(inputs)
            return super().forward(inputs)

    # 50 samples in global batches of 24: shards of 12 and 12, 12 and 12, 1 and 1, then 12 and 12 again.
    model = run_steps(lambda: Counting(add_up, torch.zeros(2)), num_steps=4, strategy=strategy)
    assert model.state.tolist() == [12.0 + 12 + 1 + 12] * 2
    counter = run_steps(lambda: Counting(add_up, torch.zeros(2, dtype=torch.int64)), num_steps=3, strategy=strategy)
    assert counter.state.tolist() == [12 + 12 + 1] * 2


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_a_parameter_that_no_shard_used_has_no_gradient(strategy):
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(6, 4, dtype=torch.float64), nn.Linear(6, 4, dtype=torch.float64)

        def forward(self, inputs):
            return self.used(inputs)

    model = run_steps(Idle, strategy=strategy)
    assert model.idle.weight.grad is None
    assert model.used.weight.grad is not None


def test_devices_without_a_virtual_shard_are_refused():
    assert [list(leaves) for leaves in place_shards(5, 2, None).ranges] == [[0, 1, 2], [3, 4]]
    assert [list(leaves) for leaves in place_shards(4, 3, (2, 1, 1)).ranges] == [[0, 1], [2], [3]]
    assert message(lambda: place_shards(2, 4, None)) == (
        "reproducible=2 leaves 2 of 4 devices without a virtual shard.\n"
        "Increase reproducible, or train on fewer devices."
    )
    assert message(lambda: place_shards(4, 2, (9, 1))).startswith("reproducible=4 leaves 1 of 2 devices")


def test_settings_that_do_not_go_together():
    assert message(lambda: Settings(reproducible=4, accumulate=3)) == (
        "accumulate cannot be combined with reproducible: each virtual shard is a micro-batch; for smaller ones, "
        "increase reproducible.\nOmit one of the two."
    )
    assert message(
        lambda: Trainer(
            make_task(), Settings(reproducible=2), Alone, strategy="torch-ddp", devices=[torch.device("cpu")]
        )
    ) == ("reproducible is for strategy single, dp, ddp, but the strategy is torch-ddp.\nOmit reproducible.")


def arithmetic():
    fills = torch.utils.deterministic.fill_uninitialized_memory
    return torch.get_num_threads(), torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark, fills


@pytest.mark.parametrize("mode", ["default", "warn"])
def test_the_arithmetic_of_the_process_is_left_as_it_was(mode):
    torch.set_deterministic_debug_mode(mode)
    before = arithmetic()
    with pytest.raises(ZeroDivisionError), Arithmetic(threads=before[0] + 1, deterministic=True).applied():
        assert arithmetic() == (before[0] + 1, 2, False, False)  # an operation that has no order of sums is an error
        raise ZeroDivisionError
    assert arithmetic() == before
    torch.set_deterministic_debug_mode("default")


def test_a_setting_that_cublas_may_have_read_before_is_a_caveat(monkeypatch):
    used_bytes = {torch.device("cuda", 0): 2**22, torch.device("cuda", 1): 2**22 - 1}
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", used_bytes.__getitem__)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    late = "the GPU was used before (start the script with CUBLAS_WORKSPACE_CONFIG=:4096:8)"
    assert find_late_cublas(torch.device("cuda", 0)) == late
    assert find_late_cublas(torch.device("cuda", 1)) is None  # by something smaller than the workspace of cuBLAS
    assert find_late_cublas(torch.device("cpu")) is None
    with monkeypatch.context() as patched:
        patched.setattr("lockstep.train.trainer.reproducible.find_late_cublas", lambda device: late)
        loop = Trainer(make_task(), Settings(reproducible=2), Alone, strategy="single", devices=[torch.device("cpu")])
        assert loop.caveats == [late]
        loop.close()
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert find_late_cublas(torch.device("cuda", 0)) is None
