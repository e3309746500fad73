"""What `tune` decides, on machines that are made up: no process, no clock."""

from dataclasses import replace

import pytest

from lockstep.study.common import Spread
from lockstep.study.tune.ask import Ask
from lockstep.study.tune.candidates import Known, stage
from lockstep.study.tune.climb import Climb
from lockstep.study.tune.effects import Effect, effect_of
from lockstep.study.tune.judge import NOW, is_decided, is_gain, why_not
from lockstep.study.tune.outcome import checks_of, memory_in_words
from lockstep.study.tune.search import Search
from lockstep.study.tune.values import in_words, value_of

ASK = Ask(
    task="a.py",
    num_devices=2,
    on_cuda=False,
    num_cores=4,
    global_batch_size=64,
    start={},
    strategies=("single", "dp", "ddp", "ddp-zero1"),
    seconds=300.0,
    began_at=0.0,
    limit_bytes=1000,
)
BASELINE = {"kind": "baseline", "advice": [], "wait_share": 0.5, "gradient_bytes": 2**25}


def drive(search, speed, *, bytes_of=lambda size: 10 + size, baseline=BASELINE, entries=None, seconds=1.0):
    """Do what the search says on a machine that trains as fast as ``speed`` says; return the entries."""
    entries = [] if entries is None else entries
    while (action := search.next())["do"] != "done" and len(entries) < 500:
        at = seconds * len(entries)
        if (entry := search.overdue(at)) is not None:
            pass
        elif action["do"] == "probe":
            needed = bytes_of(action["size"])
            entry = {"kind": "probe", "size": action["size"], "peak_bytes": needed}
        elif action["do"] == "baseline":
            entry = baseline
        else:
            number = action["round"]
            noise = 1 + 0.01 * (number % 3 - 1)  # hits all alike
            rates = {}
            for name, values in action["contenders"].items():
                rate = speed(values)
                if isinstance(rate, str):
                    entry = {"kind": "lost", "name": name, "why": rate}
                    break
                rates[name] = rate * noise
            else:
                entry = {"kind": "round", "rates": rates}
        entry = {**entry, "at": at}
        entries.append(entry)
        search.record(entry)
    return entries


def slow_loader(values):
    """Be held up by loading unless there are workers; like zero1; be quick in bf16; fail with dp."""
    if value_of(values, "strategy") == "dp":
        return "ValueError: no threads, please"
    loading = {0: 1.0, 1: 1.7, 2: 2.5, 4: 2.5, 8: 2.4}[value_of(values, "workers")]
    zero = 1.2 if value_of(values, "strategy") == "ddp-zero1" else 1.0
    single = 0.5 if value_of(values, "strategy") == "single" else 1.0
    bf16 = 1.5 if value_of(values, "precision") == "bf16" else 1.0
    return 100 * loading * zero * single * bf16 / value_of(values, "accumulate") ** 0.1


def test_it_finds_what_is_fastest_and_leaves_the_training_alone():
    search = Search(ASK)
    drive(search, slow_loader)
    assert search.base == {"workers": 2, "strategy": "ddp-zero1"}
    assert search.total.median == pytest.approx(3.0)
    by_change = {result.candidate.name: result for result in search.results}
    assert [name for name, result in by_change.items() if result.kept and result.stage != "all together"] == [
        "workers 2",
        "strategy ddp-zero1",
    ]
    assert by_change["strategy dp"].why == "ValueError: no threads, please"
    assert by_change["precision bf16"].why == "offered: taken with --allow-precision"
    assert by_change["strategy single"].why == "slower"
    assert by_change["workers 4"].why == "another was better"
    assert by_change["prefetch 4"].why == "within the noise"


def test_with_leave_it_takes_another_arithmetic():
    search = Search(replace(ASK, allow_precision=True))
    drive(search, slow_loader)
    assert search.base == {"workers": 2, "strategy": "ddp-zero1", "precision": "bf16"}


def test_after_a_crash_it_goes_on_where_it_was():
    whole, entries = Search(ASK), []
    drive(whole, slow_loader, entries=entries)
    for count in range(0, len(entries), 7):
        again = Search(ASK)
        for entry in entries[:count]:
            again.next()
            again.record(entry)
        rest = entries[:count]
        drive(again, slow_loader, entries=rest)
        assert rest == entries
        assert (again.base, again.results) == (whole.base, whole.results)


