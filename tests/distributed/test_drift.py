"""Replicas that drift apart: found at the next check, by the tensor's name, the ranks on each side, and since when."""

import contextlib
import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from lockstep.errors import ConfigurationError, LockstepError, NonFiniteGradient, ReplicasDiffer
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.shm import shm_group
from tests.training import make_task, mean_loss, network, samples

ADVICE = (
    "Either code changed it on some ranks only (an if on the rank; another learning rate, clipping or number of "
    "updates; a checkpoint that one rank loaded; a buffer that nobody synchronises), or a device or its memory is "
    "faulty. Resume from an earlier checkpoint."
)


def make_loop(world, strategy, every=2, steps=6, **fields):
    settings = {name: fields.pop(name) for name in list(fields) if name == "reproducible"}
    adam = lambda params: torch.optim.Adam(params, lr=0.01)  # noqa: E731
    task = make_task(**{"optimizer": adam, "drop_last": True, **fields})
    settings = Settings(check_replicas=every, steps=steps, **settings)
    return Trainer(task, settings, world, strategy=strategy, devices=[torch.device("cpu")])


def flip_sign(tensor, place):
    with torch.no_grad():
        tensor.view(-1)[place] *= -1


@pytest.mark.parametrize("strategy", ["ddp", "torch-ddp"])
def test_a_flipped_bit_is_found_at_the_next_check(ranks, strategy):
    def flip(world):
        loop = make_loop(world, strategy)
        for _ in range(5):
            loop.step()
        weight = dict(loop.model.named_parameters())["2.weight"]
        if world.rank == 1:
            flip_sign(weight, 10)
        with pytest.raises(ReplicasDiffer) as error:
            loop.step()
        loop.close()
        return str(error.value), error.value.tensor, error.value.sides, weight.detach()[1, 2].item()

    results = ranks(2, warnings="ignore")(flip)
    right, wrong = results[0][3], results[1][3]
    text = (
        "The ranks do not hold the same bits any more (after step 6): parameter 2.weight differs between rank 0 and "
        "rank 1.\n"
        f"1 of its 64 elements differs: the first at [1, 2] is {wrong} on rank 1 and {right} on rank 0.\n"
        f"1 of 27 tensors differs. After step 4 all were alike.\n{ADVICE}"
    )
    assert [result[:3] for result in results] == [(text, "parameter 2.weight", ((0,), (1,)))] * 2


def test_the_majority_is_right(ranks):
    """A state of the optimizer that is changed on rank zero only, before the second check."""

    def change(world):
        loop = make_loop(world, "ddp", every=4)
        loop.step()
        if world.rank == 0:
            state = loop.optimizer.state[dict(loop.model.named_parameters())["5.bias"]]
            flip_sign(state["exp_avg"], 3)
            state["exp_avg_sq"].view(torch.int64)[1] ^= 1 << 40
        loop.num_steps_done = 2
        with pytest.raises(ReplicasDiffer) as error:
            loop.check_replicas()
        if world.rank == 0:
            flip_sign(state["exp_avg"], 3)
        with pytest.raises(ReplicasDiffer) as other:
            loop.check_replicas()
        loop.close()
        return str(error.value).splitlines(), str(other.value).splitlines()

    for lines, other in ranks(3)(change):
        assert lines[0] == (
            "The ranks do not hold the same bits any more (after step 2): exp_avg of parameter 5.bias differs on "
            "rank 0 from that on ranks 1, 2."
        )
        assert lines[1].startswith("1 of its 4 elements differs, by one bit: the first at [3] is ")
        assert lines[2] == "2 of 27 tensors differ. After step 1 all were alike."
        assert other[1].startswith("1 of its 4 elements differs, by one bit: the first at [1] is ")


class Counting(nn.Module):
    """Counts in a buffer, beside running statistics."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)
        self.rest = network()

    def forward(self, inputs):
        self.seen += 1
        return self.rest(self.norm(inputs))


def test_what_rightly_differs_does_not_disturb(ranks):
    """Running statistics of each rank's own samples, parts of an optimizer, parts of parameters."""

    def run(world):
        for strategy in ("ddp", "torch-ddp", "ddp-zero1", "fsdp", "reproducible"):
            how = {"reproducible": 4} if strategy == "reproducible" else {}
            loop = make_loop(world, "ddp" if how else strategy, every=1, model=Counting, **how)
            for _ in range(4):
                loop.step()
            assert loop.alike_after == 4
            loop.close()

    ranks(2, warnings="ignore")(run)


