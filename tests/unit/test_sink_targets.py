"""What `log_to` asks for: read, checked, and opened all together or not at all."""

import socket
import sys
import threading

import pytest

from lockstep.errors import ConfigurationError
from lockstep.telemetry import sinks
from lockstep.telemetry.sinks import open_sinks, parse_targets, require_package
from lockstep.train.settings import FitSettings
from tests.unit.sinks_planted import facts


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
