"""Each sink as whoever reads it sees it: the file, the page, the event file, the calls of a service's client."""

import json
import os
import re
import resource
import socket
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from lockstep.errors import ConfigurationError
from lockstep.telemetry import figures, sinks
from lockstep.telemetry.figures import Spread, scalars, with_waits
from lockstep.telemetry.record import StepLine
from lockstep.telemetry.recorder import RankMeans
from lockstep.telemetry.resources import MachineSampler
from lockstep.telemetry.sinks import (
    Delivery,
    MetricsSink,
    MlflowRun,
    Prometheus,
    TensorBoard,
    WandbRun,
    open_sinks,
    parse_targets,
    require_package,
)
from lockstep.telemetry.step_times import TIMES, StepTimes
from lockstep.train.settings import FitSettings
from tests.unit.telemetry.sinks_planted import CONFIG, counted, event, facts, feed, give, snapshot

EVALUATED = event("evaluation", 4, seconds=0.5, metrics={"loss": 0.25})


def test_tensorboard_reads_what_was_written_and_steps_done_again_but_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(f"{tmp_path}/run", facts())
    assert sink.where == f"metrics go to TensorBoard: tensorboard --logdir {tmp_path}/run"
    feed(sink, snapshot(4, EVALUATED), snapshot(4), snapshot(8, event("checkpoint", 8)))
    feed(TensorBoard(f"{tmp_path}/run", facts(first_step=4, is_fresh=False)), snapshot(6), snapshot(9))
    found = EventAccumulator(str(tmp_path / "run"))
    found.Reload()
    losses = [(each.step, each.wall_time, pytest.approx(each.value)) for each in found.Scalars("train/loss")]
    assert losses == [(step, 1e9 + step, 4 / (step + 1)) for step in (4, 6, 9)]
    assert [(each.step, each.value) for each in found.Scalars("eval/loss")] == [(4, 0.25)]
    assert found.Scalars("rank/own_s_max_rank")[-1].value == 1
    tags = found.Tags()
    assert "run/text_summary" in tags["tensors"] and "events/evaluation/text_summary" in tags["tensors"]
    text = found.Tensors("run/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text.startswith("| digits | |\n|---|---|\n| strategy | ddp |\n| seed | 3 |")
    # A run that begins anew in the same folder hides what was before.
    feed(TensorBoard(f"{tmp_path}/run", facts()), snapshot(3))
    found = EventAccumulator(str(tmp_path / "run"))
    found.Reload()
    assert [each.step for each in found.Scalars("train/loss")] == [3]


def test_a_full_disk_costs_tensorboard_one_warning(tmp_path, capfd):
    pytest.importorskip("tensorboard")
    sink = TensorBoard(f"{tmp_path}/run", facts())
    (path,) = (tmp_path / "run").iterdir()
    before, thread = resource.getrlimit(resource.RLIMIT_FSIZE), Delivery(sink)
    # As on a full disk, writes fail.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, before[1]))
    try:
        for step in range(3):
            thread.give(snapshot(step))
            time.sleep(0.05)
        thread.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (
        capfd.readouterr().err
        == "lockstep: TensorBoard gets no more figures of this run: OSError: [Errno 27] File too large\n"
    )


def page_of(sink):
    url = sink.where.removeprefix("metrics for Prometheus at ")
    with urllib.request.urlopen(url, timeout=10) as answer:
        return url, answer.read().decode()


def samples_in(page):
    return dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))