def test_a_forgotten_buffer_is_found_in_a_script_of_ones_own(ranks):
    """Each rank has running statistics of its own there, which is as it should be, but not the counter."""

    def run(world):
        torch.manual_seed(0)
        model = lockstep.DistributedDataParallel(Counting(), broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inputs = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(world.rank))
        texts = []
        for step in range(4):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            if step == 1 and world.rank == 1:
                model.module.seen[1] += 4
            try:
                model.check_replicas(optimizer)
            except ReplicasDiffer as error:
                texts.append((step, str(error)))
        synced = lockstep.DistributedDataParallel(Counting())
        synced.module.seen += world.rank
        synced.check_replicas()  # the next forward takes rank 0's
        synced.forward_sync_buffers = False
        with pytest.raises(ReplicasDiffer) as error:
            synced.check_replicas()
        return texts, str(error.value).splitlines()[0]

    text = (
        "The ranks do not hold the same bits any more: buffer seen differs between rank 0 and rank 1.\n"
        "1 of its 2 elements differs{}: the first at [1] is {} on rank 1 and {} on rank 0.\n"
        "1 of {} tensors differs. 1 check before found none.\n" + ADVICE
    )
    for texts, line in ranks(2, warnings="ignore")(run):
        assert [step for step, _ in texts] == [1, 2, 3]
        assert texts[0][1] == text.format(", by one bit", 6, 2, 21)
        assert line.startswith("The ranks do not hold the same bits any more: buffer seen differs between")


def test_other_shapes_and_missing_state_are_differences_too(ranks):
    def run(world):
        torch.manual_seed(0)
        model = lockstep.DistributedDataParallel(nn.Linear(3, 2))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + 0.1 * (world.rank == 2))
        lines = []
        for change in (False, True):
            if change and world.rank == 1:
                model(torch.ones(1, 3))
                optimizer.state[model.module.bias]["step"] = torch.tensor(1.0)
            with pytest.raises(ReplicasDiffer) as error:
                model.check_replicas(optimizer)
            lines.append((str(error.value).splitlines()[0], error.value.tensor, error.value.sides))
        return lines

    for lines in ranks(3)(run):
        assert [line[1:] for line in lines] == [
            ("lr of parameter group 0", ((0, 1), (2,))),
            ("step of parameter bias", ((0, 2), (1,))),
        ]


def bad_rank_loss(model, inputs, is_bad):
    return model(inputs).square().mean() * (float("nan") if is_bad else 1.0)


