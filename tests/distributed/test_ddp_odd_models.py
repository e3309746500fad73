"""Outputs, layers and parameters of unusual kinds: the gradients of one process, or one error that names the cause."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributions import Independent, Normal
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.errors import ConfigurationError
from tests.models import assert_gradients_equal


def inputs(world, step=0):
    whole = torch.randn(4 * world.world_size, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    return whole, whole.chunk(world.world_size)[world.rank]


class Net(nn.Module):
    def __init__(self, kind=""):
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.body, self.head = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))

    def forward(self, x):
        match self.kind:
            case "no_grad":
                with torch.no_grad():
                    return self.head(self.body(x))
            case "reentrant":
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch's own, of this mistake
                    return checkpoint(lambda part: self.head(self.body(part)), x, use_reentrant=True)
            case "detached":
                return self.head(self.body(x)).detach()
        return self.head(self.body(x).tanh())


# --- nothing is trained -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no_grad", "reentrant", "detached", "frozen"])
def test_an_output_that_needs_no_gradient_on_any_rank_is_an_error(ranks, kind):
    def run(world):
        model = lockstep.DistributedDataParallel(Net(kind))
        if kind == "frozen":
            model.requires_grad_(False)
        with pytest.raises(ConfigurationError, match="output of the model requires no gradient on any rank"):
            model(inputs(world)[1]).square().mean().backward()

    ranks(2)(run)


def test_training_that_stops_is_an_error_in_the_second_step_and_on_one_rank_the_error_of_autograd(ranks):
    def run(world):
        model = lockstep.DistributedDataParallel(Net())
        model(inputs(world)[1]).sum().backward()
        model.module.kind = "detached"
        model(inputs(world)[1]).sum().backward()  # a model may choose no layer once
        with pytest.raises(ConfigurationError, match="requires no gradient"):
            model(inputs(world)[1]).sum().backward()

    def alone(world):
        model = lockstep.DistributedDataParallel(Net("detached"))
        with pytest.raises(RuntimeError, match="does not require grad"):
            model(inputs(world)[1]).sum().backward()

    ranks(2)(run)
    ranks(1)(alone)


# --- outputs ----------------------------------------------------------------------------------------------------------


class Slots:
    __slots__ = ("pair",)


def in_slots(a, b):
    held = Slots()
    held.pair = [a, b]
    return held


OUTPUTS = {
    "slots": (in_slots, lambda out: out.pair),
    "namespace": (lambda a, b: SimpleNamespace(a=a, b=b), lambda out: (out.a, out.b)),
    "closure": (lambda a, b: lambda: (a, b), lambda out: out()),
    "distribution": (lambda a, b: (Independent(Normal(a, b.exp()), 1),), lambda out: (out[0].mean, out[0].stddev)),
    "one kept elsewhere": (lambda a, b: KEPT.update(b=b) or a, lambda out: (out, KEPT.pop("b"))),
    "kept elsewhere": (lambda a, b: KEPT.update(pair=(a, b)), lambda _: KEPT.pop("pair")),
}
KEPT = {}


class Returns(Net):
    def __init__(self, pack):
        super().__init__()
        self.pack = pack

    def forward(self, x):
        return self.pack(self.body(x), self.head(x))


def two_backwards(model, unpack, x):
    first, second = unpack(model(x))
    first.square().mean().backward(retain_graph=True)
    second.square().mean().backward()


@pytest.mark.parametrize("kind", OUTPUTS)
def test_outputs_in_any_object_and_two_backwards(ranks, kind):
    def run(world):
        pack, unpack = OUTPUTS[kind]
        oracle, model = Returns(pack), lockstep.DistributedDataParallel(Returns(pack))
        for step in range(3):
            whole, mine = inputs(world, step)
            model.zero_grad()
            oracle.zero_grad()
            two_backwards(model, unpack, mine)
            two_backwards(oracle, unpack, whole)
            assert_gradients_equal(model.module, oracle)

    ranks(2)(run)


# --- evaluations before and between -----------------------------------------------------------------------------------


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Net(), nn.BatchNorm1d(4, dtype=torch.float64))
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x):
        if torch.is_inference_mode_enabled():
            self.cache = torch.ones(1)
        return self.layers(x)


def test_a_first_forward_in_inference_mode_may_replace_buffers(ranks):
    def run(world):
        oracle, model = Cache().eval(), lockstep.DistributedDataParallel(Cache()).eval()
        whole, mine = inputs(world)
        for _ in range(2):
            with torch.inference_mode():
                model(mine)
            model.zero_grad()
            oracle.zero_grad()
            model(mine).square().mean().backward()
            oracle(whole).square().mean().backward()
            assert_gradients_equal(model.module, oracle)

    ranks(2)(run)


def test_join_around_an_evaluation_of_uneven_length_and_training_behind_it(ranks):
    def run(world):
        model = lockstep.DistributedDataParallel(nn.Sequential(Net(), nn.BatchNorm1d(4, dtype=torch.float64)))
        _, mine = inputs(world)
        for mode in (torch.no_grad(), torch.inference_mode()):
            model.eval()
            with mode, model.join():
                for _ in range(1 + 2 * world.rank):
                    model(mine)
            model.train()
            model(mine).sum().backward()

    ranks(2)(run)


# --- layers and parameters --------------------------------------------------------------------------------------------


def traced(part):
    return torch.jit.trace(part, torch.ones(2, 4, dtype=torch.float64))


@pytest.mark.parametrize("to_script", [torch.jit.script, traced])
def test_torchscript_parts_train(ranks, to_script):
    def run(world):
        def build():
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()).double().eval()

        oracle = nn.Sequential(build(), Net())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch deprecates both; since 2.15 by a FutureWarning
            part = to_script(build())
        model = lockstep.DistributedDataParallel(nn.Sequential(part, Net()))
        for step in range(2):
            whole, mine = inputs(world, step)
            model.zero_grad()
            oracle.zero_grad()
            model(mine).square().mean().backward()
            oracle(whole).square().mean().backward()
            assert_gradients_equal(model.module, oracle)

    ranks(2)(run)


COMMON = ["weight", "bias", "scale", "loss", "gamma", "beta", "kernel", "rate", "in_features", "num_features"]


def test_wrappers_have_no_attribute_that_layers_commonly_have(ranks):
    def run(world):
        module = nn.Sequential(nn.Linear(2, 2))
        for wrapper in (lockstep.DistributedDataParallel(module), lockstep.DataParallel(module, device_ids=["cpu"])):
            assert [name for name in COMMON if hasattr(wrapper, name)] == []

    ranks(1)(run)


def views():
    """Parameters that are views, and what an error says of them."""
    values = torch.randn(4, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    return {
        "real": (values.real, ""),
        "strided": (torch.randn(8, dtype=torch.float64)[::2], ""),
        "expanded": (values.real[:1].clone().expand(4, 4), "expanded, so that elements share memory"),
        "conj": (values.conj(), "a view by conj()"),
        "neg": (values.conj().imag, "a view by conj()"),
    }


@pytest.mark.parametrize("kind", views())
def test_parameters_that_are_views_are_compared_or_named_on_every_rank(ranks, kind):
    def run(world):
        value, problem = views()[kind]
        module = nn.Module()
        module.odd = nn.Parameter(value)
        if not problem:
            lockstep.DistributedDataParallel(module).check_replicas()
            return
        with pytest.raises(ConfigurationError) as caught:
            lockstep.DistributedDataParallel(module)
        assert str(caught.value) == (
            f"Parameter odd is {problem}; it cannot be broadcast from rank 0.\n"
            "Create it from a copy: nn.Parameter(tensor.resolve_conj().resolve_neg().contiguous())."
        )

    ranks(2)(run)


def test_a_rank_outside_of_the_process_group(ranks):
    def run(world):
        group = torch.distributed.new_group([0])
        if world.rank == 0:
            lockstep.DistributedDataParallel(Net(), process_group=group)
            return
        for use in (
            lambda: lockstep.DistributedDataParallel(Net(), process_group=group),
            lambda: lockstep.ZeroRedundancyOptimizer(Net().parameters(), torch.optim.SGD, process_group=group),
            lambda: lockstep.SyncBatchNorm(4, process_group=group)(torch.ones(2, 4)),
        ):
            with pytest.raises(ConfigurationError, match=r"^Rank 1 is not in the process_group: "):
                use()

    ranks(2)(run)
