"""`fit` on simulated accelerators, by every strategy, and all that it does beside training; the CPU is the oracle."""

import json

import pytest
import torch
from torch import nn

import lockstep
from lockstep.base import accelerator
from lockstep.errors import ConfigurationError, OutOfMemory
from lockstep.study.report.view import sentences, view_run
from lockstep.telemetry.resources import MachineSampler
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.models import soak
from tests.reproducing import TASKS, Alone
from tests.reproducing import train as train_for_bits
from tests.training import make_task, mean_loss, relative_error, samples, whole_batch

NUM_STEPS = 6  # of which the third has 2 samples, so that some ranks have none


def token_loss(model, batch):
    """Return the sum over the outputs that count."""
    inputs, targets, lengths = batch
    counts = torch.arange(4, device=inputs.device) < lengths.unsqueeze(1)
    return lockstep.Loss(((model(inputs) - targets).square() * counts).sum(), counts.sum())


def steps_of(world, task, strategy, num_steps=NUM_STEPS, num_devices=None, **settings):
    """Train; return losses, times and weights."""
    devices = [torch.device("sim", index) for index in range(num_devices or 0)] or [world.device]
    loop = Trainer(task, Settings(**settings), world, strategy=strategy, devices=devices)
    records = [loop.step() for _ in range(num_steps)]
    loop.settle()
    weights = torch.cat([each.detach().flatten().cpu() for each in loop.strategy.whole(loop.model).parameters()])
    loop.close()
    return [float(each.loss) for each in records], [each.times for each in records], weights


@pytest.mark.parametrize(
    ("strategy", "num_ranks", "num_devices", "loss", "settings"),
    [
        ("single", 1, None, token_loss, {"workers": 1}),
        ("dp", 1, 2, token_loss, {"accumulate": 2, "clip": 0.3}),
        ("ddp", 2, None, token_loss, {"accumulate": 2, "clip": 0.3, "workers": 1}),
        ("ddp", 2, None, mean_loss, {"overlap_optimizer": True}),
        ("ddp-zero1", 2, None, token_loss, {"clip": 0.3}),
        ("fsdp", 2, None, mean_loss, {}),
        *soak([("dp", 1, 4, mean_loss, {}), ("torch-ddp", 2, None, token_loss, {"clip": 0.3})]),
        *soak([(name, 4, None, mean_loss, {"accumulate": 2}) for name in ("ddp", "ddp-zero1", "torch-ddp")]),
    ],
)
def test_it_trains_as_one_process_on_the_cpu(on_sim, strategy, num_ranks, num_devices, loss, settings):
    task = make_task(loss=loss)
    expected = whole_batch(task, NUM_STEPS, clip=settings.get("clip"))
    ranks = on_sim(num_ranks, several_devices=num_devices is not None)
    found = ranks(steps_of, task, strategy, NUM_STEPS, num_devices, **settings)
    for losses, times, weights in found:
        assert losses == pytest.approx(expected["losses"], rel=1e-11)
        assert relative_error(weights, expected["weights"]) < 1e-11
        assert torch.equal(weights, found[0][2])
        assert all(min(each.forward_s, each.backward_s, each.optimizer_s) > 0 for each in times)


def test_a_steady_step_takes_no_new_memory(on_sim):
    """Where it waits is in test_fit_waits.py."""

    def run(world):
        loop = Trainer(make_task(), Settings(), world, strategy="ddp", devices=[world.device])
        for _ in range(4):
            loop.step()
        with torch.sim.counting() as counts:
            loop.step()
        loop.settle()
        loop.close()
        return counts.synchronizations, counts.collectives, counts.segments, dict(counts.places)

    for *found, places in on_sim(2)(run):
        assert found == [0, 2, 0], places


@pytest.mark.parametrize("strategy", soak(["local-sgd", "diloco"]))
def test_local_steps_with_exchanges(on_sim, ranks, strategy):
    def on_cpu(world):
        return steps_of(world, make_task(), strategy, sync_every=2)

    for found, expected in zip(on_sim(2)(on_cpu), ranks(2)(on_cpu), strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-11)
        assert relative_error(found[2], expected[2]) < 1e-11


def network():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


def low(model, batch):
    outputs = model(batch[0].float())
    assert outputs.dtype is torch.get_autocast_dtype(batch[0].device.type)
    return (outputs.float() - batch[1].float()).square().mean()


