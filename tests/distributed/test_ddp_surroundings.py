"""What surrounds the gradients: buffers, state, pickles, attributes, groups, mismatches, uneven inputs, hooks."""

import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join

import lockstep
from lockstep.errors import ModelMismatch
from tests.models import assert_gradients_equal, build, global_batch, share, squared_error


def buffers_follow_rank_zero(world, forward_sync):
    model = lockstep.DistributedDataParallel(nn.BatchNorm1d(2), forward_sync_buffers=forward_sync)
    model.module.running_mean.fill_(float(world.rank))
    model(torch.full((4, 2), 10.0 * world.rank)).sum().backward()
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 2))
    return model.module.running_mean.tolist()


def test_buffers_are_broadcast_before_forward(ranks):
    assert ranks(2)(buffers_follow_rank_zero, True) == [[0.0, 0.0], [0.0, 0.0]]
    first, second = ranks(2)(buffers_follow_rank_zero, False)
    assert first == [0.0, 0.0]
    assert second == pytest.approx([1.9, 1.9])  # 0.9 * 1 + 0.1 * 10: its own


class Counting(nn.Module):
    """Assigns its buffer anew in each forward, and clears another."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1))

    def forward(self, x):
        self.count = self.count + x.sum()
        self.scratch = None
        return self.weight * x


def buffers_assigned_anew(world):
    model = lockstep.DistributedDataParallel(Counting())
    seen = []
    for _ in range(3):
        model(torch.full((1,), 1.0 + world.rank)).sum().backward()
        seen.append(model.module.count.item())
    return seen


def test_buffers_that_a_module_assigns_anew_are_broadcast(ranks):
    """Before each forward every rank has rank 0's count: 0, 1, 2."""
    assert ranks(2)(buffers_assigned_anew) == [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]


def forward_under_the_profiler(world):
    model = lockstep.DistributedDataParallel(nn.Linear(2, 2))
    with torch.autograd.profiler.profile() as profile:
        model(torch.ones(1, 2))
    return sum(event.name == "DistributedDataParallel.forward" for event in profile.function_events)


def test_profiles_show_the_forward_under_torchs_name(ranks):
    assert ranks(1, warnings="ignore")(forward_under_the_profiler) == [1]


def load_both_ways(world):
    bare = build("mlp", seed=3)
    model = lockstep.DistributedDataParallel(build("mlp"))
    keys = list(model.state_dict())
    model.load_state_dict(bare.state_dict())
    back = build("mlp")
    state = model.state_dict()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    back.load_state_dict(state)
    return keys[0], all(torch.equal(a, b) for a, b in zip(back.parameters(), bare.parameters(), strict=True))


def test_state_dict(ranks):
    assert ranks(2)(load_both_ways) == [("module.0.weight", True)] * 2


def pickle_and_train(world):
    plain = nn.Sequential(*build("mlp"))  # pickle knows the class, unlike those of a test module
    model = lockstep.DistributedDataParallel(plain)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    oracle = build("mlp")
    for step in range(2):
        batch = global_batch("mlp", 4 * world.world_size, step)
        again.zero_grad()
        oracle.zero_grad()
        squared_error(again, share(batch, world.rank, world.world_size)).backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(again.module, oracle)


def test_saved_wrapper_loads_and_trains(ranks):
    ranks(2)(pickle_and_train)


class WithConfig(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = {"width": 3}
        self.encoder = nn.Linear(2, 2)
        self.register_buffer("table", torch.arange(3))

    def generate(self):
        return "text"

    def forward(self, x):
        return self.encoder(x)


def read_attributes(world):
    model = lockstep.DistributedDataParallel(WithConfig())
    errors = {}
    for name in ("generate", "encoder", "nothing"):
        with pytest.raises(AttributeError) as caught:
            getattr(model, name)
        errors[name] = str(caught.value)
    return model.config, model.table.tolist(), errors, isinstance(model, nn.parallel.DistributedDataParallel)


def test_attributes_pass_where_they_cannot_bypass_the_reduction(ranks):
    config, table, errors, is_torch_ddp = ranks(1)(read_attributes)[0]
    assert config == {"width": 3}
    assert table == [0, 1, 2]
    assert is_torch_ddp
    assert errors["nothing"] == "'DistributedDataParallel' object has no attribute 'nothing'"
    assert errors["generate"] == (
        "'DistributedDataParallel' object has no attribute 'generate'\nThe wrapped WithConfig has one, but a forward "
        "through it would not synchronise gradients. If that is what you want, write `.module.generate`."
    )
    assert errors["encoder"].endswith("write `.module.encoder`.")


def other_shape(world):
    lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + world.rank // 2)))


def extra_layer(world):
    lockstep.DistributedDataParallel(nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + world.rank))))


