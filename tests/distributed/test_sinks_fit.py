"""`fit(log_to=...)`: figures of all ranks while it runs, one run over several sessions, errors on all ranks."""

import json
import socket
import threading
import time
import urllib.request

import pytest

import lockstep
from lockstep.errors import ConfigurationError
from tests.training import make_task, mean_loss, samples


def lines_of(path, kind):
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == kind]


def fit(log_to, **settings):
    return lockstep.fit(make_task(eval_dataset=samples), quiet=True, log_to=log_to, **settings)


def test_figures_of_all_ranks_go_to_the_sinks_in_one_run_over_two_sessions(ranks, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_to = [f"jsonl:{tmp_path}/out.jsonl", f"tensorboard:{tmp_path}/board"]

    def train(world, steps):
        result = fit(log_to, checkpoint=tmp_path / "kept", steps=steps, eval_every=3, clip=1.0)
        return result.losses, [(each.step, each.metrics) for each in result.evaluations]

    (first, found), _ = ranks(2)(train, 6)
    (rest, _), _ = ranks(2)(train, 9)
    out = tmp_path / "out.jsonl"
    runs = lines_of(out, "run")
    assert [run["first_step"] for run in runs] == [0, 6]
    config = runs[0]["config"]
    assert {"steps": 6, "clip": 1.0, "world_size": 2, "global_batch_size": 24, "task": "task"}.items() <= config.items()
    assert {"version/torch", "command", "host", "num_parameters"} <= set(config)
    metrics = lines_of(out, "metrics")
    steps = [line["step"] for line in metrics]
    assert steps == sorted(set(steps)) and {6, 9} <= set(steps)
    losses = [*first, *rest]
    for line in metrics:
        if line["step"]:
            assert line["metrics"]["train/loss"] == losses[line["step"] - 1]
    last = metrics[-1]["metrics"]
    assert (last["train/ranks"], last["train/num_steps"], last["rank/own_s_min"] > 0) == (2, 9, True)
    told = [(line["step"], line["metrics"]) for line in lines_of(out, "evaluation")]
    assert told[: len(found)] == [
        (step, {f"eval/{name}": value for name, value in each.items()}) for step, each in found
    ]
    events = [(line["event"], line["step"]) for line in lines_of(out, "event") if line["event"] != "remark"]
    assert [event for event in events if event[0] in ("end", "resume")] == [("end", 6), ("resume", 6), ("end", 9)]
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    shown = [(each.step, pytest.approx(each.value)) for each in board.Scalars("train/loss")]
    assert shown[-1] == (9, losses[8]) and [step for step, _ in shown] == sorted({step for step, _ in shown})


def test_the_page_for_prometheus_is_there_as_long_as_the_run(ranks):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    def train(world):
        pages, is_over = [], threading.Event()

        def watch():
            while not is_over.wait(0.05):
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                        pages.append(answer.read().decode())
                except OSError:
                    continue

        def loss(model, batch):
            time.sleep(0.02 * world.rank)
            return mean_loss(model, batch)

        thread = threading.Thread(target=watch)
        if world.is_rank_zero:
            thread.start()
        try:
            lockstep.fit(make_task(loss=loss), quiet=True, log_to=f"prometheus:{port}", steps=150)
        finally:
            is_over.set()
            if world.is_rank_zero:
                thread.join()
        return pages

    pages, _ = ranks(2)(train)
    last = dict(line.rsplit(" ", 1) for line in pages[-1].splitlines() if not line.startswith("#"))
    assert float(last["lockstep_train_steps_total"]) > 10
    own = [float(last[f'lockstep_rank_own_work_seconds{{rank="{rank}"}}']) for rank in range(2)]
    assert own[1] > 0.02 > own[0]
    assert last["lockstep_time_slowest_rank"] == "1.0"
    with socket.create_server(("127.0.0.1", port)):  # it is free again
        pass


def test_what_rank_zero_cannot_open_is_an_error_on_all(ranks, tmp_path):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def train(world):
            began = time.monotonic()
            with pytest.raises(ConfigurationError) as error:
                fit(f"jsonl:{tmp_path}/out.jsonl,prometheus:{port}", steps=3)
            return str(error.value), time.monotonic() - began < 10

        text = f"prometheus:{port} cannot be opened: Address already in use.\n"
        text += "Name another port in log_to, or 0 for any that is free."
        assert ranks(2)(train) == [(text, True)] * 2
