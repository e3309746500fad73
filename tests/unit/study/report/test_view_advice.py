"""Advice from planted figures: the right cause, and the gain that leaving it out would bring."""

from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.study.report.figures import Cores
from lockstep.study.report.view import View
from lockstep.telemetry.figures import Figures, Straggler
from lockstep.telemetry.record import Event, RankRecord, Recorded
from lockstep.telemetry.step_times import PARTS, StepTimes

SOUND = {"forward_s": 0.030, "backward_s": 0.060, "exposed_s": 0.002, "optimizer_s": 0.002}
HANDOVER_S = 0.0003
MIB = 2**20


def facts(num_ranks=4, num_machines=1, device="cuda", straggler=None, cores=None, pauses=(), **changes):
    parts = {**SOUND, "exposed_s": changes.pop("wire_s", SOUND["exposed_s"])}
    parts |= {name: changes.pop(name) for name in list(changes) if name.removesuffix("_s") in PARTS}
    critical = StepTimes(total_s=sum(parts.values()), **parts)
    figures = Figures(
        step_s=critical.total_s,
        samples_per_s=1.0,
        total_s=1.0,
        by_rank=dict.fromkeys(range(num_ranks), critical),
        critical=critical,
        straggler=straggler,
    )
    hosts = [{"host": f"host {rank % num_machines}"} for rank in range(num_ranks)]
    session = {"workers": 2, "strategy": "ddp", "gradient_bytes": MIB, "ranks": hosts, "settings": changes, **changes}
    events = [Event(event=name, step=number, seconds=seconds) for number, (name, seconds) in enumerate(pauses)]
    run = Recorded(Path("run"), [session], {0: RankRecord(0, events=events)}, [])
    return View(run, figures, None, cores, "net", device, num_ranks)


def advise(view):
    return view.advice


FACTS = facts()


def test_a_sound_run_is_left_alone():
    assert advise(FACTS) == []


def test_waiting_for_data_asks_for_so_many_workers_as_hide_it():
    # 94 ms of other work a step can hide 188 ms of loading in 2 workers.
    (advice,) = advise(facts(data_wait_s=0.188, workers=0))
    assert advice.text == (
        "Data wait is 67% of the step: 2 loader workers per rank instead of 0 (--workers 2) would give about 2.99 "
        "times the throughput."
    )
    assert advice.gain == pytest.approx(0.282 / (0.094 + HANDOVER_S))


def test_workers_that_do_not_keep_up_are_busy_all_the_time():
    # 2 workers take 2 x 188 ms for a step's samples; 4 need as long as the rest of the step.
    (advice,) = advise(facts(data_wait_s=0.094))
    assert advice.change == "4 loader workers per rank instead of 2 (--workers 4)"
    assert advice.gain == pytest.approx(0.188 / (0.094 + HANDOVER_S))
    # A loader process hands each micro-batch over, which takes longer than loading a small one.
    small = advise(facts(data_wait_s=0.0005, forward_s=0.002, backward_s=0.004, workers=0))
    assert all("--workers" not in advice.change for advice in small)


def test_a_slow_rank_is_named_with_its_phase():
    slow = Straggler(3, "forward", lost_s=0.047, took_s=0.077, usual_s=0.030, step_s=0.094)
    (advice,) = advise(facts(straggler=slow))
    assert advice.cause == (
        "Rank 3 is slow: it loses 47.0 ms in each step of 94.0 ms, in forward (77.0 ms, usual is 30.0 ms), and the "
        "others wait for it"
    )
    assert advice.gain == pytest.approx(2.0)


def test_a_rank_that_loads_slowly_alone_needs_no_workers_on_all():
    slow = Straggler(1, "data_wait", lost_s=0.090, took_s=0.094, usual_s=0.004, step_s=0.188)
    texts = [advice.cause for advice in advise(facts(data_wait_s=0.094, workers=0, straggler=slow))]
    assert [text.partition(", and")[0] for text in texts] == [
        "Rank 1 is slow: it loses 90.0 ms in each step of 188 ms, in loading data (94.0 ms, usual is 4.0 ms)"
    ]


