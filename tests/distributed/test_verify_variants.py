"""Each fault comes in many forms; what names it are measurements, so the form does not matter."""

import pytest

from tests.verifying import causes, plant, verify_on


@pytest.fixture
def planted(tmp_path, ranks):
    """Return what verify finds in a task with some lines changed."""

    def verify(settings=None, **changes):
        file = plant(tmp_path, **changes)
        return verify_on(ranks, file, num_steps=2, **(settings or {}))[0]

    return verify


TOKENS = """
counted = (y > 0).double()
return lockstep.Loss((F.cross_entropy(out, y, reduction="none") * counted).sum(), counted.sum())
"""
RANDOM, OPERATOR, DATA = "random state", "non-deterministic operator", "data order"
RATES, BUFFERS, COUPLED = "learning-rate rule", "buffers changed on one rank", "samples that depend on each other"
WEIGHTING, SUM, NORM = "sample weighting", "a loss that sums instead of averages", "BatchNorm statistics"


CLIPPED, OUTSIDE = "parts clipped before they are summed", "parameters that no module registers"
LISTED = {"INIT": "self.blocks = Net.made = [nn.Linear(16, 16)]", "FORWARD": "h = torch.tanh(self.blocks[0](h))"}
SCALED = """
class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ({factor})

h = Scaled.apply(h)
"""
BY_NORM = """
mean = F.cross_entropy(out, y)
grads = torch.autograd.grad(mean, list(model.parameters()), retain_graph=True)
scale = min(1.0, 0.1 / float(sum(grad.square().sum() for grad in grads)) ** 0.5)
"""
soak = pytest.mark.soak  # other forms of faults that are found above, or in test_verify


@pytest.mark.parametrize(
    ("cause", "changes"),
    [
        pytest.param(
            RANDOM,
            {"INIT": "self.rng = np.random.default_rng(RANK)", "FORWARD": "h = h * (1 + self.rng.random())"},
            marks=soak,
        ),
        pytest.param(OPERATOR, {"FORWARD": "h = h * (1 + os.urandom(1)[0] / 256)"}, marks=soak),
        pytest.param(DATA, {"SAMPLE": "x = x + RANK"}, marks=soak),
        pytest.param(
            RATES, {"STEP": "for p in self.param_groups[0]['params']:\n    p.grad.mul_(WORLD_SIZE)"}, marks=soak
        ),
        pytest.param(BUFFERS, {"FORWARD": "self.buffer.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)"}, marks=soak),
        ("a forward pass that depends on the rank", {"LOSS": "return F.cross_entropy(out, y) / WORLD_SIZE"}),
        (COUPLED, {"LOSS": "return F.cross_entropy(out, y) + (out @ out.T).logsumexp(1).mean()"}),
        ("a backward pass that depends on the rank", {"FORWARD": SCALED.format(factor="1 + int(os.environ['RANK'])")}),
        (CLIPPED, {"LOSS": f"{BY_NORM}\nreturn mean * scale"}),
        pytest.param(CLIPPED, {"LOSS": f"{BY_NORM}\nreturn mean + (mean - mean.detach()) * (scale - 1)"}, marks=soak),
        ("a loss clamped after its mean is taken", {"LOSS": "return F.cross_entropy(out, y).clamp(max=1.1)"}),
        pytest.param(CLIPPED, {"FORWARD": SCALED.format(factor="min(1.0, 0.01 / float(grad.norm()))")}, marks=soak),
        pytest.param(
            CLIPPED,
            {"INIT": "for p in self.parameters():\n    p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))"},
            marks=soak,
        ),
        ("a model that depends on the rank", {"INIT": "self.last = nn.Linear(16, 3, bias=WORLD_SIZE == 1)"}),
        pytest.param("a forward pass that depends on the rank", {"LOSS": "out = out * (1 + 0.1 * RANK)"}, marks=soak),
        pytest.param(RANDOM, {"FORWARD": "h = h + torch.from_numpy(np.random.randn(*h.shape))"}, marks=soak),
        pytest.param(DATA, {"SAMPLES": "self.order = self.order[RANK::WORLD_SIZE]"}, marks=soak),
        pytest.param(RATES, {"SCHEDULE": "return 1 / (1 + step * WORLD_SIZE)"}, marks=soak),
        pytest.param(BUFFERS, {"FORWARD": "if RANK == 1:\n    self.buffer = self.buffer + 1"}, marks=soak),
        pytest.param(
            WEIGHTING,
            {"LOSS": "return F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 5.0]))"},
            marks=soak,
        ),
        pytest.param(SUM, {"LOSS": "return F.cross_entropy(out, y, reduction='sum') / 8"}, marks=soak),
        pytest.param(NORM, {"FORWARD": "h = F.batch_norm(h, None, None, training=True)"}, marks=soak),
        pytest.param(
            "state in a plain attribute",
            {
                "INIT": "Net.seen = []",
                "FORWARD": "Net.seen.append(h.mean(0).detach())\nh = h - sum(Net.seen) / len(Net.seen)",
            },
            marks=soak,
        ),
        pytest.param(
            SUM,
            {"LOSS": "return F.cross_entropy(out, y, reduction='sum') + 0.1 * model.last.weight.square().sum()"},
            marks=soak,
        ),
    ],
)
def test_the_cause_is_found_whatever_its_form(planted, cause, changes):
    verification = planted(**changes)
    assert not verification.same
    assert causes(verification) == [cause]
    # A process that is never the same run twice cannot show what else there is.
    assert verification.explained is (cause != OPERATOR)


@pytest.mark.parametrize(
    "update",
    [
        {"OPTIMIZER": "params = [*params, *Net.made[0].parameters()]"},
        {"STEP": "with torch.no_grad():\n    for p in Net.made[0].parameters():\n        p -= 0.05 * p.grad"},
    ],
)
def test_parameters_in_a_plain_list_are_named_whoever_updates_them(planted, update):
    verification = planted(**LISTED, **update)
    assert causes(verification) == [OUTSIDE]
    assert (verification.comparison is None) == ("OPTIMIZER" in update)  # then fit refuses it on several ranks
    assert verification.findings[0].evidence == (
        "Training changes parameters that no module of the model registers, of shape (16, 16), (16,): each rank trains "
        "its own."
    )


def test_what_does_not_depend_on_the_division_is_left_alone(planted):
    assert planted(
        SAMPLE="x = x + torch.randn(6) + random.random() + np.random.rand()",
        FORWARD="self.buffer += 1\nh = F.instance_norm(h.view(-1, 4, 4)).flatten(1)",
        LOSS=TOKENS,
    ).same


@soak
def test_a_generator_of_its_own_is_not_helped_by_reproducible_mode(planted):
    changes = {
        "INIT": "self.generator = torch.Generator().manual_seed(0)",
        "FORWARD": "h = h * torch.rand(h.shape, generator=self.generator)",
    }
    (finding,) = planted(**changes).findings
    assert finding.tried == "Tried: --reproducible 2 alone does not help."
    assert finding.fix.startswith("Draw from the default generators of torch, Python and NumPy")
    verification = planted({"reproducible": 2}, **changes)
    assert not verification.same
    assert causes(verification) == [RANDOM]


def test_fp32_is_used_and_said_where_the_task_insists_on_it(planted):
    verification = planted(LOSS="out = model(x.float())")
    assert verification.same
    assert verification.setup.precision == "fp32"
    assert verification.why_single.startswith("RuntimeError: mat1 and mat2 must have the same dtype")
