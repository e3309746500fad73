"""``lockstep compare`` as a user starts it, with ranks of the pool in place of those that it would launch."""

import json
import time

import pytest
import torch

from lockstep import cli
from lockstep.study.compare import benchmark
from lockstep.study.compare.benchmark import Benchmark, start_together
from lockstep.study.compare.comparison import Setup
from lockstep.train.settings import Settings
from tests.distributed.commands import lockstep as command
from tests.training import make_task

MIB = 2**20

TASK = """
import torch
from torch import nn
import lockstep

def samples():
    torch.manual_seed(3)
    return torch.utils.data.TensorDataset(torch.randn(SAMPLES, 6).double(), torch.randn(SAMPLES, 3).double())

task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)).double(),
    dataset=samples,
    loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    global_batch_size=BATCH,
)
"""


def run_turns(world, plan):
    return benchmark.run_benchmark(plan, world)


@pytest.fixture
def run(ranks, tmp_path, monkeypatch, capsys):
    """Give ``run(devices, batch, *args)``: run the command; return what it printed, and its JSON."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(benchmark, "run_ranks", lambda _, plan, devices: ranks(devices)(run_turns, plan))
    monkeypatch.chdir(tmp_path)

    def run(devices, batch, *args):
        task = tmp_path / "tiny.py"  # by its whole path, as the pool's ranks are in another folder
        task.write_text(f"SAMPLES, WIDTH, BATCH = {5 * batch // 2}, 8, {batch}\n{TASK}")
        command = ["compare", str(task), "--devices", str(devices), "--no-memory", "--json", "figures.json", *args]
        assert cli.main(command) == 0
        return capsys.readouterr().out.splitlines(), json.loads((tmp_path / "figures.json").read_text())

    return run


def test_two_devices_train_alike_and_end_in_a_table_and_two_files(run, tmp_path):
    out, record = run(2, 16, "--rounds", "2", "--steps", "3", "--warmup", "2", "--html", "page.html")
    assert out[0].rstrip() == "tiny.py: 2 x cpu, global batch 16, 2 rounds of 3 steps"
    assert [line.split()[0] for line in out[4:8]] == ["single", "dp", "torch-ddp", "ddp"]
    assert "Verdict" in out
    assert out[-2:] == ["figures written to figures.json", "page written to page.html"]
    assert record["left_out"] == [
        {"strategy": "torch-dp", "reason": "torch.nn.DataParallel does nothing on CPUs; ours runs there, as dp."}
    ]
    assert record["setup"]["num_parameters"] == 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3
    assert record["verdict"]["sentences"][0] in (tmp_path / "page.html").read_text().replace("&#x27;", "'")
    found = {contender["strategy"]: contender for contender in record["contenders"]}
    for contender in found.values():
        # Three steps make an epoch of 16 + 16 + 8 samples. The warm-up takes two and one without synchronisation, and
        # each turn three and three without: so every turn trains on a whole epoch.
        assert [(turn["round"], turn["num_samples"]) for turn in contender["turns"]] == [(0, 40), (1, 40)]
    losses = {name: contender["losses"] for name, contender in found.items()}
    assert len(set(losses["single"])) == 2 + 2 * 3
    assert losses["ddp"] == losses["torch-ddp"]
    for name in ("dp", "ddp"):
        assert losses[name] == pytest.approx(losses["single"], rel=1e-12)


def test_who_normalises_apart_is_said_and_can_be_made_alike(run, monkeypatch):
    layers = "nn.Tanh(), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)"
    monkeypatch.setitem(globals(), "TASK", TASK.replace("nn.Tanh(), nn.Linear(WIDTH, WIDTH)", layers))
    flags = [
        "--rounds",
        "1",
        "--steps",
        "1",
        "--warmup",
        "1",
        "--strategies",
        "dp,torch-ddp,ddp,ddp-zero1,ddp-local-bn",
    ]
    out, record = run(2, 16, *flags)
    assert "ddp-local-bn is ddp with --no-sync-batchnorm." in [line.strip() for line in out]
    assert record["setup"]["norms_apart"] == ["dp", "torch-ddp", "ddp-local-bn"]
    assert any(
        text.startswith(
            "Batch norms of dp, torch-ddp and ddp-local-bn normalise over the samples of each device apart, those of "
            "ddp and ddp-zero1 over all devices, as on one, which takes exchanges: the times and losses are not of the "
            "same run. To compare alike: --no-sync-batchnorm, or Settings(sync_batchnorm=False). With them, ddp has "
        )
        for text in record["verdict"]["sentences"]
    )
    losses = {each["strategy"]: each["losses"] for each in record["contenders"]}
    assert losses["ddp"] == pytest.approx(losses["single"], rel=1e-12)
    assert losses["torch-ddp"] != pytest.approx(losses["single"], rel=1e-3)
    assert losses["ddp-local-bn"] == pytest.approx(losses["torch-ddp"], rel=1e-12)
    _, record = run(2, 16, *flags, "--no-sync-batchnorm")
    assert record["setup"]["norms_apart"] == ["dp", "torch-ddp", "ddp", "ddp-zero1", "ddp-local-bn"]
    losses = {each["strategy"]: each["losses"] for each in record["contenders"]}
    assert losses["ddp"] == pytest.approx(losses["torch-ddp"], rel=1e-12)


def test_a_rank_may_have_no_turn_at_all(run):
    _, record = run(2, 16, "--rounds", "1", "--steps", "2", "--warmup", "1", "--strategies", "dp")
    single, dp = record["contenders"]
    assert dp["losses"] == pytest.approx(single["losses"], rel=1e-12)


def test_a_batch_that_three_devices_cannot_share_evenly_is_the_same_for_all(run):
    _, record = run(3, 64, "--rounds", "1", "--steps", "3", "--warmup", "1")
    single, *others = record["contenders"]
    assert [each["strategy"] for each in others] == ["dp", "torch-ddp", "ddp"]
    for each in others:
        assert each["losses"] == pytest.approx(single["losses"], rel=1e-12)
        assert [turn["num_samples"] for turn in each["turns"]] == [64 + 32 + 64]  # the warm-up took the first and third


def test_one_launched_device_is_enough_and_its_peak_memory_is_measured(tmp_path):
    (tmp_path / "wide.py").write_text(f"SAMPLES, WIDTH, BATCH = 40, 1500, 16\n{TASK}")
    flags = ["--devices", "1", "--strategies", "single", "--rounds", "1", "--steps", "2", "--warmup", "1"]
    file = tmp_path / "figures.json"
    done = command("compare", str(tmp_path / "wide.py"), *flags, "--json", str(file))
    assert done.code == 0, done.err
    (single,) = json.loads(file.read_text())["contenders"]
    assert single["num_threads"] in (1, torch.get_num_threads())  # whichever was faster in the warm-up
    # Weights, gradients and momentum, and not much more than the libraries take when first used.
    weights_bytes = 8 * 1500 * 1500
    (peak_bytes,) = single["peak_bytes"]
    assert 3 * weights_bytes < peak_bytes < 8 * weights_bytes + 150 * MIB


def plan_of(loss=None, num_devices=2):
    task = make_task() if loss is None else make_task(loss=loss)
    setup = Setup(
        "t", "", "cpu", num_devices, 2, 0.0, 8, num_steps=1, num_rounds=1, num_warmup=1, seed=0, precision="fp32"
    )
    return Benchmark(task, {name: (name, Settings()) for name in ("single", "ddp")}, setup, quiet=True)


def fail_in_the_turn_of_ddp(world):
    def loss(model, batch):
        raise KeyError("boom")

    with pytest.raises(KeyError) as caught:
        run_turns(world, plan_of(loss, num_devices=1))
    return caught.value.__notes__


def test_an_exception_says_whose_turn_it_was(ranks):
    (notes,) = ranks(1)(fail_in_the_turn_of_ddp)
    assert notes[-1] == ("Strategy single was running. To measure only others: --strategies LIST")


TURN_S = 1.0


def wait_for_a_turn(world):
    assert start_together("single", 1, world) == (world.rank == 0)
    start, start_cpu = time.monotonic(), time.process_time()
    if world.rank == 0:
        time.sleep(TURN_S)  # in place of the turn
    assert start_together("ddp", 1, world)
    return time.monotonic() - start, time.process_time() - start_cpu


def test_a_rank_that_waits_uses_next_to_no_core(ranks):
    for waited_s, cpu_s in ranks(2)(wait_for_a_turn):
        assert waited_s > 0.9 * TURN_S
        assert cpu_s < 0.15 * TURN_S


def threads_within(world):
    plan, found = plan_of(), {}
    for name in ("single", "ddp", "single"):
        start_together(name, plan.threads(name), world)
        found[name] = torch.get_num_threads()
    return found


def test_each_contender_computes_with_its_own_number_of_threads(ranks):
    assert ranks(2)(threads_within) == [{"single": 2, "ddp": 1}] * 2