def test_prometheus_reads_the_last_snapshot_until_the_port_is_given_back():
    pytest.importorskip("prometheus_client")
    sink = Prometheus("0", facts())
    url, page = page_of(sink)
    port = int(url.split(":")[2].split("/")[0])
    info = 'global_batch_size="64",strategy="ddp",task="digits",version_torch="2.13.0"'
    assert samples_in(page) == {f"lockstep_run_info{{{info}}}": "1.0"}
    checkpoints = event("checkpoint", 8, seconds=0.5), event("checkpoint", 9, seconds=0.25)
    for each in counted(snapshot(4, EVALUATED), snapshot(9, *checkpoints)):
        give(sink, each)
    _, page = page_of(sink)
    found = samples_in(page)
    assert float(found.pop('lockstep_rank_own_work_seconds{rank="1"}')) == pytest.approx(0.09)
    assert {
        "lockstep_train_loss": "0.4",
        "lockstep_train_steps_total": "9.0",
        "lockstep_time_slowest_rank": "1.0",
        'lockstep_rank_info{device="cpu",host="here",rank="1"}': "1.0",
        'lockstep_rank_cpu_cores{rank="0"}': "1.5",
        'lockstep_eval{metric="loss"}': "0.25",
        'lockstep_events_total{event="checkpoint"}': "2.0",
        "lockstep_updated_timestamp_seconds": "1.000000009e+09",
    }.items() <= found.items()
    assert not [name for name in found if "gpu" in name or "gradient_norm" in name]
    assert "# TYPE lockstep_train_steps_total counter\n" in page and "# TYPE lockstep_train_loss gauge\n" in page
    assert "# HELP lockstep_train_loss loss of the last step, the mean over its global batch\n" in page
    sink.update(snapshot(10, ranks=()))  # what is not known any more is not shown any more
    assert not [name for name in samples_in(page_of(sink)[1]) if name.startswith("lockstep_rank_")]
    sink.close()
    with socket.create_server(("127.0.0.1", port)):  # nobody else has it
        pass


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_does_not_keep_the_port():
    pytest.importorskip("prometheus_client")
    sink = Prometheus("0", facts())
    if not (child := os.fork()):
        os._exit(int(sink._server.fileno() != -1))
    assert os.waitpid(child, 0)[1] == 0
    assert "lockstep_run_info" in page_of(sink)[1]  # the parent has it still
    sink.close()


class FakeRun:
    """What is used of a run of W&B."""

    offline = True
    dir = "offline/files"

    def __init__(self, calls):
        self._calls = calls

    def log(self, data, step=None):
        self._calls.append(("log", step, data))

    def finish(self, exit_code=None):
        self._calls.append(("finish", exit_code))


@pytest.fixture
def wandb(monkeypatch):
    """Put a client that only remembers what it is told in the place of W&B's; its signatures are that one's."""
    calls = []

    def init(
        *,
        entity=None,
        project=None,
        id=None,
        resume=None,
        config=None,
        allow_val_change=None,
        reinit=None,
        settings=None,
    ):
        calls.append(("init", entity, project, id, resume, config))
        return FakeRun(calls)

    fake = ModuleType("wandb")
    fake.init, fake.Settings = init, lambda **settings: SimpleNamespace(**settings)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return calls


def test_wandb_gets_one_run_with_steps_that_grow(wandb, tmp_path):
    sink = WandbRun("me/digits", facts(memory=tmp_path))
    run_id = wandb[0][3]
    assert wandb == [("init", "me", "digits", run_id, "allow", CONFIG)]
    assert len(run_id) == 8
    assert sink.where == f"metrics go to Weights & Biases: run {run_id}, offline in offline/files"
    feed(sink, snapshot(5, EVALUATED), snapshot(8), snapshot(8, event("error", 8)))
    assert [call[:2] for call in wandb[1:]] == [("log", 4), ("log", 5), ("log", 8), ("finish", 1)]
    assert wandb[1][2] == {"eval/loss": 0.25}
    assert wandb[3][2]["train/loss"] == pytest.approx(4 / 9)
    wandb.clear()

    WandbRun("me/other", facts(memory=tmp_path))
    sink = WandbRun("me/digits", facts(first_step=4, is_fresh=False, memory=tmp_path))
    feed(sink, snapshot(9, event("end", 9)))
    assert [call[3] == run_id for call in wandb[:2]] == [False, True]  # it goes on in the same run
    assert [call[:2] for call in wandb[2:]] == [("log", 9), ("finish", 0)]


