"""`lockstep.monitor` on several ranks, and ``lockstep run --monitor`` on a script that knows nothing of it."""

import contextlib
import io
import json
import re
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigurationError, RankFailed
from lockstep.launcher.command import run as start
from lockstep.study.report.view import sentences, view_run
from tests.distributed.commands import lockstep as command

SLOW_S = 0.02


def train(world, wrap, folder, *, accumulate=1, slow_rank=None):
    """Train for some steps; return the weights, as lists."""
    torch.manual_seed(world.rank)
    model = wrap(nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)).double())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1 + world.rank)
    inputs = torch.randn(48, 6, generator=generator, dtype=torch.float64)
    loader = DataLoader(TensorDataset(inputs, inputs[:, :3].sin()), 4, shuffle=True, generator=generator)
    watch = None if folder is None else lockstep.monitor(model, optimizer, loader, run_dir=folder)
    for number, (batch, targets) in enumerate(loader):
        is_last = number % accumulate == accumulate - 1
        if world.rank == slow_rank:
            time.sleep(SLOW_S)  # not in forward or backward: before them, as a slow transform would be
        if is_last:
            nn.functional.mse_loss(model(batch), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            with model.no_sync():
                nn.functional.mse_loss(model(batch), targets).backward()
    if watch is not None:
        watch.finish()
    return [parameter.tolist() for parameter in model.parameters()]


@pytest.mark.flaky("compares waits with a sleep of 20 ms, which a rank without a core exceeds")
@pytest.mark.parametrize("engine", ["torch-ddp", "ddp"])
def test_both_engines_tell_what_they_wait_for_and_compute_the_same_bits(ranks, tmp_path, engine):
    def both(world):
        wrap = TorchDistributedDataParallel if engine == "torch-ddp" else lockstep.DistributedDataParallel
        plain = train(world, wrap, None, slow_rank=1)
        watched = train(world, wrap, tmp_path / "run", slow_rank=1)
        train(world, wrap, tmp_path / "accumulated", accumulate=3)
        return plain, watched

    for plain, watched in ranks(2)(both):
        assert plain == watched
    view = view_run(tmp_path / "run")
    assert view.run.gaps == []
    for record in view.run.ranks.values():
        assert [(step.step, step.samples) for step in record.steps] == [(number, 8) for number in range(12)]
        for step in record.steps:
            assert sum(step.times.parts().values()) <= step.times.total_s + 1e-6
    # Rank 1 is late, so rank 0 waits for it, and rank 1 for the wire alone.
    assert view.figures.critical.exposed_s is not None
    assert view.figures.by_rank[0].peers_s > SLOW_S / 2 > view.figures.by_rank[1].peers_s
    assert any(each.buckets for each in view.run.zero.timelines) == (engine == "ddp")
    session = view.run.last
    assert (session["settings"]["strategy"], session["backend"]) == (engine, "gloo")
    assert ("compression" in session["settings"]) == (engine == "ddp")
    assert (session["global_batch_size"], session["num_steps"]) == (8, 12)
    assert len(session["ranks"]) == 2
    view = view_run(tmp_path / "accumulated")
    for record in view.run.ranks.values():
        assert [step.samples for step in record.steps] == [24] * 4
        (timeline,) = record.timelines[:1] or [None]
        assert timeline is None or [phase for phase, _, _ in timeline.spans].count("backward") == 3


def test_an_optimizer_that_steps_within_backward_ends_the_step_with_it(ranks, tmp_path):
    def overlapping(world):
        model = lockstep.DistributedDataParallel(
            nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb=0.02
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.overlap_optimizer(optimizer)
        with lockstep.monitor(model, optimizer, run_dir=tmp_path) as watch:
            for _ in range(6):
                optimizer.zero_grad()
                model(torch.ones(2, 64)).sum().backward()
            return watch.num_steps

    assert ranks(2)(overlapping) == [6, 6]
    assert [(step.samples, step.learning_rate) for step in view_run(tmp_path).run.ranks[1].steps] == [(4, 0.1)] * 6


def test_a_folder_that_a_rank_cannot_write_to_is_an_error_on_all(ranks, tmp_path):
    (tmp_path / "file").write_text("")

    def fails(world):
        model = nn.Linear(2, 1)
        with pytest.raises(ConfigurationError) as error:
            lockstep.monitor(model, run_dir=tmp_path / "file" / "run" if world.rank else tmp_path / "run")
        assert not model._forward_hooks
        return str(error.value)

    text = f"Rank 1: Cannot record the run in {tmp_path}/file/run: Not a directory.\nName another folder"
    assert ranks(2)(fails) == [f"{text} (--run-dir DIR)."] * 2


SCRIPT = '''
"""A loop as tutorials have it, in the manner of a language model: dicts of tensors, a model that returns its loss."""
import os
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Texts(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, number):
        ids = torch.arange(number, number + 9) % 17
        return {"input_ids": ids[:-1], "labels": ids[1:]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(17, 32), nn.Linear(32, 17)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.5)
sampler = DistributedSampler(Texts(), seed=0)
loader, held_out = DataLoader(Texts(), 4, sampler=sampler), DataLoader(Texts(), 16)
# MONITOR
for epoch in range(2):
    sampler.set_epoch(epoch)
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        total = sum(model.module(**batch).loss for batch in held_out) + sum(model(**batch).loss for batch in held_out)
if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), sys.argv[1])
dist.destroy_process_group()
if len(sys.argv) > 2:
    sys.exit(int(sys.argv[2]))
'''


def check_record(folder, last_event, last_text):
    view = view_run(folder)
    assert view.run.gaps == []
    for record in view.run.ranks.values():
        assert [step.step for step in record.steps] == list(range(16))
        assert [step.samples for step in record.steps] == [8] * 16
        for part in ("data_wait", "forward", "backward", "optimizer", "exposed"):
            times = [step.times.part(part) for step in record.steps]
            assert min(times) >= 0 and sum(times) > 0  # of a step, it may all have been waiting for a core
        assert [step.learning_rate for step in record.steps] == [0.01] * 8 + [0.005] * 8
        events = [(event.event, event.step) for event in record.events]
        assert events == [("evaluation", 8), ("evaluation", 16), (last_event, 16)]
        assert record.events[-1].text == last_text
    assert view.run.last["settings"]["strategy"] == "torch-ddp"
    assert view.how("workers", 2) == "DataLoader(num_workers=2)"  # not --workers, which lockstep run refuses
    assert view.run.last["task"] == "train.py"
    assert (view.run.last["backend"], view.run.last["global_batch_size"]) == ("gloo", 8)
    assert view.figures.critical.exposed_s is not None
    assert sentences(view)[0].startswith("train.py trains ")


def test_a_script_that_knows_nothing_of_it_is_recorded_and_computes_the_same_bits(ranks, tmp_path):
    """What each rank of ``lockstep run --monitor`` does, on the ranks of the pool."""
    source = SCRIPT.replace('dist.init_process_group("gloo")', "").replace("dist.destroy_process_group()", "")

    def both(world):
        import os

        from lockstep.base import activity
        from lockstep.loop import monitor

        activity.now.step = (
            None  # what a `fit` on this rank of the pool has left: a process that runs `fit` is not watched
        )
        environment = {"RANK": str(world.rank), "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run"}
        os.environ.update(environment)
        argv = sys.argv
        try:
            for name in ("plain.pt", "watched.pt"):
                sys.argv = ["train.py", str(tmp_path / name)]
                if name == "watched.pt":
                    monitor.attach(str(tmp_path / "runs"))
                exec(compile(source, "train.py", "exec"), {"__name__": "__main__"})
            monitor._attached.stop()
            monitor._attached = None
        finally:
            sys.argv = argv
            for name in environment:
                del os.environ[name]

    ranks(2, warnings="ignore")(both)
    one, other = torch.load(tmp_path / "plain.pt"), torch.load(tmp_path / "watched.pt")
    assert all(torch.equal(one[name], other[name]) for name in one)
    check_record(tmp_path / "runs", "end", "16 steps done")


def test_the_report_knows_the_workers_of_the_prepared_loader_that_is_read(ranks, tmp_path):
    def run(world):
        data, model = TensorDataset(torch.ones(8, 4)), nn.Linear(4, 1)
        model, held_out, loader = lockstep.prepare(model, DataLoader(data, 8), DataLoader(data, 4, num_workers=1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, (x,) in enumerate(loader):
            if number == 0:
                watch = lockstep.monitor(model, optimizer, run_dir=tmp_path)
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        watch.close()
        return len(held_out)

    ranks(2)(run)
    assert view_run(tmp_path).number("workers") == 1


@pytest.mark.soak
def test_a_script_with_the_line_in_it_is_recorded_under_torchrun(tmp_path):
    line = 'import lockstep; watch = lockstep.monitor(model, optimizer, loader, run_dir="mine")'
    (tmp_path / "train.py").write_text(SCRIPT.replace("# MONITOR", line))
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
        "train.py",
        "x.pt",
    ]
    subprocess.run(torchrun, check=True, capture_output=True, timeout=100, cwd=tmp_path)
    check_record(tmp_path / "mine", "end", "16 steps done")
    lines = [json.loads(each) for each in (tmp_path / "mine" / "rank-1.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "start" and lines[0]["rank"] == 1
    assert any(each["kind"] == "machine" and each["rss_bytes"] > 2**24 for each in lines)


def test_wrong_uses_of_the_flag_are_named_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigurationError) as error:
        start(["--devices", "1", "--no-python", "--monitor", "runs", "true"])
    assert str(error.value) == (
        "--monitor records Python scripts, but --no-python starts any executable.\nLeave one out."
    )
    for flag, value in (("--view", "lines"), ("--log-to", "tensorboard:board")):
        with pytest.raises(ConfigurationError) as error:
            start(["--devices", "1", flag, value, "train.py"])
        assert str(error.value) == f"{flag} needs --monitor.\nAdd --monitor DIR, or omit {flag}."
    with pytest.raises(ConfigurationError) as error:
        start(["--devices", "1", "--monitor", "runs", "--log-to", "wandb", "train.py"])
    assert str(error.value) == "log_to='wandb' does not say where to write.\nGive wandb:[ENTITY/]PROJECT."


def test_figures_of_all_ranks_of_a_script_go_to_a_view_and_to_sinks(ranks, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def observe(world):
        from lockstep.telemetry import live_view

        model = lockstep.DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        shown, live_view._LINE_S, line_s = io.StringIO(), 0.0, live_view._LINE_S
        log_to = f"tensorboard:{tmp_path}/board"
        try:
            with contextlib.redirect_stdout(shown):
                watch = lockstep.monitor(model, optimizer, run_dir=tmp_path / "run", view="lines", log_to=log_to)
                for step in range(40):
                    loss = model(torch.ones(2, 4)).square().mean()
                    (tmp_path / f"{step} of {world.rank}").touch()
                    while not (tmp_path / f"{step} of 0").exists():  # it may have to wait for a core
                        time.sleep(0.001)
                    time.sleep(0.03 * world.rank)
                    loss.backward()
                    optimizer.step()
                    watch.loss(loss)
                watch.finish()
        finally:
            live_view._LINE_S = line_s
        return shown.getvalue()

    zero, one = ranks(2)(observe)
    assert one == ""
    assert zero.splitlines()[0] == f"metrics go to TensorBoard: tensorboard --logdir {tmp_path}/board"
    assert re.search(r"^step \d+  loss \d\.\d{4}  [\d.,]+ samples/s  .* rank 1 is slowest$", zero, re.MULTILINE)
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    last = {tag: board.Scalars(tag)[-1].value for tag in board.Tags()["scalars"]}
    assert (last["train/step"], last["train/ranks"]) == (40, 2)
    assert 1 in [scalar.value for scalar in board.Scalars("rank/own_s_max_rank")]  # the last is of a few steps
    assert "train/loss" in last and "train/num_steps" not in last
    (run,) = board.Tensors("run/text_summary")
    assert "| strategy | ddp |" in run.tensor_proto.string_val[0].decode()
    assert "events/end/text_summary" in board.Tags()["tensors"]


OTHERS = """
import sys, torch, lockstep
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
def train(number):
    for _ in range(number):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
train(5)
watch = lockstep.monitor(model, optimizer, run_dir=sys.argv[1])  # the script knows best
train(3)
raise RuntimeError("on purpose")
"""


def test_a_script_that_records_itself_is_left_to_that(tmp_path):
    (tmp_path / "others.py").write_text(OTHERS)
    flags = ("--monitor", "runs", "--log-to", "tensorboard:board", "--view", "lines")
    done = command("run", "--devices", "1", *flags, "others.py", "mine", cwd=tmp_path)
    assert done.code == 1 and "RuntimeError: on purpose" in done.err
    assert "metrics go to TensorBoard: tensorboard --logdir board" in done.out
    assert len(list((tmp_path / "board").iterdir())) == 1
    assert "lockstep: recorded in runs; read it with: lockstep report runs" in done.err.splitlines()
    for folder, num_steps, last in (("runs", 5, "end: 5 steps done"), ("mine", 3, "error: RuntimeError: on purpose")):
        record = view_run(tmp_path / folder).run.ranks[0]
        assert len(record.steps) == num_steps
        assert f"{record.events[-1].event}: {record.events[-1].text}" == last


def test_that_nothing_was_recorded_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lockstep.launcher.command.supervise", lambda *_, **__: None)
    (tmp_path / "idle.py").touch()
    start(["--devices", "1", "--monitor", "none", "idle.py"])

    def fail(*_, **__):
        raise RankFailed("Rank 0 failed: boom")

    # A rank that fails before its first step has a cause of its own.
    with monkeypatch.context() as context, pytest.raises(RankFailed):
        context.setattr("lockstep.launcher.command.supervise", fail)
        start(["--devices", "1", "--monitor", "none", "idle.py"])
    reason = "no rank ran forward and backward of a torch model that could be seen"
    assert capsys.readouterr().err == f"lockstep: nothing was recorded in none: {reason}\n"
