"""What a step of `fit` costs the host on a device: where it waits, and behind what; and that nothing else changes."""

import copy
import math
from collections import defaultdict, deque
from contextlib import ExitStack
from operator import eq, gt, lt

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode as current_dispatch_mode

import lockstep
from lockstep.base import accelerator
from lockstep.base.accelerator import HostCopy, mark_on
from lockstep.errors import NonFiniteGradient
from lockstep.train.settings import Settings
from lockstep.train.step_parts import Part, StepMetrics
from lockstep.train.trainer import Trainer
from lockstep.train.update import Update
from tests.distributed.test_fit_not_finite import BAD, BATCH, STEP, Normed, root_loss, with_nan, with_zero
from tests.models import soak
from tests.simulated.test_fit import low, network, token_loss
from tests.training import make_task, mean_loss, samples


def fused(params):
    """Return an optimizer that can leave out an update on the device."""
    return torch.optim.AdamW(params, lr=1e-3, fused=True)


class Partly(nn.Module):
    """Has a layer that is never used."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(6, 4).double(), nn.Linear(6, 4).double()

    def forward(self, inputs):
        return self.used(inputs)


LOW = {"model": network, "loss": low}
# By name: the task, the settings, and the function in which the host waits for the report of the step.
STEPS = {
    "plain": ({}, {}, "_add_losses"),
    "clipped": ({}, {"clip": 0.3}, "_add_losses"),
    "accumulated": ({}, {"accumulate": 2}, "_add_losses"),
    "tokens": ({"loss": token_loss}, {"clip": 0.3}, "_add_losses"),
    "unused": ({"model": Partly}, {}, "_add_losses"),
    "bf16": (LOW, {"precision": "bf16"}, "_add_losses"),
    "fp16": (LOW, {"precision": "fp16"}, "_update"),
    "fp16, fused": ({**LOW, "optimizer": fused}, {"precision": "fp16", "clip": 0.3}, "_add_losses"),
    "skip": ({}, {"on_nan": "skip", "clip": 0.3}, "_update"),
    "skip, fused": ({"optimizer": fused}, {"on_nan": "skip"}, "_add_losses"),
    "optimizer in backward": ({}, {"overlap_optimizer": True}, "_add_losses"),
}


# The others differ from these in what the host does not wait for either.
QUICK = ["clipped", "tokens", "unused", "fp16", "skip, fused", "optimizer in backward"]


@pytest.mark.parametrize(
    ("strategy", "names"),
    [
        ("ddp", QUICK),
        *soak(
            [
                ("ddp", [name for name in STEPS if name not in QUICK]),
                ("single", list(STEPS)),
                ("ddp-zero1", list(STEPS)),
            ]
        ),
    ],
    ids=["ddp", "ddp, others", "single", "ddp-zero1"],
)
def test_a_step_waits_only_when_its_first_forward_is_queued(on_sim, strategy, names):
    """Never in backward; only an optimizer that cannot leave out an update itself makes the host wait before that."""

    def run(world):
        found = {}
        for name in names:
            task, settings, _ = STEPS[name]
            if settings.get("overlap_optimizer") and strategy != "ddp":
                continue
            parts = []  # of the last step: until its first forward is queued, and the rest

            compute = task.get("loss", mean_loss)

            def loss(model, batch, compute=compute, parts=parts):
                result = compute(model, batch)
                if len(parts) == 1:
                    parts[0][0].close()
                    parts.append(counting())
                return result

            devices = [world.device]
            task = make_task(**{**task, "loss": loss})
            loop = Trainer(task, Settings(**settings), world, strategy=strategy, devices=devices)
            for _ in range(5):
                loop.step()
            parts.append(counting())
            loop.step()
            parts[1][0].close()
            loop.settle()
            loop.close()
            before, after = (counts for _, counts in parts)
            found[name] = (
                [(wait.kind, wait.line) for wait in before.waits],
                [(wait.kind, wait.queued > 0, wait.line) for wait in after.waits],
                before.segments + after.segments,
            )
        return found

    for found in on_sim(1 if strategy == "single" else 2)(run):
        for name, (before, after, segments) in found.items():
            assert (before, segments) == ([], 0), name
            ((kind, has_work, line),) = after
            assert (kind, has_work) == ("event", True), (name, after)
            assert " settle < " in line and line.endswith(f" {STEPS[name][2]}"), (name, line)


def counting():
    """Count from here until the first of the two is closed."""
    stack = ExitStack()
    return stack, stack.enter_context(torch.sim.counting())


def test_gradients_are_read_beside_backward(on_sim):
    """The sum of this rank's part, and the norm: on streams of their own, but for the norm of the last bucket."""

    def deep():
        return nn.Sequential(nn.Linear(6, 512), *(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, 4))

    def loss(model, batch):
        return (model(batch[0].float()) - batch[1].float()).square().mean()

    def run(world):
        settings, task = Settings(bucket_cap_mb=1), make_task(model=deep, loss=loss)
        loop = Trainer(task, settings, world, strategy="ddp", devices=[world.device])
        for _ in range(3):
            loop.step()
        with torch.sim.counting() as counts:
            loop.step()
        loop.settle()
        loop.close()
        beside = {name: count for name, count in counts.kernels_by_stream.items() if "default" not in name}
        copies = [count for (_, line), count in counts.places.items() if "_update" in line]
        return sorted(beside.values()), len(loop.strategy.ours.reducer.bucket_set.buckets), copies

    for beside, num_buckets, copies in on_sim(2)(run):
        assert copies == [1]  # of the norm and the flags of the ranks together
        # A sum for each bucket, and a norm for all but the last, which is launched when backward is over.
        assert num_buckets == 7
        assert beside == [num_buckets - 1, num_buckets]


