"""What `log_to` asks for: read, checked, and opened all together or not at all."""

import socket
import sys
import threading
import time
from dataclasses import replace

import pytest

from lockstep.errors import ConfigurationError
from lockstep.telemetry.sinks import factory
from lockstep.telemetry.sinks.base import SinkState
from lockstep.telemetry.sinks.factory import Target, open_here, opened_within, parse_targets, require_package
from lockstep.train.settings import FitSettings
from tests.unit.sinks_planted import event, facts, snapshot


def test_a_text_and_a_list_say_the_same():
    text = "tensorboard:runs/a, prometheus:9200,mlflow:http://host:5000,wandb:me/digits,mlflow"
    found = parse_targets(text)
    assert found == parse_targets(text.split(","))
    assert [str(target) for target in found] == [
        "tensorboard:runs/a",
        "prometheus:9200",
        "mlflow:http://host:5000",
        "wandb:me/digits",
        "mlflow:",
    ]
    assert FitSettings(log_to=text).log_to == tuple(map(str, found))


@pytest.mark.parametrize(
    ("place", "address"),
    [
        ("9200", ("127.0.0.1", 9200)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9200", ("::1", 9200)),
        ("host:1", ("host", 1)),
    ],
)
def test_prometheus_listens_on_loopback_if_no_host_is_given(place, address):
    assert parse_targets(f"prometheus:{place}")[0].address == address


@pytest.mark.parametrize(
    ("log_to", "text"),
    [
        (
            "csv:out",
            "log_to='csv:out' names no sink that there is.\nGive tensorboard:DIR, prometheus:[HOST:]PORT, "
            "wandb:[ENTITY/]PROJECT or mlflow:[URI].",
        ),
        ("tensorboard", "log_to='tensorboard' does not say where to.\nGive tensorboard:DIR."),
        ("prometheus:port", "log_to='prometheus:port' has no port at its end.\nGive prometheus:[HOST:]PORT."),
        ("prometheus:70000", "log_to='prometheus:70000' has a port above 65535.\nGive prometheus:[HOST:]PORT."),
        ("wandb:a/b/c", "log_to='wandb:a/b/c' has more than one slash.\nGive wandb:[ENTITY/]PROJECT."),
        ("mlflow:a,mlflow:a", "log_to names mlflow:a twice.\nLeave one of them out."),
        (
            "mlflow:https://me:secret@host",
            "The URI of mlflow in log_to has a password, which would stay in the records of the run.\n"
            "Set MLFLOW_TRACKING_URI to it, and give mlflow: without one.",
        ),
        ([], "log_to=[] is not allowed.\nGive a text, or several."),
        (3, "log_to=3 is not allowed.\nGive a text, or several."),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(log_to, text):
    with pytest.raises(ConfigurationError) as error:
        FitSettings(log_to=log_to)
    assert str(error.value) == text


def test_a_package_that_is_not_installed_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(factory.KINDS, "wandb", replace(factory.KINDS["wandb"], package="wandb_is_not_here"))
    with pytest.raises(ConfigurationError) as error:
        require_package(Target("wandb", "digits"))
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
        before = threading.active_count()
        with pytest.raises(ConfigurationError) as error:
            open_here(targets, facts())
    assert str(error.value) == (
        f"prometheus:{port} cannot be opened: Address already in use.\n"
        "Name another port in log_to, or 0 for any that is free."
    )
    assert threading.active_count() == before  # the other server is gone


def test_a_folder_that_is_none_is_an_error(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    target = Target("tensorboard", f"{tmp_path}/file/out")
    with pytest.raises(ConfigurationError) as error:
        open_here([target], facts())
    assert str(error.value) == f"{target} cannot be opened: Not a directory.\nName another folder in log_to."


class Slow:
    """A sink that is there too late."""

    def __init__(self):
        self.is_closed = threading.Event()

    def close(self):
        self.is_closed.set()


def test_a_service_that_does_not_answer_is_given_up_and_closed_when_it_does():
    go_on, slow = threading.Event(), Slow()

    def make():
        go_on.wait(10)
        return slow

    began = time.monotonic()
    with pytest.raises(ConfigurationError) as error:
        opened_within(0.1, make, "mlflow:http://host", "Wait.")
    assert str(error.value) == "mlflow:http://host has not answered for 0.1 s.\nWait."
    assert time.monotonic() - began < 5
    go_on.set()
    assert slow.is_closed.wait(10)
    assert opened_within(10, make, "mlflow:", "Wait.") is slow


def test_what_a_library_raises_is_told_in_one_line(monkeypatch):
    def fail(target, facts):
        raise RuntimeError("no such experiment.\nAnd much more")

    monkeypatch.setattr(factory, "_make", fail)
    with pytest.raises(ConfigurationError) as error:
        open_here([Target("prometheus", "a")], facts())
    assert str(error.value) == (
        "prometheus:a cannot be opened: RuntimeError: no such experiment.\n"
        "Name another port in log_to, or 0 for any that is free."
    )


def news_of(state, *snapshots):
    """The steps that a state gives, and whether each is of an evaluation."""
    return [(step, "eval/loss" in values) for each in snapshots for step, _, values in state.news(each)]


def test_a_sink_remembers_its_run_and_its_last_step(tmp_path):
    first = SinkState("wandb:a", facts(memory=tmp_path))
    assert first.run_id is None
    first.begin("abc")
    assert news_of(first, snapshot(7, event("evaluation", 5, metrics={"loss": 1.0}))) == [(5, True), (7, False)]
    SinkState("mlflow:", facts(memory=tmp_path)).begin("def")
    again = SinkState("wandb:a", facts(memory=tmp_path, is_fresh=False))
    assert (again.run_id, again.last_step, again.last_evaluation) == ("abc", 7, 5)
    again.begin("abc")
    late = [event("evaluation", step, metrics={"loss": 1.0}) for step in (5, 6)]
    assert news_of(again, snapshot(7, *late), snapshot(8)) == [(6, True), (8, False)]
    again.begin("other")
    assert again.last_step == -1
    assert SinkState("wandb:a", facts(memory=tmp_path)).run_id is None  # a run that begins anew
    (tmp_path / "sinks.json").write_text("[")
    assert SinkState("wandb:a", facts(memory=tmp_path, is_fresh=False)).run_id is None
    nowhere = SinkState("wandb:a", facts(is_fresh=False))
    nowhere.begin("abc")
    assert [path.name for path in tmp_path.iterdir()] == ["sinks.json"]
