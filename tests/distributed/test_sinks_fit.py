"""`fit(log_to=...)`: figures of all ranks while it runs, one run over several sessions, errors on all ranks."""

import socket
import threading
import time
import urllib.request

import pytest

import lockstep
from lockstep.errors import ConfigurationError
from tests.training import make_task, mean_loss, samples


def fit(log_to, **settings):
    return lockstep.fit(make_task(eval_dataset=samples), quiet=True, log_to=log_to, **settings)


def test_figures_of_all_ranks_go_to_the_sinks_in_one_run_over_two_sessions(ranks, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_to = f"tensorboard:{tmp_path}/board"

    def train(world, steps):
        result = fit(log_to, checkpoint=tmp_path / "kept", steps=steps, eval_every=3, clip=1.0)
        return result.losses, [(each.step, each.metrics) for each in result.evaluations]

    (first, found), _ = ranks(2)(train, 6)
    (rest, _), _ = ranks(2)(train, 9)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()

    def shown(name):
        return {each.step: pytest.approx(each.value) for each in board.Scalars(name)}

    losses = [*first, *rest]
    steps = [each.step for each in board.Scalars("train/loss")]
    assert steps == sorted(set(steps)) and 9 in steps
    assert all(losses[step - 1] == loss for step, loss in shown("train/loss").items() if step)
    assert shown("train/ranks")[9] == 2 and shown("train/num_steps")[9] == 9
    assert next(iter(board.Scalars("rank/own_s_min"))).value > 0
    assert [shown("eval/loss")[step] == dict(found)[step]["loss"] for step in (3, 6)] == [True, True]
    (run,) = board.Tensors("run/text_summary")
    text = run.tensor_proto.string_val[0].decode()
    assert "| world_size | 2 |" in text and "| clip | 1.0 |" in text and "| version/torch |" in text
    assert 9 in {each.step for each in board.Tensors("events/end/text_summary")}
    assert 6 in {each.step for each in board.Tensors("events/resume/text_summary")}


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


def test_what_rank_zero_cannot_open_is_an_error_on_all(ranks):
    pytest.importorskip("prometheus_client")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        def train(world):
            began = time.monotonic()
            with pytest.raises(ConfigurationError) as error:
                fit(f"prometheus:0,prometheus:{port}", steps=3)
            return str(error.value), time.monotonic() - began < 10

        text = f"prometheus:{port} cannot be opened: Address already in use.\n"
        text += "Name another port in log_to, or 0 for any that is free."
        assert ranks(2)(train) == [(text, True)] * 2
