"""The examples that use other libraries, and the one with a memory-mapped file, run as their first lines say."""

import json
import math
import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch

from lockstep.cli import main
from tests.distributed import commands

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """A folder of its own, no GPU, nothing from the Hub; what the command changes in this process is put back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, value in (("CUDA_VISIBLE_DEVICES", ""), ("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)


def test_workers_do_not_change_what_is_learnt_from_a_mapped_file(tmp_path, monkeypatch, capfd):
    file, script = tmp_path / "images.npy", str(EXAMPLES / "mapped_images.py")
    monkeypatch.setenv("MAPPED_IMAGES", str(file))
    assert main(["train", script]) == 2
    assert f"{file} does not exist.\n" in capfd.readouterr().err
    monkeypatch.setattr(sys, "argv", [script, "--images", "200"])
    sys.path.insert(0, str(EXAMPLES))
    made = runpy.run_path(script, run_name="__main__")
    assert file.stat().st_size // 200 == made["RECORD"].itemsize == 3 * 64 * 64 + 8
    assert set(made["mapped"](file)["label"]) == set(range(5))
    ends, train = [], ["train", script, "--strategy", "single", "--steps", "2", "--global-batch-size", "16"]
    for workers in ("0", "2"):
        assert main([*train, "--workers", workers]) == 0
        out = capfd.readouterr().out
        ends.append(re.findall(r"(?:evaluation: |last )loss [\d.]+", out))
    assert ends[0] == ends[1] and len(ends[0]) == 2


def test_the_language_model_is_compiled(capfd):
    """With a backend that generates no code, one of its four equal layers, and less data and text."""
    text = (EXAMPLES / "gpt.py").read_text()
    smaller = text.replace("NUM_LAYERS = 64, 128, 4, 4", "NUM_LAYERS = 64, 128, 4, 1")
    smaller = smaller.replace("NUM_TRAIN, NUM_TEST = 19_200, 256", "NUM_TRAIN, NUM_TEST = 64, 8")
    smaller = smaller.replace("range(300)", "range(60)")  # over the full context
    assert len(text) - len(smaller) == 7
    Path("gpt.py").write_text(smaller)
    torch.compiler.set_default_backend("aot_eager")
    try:
        how = ["--strategy", "single", "--steps", "3", "--global-batch-size", "4"]
        assert main(["train", "gpt.py", *how, "--compile"]) == 0
    finally:
        torch.compiler.set_default_backend(None)
    lines = capfd.readouterr().out
    assert re.search(r"3 steps in [\d.]+ s, of which the first took [\d.]+ s \(compiling\), [\d.]+ samples/s", lines)


def run_killed(example, number, lost):
    """Run an example on two ranks; rank ``lost`` is killed in its update with this number, once. Return the output."""
    script = Path("killed.py")
    script.write_text(
        f"""import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_pre_hook
sys.path.insert(0, {str(EXAMPLES)!r})

def count(optimizer, *_):
    global num_steps
    num_steps += 1
    if os.environ["RANK"] == os.environ.get("LOST") and num_steps == {number} and not os.path.exists("once"):
        open("once", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)

num_steps = 0
register_optimizer_step_pre_hook(count)
runpy.run_path({str(EXAMPLES / example)!r}, run_name="__main__")
"""
    )
    environ = {**os.environ, "LOST": lost}
    done = commands.lockstep("run", "--devices", "2", "--max-restarts", "3", str(script), env=environ)
    assert done.code == 0, done.err
    assert ("rank 1 was killed" in done.err) == bool(lost) and "restart" not in done.err
    assert len(re.findall(r"rank \d is process", done.out)) == 2 + bool(lost)
    return done.out


def test_a_loop_goes_on_with_the_same_bits_when_a_rank_is_killed():
    outputs = [run_killed("recovery_script.py", 50, lost) for lost in ("", "1")]
    found = [re.search(r"([\d.]+)% right, sum of the weights (\S+)", out).groups() for out in outputs]
    assert found[0] == found[1] and float(found[0][0]) > 97


def test_a_loop_with_two_updates_goes_on_when_a_rank_is_killed_and_from_its_checkpoint():
    """Rank 1 is killed between the two updates of a step; the second run begins at a checkpoint of the first."""
    found = []
    for lost in ("1", "", ""):
        out = run_killed("recovery_gan.py", 122, lost)
        found.append(re.search(r"after step (\d+): the mean images differ by ([\d.]+), (sum .*)", out).groups())
        if not found[1:]:
            shutil.rmtree("runs")
    assert [int(start) for start, *_ in found] == [0, 0, 100]
    assert len({tuple(rest) for _, *rest in found}) == 1 and float(found[0][1]) < 0.12


@pytest.mark.timeout(120)
def test_the_best_averaged_weights_are_the_same_on_one_and_two_devices_and_stay_after_a_resume():
    text = (EXAMPLES / "best_digits.py").read_text().split('"""')[1]
    command = text.partition("\n\n")[2].replace("\\\n", " ").split()
    assert command[:3] == ["lockstep", "train", "examples/best_digits.py"]
    outputs = []
    for devices in ("2", "1"):  # the second run is the resume of the first, and has nothing left to train
        words = command[3:]
        words[words.index("--devices") + 1] = devices
        done = commands.lockstep("train", str(EXAMPLES / "best_digits.py"), *words, "--reproducible", "4", timeout=100)
        assert done.code == 0, done.err
        outputs.append((done.out, Path("runs/best.safetensors").read_bytes()))
    (first, weights), (second, again) = outputs
    assert re.findall(r"stopped early: .*", first) == re.findall(r"stopped early: .*", second) != []
    assert weights == again
    assert re.search(r"^\d is taken for \d, \d times$", first, re.M)
    best = json.loads(Path("runs/best/best.json").read_text())
    assert best["metric"] == "accuracy" and best["value"] > 0.98
    assert max(float(found) for found in re.findall(r"accuracy ([\d.]+)$", first, re.M)) == round(best["value"], 4)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_adapter_has_the_same_bits_from_one_and_two_ranks_and_loads_again(monkeypatch):
    pytest.importorskip("peft")
    how = ["--precision", "bf16", "--clip", "1", "--reproducible", "4", "--steps", "3"]
    for folder in ("1", "2"):
        monkeypatch.setenv("ADAPTER", folder)
        done = commands.lockstep("train", str(EXAMPLES / "finetune.py"), "--devices", folder, *how, timeout=280)
        assert done.code == 0, done.err
        evaluated = float(re.search(r"evaluation: loss ([\d.]+)", done.out)[1])
        loaded = float(re.search(r"loaded again: perplexity ([\d.]+)", done.out)[1])
        assert loaded == pytest.approx(math.exp(evaluated), rel=0.02), "bf16 against float32"
    for file in ("adapter_model.safetensors", "tokenizer.json"):
        assert Path("1", file).read_bytes() == Path("2", file).read_bytes()


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_a_library_trains_alike_on_our_engine(library):
    pytest.importorskip(library)
    script = EXAMPLES / f"with_{library.replace('transformers', 'trainer')}.py"
    losses = {}
    for flag in ([], ["--adopt"]):
        done = commands.lockstep("run", "--devices", "2", *flag, str(script), timeout=280)
        assert done.code == 0, done.err
        engine, loss = re.search(r"engine ([\w.]+), \w+ loss (\d\.\d{6})", done.out).groups()
        losses[engine] = loss
    assert set(losses) == {"torch.nn.parallel.distributed", "lockstep.parallel.ddp.wrapper"}
    assert len(set(losses.values())) == 1
