"""Each sink as whoever reads it sees it: the file, the page, the event file, the calls of a service's client."""

import os
import resource
import socket
import sys
import time
import urllib.request
from types import ModuleType, SimpleNamespace

import pytest

from lockstep.telemetry.sinks import Delivery, MlflowRun, Prometheus, TensorBoard, WandbRun
from tests.unit.sinks_planted import CONFIG, counted, event, facts, feed, give, snapshot

EVALUATED = event("evaluation", 4, seconds=0.5, metrics={"loss": 0.25})


def test_tensorboard_reads_what_was_written_and_steps_done_again_but_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(f"{tmp_path}/run", facts())
    assert sink.where == f"metrics go to TensorBoard: tensorboard --logdir {tmp_path}/run"
    feed(sink, snapshot(4, EVALUATED), snapshot(4), snapshot(8, event("checkpoint", 8)))
    feed(TensorBoard(f"{tmp_path}/run", facts(first_step=5, is_fresh=False)), snapshot(6), snapshot(9))
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
