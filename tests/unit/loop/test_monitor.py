"""`lockstep.monitor` on loops in this process: it sees what they do, says what is wrong, and changes no bit."""

import copy
import io
import json
import re
import subprocess
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lockstep
from lockstep.errors import ConfigurationError
from lockstep.study.report.view import view_run

NUM_SAMPLES, BATCH = 36, 8


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(NUM_SAMPLES, 6, generator=generator), torch.randn(NUM_SAMPLES, 3, generator=generator)
    )


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


def make(lr=0.1):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=lr)


def train(model, optimizer, loader, *, epochs=2, accumulate=1, evaluate=None, watch=None):
    """A plain loop; returns its losses."""
    losses = []
    for _ in range(epochs):
        model.train()
        for number, (inputs, targets) in enumerate(loader):
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss / accumulate).backward()
            if watch is not None:
                watch.loss(loss)
            losses.append(loss.item())
            if (number + 1) % accumulate == 0:
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                if watch is not None:
                    watch.grad_norm(norm)
                optimizer.step()
                optimizer.zero_grad()
        if evaluate is not None:
            model.eval()
            with torch.no_grad():
                for inputs, _ in evaluate:
                    model(inputs)
    return losses


def steps_of(folder):
    view = view_run(folder)
    assert view.run.gaps == []
    return view.run.ranks[0].steps


def test_a_loop_is_recorded_and_not_a_bit_of_it_changes(tmp_path):
    def run(folder):
        model, optimizer = make()
        loader = DataLoader(data(), BATCH, shuffle=True, generator=torch.Generator().manual_seed(2))
        watch = None if folder is None else lockstep.monitor(model, optimizer, loader, run_dir=folder)
        losses = train(model, optimizer, loader, epochs=3, evaluate=DataLoader(data(), BATCH), watch=watch)
        if watch is not None:
            assert (watch.run_dir, watch.num_steps) == (folder, 15)
            watch.close()
            watch.close()
        return losses, [tensor.clone() for tensor in model.state_dict().values()], torch.random.get_rng_state()

    plain, watched = run(None), run(tmp_path)
    assert plain[0] == watched[0]
    assert all(torch.equal(one, other) for one, other in zip(plain[1], watched[1], strict=True))
    assert torch.equal(plain[2], watched[2])

    view = view_run(tmp_path)
    steps = view.run.ranks[0].steps
    assert [step.step for step in steps] == list(range(15))
    assert [step.loss for step in steps] == pytest.approx(watched[0], rel=1e-6)
    assert [step.samples for step in steps] == [8, 8, 8, 8, 4] * 3
    # A single one may be all waiting for a core.
    assert all(sum(step.times.part(name) for step in steps) > 0 for name in ("forward", "backward", "optimizer"))
    for step in steps:
        assert step.grad_norm > 0
        assert step.times.exposed_s == 0.0
        assert step.times.own_s == pytest.approx(step.times.total_s, abs=1e-6)  # nothing is waited for
        assert step.times.total_s <= step.lasted_s
        assert step.learning_rate == 0.1
    assert [line.step for line in view.run.ranks[0].timelines] == [4, 5, 6, 7]
    events = [(event.event, event.step) for event in view.run.ranks[0].events]
    assert events == [("evaluation", 5), ("evaluation", 10), ("evaluation", 15), ("end", 15)]
    session = view.run.last
    assert (session["num_steps"], session["num_parameters"]) == (15, 6 * 16 + 16 + 32 + 16 * 3 + 3)
    assert session["settings"]["strategy"] == "single"
    assert session["settings"]["workers"] == 0
    assert session["settings"]["pin_memory"] is False
    assert view.figures.critical.exposed_s is not None


def test_accumulation_other_loaders_and_two_optimizers(tmp_path):
    model, _ = make()
    optimizers = [torch.optim.SGD(model[0].parameters(), 0.1), torch.optim.SGD(model[4].parameters(), 0.2)]
    with lockstep.monitor(model, optimizers, run_dir=tmp_path) as watch:
        for loader in (DataLoader(Stream(), BATCH), DataLoader(data(), BATCH, num_workers=1)):
            for number, (inputs, targets) in enumerate(loader):
                nn.functional.mse_loss(model(inputs), targets).backward()
                if number % 2:
                    for optimizer in optimizers:
                        optimizer.step()
                        optimizer.zero_grad()
            del loader
        for inputs, targets in watch.batches(zip(*(part.split(9) for part in data().tensors), strict=True)):
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizers[0].step()
    steps = steps_of(tmp_path)
    assert [step.samples for step in steps] == [16, 16, 20, 16, 13, 9, 9, 9]
    assert {step.learning_rate for step in steps} == {0.1}
    assert all(step.loss is None and step.grad_norm is None for step in steps)


def test_a_step_that_grad_scaler_leaves_out_is_told(tmp_path):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    original = torch.amp.GradScaler.step
    with lockstep.monitor(model, run_dir=tmp_path) as watch:
        assert torch.amp.GradScaler.step is not original
        for number in range(4):
            loss = model(torch.randn(5, 6)).sum() * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert watch.num_steps == 4
    assert torch.amp.GradScaler.step is original
    assert scaler.get_scale() == 2.0
    run = view_run(tmp_path).run
    assert [step.samples for step in run.ranks[0].steps] == [5] * 4
    (skipped,) = [event for event in run.events if event.event == "skipped"]
    assert (skipped.step, skipped.text) == (3, "step 3: skipped by GradScaler, as the gradient was not finite")
    assert [json.loads(line)["data_wait_s"] for line in lines(tmp_path, "step")] == [None] * 4