def test_many_bytes_travel_faster_as_bf16_and_less_often_with_accumulation():
    found = advise(facts(wire_s=0.092, gradient_bytes=100 * 2**20))
    assert [advice.change for advice in found] == [
        "rounding gradients for the exchange (--compression bf16)",
        "exchanging gradients once for 4 micro-batches (--accumulate 4 with a global batch 4 times as large)",
    ]
    assert found[0].gain == pytest.approx(0.184 / 0.138)
    assert found[1].gain == pytest.approx(
        0.184 / (0.184 - 3 / 4 * (0.092 + 0.002))
    )  # the update is done less often, too
    assert [advice.keeps_run for advice in found] == [True, False]
    # In shared memory, rounding takes as long as adding.
    (rarer,) = advise(facts(wire_s=0.092, gradient_bytes=100 * 2**20, device="cpu"))
    assert rarer.change.startswith("exchanging gradients once")
    apart = advise(facts(wire_s=0.092, gradient_bytes=100 * 2**20, num_machines=2, device="cpu"))
    assert apart[0].change == "rounding gradients for the exchange (--compression bf16)"
    rounded = advise(facts(wire_s=0.092, gradient_bytes=100 * 2**20, compression="bf16"))
    assert [advice.keeps_run for advice in rounded] == [False]


def test_a_model_too_small_to_divide_is_better_off_alone():
    found = advise(facts(forward_s=0.001, backward_s=0.002, wire_s=0.020, num_ranks=4))
    assert found[0].text == (
        "The model is too small for several devices: computing is 12% of the step on 4 devices: one device (--devices "
        "1) would give about 1.79 times the throughput."
    )
    assert found[0].gain == pytest.approx(0.025 / (4 * 0.003 + 0.002))
    assert all("--accumulate" not in advice.change for advice in found)
    found = advise(facts(forward_s=0.001, backward_s=0.002, wire_s=0.020, num_ranks=4, device="cpu"))
    assert found[0].change == "one device (--devices 1 --threads 1)"
    assert "at least 1.79 times" in found[0].text  # one process may use the cores of the others


def test_a_large_model_behind_a_slow_link_is_not_called_small():
    rounded, alone, larger = advise(facts(wire_s=0.500, gradient_bytes=100 * 2**20))
    assert larger.change == "a global batch 4 times as large (--global-batch-size)"
    assert rounded.change == "rounding gradients for the exchange (--compression bf16)"
    assert alone.cause == "Exchanging gradients costs more than it saves: computing is 15% of the step on 4 devices"


def test_an_optimizer_that_all_ranks_repeat_can_be_divided():
    (advice,) = advise(facts(optimizer_s=0.040))
    assert advice.change == "dividing it among the ranks (--strategy ddp-zero1)"
    assert advice.gain == pytest.approx(0.132 / (0.132 - 0.040 * 3 / 4))
    assert advise(facts(optimizer_s=0.040, strategy="ddp-zero1")) == []


def test_a_divided_optimizer_must_save_much_and_is_not_for_several_machines():
    assert advise(facts(optimizer_s=0.030)) == []  # 18 %: the second exchange takes that
    assert advise(facts(optimizer_s=0.080, num_machines=2)) == []


def test_pauses_that_take_much_of_the_run_can_be_fewer():
    (advice,) = advise(
        facts(pauses=[("evaluation", 0.05), ("evaluation", 0.15), ("checkpoint", 0.01), ("skipped", None)])
    )
    assert advice.cause == "Training pauses for evaluations during 20% of the run"
    assert advice.gain == pytest.approx(1 / 0.9)


def test_the_largest_gain_comes_first_and_another_training_run_last():
    gains = [(advice.keeps_run, advice.gain) for advice in advise(facts(wire_s=0.1, data_wait_s=0.05, workers=0))]
    kept = [gain for keeps, gain in gains if keeps]
    assert kept == sorted(kept, reverse=True)
    assert [keeps for keeps, _ in gains] == sorted((keeps for keeps, _ in gains), reverse=True)
    assert not gains[-1][0]


def test_on_cpus_a_loader_gains_at_most_what_its_waiting_costs():
    (advice,) = advise(facts(data_wait_s=0.188, workers=0, device="cpu"))
    assert advice.gain == pytest.approx(0.282 / (0.094 + HANDOVER_S))
    assert "would give at most 2.99 times the throughput" in advice.text


def test_what_does_not_depend_on_the_batch_is_paid_less_often():
    small = facts(forward_s=0.001, backward_s=0.002, wire_s=0.020, global_batch_size=64)
    (advice,) = [each for each in advise(small) if not each.keeps_run]
    assert advice.change == "a global batch 4 times as large (--global-batch-size 256)"
    assert advice.gain == pytest.approx(0.025 / (0.025 - 3 / 4 * 0.022))