def other_buffer(world):
    module = nn.Linear(2, 2)
    module.register_buffer("count", torch.zeros(1, dtype=torch.int64 if world.rank else torch.float32))
    lockstep.DistributedDataParallel(module)


@pytest.mark.parametrize(
    ("function", "num_ranks", "first_line"),
    [
        pytest.param(
            other_shape,
            3,
            "The models differ between ranks: rank 0 has parameter 1.weight of float32[3, 2] with strides [2, 1], "
            "where rank 2 has parameter 1.weight of float32[4, 2] with strides [2, 1].",
            id="shape",
        ),
        pytest.param(
            extra_layer,
            2,
            "The models differ between ranks: rank 0 has nothing more, "
            "where rank 1 has parameter 1.weight of float32[2, 2] with strides [2, 1].",
            id="number",
        ),
        pytest.param(
            other_buffer,
            2,
            "The models differ between ranks: rank 0 has buffer count of float32[1] with strides [1], "
            "where rank 1 has buffer count of int64[1] with strides [1].",
            id="buffer",
        ),
    ],
)
def test_mismatched_models_are_an_error_on_every_rank(ranks, function, num_ranks, first_line):
    outcomes = ranks(num_ranks).each(function)
    assert all(isinstance(outcome.error, ModelMismatch) for outcome in outcomes)
    assert {str(outcome.error).splitlines()[0] for outcome in outcomes} == {first_line}


def nothing_to_train(world):
    lockstep.DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))


def test_model_without_trainable_parameters(ranks):
    outcomes = ranks(2).each(nothing_to_train)
    assert {str(outcome.error) for outcome in outcomes} == {
        "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.\n"
        "Unfreeze what is to be trained before wrapping, or use the bare module."
    }


def part_of_the_ranks(world):
    groups = [dist.new_group([0, 2]), dist.new_group([1])]
    group = groups[world.rank % 2]
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1, bias=False), process_group=group)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), 1.0 + world.rank)).sum().backward()
    return model.module.weight.grad.item()


def test_process_group_of_some_ranks(ranks):
    assert ranks(3)(part_of_the_ranks) == [2.0, 2.0, 2.0]


def ignored_parameters(world):
    module = nn.ModuleDict({"kept": nn.Linear(1, 1, bias=False), "local": nn.Linear(1, 1, bias=False)})
    module.forward = lambda x: module["kept"](x) + module["local"](x)
    lockstep.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["local.weight"])
    nn.init.constant_(module["local"].weight, world.rank)
    model = lockstep.DistributedDataParallel(module)
    for _ in range(2):
        model.zero_grad()
        model(torch.full((1, 1), 1.0 + world.rank)).sum().backward()
    return module["kept"].weight.grad.item(), module["local"].weight.grad.item(), module["local"].weight.item()


def test_ignored_parameters_stay_local(ranks):
    assert ranks(2)(ignored_parameters) == [(1.5, 1.0, 0.0), (1.5, 2.0, 1.0)]


def uneven(world, by_initial):
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join(divide_by_initial_world_size=by_initial):
        for _ in range(1 + 2 * world.rank):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    return model.module.weight.item()


def test_join(ranks):
    """Rank 0 has 1 batch, rank 1 has 3: steps of 1, then of 1/2 or 1, and the last model on both."""
    assert ranks(2)(uneven, True) == [-2.0, -2.0]
    assert ranks(2)(uneven, False) == [-3.0, -3.0]