def test_changes_that_only_seem_to_help_are_dropped_when_all_are_tried_together():
    def speed(values):
        return 100.0 if value_of(values, "workers") == 0 or len(values) > 1 else 150.0

    calls = []

    def fickle(values):
        calls.append(values)
        return speed(values) if len(calls) < 60 else 100.0

    search = Search(replace(ASK, strategies=("ddp",), num_cores=1))
    drive(search, fickle)
    assert search.results[-1].stage == "all together"
    assert search.base == search.start == {}
    assert search.results[-1].why == "within the noise"


def test_time_ends_a_stage_and_then_all_but_the_last():
    search = Search(replace(ASK, seconds=60.0))
    entries = drive(search, slow_loader, seconds=2.0)
    assert entries[-1]["at"] <= 60.0
    assert any(entry["kind"] == "end" and entry["rest"] for entry in entries)
    search.finish()
    assert search.base.get("workers") in (2, 4)


def test_what_is_open_when_time_is_up_is_judged_by_what_there_is():
    search, entries = Search(ASK), []
    while len(entries) < 3 + 1 + 5:  # three probes, the recorded run, five rounds
        action = search.next()
        if action["do"] == "probe":
            entry = {"kind": "probe", "size": action["size"], "peak_bytes": 10}
        elif action["do"] == "baseline":
            entry = BASELINE
        else:
            entry = {"kind": "round", "rates": {name: slow_loader(v) for name, v in action["contenders"].items()}}
        entries.append(entry)
        search.record({**entry, "at": 0.0})
    search.finish()
    assert search.base == {"workers": 2}
    assert search.total is None


def test_a_batch_that_does_not_fit_is_cut_before_anything_else():
    # 32 samples fall to a device; 8 of them and no more fit into 1000 bytes.
    search = Search(ASK)
    drive(search, slow_loader, bytes_of=lambda size: 100 * size if size < 10 else None)
    assert search.largest == 8
    assert search.start == {"accumulate": 4}
    tried = [result.candidate.changes for result in search.results if result.stage == "micro-batch"]
    assert tried == [{"accumulate": 8}, {"accumulate": 16}]


def test_the_climb_begins_small_and_jumps_if_a_line_says_that_it_can():
    climb, tried = Climb(64, 1000), []
    while (size := climb.next()) is not None:
        tried.append(size)
        climb.record(size, 100 + 10 * size)
    assert tried == [2, 4, 64]
    climb, tried = Climb(64, 500), []
    while (size := climb.next()) is not None:
        tried.append(size)
        climb.record(size, 100 + 10 * size)
    assert tried == [2, 4, 8, 16, 32]  # 64 would need 740
    assert climb.largest == 32


def test_what_grows_in_the_first_steps_anyway_is_not_taken_for_the_samples():
    climb, tried, grown = Climb(64, 500), [], {2: 0, 4: 60, 8: 70}
    while (size := climb.next()) is not None:
        tried.append(size)
        climb.record(size, 100 + 5 * size + grown.get(size, 70))
    assert tried == [2, 4, 8, 16, 32, 64]
    assert climb.bytes_of(128) == 100 + 5 * 128 + 70


def test_the_climb_goes_down_again_where_only_trying_tells():
    climb, tried = Climb(48), []
    while (size := climb.next()) is not None:
        tried.append(size)
        climb.record(size, size if size <= 10 else None)
    assert tried == [2, 4, 48, 24, 16, 12, 8]
    assert climb.largest == 8
    assert Climb(1).next() == 1
    first = Climb(4)
    first.record(2, None)
    assert first.next() == 1


def test_contenders_that_do_not_fit_beside_each_other_run_alone():
    search = Search(replace(ASK, limit_bytes=150))
    entries = []
    while (action := search.next())["do"] != "race":
        entry = {"kind": "probe", "size": action["size"], "peak_bytes": 100} if action["do"] == "probe" else BASELINE
        entries.append(entry)
        search.record(entry)
    assert action["alone"]
    roomy = Search(replace(ASK, limit_bytes=1000))
    for entry in entries:
        roomy.next()
        roomy.record(entry)
    assert not roomy.next()["alone"]
    roomy.record({"kind": "alone"})
    assert roomy.next()["alone"]


