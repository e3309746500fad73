"""What a run used: counters of energy, sums over all starts, money, and what more devices buy."""

import json
import math
import os
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import lockstep
from lockstep.cli.studies import report
from lockstep.errors import ConfigurationError
from lockstep.study.compare.benchmark import merge
from lockstep.study.compare.comparison import judge
from lockstep.study.report.figures import find_costs
from lockstep.telemetry import resources
from lockstep.telemetry.cost import Price, Usage
from lockstep.telemetry.record import read_run
from lockstep.telemetry.resources import MachineSampler, UsageMeter
from tests.unit.study.compare.compare_planted import comparison, contender
from tests.unit.study.report.report_planted import MACHINE, START, session, step_line, steps, write_run

CPU, GPUS = [torch.device("cpu")], [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_a_price_is_a_number_and_a_word():
    used = Usage(5400.0, 1.476e6)
    assert used.text(None) == "1.5 device-hours, energy 410 Wh (whole devices)"
    assert used.text(Price.read("2.50 EUR")) == "1.5 device-hours at 2.50 EUR: 3.75 EUR, energy 410 Wh (whole devices)"
    assert (used * 0.001 + Usage(0.0, math.nan)).text(Price.read(".5")) == ("0.0015 device-hours at 0.50: 0.00075")
    assert Usage(3.6e9, 3.6e6).text(Price.read("1 GPU credit")) == (
        "1,000,000 device-hours at 1.00 GPU credit: 1,000,000.00 GPU credit, energy 1,000 Wh (whole devices)"
    )
    for text in ("", "EUR", "-1", "nan", "inf EUR", ",5"):
        with pytest.raises(ConfigurationError) as error:
            Price.read(text)
        assert str(error.value).startswith(f"{text!r} is not a price.\nGive the price of one device for an hour")


@pytest.fixture
def powercap(tmp_path, monkeypatch):
    """A made-up /sys/class/powercap; returns a function that sets a zone."""
    monkeypatch.setattr(resources, "POWERCAP", tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def zone(number, name, joules, limit_j=1000):
        folder = tmp_path / number
        folder.mkdir(exist_ok=True)
        for file, text in (("name", name), ("energy_uj", joules * 10**6), ("max_energy_range_uj", limit_j * 10**6)):
            (folder / file).write_text(f"{text}\n")
        return folder / "energy_uj"

    return zone


def test_rapl_counts_packages_and_memory_once_and_over_the_wrap_around(powercap):
    def set_all(package, dram, other):
        powercap("intel-rapl:0", "package-0", package)
        powercap("intel-rapl:0:0", "core", other)
        powercap("intel-rapl:0:2", "dram", dram, 100)
        powercap("intel-rapl:1", "psys", other)
        powercap("intel-rapl-mmio:0", "package-0", package)

    set_all(900, 90, 0)
    meter, sampler = UsageMeter(CPU * 2), MachineSampler(CPU)
    set_all(950, 95, 500)
    assert meter.read().energy_j == 55
    set_all(20, 5, 900)
    used = meter.read()
    assert used.energy_j == pytest.approx(80)
    assert 0 < used.device_s < 60
    line = sampler()
    assert (line["energy_j"], line["num_devices"]) == (pytest.approx(135), 1)
    assert sampler()["energy_j"] == 0
    assert (sampler.used.energy_j, sampler.used.device_s > line["device_s"]) == (pytest.approx(135), True)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_ranks_that_share_a_counter_count_it_once_in_a_job(powercap, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "localhost")

    def joules(rank, port):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("MASTER_PORT", port)
        powercap("intel-rapl:0", "package-0", 5)
        meter = UsageMeter(CPU)
        powercap("intel-rapl:0", "package-0", 25)
        return meter.read().energy_j

    assert joules("0", "40001") == 20
    for port, expected in (("40001", 0), ("40002", 20)):  # another rank of the job, and one of another job
        if not (child := os.fork()):
            os._exit(int(joules("1", port)))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected


def test_a_counter_that_cannot_be_read_is_unknown_and_not_estimated(powercap):
    sampler = MachineSampler(CPU)
    assert (sampler()["energy_j"], math.isnan(sampler.used.energy_j)) == (None, True)
    powercap("intel-rapl:0", "package-0", 5)
    second = powercap("intel-rapl:1", "package-1", 5)
    meter = UsageMeter(CPU)
    second.unlink()  # as root alone may read it
    assert math.isnan(meter.read().energy_j)


def test_nvml_counts_the_gpus_of_the_rank(monkeypatch):
    millijoules = {"GPU-a": 5_000, "GPU-b": 7_000}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: ("handle", uuid),
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: millijoules[handle[1]],
    )
    uuids = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(uuid="ab"[device.index]))
    monkeypatch.setattr(torch, "get_device_module", lambda device: uuids)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    meter, first = UsageMeter(GPUS), UsageMeter(GPUS[:1])
    millijoules.update({"GPU-a": 6_000, "GPU-b": 9_500})
    assert (meter.read().energy_j, first.read().energy_j, meter.read().energy_j) == (3.5, 1.0, 0.0)
    del millijoules["GPU-b"]  # such as one that is too old for this counter
    assert math.isnan(meter.read().energy_j)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert math.isnan(UsageMeter(GPUS[:1]).read().energy_j)


