"""`make gpu` where there is no GPU: it says so; and what it measures, tried out on CPU ranks."""

import ctypes
import json
import sys
import time

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from bench import gpu_proof, gpu_steps, gpu_waits
from bench.models import TINY_GPU_MODELS
from bench.report import gpu
from tests.models import soak


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Give ``run(*arguments)``: the exit status, what was printed, and what was kept."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu_proof", *arguments])
        monkeypatch.setattr(gpu_proof, "TRIALS", tmp_path)
        monkeypatch.setattr(gpu_proof, "RESULTS", tmp_path)
        status = gpu_proof.main()
        return status, capsys.readouterr().out, [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]

    return call


def test_without_a_gpu_it_says_so_in_one_line(run, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text = f"torch {torch.__version__} finds no CUDA GPU on this machine, so there is nothing to prove here.\n"
    assert run() == (2, text, [])


def test_a_section_that_is_cut_off_is_kept_and_listed(run):
    status, out, [kept] = run("--device", "cpu", "--only", "waits", "--minutes", "0.01")
    assert status == 0 and kept["gpus"]["number"] == 2
    assert kept["sections"]["waits"]["status"] == "cut off"
    assert "Section tests: it was not run." in kept["not_proved"] and "  - Section tests: it was not run.\n" in out
    assert any(line.startswith("Section waits: it was cut off after") for line in kept["not_proved"])
    assert "- waits: cut off" in gpu.block([kept])


@pytest.mark.soak
def test_the_library_is_compiled_where_it_is_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_proof, "LIBRARY", tmp_path / "_native.so")
    assert gpu_proof.compile_library() == ""
    assert ctypes.CDLL(str(tmp_path / "_native.so"))._handle
    monkeypatch.setattr(gpu_proof, "LIBRARY", tmp_path / "another.so")
    monkeypatch.setenv("CC", "false")
    assert "it could not be compiled: Command '['false'" in gpu_proof.compile_library()


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_all_sections(run):
    status, _, [kept] = run("--device", "cpu", "--minutes", "4")
    assert status == 0
    assert {name: section["status"] for name, section in kept["sections"].items()} == dict.fromkeys(
        gpu_proof.SHARES, "done"
    )
    assert (
        set(kept["sections"]["waits"]["passed"]) == set(gpu_waits.SETTINGS) == set(kept["sections"]["waits"]["waits"])
    )
    assert "| **`lockstep.fit`** |" in gpu.block([kept])


@pytest.mark.parametrize("name", ["2,000 tensors", *soak(["resnet50", "gpt 124M, 512 tokens"])])
def test_steps(ranks, name):
    def measure(world):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(gpu_steps, "WARM_UP_STEPS", 3)
            monkeypatch.setattr(gpu_steps, "MOST_STEPS", 2)
            return gpu_steps.measure(name, "cpu", time.time())

    first, second = ranks(2, warnings="default")(measure)
    assert first == second and first["missing"] == {}
    assert list(first["rounds_s"]) == list(gpu_steps.EAGER) == list(first["host_s"])
    assert shown(name, first) == [gpu.SHOWN[each] for each in gpu.SHOWN if each in gpu_steps.EAGER]


def shown(name, figures):
    return [row.split("|")[1].strip() for row in gpu.table(name, figures)[2:]]


def test_steps_of_one_rank(ranks):
    """A rank that is alone is measured with its buckets and collectives, too, and two replicas of it."""

    def measure(world):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(gpu_steps, "WARM_UP_STEPS", 3)
            monkeypatch.setattr(gpu_steps, "MOST_STEPS", 2)
            args = "2,000 tensors", "cpu", time.time()
            return gpu_steps.measure(*args), gpu_steps.measure_replicas(*args, 1), counts_of_collectives(world)

    [(steps, replicas, counts)] = ranks(1, warnings="default")(measure)
    assert list(steps["rounds_s"]) == [*gpu_steps.EAGER, "ours-alone"]
    assert gpu.SHOWN["ours-alone"] in shown("one", steps)
    assert shown("two replicas", replicas) == [gpu.SHOWN["single"], gpu.SHOWN["dp"]]
    assert counts["ours"] == counts["none"] == 0 < counts["ours-alone"]


def counts_of_collectives(world):
    """Return how many collectives a step of each contender calls."""
    workload = TINY_GPU_MODELS["2,000 tensors"]
    ranks, found = gpu_steps.ranks_of(workload, world, world.group), {}
    for name in ("none", "ours", "ours-alone"):
        trainee = gpu_steps.made(name, workload, ranks)
        trainee.step(ranks.batches[0])
        with CommDebugMode() as mode:
            trainee.step(ranks.batches[0])
        found[name] = mode.get_total_counts()
    return found