def test_what_is_known_of_memory_is_said_as_far_as_it_is_known():
    def words(*entries, ask=ASK):
        search = Search(ask)
        for entry in entries:
            search.next()
            search.record(entry)
        return memory_in_words(search), search.largest

    def probe(size, peak_bytes):
        return {"kind": "probe", "size": size, "peak_bytes": peak_bytes}

    roomy = replace(ASK, limit_bytes=2**30)
    assert words(probe(2, 2**20), probe(4, 2**21), probe(32, 2**24), ask=roomy) == (
        "The largest micro-batch that fits on every device has 32 samples (a device's whole part of the global batch): "
        "16 MiB, of 1,024 MiB that each may use.",
        32,
    )
    cut, largest = words(probe(2, 2**20), probe(4, 2**21), probe(32, None), probe(16, None), probe(8, None), ask=roomy)
    assert (cut.partition(":")[0], largest) == (
        "The largest micro-batch that fits on every device has 4 samples (the part of 32 is cut into 8)",
        4,
    )
    assert words(probe(2, 2**20), {"kind": "enough"}, ask=roomy) == (
        "Micro-batches of 2 samples fit on every device, and larger ones were not tried: 1 MiB, of 1,024 MiB that each "
        "may use.",
        None,
    )
    assert words() == ("", None)


def advised(changes, gain, cause="because", at_most=False):
    return {"cause": cause, "change": in_words(changes), "gain": gain, "at_most": at_most, "changes": changes}


def test_advice_is_tried_first_and_its_error_is_shown():
    advice = [
        advised({"workers": 2}, 2.0),
        advised({"strategy": "ddp-zero1"}, 1.5),
        advised({"precision": "bf16"}, 3.0, at_most=True),
        advised({}, 1.4),
    ]
    search = Search(ASK)
    drive(search, slow_loader, baseline={**BASELINE, "advice": advice})
    workers, zero, bf16, other = checks_of(search)
    assert (workers.measured.median, workers.error) == (pytest.approx(2.5), pytest.approx(-0.2))
    assert (zero.measured.median, zero.error) == (pytest.approx(1.2), pytest.approx(0.25))
    assert (bf16.measured.median, bf16.error) == (pytest.approx(1.5), 0.0)
    assert (other.measured, other.why) == (None, "no setting to try")
    # What was a gain beside the best is tried again on top of it.
    assert [(result.stage, result.candidate.name) for result in search.results[:4]] == [
        ("advice", "workers 2"),
        ("advice", "strategy ddp-zero1"),
        ("advice", "precision bf16"),
        ("advice, again", "strategy ddp-zero1"),
    ]
    assert search.base == {"workers": 2, "strategy": "ddp-zero1"}


def test_batch_norm_keeps_batches_divided_as_they_are():
    def speed(values):
        return 200.0 if value_of(values, "accumulate") == 2 else 100.0

    def normed(ask):
        search = Search(ask)
        search.record({"kind": "layers", "split": ["batch norm"]})
        drive(search, speed)
        return search

    search = normed(ASK)
    assert search.base == {}
    assert "offered: batch norm would see another division; --allow-division takes it" in {
        result.why for result in search.results
    }
    search = normed(replace(ASK, allow_division=True))
    assert search.base == {"accumulate": 2}


def test_a_gain_is_outside_of_the_noise_and_of_five_rounds():
    assert is_gain(Spread(1.1, 1.01, 1.2), 5)
    assert not is_gain(Spread(1.1, 0.99, 1.2), 9)
    assert not is_gain(Spread(1.1, 1.01, 1.2), 4)
    assert not is_gain(Spread(1.015, 1.01, 1.02), 9)
    assert why_not(Spread(0.8, 0.7, 0.9), 3) == "slower"
    assert why_not(Spread(1.1, 1.01, 1.2), 1) == "time was up after 1 round"
    assert why_not(None, 0) == "time was up before it ran"
    assert why_not(Spread(1.015, 1.01, 1.02), 9) == "too little to matter"


def test_what_is_hopeless_or_clear_needs_no_more_rounds():
    def rounds(ratio, count):
        return [{NOW: 1.0, "x": ratio}] * count

    assert [is_decided("x", rounds(0.5, count)) for count in range(5)] == [False, False, False, True, True]
    assert [is_decided("x", rounds(1.5, count)) for count in (4, 5)] == [False, True]
    assert [is_decided("x", rounds(1.01, count)) for count in (8, 9)] == [False, True]


