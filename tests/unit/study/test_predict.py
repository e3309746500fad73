"""What `predict` advises, shows and writes, from planted profiles; wrong input."""

import json
from dataclasses import replace

import pytest

from lockstep.study.common import console, to_json
from lockstep.study.links import Computing, Cost, Method, Profile, ReadyBucket, Step, given_link
from lockstep.study.predict import Forecast, Row, choose, footnote, forecast, list_methods, render, sentences, to_record
from lockstep.telemetry.cost import Price
from lockstep.telemetry.provenance import Provenance

PROVENANCE = Provenance("2026-01-01T00:00:00+00:00", {"torch": "2.13.0"}, {"cpu": "A & B"}, {})
# 43.2 MB of gradients, 0.36 s a step, of which the update takes 10 ms.
SHARES = {share: Computing(0.11 * share / 32, 0.24 * share / 32, 0.01) for share in (32, 16, 8, 4)}
PROFILE = Profile(32, SHARES, (ReadyBucket(1_000_000, 0.1), ReadyBucket(42_200_000, 1.0)), cores=2, busy_cores=2)
COSTS = {"ddp": Cost(), "bf16": Cost(0.5, 1e-10, 1e-10)}
RARE = Method("rare", "--rare", "another run", sync_every=50)


def predicted(link, profile=PROFILE, num_machines=2):
    methods = [*list_methods(COSTS, profile)[:2], RARE]
    return forecast("gpt", profile, methods, link, num_machines)


def test_a_fast_link_needs_nothing():
    found = predicted(given_link("40Gb"))
    assert choose(found).method.name == "ddp"
    share = f"{found.efficiency(found.rows[0]):.0%} of linear scaling on 2 machines"
    faster = "The fastest on 2 machines is rare: 1.94 times the speed of one (another run)."
    assert sentences(found)[1] == f"No option is needed: this is {share}. {faster}"


def test_a_slow_link_gets_what_changes_the_run_least_and_is_enough():
    found = predicted(given_link("100Mb"))
    as_it_is, turn_on, pays, costs = sentences(replace(found, price=Price(2.0, "EUR")))
    # 43.2 MB at 11.25 MB/s take 3.84 s.
    assert as_it_is.startswith("DistributedDataParallel without options takes 3.")
    assert as_it_is.endswith("each sends 43.2 MB a step.")
    assert turn_on.startswith("Turn on rare (--rare): 1.")
    assert turn_on.endswith("; another run.")
    assert pays.startswith("2 machines are 1.05 times as fast as one from ")
    assert " on with bf16, " in pays
    hours = found.hours(choose(found), 2)
    bought = f"2 machines {hours - 1:+.2f} h, {2 * (2 * hours - 1):+.2f} EUR; 4 machines "
    assert costs.startswith(f"Compared with an hour of one machine, for the same samples, rare: {bought}")
    assert costs.endswith(" EUR.")
    # bf16 is enough between the two.
    chosen = [choose(predicted(given_link(f"{rate}Gb"))).method.name for rate in (1, 7, 40)]
    assert chosen == ["rare", "bf16", "ddp"]


def test_a_task_that_never_pays_says_so():
    # All of it is the update, which every machine repeats.
    tiny = replace(PROFILE, computing={share: Computing(0.0, 0.0, 0.01) for share in (32, 16, 8, 4)})
    found = forecast("tiny", tiny, list_methods(COSTS, tiny)[:2], given_link("100Gb"), 2)
    assert choose(found) is None
    assert sentences(found)[1:3] == [
        "Not on 2 machines: no option makes them 1.05 times as fast as one over this link. Train on one machine, the "
        "fastest of the table.",
        "No link makes 2 machines 1.05 times as fast as one with any of these methods.",
    ]


def with_speeds(*speeds):
    """Return a forecast in which the methods have these speeds on 2 machines, over one with the first."""
    rows = [Row(Method(f"m{each}"), {1: Step(1.0, 0.0, 1), 2: Step(1 / each, 0.0, 1)}, None) for each in speeds]
    return Forecast("planted", PROFILE, given_link("1Gb"), 2, rows)