@pytest.mark.parametrize("kept", ["[", "7"])
def test_wandb_begins_a_run_where_none_is_remembered(wandb, tmp_path, kept):
    (tmp_path / "sinks.json").write_text(kept)
    WandbRun("me/digits", facts(is_fresh=False, memory=tmp_path))
    WandbRun("me/digits", facts(is_fresh=False))
    WandbRun("me/digits", facts(memory=tmp_path))
    assert len({call[3] for call in wandb}) == 3


class FakeMlflow:
    """What is used of MLflow's client; keeps what it is given."""

    calls: list[tuple]

    def __init__(self, tracking_uri=None):
        self.tracking_uri = tracking_uri or "the default"

    def get_experiment_by_name(self, name):
        self.calls.append(("experiment", name))

    def create_experiment(self, name):
        return f"number of {name}"

    def create_run(self, experiment_id, run_name=None):
        self.calls.append(("run", experiment_id, run_name))
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def log_batch(self, run_id, metrics=(), params=()):
        assert len(metrics) <= 1000 and len(params) <= 100
        found = {each.key: each.value for each in (*metrics, *params)}
        self.calls.append(("batch", run_id, {each.step for each in metrics}, found))

    def get_metric_history(self, run_id, key):
        assert (run_id, key) == ("abc", "train/loss")
        return [SimpleNamespace(step=step) for call in self.calls if call[0] == "batch" for step in call[2]]

    def update_run(self, run_id, status=None):
        self.calls.append(("update", run_id, status))

    def set_terminated(self, run_id, status=None):
        self.calls.append(("end", run_id, status))


def test_mlflow_gets_one_run_with_parameters_once_and_steps_that_grow(tmp_path, monkeypatch):
    fake, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    fake.MlflowClient = FakeMlflow
    FakeMlflow.calls = calls = []
    entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)
    entities.Param = lambda key, value: SimpleNamespace(key=key, value=value)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    sink = MlflowRun("http://host", facts(memory=tmp_path))
    assert sink.where == "metrics go to MLflow: run abc at http://host"
    assert calls == [
        ("experiment", "mine"),
        ("run", "number of mine", "digits"),
        ("batch", "abc", set(), {name: str(value) for name, value in CONFIG.items()}),
        ("update", "abc", "RUNNING"),
    ]
    calls.clear()
    feed(sink, snapshot(5, EVALUATED), snapshot(8, event("error", 8)))
    assert calls[0] == ("batch", "abc", {4}, {"eval/loss": 0.25})
    assert [call[2] for call in calls[1:3]] == [{5}, {8}]
    assert calls[3:] == [("end", "abc", "FAILED")]
    del calls[3:]
    # It goes on in the same run, behind the last step that MLflow has.
    sink = MlflowRun("http://host", facts(first_step=4, is_fresh=False, memory=tmp_path))
    feed(sink, snapshot(6), snapshot(9, event("end", 9)))
    assert calls[3] == ("update", "abc", "RUNNING")
    assert [call[2] for call in calls[4:-1]] == [{9}]
    assert calls[-1] == ("end", "abc", "FINISHED")


# Names of the live figures: frozen, documented, by Prometheus' rules, and what they are in a snapshot.


DOCS = Path(__file__).parents[3] / "docs"

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


# What `log_to` asks for: read, checked, and opened all together or not at all.


def open_here(targets):
    opened, problem = open_sinks(targets, facts())
    if problem is not None:
        raise ConfigurationError(problem)
    return opened


def test_a_text_and_a_list_say_the_same():
    text = "tensorboard:runs/a, prometheus:9200,mlflow:http://host:5000,wandb:me/digits,mlflow,tensorboard:runs/a"
    found = parse_targets(text)
    assert found == parse_targets(text.split(","))
    assert found == ("tensorboard:runs/a", "prometheus:9200", "mlflow:http://host:5000", "wandb:me/digits", "mlflow:")
    assert FitSettings(log_to=text).log_to == found