def test_sums_of_a_step_take_two_kernels(on_sim):
    """The host's numbers come in one copy; then a kernel adds a loss, and one divides their sum."""

    def run(world):
        value = torch.full((), 0.5, device=world.device, requires_grad=True)
        found = []
        for part in (Part(value, 3.0, 3.0), Part(value * 3, 1.0, torch.tensor(3))):
            metrics = StepMetrics(world.device, None, torch.float64, has_counts=False, only_means=False)
            with torch.sim.counting() as counts:
                metrics.add([part], (1, 0, 0, 0, 0, 2))
                metrics.wait(3.0, may_miss=False)
            count = None if metrics.count is None else metrics.count.item()
            found.append((counts.kernels, counts.synchronizations, metrics.loss.item(), metrics.report.tolist(), count))
        return found, metrics.divisor.item()

    report = [1, 0, 0, 0, 0, 2, 0]
    [(found, divisor)] = on_sim(1)(run)
    assert found[0][1:] == (0, 0.5, report, None)
    assert found[1][1:] == (0, 0.5, report, 3)
    assert divisor == 1
    assert [kernels for kernels, *_ in found] == [2, 6]


class Recurrent(nn.LSTM):
    """Draws as torch does for cuDNN's dropout, when the device was seeded: it reads a number from the device."""

    def forward(self, inputs):
        self.drawn = torch.empty((), dtype=torch.long, device=inputs.device).random_().item()
        return nn.functional.dropout(inputs, 0.5) * (1 + self.drawn % 8)


def recurrent():
    return nn.Sequential(nn.Linear(6, 4), Recurrent(4, 4, 2, dropout=0.5)).double()


def test_a_recurrent_layer_is_seeded_without_a_wait(on_sim):
    """And as its position in the run says: also after a resume, in another process or when computed again."""

    def run(world):
        def start():
            return Trainer(make_task(model=recurrent), Settings(), world, strategy="single", devices=[world.device])

        def steps(loop, number):
            return [(loop.step().loss.item(), loop._model[1].drawn) for _ in range(number)]

        loop, again = start(), start()
        first, state = steps(loop, 2), copy.deepcopy(loop.state_dict())
        rest = steps(loop, 2)
        again.load_state_dict(state)
        assert steps(again, 2) == rest
        counted = []
        for close in (False, True):
            if close:
                loop.settle()
                loop.close()
            with torch.sim.counting() as counts:
                loop._model(torch.zeros(2, 6, dtype=torch.double, device=world.device))
            counted.append(counts.synchronizations)
        again._model[1].forward = lambda inputs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            again._model(torch.zeros(2, 6, dtype=torch.double, device=world.device))
        assert current_dispatch_mode() is None  # also after a layer that failed
        again.settle()
        again.close()
        return first + rest, counted

    [(found, counted)] = on_sim(1)(run)
    assert len(set(found)) == 4
    assert counted == [0, 1]


# --- what is found later is the same ----------------------------------------------------------------------------------


def trained(world, task, num_steps, *, later, strategy="ddp", **settings):
    """Train; return everything that a bad step must not change, with checks one forward later or in the step."""
    loop = Trainer(task, Settings(**settings), world, strategy=strategy, devices=[world.device])
    assert loop.updater.checks_later
    if not later:
        loop.updater.checks_later, loop.updater.policy = False, Update.PLAIN
    losses = [loop.step().loss for _ in range(num_steps)]
    state = loop.state_dict()
    tensors = [value.detach().cpu().clone() for value in loop.model.state_dict().values()]
    found = [(bad.step, bad.ranks, bad.samples) for bad in loop.updater.nonfinite.found]
    loop.close()
    counts = state["num_updates"], state["num_steps_done"], state["scaler"], loop.optimizer.param_groups[0]["lr"]
    return [float(loss) for loss in losses], tensors, found, counts