def uneven_with_buffers_and_accumulation(world):
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(2 + 3 * world.rank):
            if step % 2 == 0:
                with model.no_sync():
                    model(torch.randn(4, 2)).sum().backward()
            else:
                model(torch.randn(4, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    return [value.tolist() for value in model.state_dict().values()]


def test_join_with_buffers_and_accumulation(ranks):
    first, second, third = ranks(3)(uneven_with_buffers_and_accumulation)
    assert first == second == third


def stop_together(world):
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1))
    with model.join(throw_on_early_termination=True):
        for _ in range(1 + world.rank):
            model(torch.ones(1, 1)).sum().backward()


def test_join_can_stop_all_ranks(ranks):
    errors = [str(outcome.error) for outcome in ranks(2).each(stop_together)]
    assert errors == [
        "Rank 0 exhausted all inputs.",
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
    ]


def train_with_hook(world, make, tolerance):
    state, hook = make()
    model, oracle = lockstep.DistributedDataParallel(build("reused").float()), build("reused").float()
    model.register_comm_hook(state, hook)
    for step in range(4):
        model.zero_grad()
        oracle.zero_grad()
        batch = tuple(part.float() for part in global_batch("reused", 4 * world.world_size, step))
        squared_error(model, share(batch, world.rank, world.world_size)).backward()
        squared_error(oracle, batch).backward()
        assert_gradients_equal(model.module, oracle, tolerance)
    return model._get_ddp_logging_data()["comm_hook"]


@pytest.mark.parametrize(
    ("make", "tolerance"),
    [
        pytest.param(lambda: (None, default_hooks.allreduce_hook), 1e-6, id="allreduce"),
        pytest.param(lambda: (None, default_hooks.fp16_compress_hook), 1e-2, id="fp16"),
        pytest.param(
            lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)), 1e-2, id="wrapped"
        ),
        pytest.param(
            lambda: (
                powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, matrix_approximation_rank=8),
                powerSGD_hook.powerSGD_hook,
            ),
            1e-4,
            id="powerSGD",
        ),
    ],
)
def test_stock_communication_hooks(ranks, make, tolerance):
    names = ranks(2, warnings="ignore")(train_with_hook, make, tolerance)
    assert names[0]


def test_noop_hook_leaves_gradients_local(ranks):
    def local(world):
        model = lockstep.DistributedDataParallel(nn.Linear(1, 1, bias=False))
        model.register_comm_hook(None, debugging_hooks.noop_hook)
        for _ in range(2):
            model.zero_grad()
            model(torch.full((1, 1), 1.0 + world.rank)).sum().backward()
        return model.module.weight.grad.item()

    assert ranks(2)(local) == [1.0, 2.0]


def refuse_hooks(world):
    model = lockstep.DistributedDataParallel(nn.Linear(1, 1))
    texts = []
    with pytest.raises(TypeError) as caught:
        model.register_comm_hook(None, 1)
    texts.append(str(caught.value))

    def wrong(state, bucket: int):
        return bucket

    with pytest.raises(ValueError, match=r"bucket annotation should be dist\.GradBucket") as caught:
        model.register_comm_hook(None, wrong)
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(RuntimeError) as caught:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    texts.append(str(caught.value))
    return texts


def test_hooks_are_checked(ranks):
    assert ranks(1)(refuse_hooks) == [
        [
            "Communication hook must be callable.",
            "register_comm_hook or register_builtin_comm_hook can only be called once.",
        ]
    ]


def lose_a_peer(world):
    model = lockstep.DistributedDataParallel(nn.Linear(2, 2))
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
    if world.rank == 1:
        raise KeyError("planted")
    model(torch.ones(1, 2)).sum().backward()


def test_a_rank_that_ends_is_an_error_on_the_others(ranks):
    first, second = ranks(2).each(lose_a_peer)
    assert isinstance(second.error, KeyError)
    assert isinstance(first.error, lockstep.errors.CollectiveError)
    lines = str(first.error).splitlines()
    assert lines[0].startswith("Rank 0: the gradient reduction of bucket 0 (weight ... bias) failed: ") or lines[
        0
    ].startswith("Rank 0: the gradient reduction of bucket 0 (bias ... weight) failed: ")
    assert lines[-1] == "Another rank probably ended or ran no backward; look at the first error of the job."


