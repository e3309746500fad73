"""Names of the live figures: frozen, documented, by Prometheus' rules, and what they are in a snapshot."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lockstep.telemetry import figures
from lockstep.telemetry.figures import Spread, scalars, with_waits
from lockstep.telemetry.record import StepLine
from lockstep.telemetry.recorder import RankMeans
from lockstep.telemetry.resources import MachineSampler
from lockstep.telemetry.sinks import MetricsSink
from lockstep.telemetry.step_times import TIMES, StepTimes
from tests.unit.sinks_planted import event, snapshot

DOCS = Path(__file__).parents[2] / "docs"

FROZEN = {
    "train/step": "lockstep_train_steps_total",
    "train/num_steps": "lockstep_train_planned_steps",
    "train/epoch": "lockstep_train_epoch",
    "train/loss": "lockstep_train_loss",
    "train/learning_rate": "lockstep_train_learning_rate",
    "train/grad_norm": "lockstep_train_gradient_norm",
    "train/samples_per_s": "lockstep_train_samples_per_second",
    "train/tokens_per_s": "lockstep_train_tokens_per_second",
    "train/elapsed_s": "lockstep_train_elapsed_seconds",
    "train/left_s": "lockstep_train_remaining_seconds",
    "train/ranks": "lockstep_train_ranks",
    "train/restarts": "lockstep_train_restarts_total",
    "train/skipped_steps": "lockstep_train_skipped_steps_total",
    "time/step_s": "lockstep_time_step_seconds",
    "time/slowest_rank": "lockstep_time_slowest_rank",
    "time/data_wait_share": "lockstep_time_data_wait_ratio",
    "time/forward_share": "lockstep_time_forward_ratio",
    "time/backward_share": "lockstep_time_backward_ratio",
    "time/wire_share": "lockstep_time_wire_ratio",
    "time/peers_share": "lockstep_time_peers_ratio",
    "time/optimizer_share": "lockstep_time_optimizer_ratio",
    "time/core_wait_share": "lockstep_time_core_wait_ratio",
    "rank/age_s": "lockstep_rank_age_seconds",
    "rank/step_s": "lockstep_rank_step_seconds",
    "rank/slowest_s": "lockstep_rank_slowest_step_seconds",
    "rank/own_s": "lockstep_rank_own_work_seconds",
    "rank/data_wait_s": "lockstep_rank_data_wait_seconds",
    "rank/copy_s": "lockstep_rank_copy_seconds",
    "rank/forward_s": "lockstep_rank_forward_seconds",
    "rank/backward_s": "lockstep_rank_backward_seconds",
    "rank/exposed_s": "lockstep_rank_exposed_seconds",
    "rank/wire_s": "lockstep_rank_wire_seconds",
    "rank/peers_s": "lockstep_rank_peers_seconds",
    "rank/hidden_s": "lockstep_rank_hidden_seconds",
    "rank/optimizer_s": "lockstep_rank_optimizer_seconds",
    "rank/core_wait_s": "lockstep_rank_core_wait_seconds",
    "rank/memory_bytes": "lockstep_rank_device_memory_bytes",
    "rank/memory_peak_bytes": "lockstep_rank_device_memory_peak_bytes",
    "rank/rss_bytes": "lockstep_rank_resident_memory_bytes",
    "rank/workers_rss_bytes": "lockstep_rank_workers_resident_memory_bytes",
    "rank/num_workers": "lockstep_rank_workers",
    "rank/cpu_percent": "lockstep_rank_cpu_cores",
    "rank/workers_cpu_percent": "lockstep_rank_workers_cpu_cores",
    "rank/load": "lockstep_rank_host_load1",
    "rank/gpu_percent": "lockstep_rank_gpu_utilization_ratio",
    "rank/gpu_power_w": "lockstep_rank_gpu_power_watts",
    "rank/gpu_temperature_c": "lockstep_rank_gpu_temperature_celsius",
    "rank/sent_bytes": "lockstep_rank_sent_bytes_total",
    "rank/step_sent_bytes": "lockstep_rank_step_sent_bytes",
    "rank/link_bytes_per_s": "lockstep_rank_link_bytes_per_second",
    "eval/{metric}": "lockstep_eval",
    "events/{event}": "lockstep_events_total",
    "log/{name}": "lockstep_log",
}
OWN = ("lockstep_run_info", "lockstep_rank_info", "lockstep_updated_timestamp_seconds")
"""Of Prometheus alone."""

ALL = figures.ALL_METRICS


def test_the_names_stay():
    assert {metric.name: metric.prometheus for metric in ALL} == FROZEN
    assert Spread._fields == ("min", "min_rank", "median", "max", "max_rank")


def test_prometheus_names_are_by_its_rules():
    units = r"(?:seconds|bytes|ratio|watts|celsius|cores|per_second)"
    for metric in ALL:
        assert re.fullmatch(r"lockstep_[a-z][a-z0-9_]*", metric.prometheus)
        assert len({each.prometheus for each in ALL}) == len(ALL)
        ours = re.search(r"_(s|bytes|percent|share|w|c|per_s)$", metric.name)
        if ours is not None:  # a number with a unit has the base unit at the end of its name there, too
            assert re.search(rf"_{units}(?:_total)?$", metric.prometheus), metric


def test_every_figure_of_a_rank_is_given():
    rank = RankMeans(0, "cpu")
    rank.add(StepLine(step=0, time=0.0, times=StepTimes(**dict.fromkeys(TIMES, 0.001)), samples=1))
    rank.machine(MachineSampler([torch.device("cpu")])())
    (given,) = with_waits([rank.read()[0]])
    assert set(given.values) == {metric.name.removeprefix("rank/") for metric in figures.RANK_METRICS}


def test_the_dashboard_and_the_alerts_name_what_there_is():
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [each["query"]["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    used = set(re.findall(r"\blockstep_\w+", " ".join([*expressions, *variables])))
    known = {*FROZEN.values(), *OWN}
    assert len(used) > 25 and used <= known
    # Each of them is of the run that was chosen.
    assert all(expression.count("lockstep_") == expression.count('instance=~"$instance"') for expression in expressions)
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)
    assert [panel["id"] for panel in dashboard["panels"]] == list(range(1, len(places) + 1))
    on_page = set(re.findall(r"\blockstep_\w+", (DOCS / "watching.md").read_text()))
    assert len(on_page) >= 5 and on_page <= known


def test_scalars_are_what_the_snapshot_says():
    found = scalars(snapshot(9, event_counts={"checkpoint": 2, "remark": 1}))
    expected = {
        "train/step": 9,
        "train/num_steps": 100,
        "train/loss": 0.4,
        "train/ranks": 2,
        "train/restarts": 1,
        "train/skipped_steps": 0,
        "time/step_s": 0.1,
        "time/slowest_rank": 1,
        "time/forward_share": 0.3,
        "time/wire_share": 0.1,
        "time/peers_share": 0.1,
        "rank/own_s_min": 0.07,
        "rank/own_s_min_rank": 0,
        "rank/own_s_median": 0.08,
        "rank/own_s_max": 0.09,
        "rank/own_s_max_rank": 1,
        "rank/cpu_percent_max": 150,
        "events/checkpoint": 2,
        "events/remark": 1,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
    assert all(type(value) is float for value in found.values())
    # What is not known is not there.
    assert not {"train/epoch", "train/grad_norm", "rank/gpu_percent_max"} & set(found)


def test_a_step_of_which_nothing_is_known_has_no_shares():
    found = scalars(snapshot(0, ranks=()))
    assert not [name for name in found if name.startswith(("time/", "rank/"))]


def test_evaluations_keep_their_step_and_names_that_every_sink_takes():
    scores = {"loss": 0.5, "top 5/accuracy": 0.75}
    written = []
    sink = SimpleNamespace(_write=lambda step, time_s, values, event: written.append((step, time_s, values)))
    MetricsSink.event(sink, event("evaluation", 8, metrics=scores))
    MetricsSink.event(sink, event("remark", 9))
    assert written == [(8, 1e9 + 8, {"eval/loss": 0.5, "eval/top_5_accuracy": 0.75}), (9, 1e9 + 9, {})]


def test_a_session_that_said_neither_end_nor_stop_has_failed():
    found = [snapshot(9, event_counts=counts).has_failed for counts in ({}, {"error": 1}, {"end": 1}, {"stop": 1})]
    assert found == [True, True, False, False]