def test_what_becomes_of_the_training():
    def effect(before, after, *layers):
        return effect_of(before, after, num_devices=2, split_layers=layers)

    assert effect({}, {"workers": 2, "prefetch": 4}) is Effect.BITS
    assert effect({}, {"accumulate": 2, "workers": 1}) is Effect.ROUNDING
    assert effect({}, {"accumulate": 2}, "dropout") is Effect.DIVISION
    assert effect({}, {"strategy": "single"}, "batch norm") is Effect.DIVISION
    assert effect({}, {"strategy": "single", "accumulate": 2}, "batch norm") is Effect.DIVISION
    assert effect({}, {"strategy": "ddp-zero1"}, "batch norm") is Effect.ROUNDING
    assert effect({}, {"strategy": "dp"}, "batch norm") is Effect.ROUNDING
    assert effect({}, {"strategy": "dp"}, "dropout") is Effect.DIVISION
    assert effect({}, {"precision": "bf16", "threads": 2}) is Effect.ARITHMETIC
    assert effect({}, {"wire": "bf16"}) is Effect.ARITHMETIC
    assert effect({}, {"global_batch_size": 256}) is Effect.RUN


KNOWN = Known(2, False, 8, 64, ("single", "dp", "ddp"), wait_share=0.5, gradient_bytes=2**26)


def changes(name, base=None, **known):
    found = stage(name, base or {}, replace(KNOWN, **known))
    return found.skipped or [dict(candidate.changes) for candidate in found.candidates]


def test_what_is_tried_depends_on_what_is_known():
    assert changes("loading") == [{"workers": 1}, {"workers": 2}, {"workers": 4}]
    assert changes("loading", {"workers": 4}) == [{"workers": 2}, {"workers": 8}]
    assert changes("loading", wait_share=0.01) == (
        "a step waits for data 1.0% of its time: no more than 1.01 times to gain"
    )
    assert changes("prefetch") == "there are no loader processes"
    assert changes("prefetch", {"workers": 1}) == [{"prefetch": 4}, {"prefetch": 8}]
    assert changes("strategy", {"bucket_cap_mb": 5.0}) == [
        {"strategy": "single", "bucket_cap_mb": None},
        {"strategy": "dp", "bucket_cap_mb": None},
    ]
    assert changes("strategy", num_devices=1) == "there is one device"
    # One device alone gets the whole batch, in pieces that fit: here no more than it had before.
    assert changes("strategy", strategies=("single",), largest=16) == [{"strategy": "single", "accumulate": 4}]
    assert changes("micro-batch", {"accumulate": 2}) == [{"accumulate": 1}, {"accumulate": 4}, {"accumulate": 8}]
    assert changes("micro-batch", {"accumulate": 2}, largest=16) == [{"accumulate": 4}, {"accumulate": 8}]
    assert changes("threads") == [{"threads": 1}, {"threads": 2}, {"threads": 8}]
    assert changes("threads", on_cuda=True) == "GPUs compute"
    assert changes("buckets") == [
        {"bucket_cap_mb": 5.0},
        {"bucket_cap_mb": 100.0},
        {"overlap_optimizer": True},
    ]
    assert changes("buckets", {"clip": 1.0}, gradient_bytes=2**18) == "all gradients (0.2 MiB) travel in one bucket"
    assert changes("buckets", {"strategy": "ddp-zero1"}) == "only ddp on several devices has them"
    assert changes("precision") == [{"precision": "bf16"}, {"wire": "bf16"}]
    assert changes("precision", {"precision": "bf16", "strategy": "single"}) == "it is low already"


def test_what_the_other_settings_rule_out_is_not_tried():
    shards = {"reproducible": 4}
    assert changes("buckets", shards) == "the other settings rule it out"
    assert changes("strategy", shards, strategies=("single", "ddp-zero1")) == [{"strategy": "single"}]
    assert changes("precision", shards) == [{"precision": "bf16"}]
    assert changes("micro-batch", shards) == "reproducible and shares set the sizes"
    assert {"overlap_optimizer": True} not in changes("buckets", {"on_nan": "skip"})