def test_time_without_a_core_comes_first_and_nothing_is_advised_for_it():
    crowd = Cores(total=2, ranks=0.4, others=1.6, stolen=0.0, throttled=0.0)
    starved = facts(core_wait_s=0.9, data_wait_s=0.3, optimizer_s=0.1, workers=0, device="cpu", cores=crowd)
    (advice,) = advise(starved)
    assert advice.text == (
        "The ranks wait for a core during 65% of the step, as other programs use 1.6 of 2 cores: stopping them, or "
        "reserving cores for the run (taskset), would give at most 2.83 times the throughput."
    )
    causes = {
        "the quota of the control group stops the ranks": {"throttled": 3.0},
        "the hypervisor keeps 1.9 of 2 cores": {"stolen": 1.9},
        "the ranks have more threads than the 2 cores": {"others": 0.1, "threads": 2, "num_ranks": 2},
    }
    for cause, changes in causes.items():
        (advice,) = advise(replace(starved, cores=crowd._replace(**changes)))
        assert advice.cause.endswith(cause)
    # A quota leaves cores idle, which other programs do not.
    (advice,) = advise(replace(starved, cores=Cores(total=2, ranks=0.5, others=0.9, stolen=0.0, throttled=0.6)))
    assert advice.cause.endswith("the quota of the control group stops the ranks")
    # Fewer threads are for ranks that have more than one; what else fits on the cores is advised, too.
    for threads, num_ranks, change in (
        (2, 2, "fewer ranks (--devices 1), or fewer threads (--threads 1)"),
        (4, 2, "fewer threads (--threads 1)"),
        (4, 1, "fewer threads (--threads 2)"),
        (1, 4, "fewer ranks (--devices 2)"),
    ):
        quiet = crowd._replace(others=0.1, threads=threads, num_ranks=num_ranks)
        (advice,) = advise(replace(starved, cores=quiet))
        assert (advice.cause.endswith("more threads than the 2 cores"), advice.change) == (True, change)
    assert advise(replace(starved, cores=crowd._replace(others=0.1, threads=1, num_ranks=2))) == []
    # A smaller part stands among the others, by its gain.
    some = advise(facts(core_wait_s=0.02, data_wait_s=0.1, workers=0, cores=crowd))
    assert ["--workers" in each.change for each in some] == [True, False]


def test_loaders_gain_nothing_where_all_cores_are_busy():
    full = Cores(total=4, ranks=4.0, others=0.0, stolen=0.0, throttled=0.0)
    assert advise(facts(data_wait_s=0.188, workers=0, device="cpu", cores=full)) == []
    (advice,) = advise(facts(data_wait_s=0.188, workers=0, device="cpu", cores=full._replace(ranks=2.0)))
    assert advice.gain == pytest.approx(2.0)  # half of the cores are idle


def test_on_cpus_workers_are_advised_only_where_they_gain_much():
    gains = {0.010: None, 0.094: 0.188 / (0.094 + HANDOVER_S)}
    for wait_s, gain in gains.items():
        found = advise(facts(data_wait_s=wait_s, workers=0, device="cpu"))
        workers = [advice.gain for advice in found if "--workers" in advice.change]
        assert workers == ([] if gain is None else [pytest.approx(gain)])


def test_a_script_is_told_what_it_can_write_and_not_flags_that_lockstep_run_refuses():
    def changes(**planted):
        return [advice.change for advice in advise(facts(recorded_by="monitor", **planted))]

    assert changes(data_wait_s=0.188, workers=0) == [
        "2 loader workers per rank instead of 0 (DataLoader(num_workers=2))"
    ]
    assert changes(wire_s=0.092, gradient_bytes=100 * MIB) == [
        'rounding gradients for the exchange (lockstep.DistributedDataParallel(compression="bf16"))',
        "exchanging gradients once for 4 micro-batches (no_sync() around all but the last)",
    ]
    assert changes(forward_s=0.001, backward_s=0.002, wire_s=0.020, device="cpu", global_batch_size=64) == [
        "one device (--devices 1, and torch.set_num_threads(1))",
        "a global batch 4 times as large (batch_size of the DataLoader)",
    ]
    assert changes(optimizer_s=0.040) == ["dividing it among the ranks (lockstep.ZeroRedundancyOptimizer)"]
    # Of an engine that is not known, nothing is advised.
    assert changes(optimizer_s=0.040, strategy=None) == []
    assert changes(pauses=[("evaluation", 0.2)]) == ["half as many of them (in the loop of the script)"]
    crowd = Cores(total=2, ranks=2.0, others=0.0, stolen=0.0, throttled=0.0, num_ranks=2, threads=4)
    assert changes(core_wait_s=0.9, device="cpu", cores=crowd) == [
        "fewer threads (torch.set_num_threads(1), or OMP_NUM_THREADS=1)"
    ]