def lines(folder, kind):
    return [line for line in (folder / "rank-0.jsonl").read_text().splitlines() if f'"kind":"{kind}"' in line]


def test_nothing_is_left_on_the_model_and_copies_are_not_watched(tmp_path):
    model, optimizer = make()
    loader, original = DataLoader(data(), BATCH), DataLoader.__iter__
    with lockstep.monitor(model, optimizer, loader, run_dir=tmp_path) as watch:
        twin = copy.deepcopy(model)
        kept = io.BytesIO()
        torch.save(model, kept)
        kept.seek(0)
        for each in (twin, torch.load(kept, weights_only=False)):
            each(torch.zeros(2, 6)).sum().backward()
        with warnings.catch_warnings(action="error"):
            pickle_me = model(torch.zeros(2, 6))
            torch.save(pickle_me.detach(), io.BytesIO())
        assert watch.num_steps == 0
    assert not model._forward_hooks and not model._forward_pre_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert DataLoader.__iter__ is original
    watch.loss(1.0)  # too late, and no harm
    with pytest.raises(ConfigurationError) as error:
        watch.grad_norm(torch.zeros(3))
    assert str(error.value) == ("The value to record has 3 elements.\nGive one number, such as the mean.")


def test_an_error_of_ours_ends_the_record_and_not_the_training(tmp_path, monkeypatch, capsys):
    model, optimizer = make()
    loader = DataLoader(data(), BATCH)
    with lockstep.monitor(model, optimizer, loader, run_dir=tmp_path) as watch:
        train(model, optimizer, loader, epochs=1)
        monkeypatch.setattr(watch.steps, "forward_ends", lambda _: 1 / 0)
        train(model, optimizer, loader, epochs=1)
    text = "the recording ended with an internal error: ZeroDivisionError: division by zero"
    assert capsys.readouterr().err == f"lockstep: {text}\n"
    run = view_run(tmp_path).run
    assert [event.text for event in run.events if event.event == "remark"] == [text]
    assert len(run.ranks[0].steps) == 5


SCRIPT = """
import torch
import lockstep
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
lockstep.monitor(model, optimizer)
for step in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
raise RuntimeError("on purpose")
"""


def test_a_script_may_end_in_any_way(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=100, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: on purpose\n")
    for code, last in ((3, ("error", "SystemExit: 3")), (0, ("end", "2 steps done"))):
        model, optimizer = make()
        with pytest.raises(SystemExit), lockstep.monitor(model, optimizer, run_dir=tmp_path / str(code)):
            for _ in range(2):
                model(torch.ones(2, 6)).sum().backward()
                optimizer.step()
            sys.exit(code)
        event = view_run(tmp_path / str(code)).run.events[-1]
        assert (event.event, event.text) == last
    run = view_run(tmp_path / "runs" / "train").run
    assert (run.events[-1].event, run.events[-1].text) == ("error", "RuntimeError: on purpose")
    assert [step.samples for step in run.ranks[0].steps] == [2, 2, 2]


def test_a_script_that_goes_on_adds_to_its_record(tmp_path):
    for first_step in (0, 5):
        model, optimizer = make()
        loader = DataLoader(data(), BATCH)
        with lockstep.monitor(model, optimizer, loader, run_dir=tmp_path, first_step=first_step):
            train(model, optimizer, loader, epochs=1)
    assert [step.step for step in steps_of(tmp_path)] == list(range(10))
    assert [session["first_step"] for session in view_run(tmp_path).run.sessions] == [0, 5]


def wrong(model=None, *args, **kwargs):
    with pytest.raises(ConfigurationError) as error:
        lockstep.monitor(make()[0] if model is None else model, *args, **kwargs)
    return str(error.value)


def test_wrong_input_is_named(tmp_path, monkeypatch):
    assert wrong(42) == (
        "model is of type int, which is not an nn.Module.\nGive the model that is called in training, or a list."
    )
    assert wrong(nn.ReLU()) == (
        "ReLU has no parameter that requires a gradient.\nGive the model that is called in training."
    )
    assert wrong(None, "sgd") == (
        "optimizer is of type str, which is not a torch.optim.Optimizer.\nGive the optimizer, or a list, or omit it."
    )
    assert wrong(None, make()[1]) == (
        "The optimizer AdamW updates no parameter of Sequential.\n"
        "Give the optimizer of this model; create it after wrapping the model."
    )
    assert wrong(None, None, range(3)) == (
        "loader is of type range, which is not a DataLoader, so waiting for its batches cannot be measured.\n"
        "Omit it, and write: for batch in watch.batches(loader), where watch is the result of monitor()."
    )
    assert wrong(first_step=-1) == "first_step is -1.\nGive the number of steps done before, at least 0."
    (tmp_path / "file").write_text("")
    assert wrong(run_dir=tmp_path / "file" / "run") == (
        f"Rank 0: Cannot record the run in {tmp_path}/file/run: Not a directory.\nName another folder (--run-dir DIR)."
    )
    with lockstep.monitor(make()[0], run_dir=tmp_path / "one"):
        assert wrong(run_dir=tmp_path / "two") == (
            f"This process is already being recorded, into {tmp_path}/one.\n"
            "Call close() on the result of monitor(), or give all models and optimizers in one call."
        )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert re.match("This process is one of 2 ranks, but has no process group yet.\nCall monitor", wrong())
