"""What `predict` advises, shows and writes, from planted profiles; wrong input."""

import json
from dataclasses import replace

import pytest

from lockstep.study.common import console, to_json
from lockstep.study.links import Computing, Cost, Method, Profile, ReadyBucket, given_link
from lockstep.study.predict import choose, forecast, list_methods, render, render_page, sentences, to_record
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
    assert sentences(found)[1] == f"No option is needed: this is {share}."


def test_a_slow_link_gets_what_changes_the_run_least_and_is_enough():
    found = predicted(given_link("100Mb"))
    as_it_is, turn_on, pays, costs = sentences(replace(found, price=Price(2.0, "EUR")))
    # 43.2 MB at 11.25 MB/s take 3.84 s.
    assert as_it_is.startswith("DistributedDataParallel without options takes 3.")
    assert as_it_is.endswith("each sends 43.2 MB a step.")
    assert turn_on.startswith("Turn on rare (--rare): 1.")
    assert turn_on.endswith("; another run.")
    assert pays.startswith("2 machines pay from ")
    assert " on with bf16, " in pays
    hours = 1 / found.speed_up(choose(found))
    bought = f"2 machines {hours - 1:+.2f} h, {2 * (2 * hours - 1):+.2f} EUR; 4 machines "
    assert costs.startswith(f"Compared with an hour of one machine, for the same samples, rare: {bought}")
    assert costs.endswith(" EUR. Energy is not predicted.")
    # bf16 is enough between the two.
    chosen = [choose(predicted(given_link(f"{rate}Gb"))).method.name for rate in (1, 7, 40)]
    assert chosen == ["rare", "bf16", "ddp"]


def test_a_task_that_never_pays_says_so():
    # All of it is the update, which every machine repeats.
    tiny = replace(PROFILE, computing={share: Computing(0.0, 0.0, 0.01) for share in (32, 16, 8, 4)})
    found = forecast("tiny", tiny, list_methods(COSTS, tiny)[:2], given_link("100Gb"), 2)
    assert choose(found) is None
    assert sentences(found)[1:3] == [
        "Train on one machine: no option makes 2 machines faster over this link.",
        "2 machines never pay for this task: no link makes them faster than one.",
    ]


def test_the_table_the_json_and_the_page(capsys):
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
    page = render_page(found, PROVENANCE, "lockstep predict <b>.py")
    assert "&lt;b&gt;" in page
