"""Gradients of ZeroRedundancyOptimizer are reduced to slices unless the script reads them, and are right if it does."""

import copy
import io
from contextlib import nullcontext, redirect_stderr

import pytest
import torch
from torch import nn

import lockstep
from lockstep.comm.collectives import all_reduce
from lockstep.comm.network import sent_to
from lockstep.errors import ConfigurationError
from tests.distributed.test_zero_parity import loss_of, net
from tests.models import relative_error
from tests.shm import shm_group

SLICES = "slices"


def sent_bytes(world):
    all_reduce(torch.ones(1), group=world.group)  # so that all of it has arrived
    return sum(each.num_bytes for each in sent_to(loopback=True).values())


def test_a_script_sends_no_more_than_ddp(ranks):
    """Of two ranks, each sends the gradients once: half of them before the step, half of the parameters after it."""

    def run(world):
        numel = 2**20
        model = lockstep.DistributedDataParallel(nn.Linear(numel, 1, bias=False))
        optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        for step in range(5):
            if step == 4:
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
    """By name, what a script does between backward and step, after step, and the mode that follows."""

    def clip(model, optimizer, step):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)

    def clip_late(model, optimizer, step):
        if step in (4, 7):
            clip(model, optimizer, step)

    def clip_from_the_fourth_on(model, optimizer, step):
        if step > 3:
            clip(model, optimizer, step)

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

    def alone(model, optimizer, step):
        if step == 5 and model.process_group.rank() == 1:
            gradients = [each.grad for each in model.parameters() if each.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    norms = []
    return norms, {
        "nothing": (None, SLICES),
        "torch's clipping": (clip, "whole"),
        "torch's clipping, seldom and late": (clip_late, SLICES),
        "torch's clipping, late and then always": (clip_from_the_fourth_on, "whole"),
        "the optimizer's clipping": (of_the_optimizer, SLICES),
        "the wrapper's clipping": (of_the_wrapper, "whole"),
        "gradients set by hand": (set_by_hand, "whole"),
        "gradients edited": (edited, "whole"),
        "gradients edited after clipping": (edited_after_clipping, "whole"),
        "one rank reads, late": (alone, SLICES),
    }


NAMES = list(scripts()[1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_whatever_a_script_reads_or_changes_is_right(ranks, name, backend):
    def train(model, optimizer, change, rank=0, size=1):
        for step in range(9):
            model.zero_grad()
            loss_of(model, step, rank, size).backward()
            if change is not None:
                change(model, optimizer, step)
            optimizer.step()

    class Alone(nn.Module):
        """The model in one process, with the wrapper's and the optimizer's methods."""

        def __init__(self, module):
            super().__init__()
            self.module = module
            self.process_group = type("Group", (), {"rank": lambda self: 1})()

        def forward(self, *inputs):
            return self.module(*inputs)

        def clip_grad_norm_(self, max_norm):
            torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)

    def run(world):
        norms, kinds = scripts()
        model = net()
        with shm_group() if backend == "shm" else nullcontext() as group:
            wrapped = lockstep.DistributedDataParallel(model, bucket_cap_mb=0.0005, process_group=group)
            optimizer = lockstep.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, group, lr=0.01)
            train(wrapped, optimizer, kinds[name][0], world.rank, world.world_size)
        oracle_norms, oracle_kinds = scripts()
        expected = Alone(net())
        theirs = torch.optim.AdamW(expected.parameters(), lr=0.01)
        theirs.clip_grad_norm_ = expected.clip_grad_norm_
        train(expected, theirs, oracle_kinds[name][0])
        for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
            assert relative_error(mine, other) < 1e-12
        if world.rank == 1:
            assert norms == pytest.approx(oracle_norms, rel=1e-12)
        flat = torch.cat([each.detach().flatten() for each in model.parameters()])
        assert {type(each) for each in model.parameters()} <= {nn.Parameter, type(next(model.parameters()))}
        return optimizer._slices.mode.value, flat.tolist()

    for mode, weights in (found := ranks(3)(run)):
        assert mode == scripts()[1][name][1]
        assert weights == found[0][1]


def test_grad_scaler_and_accumulation_without_no_sync_keep_gradients_whole(ranks):
    def run(world):
        modes = []
        for kind in ("scaler", "accumulation"):
            model = net()
            wrapped = lockstep.DistributedDataParallel(model)
            optimizer = lockstep.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=kind == "scaler")
            for step in range(5):
                optimizer.zero_grad()
                for part in range(1 + (kind == "accumulation")):
                    loss = loss_of(wrapped, step + part, world.rank, world.world_size, head=0)
                    scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            modes.append(optimizer._slices.mode.value)
            expected, theirs = net(), None
            theirs = torch.optim.SGD(expected.parameters(), lr=0.01)
            for step in range(5):
                theirs.zero_grad()
                for part in range(1 + (kind == "accumulation")):
                    loss_of(expected, step + part, head=0).backward()
                theirs.step()
            for mine, other in zip(model.parameters(), expected.parameters(), strict=True):
                assert relative_error(mine, other) < 1e-12
        return modes

    assert ranks(2)(run) == [["whole", "whole"]] * 2


def test_a_read_that_no_other_rank_would_answer_is_an_error(ranks):
    def run(world):
        model = net()
        wrapped = lockstep.DistributedDataParallel(model)
        optimizer = lockstep.ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.01)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(wrapped, step, world.rank, world.world_size).backward()
            optimizer.step()
        with pytest.raises(ConfigurationError) as caught:
            next(model.parameters()).grad.norm()
        copied = next(copy.deepcopy(model).parameters())
        assert copied.grad is None and type(copied) is nn.Parameter
        wrapped.zero_grad()  # finds out what there is to reset, and is no read
        assert next(model.parameters()).grad is None
        return str(caught.value)

    refusal = (
        "A gradient is read after the optimizer has used it: it was reduced to each rank's slice, since none was read "
        "in the first steps.\nRead it before step() and clip_grad_norm_() of the optimizer, or pass "
        "shard_gradients=False to ZeroRedundancyOptimizer."
    )
    assert ranks(2)(run) == [refusal] * 2


def test_a_script_that_reads_gradients_gets_one_hint(ranks):
    def run(world):
        model = lockstep.DistributedDataParallel(nn.Linear(3, 2))
        optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with redirect_stderr(io.StringIO()) as text:
            for _ in range(5):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        return text.getvalue()

    hint = (
        "lockstep: ZeroRedundancyOptimizer sends whole gradients, half as many bytes again as it needs: the script "
        "reads\ngradients between backward and zero_grad(). Clip with the optimizer's clip_grad_norm_(), and pass "
        "shard_gradients=True,\nor pass shard_gradients=False, which ends this message.\n"
    )
    assert ranks(2)(run) == [hint, ""]


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