# --- buffers that come and go, transforms of torch.func ---


class TakesBuffers(nn.Module):
    """A layer whose buffers the test changes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2, dtype=torch.float64)

    def forward(self, x):
        return self.layer(x)


def test_buffers_are_looked_up_in_each_forward(ranks):
    def body(world):
        module = TakesBuffers()
        module.register_buffer("goes", torch.zeros(1))
        module.register_buffer("filled", None)
        module.register_buffer("row", torch.full((1, 4), world.rank).expand(3, 4))
        model, x = lockstep.DistributedDataParallel(module), torch.ones(1, 3, dtype=torch.float64)
        found = [module.row.tolist()]
        model(x)
        del module.goes
        module.filled = torch.full((2,), world.rank)
        module.layer.register_buffer("late", torch.full((2,), world.rank))
        model(x)
        found += [module.filled.tolist(), module.layer.late.tolist()]
        module.filled.data = torch.full((3,), world.rank, dtype=torch.float64)  # grows in place
        model(x)
        return [*found, module.filled.tolist()]

    assert ranks(2)(body) == [[[[0] * 4] * 3, [0, 0], [0, 0], [0.0] * 3]] * 2


def test_a_buffer_that_grows_otherwise_on_another_rank_is_named(ranks):
    def body(world):
        module = TakesBuffers()
        module.register_buffer("mask", torch.zeros(1))
        model, x = lockstep.DistributedDataParallel(module), torch.ones(1, 3, dtype=torch.float64)
        module.mask = torch.zeros(2 + world.rank)
        model(x)

    for outcome in ranks(2).each(body):
        assert isinstance(outcome.error, ModelMismatch)
        first, second = str(outcome.error).splitlines()
        assert first == (
            "The models differ between ranks: rank 0 has buffer mask of float32[2] with strides [1], "
            "where rank 1 has buffer mask of float32[3] with strides [1]."
        )
        assert second.startswith("Buffers have changed since the model was wrapped;")


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_layers_in_another_order_are_an_error_on_every_rank(ranks, kind):
    def body(world):
        module = TakesBuffers()
        for name in ("left", "right") if world.rank == 0 else ("right", "left"):
            if kind == "buffer":
                module.register_buffer(name, torch.zeros(2))
            else:
                module.register_parameter(name, nn.Parameter(torch.zeros(2)))
        lockstep.DistributedDataParallel(module)

    for outcome in ranks(2).each(body):
        assert isinstance(outcome.error, ModelMismatch)
        assert f"rank 0 has {kind} left of float32[2] with strides [1], where rank 1 has {kind} right of" in str(
            outcome.error
        )


def test_shared_and_compiled_layers_have_other_names(ranks):
    def body(world):
        module, shared = nn.Module(), nn.Linear(2, 2)
        module.add_module("first", nn.Linear(2, 2))
        for name in ("left", "right") if world.rank == 0 else ("right", "left"):
            module.add_module(name, shared)
        if world.rank == 0:
            module.first = torch.compile(module.first, backend="eager")
        lockstep.DistributedDataParallel(module)
        return shared.weight.tolist()

    first, second = ranks(2)(body)
    assert first == second


def test_a_sparse_buffer_is_named(ranks):
    def body(world):
        module = TakesBuffers()
        module.register_buffer("graph", torch.eye(2).to_sparse())
        lockstep.DistributedDataParallel(module)

    for outcome in ranks(2).each(body):
        assert str(outcome.error).startswith("Buffer graph is sparse (torch.sparse_coo), and cannot be broadcast")


def test_transforms_compute_this_ranks_derivatives_and_vmap_trains(ranks):
    def body(world):
        module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().eval()
        model = lockstep.DistributedDataParallel(module)
        x = torch.full((2, 5, 3), world.rank + 1.0, dtype=torch.float64)
        assert torch.equal(torch.func.jacrev(model)(x[0]), torch.func.jacrev(module)(x[0]))
        torch.vmap(model)(x).sum().backward()
        return module[0].weight.grad.tolist()

    first, second = ranks(2)(body)
    assert first == second
