"""Small programs written for torch's class, run on it and, after ``adopt()``, on ours: every tensor must be the same.

The programs make the calls that nanoGPT, Accelerate, Lightning, Transformers and torch's own tools make, so that none
of them has to be installed. At two ranks both engines compute the same bits.
"""

import copy
import io
import subprocess
import sys

import pytest
import torch
from torch import nn

import lockstep
from tests.unit.loop.test_adopt import adopted


def network(dropout=0.0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 4)
        return nn.Sequential(*layers)


def loss_of(model, rank, step):
    return model(inputs_of(rank, step)).square().mean()


def inputs_of(rank, step):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def wrap(module, **options):
    return nn.parallel.DistributedDataParallel(module, **options)


def values(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).clone()


def flags_set_by_hand(rank):
    """nanoGPT: accumulates by setting require_backward_grad_sync, and evaluates through the wrapper."""
    model, found = wrap(network()), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for micro_step in range(3):
            model.require_backward_grad_sync = micro_step == 2
            loss_of(model, rank, 3 * step + micro_step).backward()
            found.append(gradients(model))
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        model.eval()
        with torch.no_grad():
            found.append(model(inputs_of(rank, 50)))
        model.train()
    loss_of(model.module, rank, 60).backward()  # not synchronised
    return [*found, gradients(model), values(model)]


def synchronised_late(rank):
    """Accelerate's trigger_sync_in_backward: both forwards ran under no_sync(), the last backward synchronises."""
    model, found = wrap(network()), []
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    for step in range(2):
        with model.no_sync():
            first, second = loss_of(model, rank, 2 * step), loss_of(model, rank, 2 * step + 1)
        first.backward()
        found.append(gradients(model))
        before = model.require_backward_grad_sync, model.require_forward_param_sync
        model.require_backward_grad_sync = model.require_forward_param_sync = True
        model.reducer.prepare_for_backward([])
        second.backward()
        model.require_backward_grad_sync, model.require_forward_param_sync = before
        found.append(gradients(model))
        model.zero_grad()
    return found


class Adversaries(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator, self.critic = network(), network()
        self.generator[-1] = nn.Linear(16, 6)

    def forward(self, inputs, trains_critic):
        if trains_critic:
            return self.critic(self.generator(inputs).detach()).mean()
        return self.critic(self.generator(inputs)).square().mean()


def prepared_by_hand(rank):
    """Lightning's manual optimization: an unsynchronised forward, a reducer armed before backward, two optimizers."""
    torch.manual_seed(3)
    model, found = wrap(Adversaries(), find_unused_parameters=True), []
    parts = model.module.generator, model.module.critic
    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-2) for part in parts]
    for step in range(3):
        for trains_critic in (False, True):
            model.module.generator.requires_grad_(not trains_critic)
            model.module.critic.requires_grad_(trains_critic)
            model.require_backward_grad_sync = False
            loss = model(inputs_of(rank, step), trains_critic)
            model.require_backward_grad_sync = True
            model.require_forward_param_sync = True
            model.reducer._rebuild_buckets()
            tensors = torch.nn.parallel.distributed._find_tensors(loss)
            model.reducer.prepare_for_backward(list(tensors) if not model.static_graph else [])
            loss.backward()
            optimizers[trains_critic].step()
            optimizers[trains_critic].zero_grad()
            found.append(values(model))
    return found


def transparent_subclass(rank):
    """A subclass that forwards attributes to the module, changes forward, and is copied."""

    class Transparent(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module, *, factor):
            super().__init__(module)
            self.factor = factor

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

        def forward(self, inputs):
            return super().forward(inputs) * self.factor

    module = network()
    module.describe = lambda: "a network"
    model = Transparent(module, factor=3.0)
    assert model.describe() == "a network" and not hasattr(model, "nothing")
    loss_of(model, rank, 0).backward()
    duplicate = copy.deepcopy(model)
    assert type(duplicate) is Transparent and duplicate.factor == 3.0
    duplicate.zero_grad()
    loss_of(duplicate, rank, 1).backward()
    return [gradients(model), gradients(duplicate)]