@pytest.mark.parametrize(
    ("speeds", "advised"),
    [
        ((1.2, 1.204), "m1.2"),  # 0.3 % is no reason to change gradients
        ((1.2, 1.26), "m1.26"),
        ((1.2, 1.22, 1.27), "m1.2"),  # the last is 1.04 times as fast as the one before
        ((1.2, 1.65, 1.9), "m1.65"),  # good enough
        ((1.59, 1.61), "m1.59"),
        ((1.044,), None),  # 1.045 is shown as the 1.05 of the sentence
        ((0.5, 1.05), "m1.05"),
    ],
)
def test_a_method_that_changes_the_training_more_must_be_clearly_faster(speeds, advised):
    chosen = choose(with_speeds(*speeds))
    assert (chosen and chosen.method.name) == advised


def test_a_larger_batch_is_compared_with_one_machine_that_has_it():
    methods = {each.name: each for each in list_methods(COSTS, PROFILE)}
    found = forecast("gpt", PROFILE, [methods["ddp"], methods["accumulate 4"]], given_link("1000Gb"), 2)
    # 4 * 0.35 + 0.01 s on one machine; two need half of the 1.4 s, and the same for the update.
    assert found.speed_up(found.rows[1]) == pytest.approx(1.41 / 0.71, rel=0.01)
    tiny = replace(PROFILE, computing={share: Computing(0.0, 0.0, 0.01) for share in (32, 16, 8, 4)})
    found = forecast("tiny", tiny, list_methods(COSTS, tiny), given_link("100Gb"), 2)
    accumulate = next(row for row in found.rows if row.method.accumulate > 1)
    assert (found.efficiency(accumulate, 1), accumulate.pays_from) == (1.0, None)
    assert footnote(found).startswith(
        "Time of a step, and efficiency: the speed-up over one machine with the same global batch, divided by the "
        "number of machines. That batch is 32, but 4 times as large with accumulate 4; * is another training run. "
    )


def test_rows_that_change_the_training_are_marked(capsys):
    console().print(render(forecast("gpt", PROFILE, list_methods(COSTS, PROFILE), given_link("100Mb"), 2)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in lines if "B  " in line] == [
        "ddp", "bf16", "int8", "int4", "accumulate 4*", "local-sgd*", "diloco*",
    ]  # fmt: skip


def test_a_busy_machine_is_the_first_sentence_of_the_verdict():
    def with_step(wall_s, fastest_s):
        whole = replace(SHARES[32], wall_s=wall_s, fastest_s=fastest_s)
        return predicted(given_link("1Gb"), replace(PROFILE, computing={**SHARES, 32: whole}))

    busy = with_step(6.86, 0.31)
    assert sentences(busy)[0] == (
        "The machine was busy, or steps differ: a measured step took 6.86 s, the fastest had a core for 310 ms. "
        "The figures may be too large: stop other programs, and run again."
    )
    assert to_record(busy, PROVENANCE)["verdict"]["sentences"] == sentences(busy)
    assert len(sentences(with_step(0.47, 0.31))) == len(sentences(busy)) == 5
    assert len(sentences(with_step(0.46, 0.31))) == 4


def test_the_table_and_the_json(capsys):
    found = predicted(given_link("100Mb"))
    console().print(render(found))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    title = "gpt: global batch 32, 43.2 MB of gradients; link 100Mb as given"
    assert title in out.replace("\n", " ")
    record = json.loads(to_json(to_record(found, PROVENANCE)))
    assert record["verdict"]["use"] == "rare"
    row = record["rows"][0]
    assert row["method"]["name"] == "ddp"
    assert row["steps"]["2"]["sent_bytes"] == pytest.approx(43.2e6)
    assert record["profile"]["buckets"][0] == {"size_bytes": 1_000_000, "ready": 0.1}
