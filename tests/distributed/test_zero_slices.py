"""With shard_gradients, gradients are reduced to slices; without, they are whole, and a script may read them."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lockstep
from lockstep.comm.collectives import all_reduce
from lockstep.comm.network import sent_to
from lockstep.errors import ConfigurationError
from tests.distributed.test_zero_parity import loss_of, net
from tests.models import relative_error


def sent_bytes(world):
    all_reduce(torch.ones(1), group=world.group)  # so that all of it has arrived
    return sum(each.num_bytes for each in sent_to(loopback=True).values())


def test_slices_send_no_more_than_ddp(ranks):
    """Of two ranks, each sends the gradients once: half of them before the step, half of the parameters after it."""

    def run(world):
        numel = 2**20
        model = lockstep.DistributedDataParallel(nn.Linear(numel, 1, bias=False))
        optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, shard_gradients=True)
        for step in range(3):
            if step == 2:
                before = sent_bytes(world)
            optimizer.zero_grad()
            model(torch.ones(1, numel)).sum().backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
        return (sent_bytes(world) - before) / (4 * numel)

    assert ranks(2)(run) == pytest.approx([1.0, 1.0], rel=0.02)


@pytest.mark.parametrize("shard_gradients", [True, False])
def test_each_step_uses_the_same_memory(ranks, shard_gradients):
    """A bucket whose memory is still in use takes new memory, which the ranks do not share."""

    def run(world):
        model = lockstep.DistributedDataParallel(net())
        optimizer = lockstep.ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, shard_gradients=shard_gradients
        )
        found = []
        for _ in range(5):
            optimizer.zero_grad()
            loss_of(model, world.rank).backward()
            optimizer.step()
            found.append([bucket.payload.data_ptr() for bucket in model.reducer.bucket_set.buckets])
        return found[1:]

    for found in ranks(2)(run):
        assert found == [found[0]] * 4


def test_gradients_in_slices_may_be_edited_and_strides_may_change(ranks):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(2, 4, 2), nn.Tanh(), nn.Conv2d(4, 2, 2)).double()

    def train(model, optimizer, batch):
        for step in range(6):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            for parameter in model.parameters():
                parameter.grad.data = parameter.grad.data * 0.5
            if step in (1, 4):
                model.to(memory_format=(torch.channels_last, torch.contiguous_format)[step == 4])
            optimizer.step()

    def run(world):
        whole = torch.randn(6, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        model, expected = lockstep.DistributedDataParallel(build()), build()
        adam = torch.optim.Adam
        optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), adam, lr=0.1, shard_gradients=True)
        train(model, optimizer, whole.chunk(world.world_size)[world.rank])
        train(expected, adam(expected.parameters(), lr=0.1), whole)
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert relative_error(mine, other) < 1e-9

    ranks(2)(run)


def scripts():
    """By name, what a script does between backward and step, and whether that is right with slices, too."""

    def clip(model, optimizer, step):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)

    def clip_values(model, optimizer, step):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)

    def of_the_optimizer(model, optimizer, step):
        optimizer.clip_grad_norm_(0.2)

    def of_the_wrapper(model, optimizer, step):
        model.clip_grad_norm_(0.2)

    def set_by_hand(model, optimizer, step):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad * 0.5

    def edited(model, optimizer, step):
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.flip(0)

    def edited_after_clipping(model, optimizer, step):
        of_the_optimizer(model, optimizer, step)
        edited(model, optimizer, step)

    return {
        "torch's clipping": (clip, False),
        "torch's clipping of values": (clip_values, True),
        "the optimizer's clipping": (of_the_optimizer, True),
        "the wrapper's clipping": (of_the_wrapper, False),
        "gradients set by hand": (set_by_hand, True),
        "gradients edited": (edited, False),
        "gradients edited after clipping": (edited_after_clipping, False),
    }


WHOLE = [(name, False) for name in scripts()]
IN_SLICES = [(name, True) for name, (_, is_right) in scripts().items() if is_right]


@pytest.mark.parametrize(("name", "shard_gradients"), WHOLE + IN_SLICES)
def test_whatever_a_script_reads_or_changes_is_right(ranks, name, shard_gradients):
    def train(model, optimizer, rank=0, size=1):
        for step in range(5):
            model.zero_grad()
            loss_of(model, step, rank, size).backward()
            scripts()[name][0](model, optimizer, step)
            optimizer.step()

    class Alone(nn.Module):
        """The model in one process, with the wrapper's and the optimizer's methods."""

        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, *inputs):
            return self.module(*inputs)

        def clip_grad_norm_(self, max_norm):
            torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def run(world):
        model, settings = net(), {"lr": 0.01, "shard_gradients": shard_gradients}
        wrapped = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.0005)
        optimizer = lockstep.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **settings)
        train(wrapped, optimizer, world.rank, world.world_size)
        expected = Alone(net())
        theirs = torch.optim.AdamW(expected.parameters(), lr=0.01)
        theirs.clip_grad_norm_ = expected.clip_grad_norm_
        train(expected, theirs)
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert relative_error(mine, other) < 1e-12
        return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()

    assert len({tuple(weights) for weights in ranks(3)(run)}) == 1


@pytest.mark.parametrize("kind", ["scaler", "accumulation"])
def test_grad_scaler_and_accumulation_without_no_sync(ranks, kind):
    def train(model, optimizer, rank=0, size=1, *, scaler):
        for step in range(5):
            optimizer.zero_grad()
            for part in range(1 + (kind == "accumulation")):
                scaler.scale(loss_of(model, step + part, rank, size, head=0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            scaler.step(optimizer)
            scaler.update()

    def run(world):
        model, expected = net(), net()
        wrapped = lockstep.DistributedDataParallel(model)
        optimizer = lockstep.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=kind == "scaler")
        train(wrapped, optimizer, world.rank, world.world_size, scaler=scaler)
        theirs = torch.optim.SGD(expected.parameters(), lr=0.01)
        train(expected, theirs, scaler=torch.amp.GradScaler("cpu", enabled=False))
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert relative_error(mine, other) < 1e-12

    ranks(2)(run)


@pytest.mark.parametrize("num_steps", [0, 3])
@pytest.mark.parametrize("foreach", [None, False])
def test_a_norm_of_slices_is_refused(ranks, num_steps, foreach):
    def run(world):
        model = net()
        wrapped = lockstep.DistributedDataParallel(model)
        optimizer = lockstep.ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.SGD, shard_gradients=True, lr=0.01
        )
        for step in range(num_steps):
            loss_of(wrapped, step, world.rank, world.world_size).backward()
            optimizer.clip_grad_norm_(0.2)
            with pytest.raises(ConfigurationError, match="has a slice"):
                next(model.parameters()).grad.norm()
            optimizer.step()
            assert all(parameter.grad is None for parameter in model.parameters())
        loss_of(wrapped, num_steps, world.rank, world.world_size).backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.2, foreach=foreach)

    for outcome in ranks(2).each(run):
        assert isinstance(outcome.error, ConfigurationError)
        assert str(outcome.error) == (
            "A norm of a gradient, as for clipping and lockstep verify, needs all of it, but with shard_gradients=True "
            "this rank has a slice.\nCall clip_grad_norm_() of the optimizer, which returns the norm of all "
            "(max_norm=math.inf does not clip), or leave shard_gradients out."
        )


NORMS = {
    "norm": Tensor.norm,
    "normalize": F.normalize,
    "vector norm": torch.linalg.vector_norm,
    "overload": lambda gradient: torch.ops.aten.linalg_vector_norm.default(gradient),
    "matrix norm": torch.linalg.matrix_norm,
    "foreach": lambda gradient: torch._foreach_norm([gradient]),
}


def test_only_operators_of_norms_are_refused(ranks):
    def run(world):
        model = lockstep.DistributedDataParallel(net())
        optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, shard_gradients=True, lr=0.1)
        loss_of(model, 0, world.rank, world.world_size).backward()
        gradient = next(parameter.grad for parameter in model.parameters() if parameter.dim() == 2)
        for compute in NORMS.values():
            with pytest.raises(ConfigurationError, match="has a slice"):
                compute(gradient)
        before = gradient.clone()
        assert not torch.equal(gradient.normal_(), before)
        F.layer_norm(gradient, gradient.shape[1:])
        optimizer.step()

    ranks(2)(run)


@pytest.mark.parametrize("is_in_cycle", [False, True])
def test_an_optimizer_may_take_the_place_of_one_that_is_gone(ranks, is_in_cycle):
    def train(model, make, world):
        for rate in (0.1, 0.05):
            optimizer = make(model.parameters(), lr=rate)
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, world.rank + step).backward()
                optimizer.step()
            if is_in_cycle:
                optimizer.own = optimizer
            del optimizer
        return [parameter.detach().clone() for parameter in model.parameters()]

    def run(world):
        def make(parameters, lr):
            return lockstep.ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, shard_gradients=True, lr=lr)

        sliced = lockstep.DistributedDataParallel(net())
        whole = lockstep.DistributedDataParallel(copy.deepcopy(sliced.module))
        pairs = zip(train(sliced, make, world), train(whole, torch.optim.AdamW, world), strict=True)
        errors = [relative_error(one, other) for one, other in pairs]
        kept = make(sliced.parameters(), 0.1)
        with pytest.raises(ConfigurationError, match="or another optimizer with shards"):
            make(sliced.parameters(), 0.1)
        return max(errors), len(sliced.reducer.observers), kept.world_size

    for error, num_observers, _ in ranks(2)(run):
        assert error < 1e-6 and num_observers == 1