def same(found, expected):
    losses, tensors, *rest = found
    assert losses == pytest.approx(expected[0], rel=0, abs=0, nan_ok=True)
    assert all(map(torch.equal, tensors, expected[1]))
    assert rest == list(expected[2:])


@pytest.mark.parametrize(("strategy", "num_ranks"), [("ddp", 2), ("ddp-zero1", 2), *soak([("single", 1)])])
def test_a_step_that_the_optimizer_leaves_out_leaves_nothing(on_sim, strategy, num_ranks):
    """Nor in the statistics of batch norm, nor in the schedule."""
    options = {"global_batch_size": 8, "on_nan": "skip", "clip": 0.5, "warmup": 10, "strategy": strategy}
    options["sync_batchnorm"] = False  # else the ranks pass on what is not finite, and no rank is the origin later
    task = make_task(dataset=with_nan, model=Normed, optimizer=fused)

    def run(world):
        return [trained(world, task, 2 * STEP + 2, later=later, **options) for later in (True, False)]

    for later, at_once in on_sim(num_ranks)(run):
        assert at_once[2][0][0] == STEP and at_once[3][0] == 2 * STEP + 1
        assert all(tensor.isfinite().all() for tensor in later[1])
        assert [bad[:2] for bad in later[2]] == [bad[:2] for bad in at_once[2]]
        assert BAD in later[2][0][2]  # its inputs are gone: all samples of the micro-batch
        same((*later[:2], None, later[3]), (*at_once[:2], None, at_once[3]))


def test_an_overflow_lowers_the_loss_scale_before_the_next_backward(on_sim):
    """The same scales, updates and bits as if each step knew; also if the very first one overflows."""

    def loss(model, batch):
        return low(model, batch) * 1e3  # the scale has to fall from 2**16, and grows again after two good steps

    def run(world):
        found = []
        for later in (True, False):
            task = make_task(model=network, loss=loss, drop_last=True, optimizer=fused)
            settings = Settings(precision="fp16", warmup=10)
            loop = Trainer(task, settings, world, strategy="ddp", devices=[world.device])
            assert loop.updater.checks_later
            if not later:
                loop.updater.checks_later, loop.updater.policy = False, Update.PLAIN
            loop.updater.scaler.growth_interval = 2
            scales = []
            for _ in range(16):
                loop.step()
                scales.append(loop.updater.scaler.scale)
            state = loop.state_dict()
            tensors = [value.cpu().clone() for value in loop.model.state_dict().values()]
            found.append((scales, tensors, state["num_updates"], state["scaler"]))
            loop.close()
        return found

    for later, at_once in on_sim(2)(run):
        scales = [2.0**16, *at_once[0]]
        falls, grows = ([one for one in range(16) if compare(scales[one + 1], scales[one])] for compare in (lt, gt))
        first = next(step for step in range(16) if step not in falls)  # the first update
        assert first > 3 and grows and falls[-1] > first and 3 < at_once[2] < 14
        # From then on the scale is known one step later, which is in time for the next backward.
        assert later[0] == at_once[0][: first + 1] + at_once[0][first:-1]
        assert later[2:] == at_once[2:]
        assert all(map(torch.equal, later[1], at_once[1]))


@pytest.mark.parametrize(
    ("loss", "dataset", "first", "where"),
    [
        (mean_loss, with_nan, "0.weight", "The loss was nan."),
        (root_loss, with_zero, "5.weight", "The loss was finite: the error arose in backward."),
    ],
)
def test_a_bad_gradient_is_named_before_anything_is_kept(on_sim, tmp_path, loss, dataset, first, where):
    """In the next step, or before a checkpoint of the bad one is written."""
    task = make_task(dataset=dataset, loss=loss, global_batch_size=8)

    def stop(world):
        loop = Trainer(task, Settings(), world, strategy="ddp", devices=[world.device])
        for _ in range(STEP + 1):
            assert loop.step().updated
        with pytest.raises(NonFiniteGradient) as error:
            loop.step()
        loop.close()
        with pytest.raises(NonFiniteGradient) as second:
            lockstep.fit(task, strategy="ddp", checkpoint=tmp_path, checkpoint_every=1, steps=6, quiet=True)
        assert str(second.value) == str(error.value)
        return str(error.value).splitlines()[:3], max(each.name[:15] for each in tmp_path.glob("step-*"))

    head = f"The gradient is not finite on rank 1 (epoch 1, step 3): first that of parameter {first}."
    mine = f"Samples of that batch of rank 1: {', '.join(map(str, BATCH[4:]))}."
    assert on_sim(2)(stop) == [([head, where, mine], "step-0000000002")] * 2