def test_a_script_learns_whose_gradient_is_not_finite(ranks):
    def run(world):
        torch.manual_seed(0)
        module = network()
        module.own = nn.Parameter(torch.zeros(()))  # of each rank's own, and so no business of the others
        module._ddp_params_and_buffers_to_ignore = ["own"]
        model = lockstep.DistributedDataParallel(module)
        inputs = torch.ones(2, 6, dtype=torch.float64)
        texts, verdicts = [], []
        for step in range(5):
            model.zero_grad()
            bad_rank_loss(model, inputs, world.rank == step % 2 and step in (1, 2)).backward()
            module.own.grad = torch.tensor(float("nan")) if world.is_rank_zero else None
            verdicts.append(model.gradients_are_finite())
            try:
                model.check_gradients()
            except NonFiniteGradient as error:
                texts.append(str(error))
        return verdicts, texts

    advice = (
        "Look at the loss and the samples of this step there. To go on without the step, ask gradients_are_finite() "
        "and call optimizer.step() only if they are."
    )
    expected = [
        f"The gradient is not finite on rank {rank}: first that of parameter 0.weight.\n{advice}" for rank in (1, 0)
    ]
    assert ranks(2)(run) == [([True, False, False, True, True], expected)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_reduction_sees_an_element_that_is_not_finite_wherever_it_is(ranks, dtype):
    def run(world):
        numel, found = 40_000, []  # several blocks in the slice of each rank
        with shm_group() as group:
            model = lockstep.DistributedDataParallel(nn.Embedding(numel, 1, dtype=dtype), process_group=group)
            saw_nonfinite = model.monitor_local_gradients()
            for step, place in enumerate([0, 0, 1, numel // 2 - 1, numel // 2, 30_001, numel - 1]):
                model.zero_grad()
                inputs = torch.ones(numel, 1, dtype=dtype)
                if world.rank == step % 2:
                    inputs[place] = float("nan") if step < 3 else float("-inf")
                (model(torch.arange(numel)) * inputs).sum().backward()
                found.append(saw_nonfinite())
            assert model._monitor._flags  # the reduction has looked, and nobody before it
        return found

    for rank, found in enumerate(ranks(2)(run)):
        assert found == [step % 2 == rank for step in range(7)]


def test_fit_never_checks_if_told_so(ranks):
    def run(world):
        def loss(model, batch):
            if world.rank == 1:
                flip_sign(model[0].weight, 0)
            return mean_loss(model, batch)

        def data():
            return TensorDataset(*samples().tensors)

        lockstep.fit(make_task(dataset=data, loss=loss), steps=4, check_replicas=0, quiet=True)
        with pytest.raises(ReplicasDiffer) as error:
            lockstep.fit(make_task(dataset=data, loss=loss), steps=3, quiet=True)
        lines = str(error.value).splitlines()
        assert lines[2] == "1 of 7 tensors differs. They never were equal."
        return lines[0]

    text = (
        "The ranks do not hold the same bits any more (before the update of step 1): parameter model.0.weight differs "
    )
    text += "between rank 0 and rank 1."
    assert ranks(2)(run) == [text] * 2


# The digest that travels with the gradients: every script has it.


def edit(net):
    flip_sign(net[0].weight, 10)


def load(net):
    net.load_state_dict({name: value * 1.1 for name, value in net.state_dict().items()})


def clip(net):
    nn.utils.clip_grad_norm_(net.parameters(), 1e-3)


def freeze(net):
    net[0].requires_grad_(False)


LR, FIRST = "lr of parameter group 0", "parameter 0.weight"
KEPT = "whether gradients of the step before were kept (no zero_grad())"
ORDER = "the place, among the wrapped models, of the one that runs backward"
# What one rank does: after its update, before it, or to its optimizer; and what differs first.
MISUSES = {
    "another learning rate": (lambda net, optimizer: optimizer.param_groups[0].update(lr=0.02), 6, LR),
    "an update more": (lambda net, optimizer: optimizer.step(), 6, FIRST),
    "an edited parameter": (lambda net, optimizer: edit(net), 6, FIRST),
    "a checkpoint": (lambda net, optimizer: load(net), 6, FIRST),
    "a group more": (
        lambda net, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}),
        *(6, "number of parameter groups"),
    ),
    "a frozen layer": (lambda net, optimizer: freeze(net), 6, "requires_grad of parameter 0.bias"),
    "no zero_grad": (lambda net, optimizer: setattr(optimizer, "zero_grad", lambda: None), 6, KEPT),
}


def train(world, wrapped, step, make=torch.optim.Adam):
    """Train 20 steps, and call ``step(number, net, optimizer)`` between backward and update."""
    torch.manual_seed(0)
    data, net = torch.randn(40, 4, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model = wrapped(net)
    optimizer = make(model.parameters(), lr=0.01)
    for number in range(20):
        optimizer.zero_grad()
        model(data[2 * number + world.rank]).square().mean().backward()
        step(number + 1, model.module, optimizer)
        optimizer.step()
    return model.module[0].weight.detach().clone()


@pytest.mark.parametrize("name", [*MISUSES, "clipping"])
def test_what_one_rank_does_alone_is_found_with_the_gradients(ranks, name):
    misuse, at, first = MISUSES.get(name, (None, 6, FIRST))

    def script(world):
        def step(number, net, optimizer):
            if world.rank == 1 and number == at:
                clip(net) if misuse is None else misuse(net, optimizer)

        with pytest.raises(ReplicasDiffer) as error:
            train(world, lockstep.DistributedDataParallel, step)
        return str(error.value)

    (text,) = set(ranks(2)(script))
    assert text.startswith(
        f"The ranks do not hold the same bits any more (before the update of step 8): {first} differs between rank 0 "
        "and rank 1.\n"
    )
    assert "They were equal at step 4." in text


@pytest.mark.parametrize("every", [1000, 0])
def test_a_state_that_differs_is_not_saved(ranks, tmp_path, every):
    def work(world):
        wrapped = lockstep.DistributedDataParallel(network(), check_replicas=every)
        optimizer = torch.optim.Adam(wrapped.parameters())
        wrapped(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
        optimizer.step()
        wrapped.module.register_buffer("own", torch.tensor(world.rank))  # only rank zero's is saved
        lockstep.save(tmp_path, model=wrapped, optimizer=optimizer, number=1)
        if world.rank == 1:
            optimizer.state[next(wrapped.module.parameters())]["exp_avg"].add_(1)
        try:
            lockstep.save(tmp_path, model=wrapped, optimizer=optimizer, number=2)
        except ReplicasDiffer as error:
            return error.tensor, lockstep.load(tmp_path)["number"]
        return None, lockstep.load(tmp_path)["number"]

    expected = ("exp_avg of parameter 0.weight", 1) if every else (None, 2)
    assert ranks(2)(work) == [expected] * 2


def test_nothing_is_compared_if_a_script_says_so(ranks):
    def script(world):
        def step(number, net, optimizer):
            edit(net) if world.rank == 1 and number == 3 else None

        return train(world, lambda net: lockstep.DistributedDataParallel(net, check_replicas=0), step)

    first, second = ranks(2)(script)
    assert not first.equal(second)


def test_a_module_that_was_put_into_the_wrapper_is_not_averaged_and_refused(ranks):
    def script(world):
        torch.manual_seed(world.rank)
        model = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(8, 1)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(LockstepError, match=r"Parameter 0\.weight was not in the model when it was wrapped"):
            for number in range(8):
                if number == 3:
                    model.module = nn.Sequential(nn.Linear(8, 1))
                    optimizer = torch.optim.SGD(model.module.parameters(), lr=0.1)
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
        with pytest.raises(LockstepError):
            model(torch.ones(2, 8))
        return number

    assert ranks(2, warnings="ignore")(script) == [3, 3]


def test_two_models_in_another_order_are_found_in_the_first_step(ranks):
    def script(world):
        for is_copy in (False, True):
            torch.manual_seed(0)
            first, second = nn.Linear(8, 1), nn.Linear(8, 1)
            second = copy.deepcopy(first) if is_copy else second
            models = [lockstep.DistributedDataParallel(net) for net in (first, second)]
            with pytest.raises(ReplicasDiffer) as error:
                for model in models[:: 1 - 2 * world.rank]:
                    model(torch.ones(2, 8)).mean().backward()
            assert error.value.tensor == ORDER
            assert "(before the update of step 1)" in str(error.value)

    ranks(2)(script)


def test_a_part_that_stays_local_while_another_is_averaged_is_refused(ranks):
    def script(world):
        torch.manual_seed(0)
        body, head = (lockstep.DistributedDataParallel(nn.Linear(8, 8)) for _ in range(2))
        optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
        for number in range(3):
            optimizer.zero_grad()
            with body.no_sync() if number == 2 else contextlib.nullcontext():
                head(body(torch.ones(2, 8))).sum().backward()
            if number == 2:
                with pytest.raises(ConfigurationError, match="not averaged over the ranks, first that of parameter we"):
                    optimizer.step()
                for parameter in body.parameters():
                    torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)
            with warnings.catch_warnings(action="error" if number < 2 else "ignore"):
                optimizer.step()

    ranks(2)(script)


def test_training_that_reaches_no_parameter_of_the_model_is_a_warning(ranks):
    def script(world):
        texts = []
        for kind in ("bare", "copied"):
            torch.manual_seed(world.rank)
            net = nn.Linear(8, 1)
            model = lockstep.DistributedDataParallel(net)
            optimizer = torch.optim.SGD((copy.deepcopy(net) if kind == "copied" else net).parameters(), lr=0.1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(5):
                    optimizer.zero_grad()
                    (net if kind == "bare" else model)(torch.ones(2, 8)).mean().backward()
                    optimizer.step()
            texts.append([str(each.message).partition("\n")[0] for each in caught])
        return texts

    for rank, texts in enumerate(ranks(2)(script)):
        first = "SGD.step() uses gradients that were not averaged over the ranks, first that of parameter weight."
        assert texts == [
            [f"Rank {rank}: {first}"],
            ["SGD.step() has updated nothing in 3 steps: none of its parameters had a gradient."],
        ]


def test_a_rank_without_a_part_of_a_sharded_optimizer_is_no_warning(ranks):
    def script(world):
        model = lockstep.DistributedDataParallel(nn.Linear(2, 1, bias=False))  # too small for a part on each rank
        optimizer = lockstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with warnings.catch_warnings(action="error"):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.ones(2, 2)).mean().backward()
                optimizer.step()

    ranks(2)(script)


def test_arguments_that_change_what_is_sent_are_equal_on_all_ranks(ranks):
    def script(world):
        with pytest.raises(ConfigurationError, match="The arguments differ between ranks: rank 0 has compression=None"):
            lockstep.DistributedDataParallel(nn.Linear(8, 1), compression="int8" if world.rank else None)

    ranks(2)(script)


def test_scripts_in_which_replicas_agree_are_left_alone(ranks):
    def script(world):
        def half(parameters, lr):
            groups = [{"params": [each], "lr": lr / (place + 1)} for place, each in enumerate(parameters)]
            return torch.optim.SGD(groups, lr=lr, momentum=0.9)

        def schedule(number, net, optimizer):
            optimizer.param_groups[0]["lr"] *= 0.9

        def plain(number, net, optimizer):
            pass

        ddp = lockstep.DistributedDataParallel
        # How an update is computed is no difference.
        either = lambda params, lr: torch.optim.SGD(params, lr=lr, foreach=world.is_rank_zero)  # noqa: E731
        weights = [train(world, ddp, schedule), train(world, ddp, plain, half), train(world, ddp, plain, either)]
        sharded = lambda params, lr: lockstep.ZeroRedundancyOptimizer(params, torch.optim.Adam, lr=lr)  # noqa: E731
        weights += [train(world, ddp, plain, sharded), train(world, lambda net: ddp(net, compression="int8"), plain)]
        model = ddp(nn.Linear(8, 1).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join():
            for number in range(4 + 4 * world.rank):
                optimizer.zero_grad()
                model(torch.full((2, 8), number, dtype=torch.float64)).tanh().mean().backward()
                optimizer.step()
        return [weight.tolist() for weight in (*weights, model.module.weight)]

    first, second = ranks(2, warnings="ignore")(script)
    assert first == second


def test_another_rate_is_an_error_on_any_processors(ranks):
    def script(world):
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1 + world.rank)

        def step(number, net, optimizer):
            optimizer.param_groups[0]["lr"] = 0.01 + 0.01 * world.rank

        try:
            with pytest.raises(ReplicasDiffer, match="lr of parameter group 0 differs between rank 0 and rank 1"):
                train(world, lockstep.DistributedDataParallel, step)
        finally:
            torch.set_num_threads(num_threads)

    ranks(2)(script)


def test_processors_that_round_differently_are_a_warning(ranks):
    def script(world):
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1 + world.rank)

        def step(number, net, optimizer):
            edit(net) if world.rank == 1 and number == 3 else None

        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                train(world, lockstep.DistributedDataParallel, step)
        finally:
            torch.set_num_threads(num_threads)
        return [str(each.message).partition(",")[0] for each in caught if "round" in str(each.message)]

    assert ranks(2)(script) == [["Processors of several kinds round differently"], []]


def test_an_optimizer_that_reports_no_steps_on_one_rank_is_no_difference(ranks):
    """torch calls its hooks for some optimizers only, depending on what the process has created before."""

    def script(world):
        def quiet(parameters, lr):
            optimizer = torch.optim.SGD(parameters, lr=lr)
            if world.rank == 1:
                optimizer.step = partial(torch.optim.SGD.step.__wrapped__, optimizer)
            return optimizer

        return train(world, lockstep.DistributedDataParallel, lambda *_: None, quiet).tolist()

    first, second = ranks(2)(script)
    assert first == second