def averaged_models(rank):
    """Averages of the weights: a deep copy of the wrapper moved by hand, and torch's AveragedModel of the wrapper."""
    from torch.optim.swa_utils import AveragedModel, update_bn

    model = wrap(network())
    moving, averaged = copy.deepcopy(model), AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
        averaged.update_parameters(model)
        with torch.no_grad():
            for slow, fast in zip(moving.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
    update_bn([inputs_of(rank, step) for step in range(2)], averaged)
    return [values(moving), values(averaged), averaged(inputs_of(rank, 9)).detach(), *averaged.buffers()]


def replicated(rank):
    """torch's composable ``replicate``, which builds a wrapper and calls what surrounds its forward."""
    sys.modules.pop("torch.distributed._composable.replicate", None)  # imported now, it takes the name as it is now
    from torch.distributed._composable.replicate import replicate

    model, found = replicate(network()), []
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        loss_of(model, rank, step).backward()
        found.append(gradients(model))
    assert isinstance(replicate.state(model)._ddp, torch.nn.parallel.DistributedDataParallel)
    return found


def saved_whole(rank):
    """torch.save of the wrapper itself, and its state_dict into a bare model."""
    file = io.BytesIO()
    model = wrap(network())
    loss_of(model, rank, 0).backward()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    loaded.zero_grad()
    loss_of(loaded, rank, 1).backward()
    state = {name.removeprefix("module."): value for name, value in model.state_dict().items()}
    assert len(state) == len(model.state_dict()) and network().load_state_dict(state).missing_keys == []
    return [gradients(loaded), *model.state_dict().values()]


PROGRAMS = [
    flags_set_by_hand,
    synchronised_late,
    prepared_by_hand,
    transparent_subclass,
    averaged_models,
    replicated,
    saved_whole,
]


def run_on_both(world, program):
    torchs = program(world.rank)
    with adopted():
        assert torch.nn.parallel.DistributedDataParallel is lockstep.DistributedDataParallel
        ours = program(world.rank)
    assert torch.nn.parallel.DistributedDataParallel is not lockstep.DistributedDataParallel
    return [torch.equal(mine, other) for mine, other in zip(ours, torchs, strict=True)], ours[-1]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_same_bits_as_on_torchs_class(ranks, program):
    for same, last in ranks(2, warnings="ignore")(run_on_both, program):
        assert same and all(same), same
        assert last.isfinite().all() and last.abs().sum() > 0


def load_torchs(world):
    file = io.BytesIO()
    torch.save(wrap(network()), file)
    file.seek(0)
    with adopted():
        try:
            torch.load(file, weights_only=False)
        except lockstep.errors.ConfigurationError as error:
            return str(error)


def test_a_wrapper_that_torch_has_pickled_is_refused_clearly(ranks):
    assert (
        ranks(2, warnings="ignore")(load_torchs)
        == [
            "This pickle holds a DistributedDataParallel of another class than lockstep's.\n"
            "Load it with the class that wrote it, and save model.module.state_dict() instead."
        ]
        * 2
    )


def ask_for_facts(world):
    with adopted():
        model = wrap(network())
    return model._get_ddp_logging_data()["can_set_static_graph"]


def test_no_library_is_told_that_a_static_graph_would_help(ranks):
    assert ranks(2)(ask_for_facts) == [0, 0]


def train_compiled(world, inside):
    torch.compiler.reset()
    with adopted():
        if inside:
            model = wrap(torch.compile(network(), backend="eager"))
        else:
            model = torch.compile(wrap(network()), backend="eager")
        plain = wrap(network())
        for step in range(2):
            model.zero_grad()
            plain.zero_grad()
            loss_of(model, world.rank, step).backward()
            loss_of(plain, world.rank, step).backward()
    return gradients(model), gradients(plain)


@pytest.mark.parametrize("inside", [pytest.param(True, marks=pytest.mark.soak), False])
def test_a_compiled_model_with_buffers_trains(ranks, inside):
    """The compiler finds what it asks of torch's class, and stays away from the broadcast of the buffers."""
    for compiled, plain in ranks(2, warnings="ignore")(train_compiled, inside, timeout=110):
        assert torch.equal(compiled, plain)


FIRST_LINES = """
import lockstep; lockstep.adopt()
import torch
from torch.nn import DataParallel
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler

print(*(name.__module__ for name in (DataParallel, DDP, DistributedSampler)))
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
"""


@pytest.mark.soak
def test_a_script_that_adopts_in_its_first_line(tmp_path):
    """Also one that never wraps a model: torch.compile imports what it asks of the classes after they were replaced."""
    script = tmp_path / "script.py"
    script.write_text(FIRST_LINES)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines() == [
        "lockstep.parallel.dp.wrapper lockstep.parallel.ddp.wrapper lockstep.data.sampler",
        "2.0",
    ], done.stderr