def test_a_stop_is_seen_on_all_ranks_after_the_next_step(on_sim):
    def run(world):
        loop = Trainer(make_task(), Settings(), world, strategy="ddp", devices=[world.device])
        loop.step()
        loop.reports.stops = lambda: world.rank == 1
        loop.step()
        soon = loop.reports.of_all()
        loop.step()
        seen = loop.reports.of_all()
        loop.settle()
        loop.close()
        return soon, seen

    assert on_sim(2)(run) == [([False] * 4, [True, False, False, False])] * 2


class Unreadable(torch.utils.data.Dataset):
    """Cannot read some samples."""

    def __init__(self, bad):
        self._bad, self._data = set(bad), samples()

    def __len__(self):
        return len(self._data)

    def __getitem__(self, index):
        if index in self._bad:
            raise OSError(f"sample {index} is gone")
        return self._data[index]


def test_bad_samples_of_two_steps_in_a_row_are_told_apart(on_sim):
    """Those of a step are exchanged in the next one, when that has read its own."""
    order = lockstep.train.plan.GlobalOrder(50, 8, 0)
    bad = [order.batch(1).tolist()[1], order.batch(2).tolist()[2], order.batch(2).tolist()[6]]

    def run(world):
        task = make_task(dataset=lambda: Unreadable(bad), global_batch_size=8)
        settings = Settings(bad_samples="skip")
        loop = Trainer(task, settings, world, strategy="ddp", devices=[world.device])
        numbers = []
        for _ in range(4):
            loop.step()
            numbers.append([each.sample for each in loop.bad_samples.skipped])
        loop.settle()
        loop.close()
        return numbers

    assert on_sim(2)(run) == [[[], [], bad[:1], bad]] * 2


# --- what is reused ---------------------------------------------------------------------------------------------------


def test_events_and_host_buffers_serve_again_but_not_while_they_are_held(on_sim):
    def run(world):
        device = world.device
        # Pools of its own: what other tests in this process still hold would count, too.
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr(accelerator, "_pools", defaultdict(deque))

        def copy(number):
            return HostCopy(torch.full((3,), float(number), device=device))

        held = [copy(number) for number in range(4)]
        assert len({each.value.data_ptr() for each in held}) == 4
        for _ in range(8):
            copy(math.nan).read()
        assert [each.read().tolist() for each in held] == [[float(number)] * 3 for number in range(4)]
        places = {each.value.data_ptr() for each in held}
        element, value = held[0].value[0], held[1].value
        del held
        again = {copy(9).value.data_ptr() for _ in range(8)}
        assert value.data_ptr() in places - again and places & again
        assert value.tolist() == [1.0] * 3 and element is not None

        loop = Trainer(make_task(), Settings(), world, strategy="ddp", devices=[device])
        sizes = []
        for _ in range(4):  # of which one is enough: how many are held at a time also depends on the threads of others
            for _ in range(12):
                loop.step()
            sizes.append({kind: len(pool) for kind, pool in accelerator._pools.items()})
        assert sizes[0] and any(map(eq, sizes, sizes[1:])), sizes
        marks = [mark_on(device) for _ in range(30)]
        assert len(set(map(id, marks))) == 30
        loop.settle()
        loop.close()
        monkeypatch.undo()

    on_sim(2)(run)


def test_a_run_that_is_recorded_waits_in_no_other_thread(on_sim, tmp_path):
    """The recorder asks, and never waits; the thread of the checkpoint waits for its own copies."""

    def run(world):
        counting, calls, counts = torch.sim.counting(), [], []

        def loss(model, batch):
            calls.append(1)
            if len(calls) == 6:
                counts.append(counting.__enter__())
            if len(calls) == 12:
                counting.__exit__(None, None, None)
            return mean_loss(model, batch)

        task = make_task(loss=loss)
        lockstep.fit(
            task,
            strategy="ddp",
            steps=14,
            run_dir=tmp_path / "run",
            checkpoint=tmp_path / "kept",
            checkpoint_every=100,
            quiet=True,
            profile=False,
        )
        return [(wait.kind, wait.queued > 0, wait.thread, wait.line) for wait in counts[0].waits]

    for waits in on_sim(2)(run):
        assert {thread for _, _, thread, _ in waits} == {"MainThread"}, waits
        mine = [line for kind, has_work, _, line in waits if (kind, has_work) == ("event", True)]
        assert len(mine) >= 6, waits