@pytest.mark.parametrize("precision", ["fp16", *soak(["bf16"])])
def test_autocast_and_the_loss_scale(on_sim, precision):
    def exact(model, batch):
        return (model(batch[0].float()) - batch[1].float()).square().mean()

    expected = whole_batch(make_task(model=network, loss=exact, drop_last=True), NUM_STEPS)
    task = make_task(model=network, loss=low, drop_last=True)
    for strategy, num_ranks in (("dp", 1), ("ddp", 2)):
        found = on_sim(num_ranks)(steps_of, task, strategy, precision=precision, clip=10.0)
        for losses, _, weights in found:
            assert losses == pytest.approx(expected["losses"], rel=0.03)
            assert relative_error(weights, expected["weights"].float()) < 0.01


def overflowing(model, batch):
    return low(model, batch) * 1e30


def test_a_step_that_overflows_is_left_out(on_sim):
    def run(world):
        loop = Trainer(
            make_task(model=network, loss=overflowing),
            Settings(precision="fp16"),
            world,
            strategy="ddp",
            devices=[world.device],
        )
        return [loop.step().updated for _ in range(3)], loop.state_dict()["scaler"]["scale"]

    assert [tuple(each) for each in on_sim(2)(run)] == [([False] * 3, 2.0**13)] * 2


def test_a_device_without_float64_sums_in_float32(on_sim):
    """Or says that what needs more cannot be had on it."""

    def run(world, strategy):
        def batch_norm():
            return nn.Sequential(nn.Linear(6, 8), lockstep.SyncBatchNorm(8), nn.Linear(8, 4))

        def loss(model, batch):
            return (model(batch[0]) - batch[1]).square().mean()

        def data():
            return torch.utils.data.TensorDataset(*(part.float() for part in samples().tensors[:2]))

        task = make_task(model=batch_norm, dataset=data, eval_dataset=data, loss=loss, drop_last=True)
        torch.sim.set_float64(False)
        accelerator.widest_dtype.cache_clear()
        try:
            with pytest.raises(ConfigurationError) as refused:
                lockstep.fit(task, strategy="ddp", reproducible=2, quiet=True)
            options = {"strategy": strategy, "steps": 4, "clip": 0.3, "quiet": True, "profile": False}
            return lockstep.fit(task, **options).losses, str(refused.value)
        finally:
            torch.sim.set_float64(True)
            accelerator.widest_dtype.cache_clear()

    for strategy in ("ddp", "ddp-zero1"):
        found = on_sim(2)(run, strategy)
        for rank, (losses, refused) in enumerate(found):
            assert len(losses) == 4 and losses == found[0][0]
            assert refused == (
                f"reproducible=2 needs sums in float64, which sim:{rank} cannot compute.\n"
                "Leave it out, or use another device."
            )