@pytest.mark.parametrize(("place", "host"), [("0", "127.0.0.1"), ("0.0.0.0:0", "0.0.0.0"), ("[::1]:0", "[::1]")])
def test_prometheus_listens_on_loopback_if_no_host_is_given(place, host):
    pytest.importorskip("prometheus_client")
    (sink,) = open_here(parse_targets(f"prometheus:{place}"))
    assert sink.where == f"metrics for Prometheus at http://{host}:{sink._server.server_port}/metrics"
    assert sink._server.server_address[0] == host.strip("[]")
    sink.close()


@pytest.mark.parametrize(
    ("log_to", "text"),
    [
        (
            "csv:out",
            "log_to='csv:out' does not name a known sink.\nGive one of tensorboard:DIR, prometheus:[HOST:]PORT, "
            "wandb:[ENTITY/]PROJECT, mlflow:[URI].",
        ),
        ("tensorboard", "log_to='tensorboard' does not say where to write.\nGive tensorboard:DIR."),
        ("prometheus:port", "log_to='prometheus:port' does not say where to write.\nGive prometheus:[HOST:]PORT."),
        ("wandb:a/b/c", "log_to='wandb:a/b/c' does not say where to write.\nGive wandb:[ENTITY/]PROJECT."),
        (
            "mlflow:https://me:secret@host",
            "The URI of mlflow in log_to contains a password, which would be kept in the record of the run.\n"
            "Set MLFLOW_TRACKING_URI to the URI, and give mlflow: without one.",
        ),
        ([], "log_to=[] is not allowed.\nGive a string, or several."),
        (3, "log_to=3 is not allowed.\nGive a string, or several."),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(log_to, text):
    with pytest.raises(ConfigurationError) as error:
        FitSettings(log_to=log_to)
    assert str(error.value) == text


def test_a_package_that_is_not_installed_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(sinks.WandbRun, "package", "wandb_is_not_here")
    with pytest.raises(ConfigurationError) as error:
        require_package("wandb:digits")
    assert str(error.value) == (
        "wandb:digits needs the package wandb_is_not_here, which is not installed on rank zero's machine.\n"
        "pip install 'lockstep-torch[wandb]'"
    )
    assert "wandb_is_not_here" not in sys.modules


def test_all_are_opened_or_none(tmp_path):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        targets = parse_targets(["prometheus:0", f"prometheus:{port}"])
        with pytest.raises(ConfigurationError) as error:
            open_here(targets)
    assert str(error.value) == (
        f"prometheus:{port} cannot be opened: Address already in use.\n"
        "Name another port in log_to, or 0 for any that is free."
    )
    assert not [
        thread for thread in threading.enumerate() if "serve_forever" in thread.name
    ]  # the other server is gone


def test_a_folder_that_is_none_is_an_error(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    target = f"tensorboard:{tmp_path}/file/out"
    with pytest.raises(ConfigurationError) as error:
        open_here([target])
    assert str(error.value) == f"{target} cannot be opened: Not a directory.\nName another folder in log_to."


def test_a_service_that_does_not_answer_is_given_up(monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(sinks, "OPEN_TIMEOUT_S", 0.1)

    def hang(sink, place, run):
        answer.wait(10)

    monkeypatch.setattr(sinks.Prometheus, "__init__", hang)
    with pytest.raises(ConfigurationError) as error:
        open_here(["prometheus:a"])
    answer.set()
    assert str(error.value).startswith("prometheus:a cannot be opened: TimeoutError: no answer in 0.1 s.\n")


def test_what_a_library_raises_is_told_in_one_line(monkeypatch):
    def fail(sink, place, run):
        raise RuntimeError("no such experiment.\nAnd much more")

    monkeypatch.setattr(sinks.Prometheus, "__init__", fail)
    with pytest.raises(ConfigurationError) as error:
        open_here(["prometheus:a"])
    assert str(error.value) == (
        "prometheus:a cannot be opened: RuntimeError: no such experiment.\n"
        "Name another port in log_to, or 0 for any that is free."
    )