def used_lines(*energies, begin=START, step_s=1800.0):
    """Return a rank's lines of half an hour each."""
    times = {"device_s": step_s, "num_devices": 1}
    return [{**MACHINE, "time": begin + step_s * at, **times, "energy_j": each} for at, each in enumerate(energies, 1)]


def planted(folder, *, energy=3600.0, **changes):
    """Two starts of two hours: three ranks, then two; and what monitor has put aside of an earlier one."""
    losses = [step_line(number, START + 60 * number, loss=10.0 - number / 10) for number in range(100)]
    first, second = used_lines(*[energy] * 4), used_lines(*[energy] * 4, begin=START + 7200)
    ranks = [[*losses, *first, *second], [*steps(3), *first, *second], [*steps(3), *first]]
    write_run(folder, ranks, [session(3), session(2, steps_per_epoch=25, **changes)])
    (folder / "rank-0.jsonl").rename(folder / "before-restart-1.rank-0.jsonl")
    write_run(folder, ranks, [session(3), session(2, steps_per_epoch=25, **changes)])
    aside = [{"kind": "start", "run": "r", "rank": 0, "host": "here", "pid": 1, "device": "cpu"}, *used_lines(energy)]
    text = "\n".join(json.dumps({"time": START, **line}) for line in aside)
    (folder / "before-restart-1.rank-0.jsonl").write_text(text + "\n")
    return folder


def test_the_report_sums_all_starts(tmp_path):
    folder = planted(tmp_path / "run", settings={"price": "3 EUR"})
    # Ranks 0 and 1 for four hours, rank 2 for two, and half an hour that was put aside; 4 epochs.
    whole = "The run (starts: 2) used 10.5 device-hours at 3.00 EUR: 31.50 EUR, energy 21 Wh (whole devices)."
    epoch = "An epoch used 2.62 device-hours at 3.00 EUR: 7.88 EUR, energy 5.25 Wh (whole devices)."
    assert find_costs(read_run(folder)) == [whole, epoch]
    done = CliRunner().invoke(report, [str(folder), "--price", "1"])
    assert "used 10.5 device-hours at 1.00: 10.50, energy 21 Wh" in done.output
    assert "What it used" in (folder / "report.html").read_text()
    with pytest.raises(ConfigurationError, match="'cheap' is not a price"):
        find_costs(read_run(folder), "cheap")


def test_without_a_counter_the_energy_is_unknown(tmp_path):
    folder = write_run(tmp_path / "run", [[*steps(9), *used_lines(7200, None)]])
    assert find_costs(read_run(folder)) == ["The run (starts: 1) used 1 device-hours."]


def test_a_record_without_usage_or_with_nonsense_has_no_costs(tmp_path):
    assert find_costs(read_run(write_run(tmp_path / "old", [[*steps(9), MACHINE]])), "2") == []
    odd = [*steps(9), *used_lines("nan"), {**used_lines(1)[0], "device_s": -1, "num_devices": 0}]
    folder = write_run(tmp_path / "odd", [odd], [session(1, steps_per_epoch="x")])
    assert len(find_costs(read_run(folder), "2")) == 1


def test_compare_says_what_devices_bought():
    single, ddp, dp = contender("single", 20.0), contender("ddp", 10.0, exposed_ms=1.0), contender("dp", 40.0)
    # 640 samples a turn: single 3200 a second takes 64 J a turn, so 320 W; ddp 96 J: 480 Wh for the same samples.
    metered = [
        replace(each, single=None, num_devices=2, turns=tuple(replace(turn, energy_j=joules) for turn in each.turns))
        for each, joules in ((single, 64.0), (ddp, 96.0), (dp, math.nan))
    ]
    on_gpus = judge(comparison(*metered, price=Price(2.0, "EUR"))).sentences
    assert (
        "Compared with an hour of single, for the same samples: ddp -0.50 h, +0.00 EUR, energy +160 Wh (whole "
        "devices); dp +1.00 h, +6.00 EUR."
    ) in on_gpus
    on_cpus = judge(comparison(*metered[:2], device="cpu")).sentences
    assert (
        "Compared with an hour of single, for the same samples: ddp -0.50 h, -1.00 device-hours, energy +160 Wh (whole "
        "devices). Single has the cores of all 2 devices, and counts as so many."
    ) in on_cpus


def test_the_energy_of_ranks_adds_up_unless_one_is_unknown():
    turn = contender("ddp", 10.0).turns[0]
    ranks = [[replace(turn, energy_j=3.0)], [replace(turn, energy_j=4.0)]]
    assert merge(ranks)[0].energy_j == 7.0
    assert math.isnan(merge([*ranks, [turn]])[0].energy_j)


def test_what_a_script_used_before_its_ranks_were_started_again_counts(powercap, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    for restart, joules in (("0", 100), ("1", 50)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
        powercap("intel-rapl:0", "package-0", 0, 10**6)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with lockstep.monitor(model, optimizer, run_dir=folder):
            for _ in range(3):
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
            powercap("intel-rapl:0", "package-0", 36 * joules, 10**6)
    run = read_run(folder)
    (whole,) = find_costs(run)
    assert whole.startswith("The run (starts: 2) used ") and whole.endswith(", energy 1.5 Wh (whole devices).")
    assert (run.gaps, len(run.zero.steps)) == ([], 3)