def tied():
    """Return a network of which two layers share a weight."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4)).double()
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize(("strategy", "num_ranks"), [("single", 1), ("local-sgd", 2), *soak([("ddp", 2), ("fsdp", 2)])])
def test_layers_that_share_a_weight_share_it_on_the_device(on_sim, strategy, num_ranks):
    task = make_task(model=tied)
    expected = whole_batch(task, NUM_STEPS)
    for _, _, weights in on_sim(num_ranks)(steps_of, task, strategy):
        assert relative_error(weights, expected["weights"]) < 1e-11 or strategy == "local-sgd"
        assert weights.shape == expected["weights"].shape


@pytest.mark.parametrize(("strategy", "num_ranks"), [("dp", 1), ("ddp-zero1", 2), *soak([("ddp", 2), ("fsdp", 2)])])
def test_a_run_goes_on_from_its_checkpoint_and_records_itself(on_sim, strategy, num_ranks, tmp_path):
    def dropping(model, batch):
        inputs, targets, _ = batch
        return (model(nn.functional.dropout(inputs, 0.3)) - targets).square().mean()

    task = make_task(loss=dropping, eval_dataset=samples)

    def fit(world, folder, steps):
        devices = 2 if strategy == "dp" else None
        return lockstep.fit(
            task,
            strategy=strategy,
            devices=devices,
            steps=steps,
            checkpoint=folder / "kept",
            checkpoint_every=2,
            run_dir=folder / "run",
            clip=1.0,
            quiet=True,
            profile=False,
        ).losses

    def both(world):
        whole = fit(world, tmp_path / "whole", 8)
        return whole, fit(world, tmp_path / "parts", 5) + fit(world, tmp_path / "parts", 8)

    found = on_sim(num_ranks, several_devices=strategy == "dp")(both)
    for whole, parts in found:
        assert parts == pytest.approx(whole, rel=1e-12) and whole == found[0][0]
    view = view_run(tmp_path / "whole" / "run")
    assert view.run.gaps == [] and view.device == "sim"
    num_devices = 2
    assert f"on {num_devices} SIMs" in " ".join(sentences(view))
    for rank, record in view.run.ranks.items():
        assert [step.loss for step in record.steps] == pytest.approx(found[rank][0])
        assert all(sum(step.times.parts().values()) <= step.times.total_s * 1.001 for step in record.steps)
        assert all(line.figures["memory_peak_bytes"] > 0 for line in record.machine)


@pytest.mark.parametrize(
    "name", ["convolutions", "attention", *soak(["language", "moody", "stream", "half precision"])]
)
def test_reproducible_runs_have_the_same_bits_on_any_number_of_devices(on_sim, name):
    def alone(world):
        return train_for_bits(Alone, name, "single", 1, device=world.device, reproducible=4)

    def replicated(world):
        found = []
        for count in (4,) if name == "attention" else (2, 4):
            found.append(bits_on([torch.device("sim", index) for index in range(count)], Alone, name, "dp"))
        return found

    def distributed(world):
        return train_for_bits(world, name, "ddp", 1, device=world.device, reproducible=4)

    (expected,) = on_sim(1)(alone)
    assert on_sim(1, several_devices=True)(replicated) == [[expected] * (1 if name == "attention" else 2)]
    assert on_sim(2)(distributed) == [expected, expected]


def bits_on(devices, world, name, strategy):
    """As `tests.reproducing.train`, on several devices."""
    from tests.reproducing import bits

    task, own = TASKS[name]
    loop = Trainer(task, Settings(**own, reproducible=4), world, strategy=strategy, devices=devices)
    norms = []
    for _ in range(5):
        record = loop.step()
        norms.append([float(record.loss), None if record.grad_norm is None else float(record.grad_norm)])
    loop.close()
    assert loop.caveats == []
    buffers = [buffer.clone() for buffer in loop.model.buffers()]
    return [norms, bits(loop.state_dict()), bits(buffers)]


def test_a_device_without_memory_is_named_with_what_it_holds(on_sim):
    def run(world):
        sim = torch.sim
        sim.set_memory_limit(sim.memory_allocated(world.device) + 2**24, world.device)

        def greedy(model, batch):
            kept = torch.empty(len(batch[0]), 2**20, dtype=torch.uint8, device=world.device)
            return mean_loss(model, batch) + 0 * kept[0, 0]

        try:
            lockstep.fit(make_task(loss=greedy), strategy="ddp", quiet=True)
        except OutOfMemory as error:
            return str(error)
        finally:
            sim.set_memory_limit(2**40, world.device)

    (text,) = on_sim(1)(run)
    first, second, third = text.splitlines()
    assert first.startswith("Out of memory in step 1, in a micro-batch of 24 samples: ")
    assert " in tensors on sim:0, at most " in second
    assert third.startswith("Try micro-batches of 12 samples: accumulate=2")


def test_figures_of_a_device(on_sim):
    def run(world):
        kept = torch.zeros(2**20, device=world.device)
        line = MachineSampler([world.device])()
        return kept.nbytes, json.loads(json.dumps(line))

    ((num_bytes, line),) = on_sim(1)(run)
    assert line["memory_peak_bytes"] >= line["memory_bytes"] >= num_bytes
    assert line["gpu_percent"] is None


def on_meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4)).double()
    model[2].weight = model[0].weight
    return model


@pytest.mark.parametrize("strategy", soak(["single", "fsdp"]))
def test_a_model_of_the_meta_device_gets_its_memory_on_the_device(on_sim, ranks, strategy, tmp_path):
    """Also one that goes on from its checkpoint."""
    task = make_task(model=on_meta, drop_last=True)

    def fit(world, folder, steps):
        return lockstep.fit(task, strategy=strategy, steps=steps, checkpoint=tmp_path / folder, quiet=True).losses

    def both(world):
        return fit(world, "whole", 6), fit(world, "parts", 3) + fit(world, "parts", 6)

    ((expected, _),) = ranks(1)(lambda world: (steps_of(world, task, "single")[0], None))
    for whole, parts in on_sim(1 if strategy == "single" else 2)(both):
        assert whole == pytest.approx(expected, rel=1e-11) and parts == pytest.approx(whole, rel=1e-12)


def step_again(world):
    """Interrupt the third step before its update, as the loss of another rank does; return the losses of all."""
    trainer = Trainer(make_task(), Settings(), world, strategy="ddp", devices=[world.device])
    losses, calls = [], []

    def lose_once():
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("lost")

    trainer.before_update = lose_once
    while len(losses) < NUM_STEPS:
        try:
            losses.append(float(trainer.step().loss))
        except ValueError:
            trainer.restore()
    trainer.close()
    return losses


def test_a_step_that_is_done_again_does_not_lose_the_batch_after_it(on_sim):
    """It was copied to the device meanwhile."""
    assert on_sim(1)(step_again) == [pytest.approx(whole_batch(make_task(), NUM_STEPS)["losses"], rel=1e-10)]
