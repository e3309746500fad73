"""`make gpu` where there is no GPU: it says so; and what it measures, tried out on CPU ranks."""

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from bench import contenders, gpu_proof, gpu_steps, gpu_tests, gpu_waits
from bench.models import TINY_GPU_MODELS
from bench.report import gpu
from lockstep.errors import LaunchTimeout, LockstepError, RankFailed
from tests.gpu import test_one_gpu
from tests.gpu.test_ranks_gpu import Scenarios
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


@pytest.mark.parametrize("only", [(), ("--only", "waits")])
def test_what_is_missing_is_named_at_once(run, monkeypatch, capsys, only):
    find = importlib.util.find_spec
    absent = {"rich", "pytest"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else find(name))
    monkeypatch.setattr(sys, "argv", ["gpu_proof", *only])
    assert gpu_proof.main() == 1
    names = "rich" if only else "rich pytest"
    assert capsys.readouterr().err.startswith(f"These Python packages are missing: {names}. Python: {sys.executable}\n")


def test_a_section_that_is_cut_off_has_failed_and_says_where(run, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("import time\ndef hang(): time.sleep(600)\nhang()\n")  # the section's only
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(gpu_proof, "STACKS_S", 0.5)
    out = tmp_path / "out"
    status, printed, [kept] = run("--device", "cpu", "--only", "waits", "--minutes", "0.05", "--out", str(out))
    section = kept["sections"]["waits"]
    assert status == 1 and section["status"] == "failed"
    # What comes before the section is part of the time.
    assert re.fullmatch("cut off after -?[0-3] s without a result", section["problems"][-1])
    assert any("most recent call first" in line for line in section["output"])
    assert any(line.endswith(" in hang") for line in section["output"])
    assert "Section tests: it was not run." in kept["not_proved"] and "  - Section tests: it was not run.\n" in printed
    assert "Failed: waits\n" in printed
    assert "- waits: failed" in gpu.block([kept])
    assert json.loads((out / "gpu-cpux2.json").read_text()) == kept
    assert (out / "gpu-cpux2-waits.log").read_text().splitlines()[-1] == section["output"][-1]


@pytest.mark.parametrize("number", [*soak([signal.SIGINT]), signal.SIGTERM])  # they have the same handler
def test_what_was_found_before_a_signal_is_kept(tmp_path, number):
    words = ["--device", "cpu", "--only", "waits", "--minutes", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.gpu_proof", *words], cwd=gpu_proof.REPO, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    has_begun = False
    while not has_begun:
        with contextlib.suppress(psutil.Error):  # other children end meanwhile
            has_begun = any("--section" in child.cmdline() for child in psutil.Process(process.pid).children())
        time.sleep(0.05)
    process.send_signal(number)
    out, _ = process.communicate()
    kept = json.loads((tmp_path / "gpu-cpux2.json").read_text())
    assert process.returncode == 130 and kept["sections"]["waits"]["status"] == "stopped"
    assert "Nothing failed." in out and any(
        line.startswith("Section waits: it was stopped") for line in kept["not_proved"]
    )


def test_two_ranks_share_a_device(monkeypatch):
    """As the tests on one GPU start them, here on the CPU."""
    monkeypatch.setattr(test_one_gpu, "DEVICE", "cpu")

    def work(world):
        return world.rank, os.environ["NCCL_HOSTID"]

    assert test_one_gpu.on_one_gpu("gloo", work) == [(0, "rank 0"), (1, "rank 1")]


def test_what_came_through_before_a_job_ends_has_passed(tmp_path, monkeypatch):
    """A job ends with its scenario that fails, or with its time; the test behind begins another one."""
    ends = [(2, LaunchTimeout("late")), (1, RankFailed("broken")), (0, LaunchTimeout("hung")), (2, None)]
    names, jobs = list("abcdefghi"), []

    def run(fn, left, folder, timeout_s):
        num_passed, error = ends[len(jobs)]
        jobs.append("".join(left))
        for number in range(num_passed):
            Path(folder, f"{number}").touch()
        if error is not None:
            raise error

    def new_folder():
        folder = tmp_path / str(len(jobs))
        folder.mkdir(exist_ok=True)
        return folder

    def ends_of(scenarios, names):
        for name in names:
            try:
                scenarios.check(name)
                yield name
            except (LockstepError, pytest.skip.Exception) as error:
                yield str(error)

    scenarios = Scenarios(run, new_folder, 200.0, names)
    assert list(ends_of(scenarios, "bcdefgh")) == ["b", "c", "d", "broken", "hung", "g", "h"]
    assert jobs == ["bcdefghi", "defghi", "fghi", "ghi"]  # the test of `a` ended in another process
    monkeypatch.setenv(gpu_tests.TEST_END, str(time.time() + 15))
    [late] = ends_of(Scenarios(run, new_folder, 200.0, names), "a")
    assert late.startswith("not reached") and len(jobs) == 4


STUCK = """
import os, subprocess, sys
import pytest
from bench import gpu_tests
gpu_tests.STACKS_S = 1.0

def test_passes(): pass

def test_fails(): assert 1 == 2

def test_hangs():
    program = "def stuck(): input()\\nstuck()"
    subprocess.run([sys.executable, "-X", "faulthandler", "-c", program], stdin=os.pipe()[0], check=True)

@pytest.mark.timeout(5)
def test_behind(): pass

def test_dies(): os._exit(7)

@pytest.mark.skip(reason="because")
def test_skipped(): pass
"""


def test_tests_that_hang_or_die_are_named_and_the_others_run(tmp_path):
    (tmp_path / "test_stuck.py").write_text(STUCK)
    (tmp_path / "test_one.py").write_text("def test(): pass")
    (tmp_path / "test_broken.py").write_text("import nothing_there")
    files = [tmp_path / f"test_{name}.py" for name in ("stuck", "one", "broken")]
    kept = []
    found = gpu_tests.run(files, 200.0, tmp_path, kept.append, root=tmp_path, test_s=3.0)
    assert sorted(found["problems"]) == [
        "test_broken.py error",
        "test_stuck.py::test_dies failed",
        "test_stuck.py::test_fails failed",
        "test_stuck.py::test_hangs hung",
    ]
    assert found["counts"] == {"passed": 3, "failed": 2, "hung": 1, "skipped": 1, "error": 1}
    reason = found["reasons"]["test_stuck.py::test_hangs"]
    assert reason.startswith("It did not end within 3 s.\n") and "in test_hangs" in reason and "in stuck" in reason
    assert "assert 1 == 2" in found["reasons"]["test_stuck.py::test_fails"]
    assert "exit status 7" in found["reasons"]["test_stuck.py::test_dies"]
    assert found["left_out"] == [] and kept[-1] == found


def test_what_there_is_no_time_for_is_listed(tmp_path):
    (tmp_path / "test_long.py").write_text("import time\ndef test_long(): time.sleep(90)\ndef test_late(): pass")
    found = gpu_tests.run([tmp_path / "test_long.py"] * 2, 14.0, tmp_path, lambda found: None, root=tmp_path)
    assert found["problems"] == []
    assert found["left_out"] == [
        "test_long.py::test_long (its time was too short)",
        "test_long.py::test_late",
        "test_long.py",
    ]


def test_the_time_of_a_file_begins_when_its_tests_are_collected(tmp_path, monkeypatch):
    watch = gpu_tests.Watch(tmp_path / "notes.jsonl", 100.0, 5e9, 90.0)
    watch.stacks.close()
    watch.pytest_collection_finish(SimpleNamespace(items=[]))
    assert watch.end == pytest.approx(time.time() + 100, abs=60)
    monkeypatch.setattr(gpu_tests, "START_S", 1.0)
    monkeypatch.setattr(gpu_tests, "END_S", 0.5)
    (tmp_path / "test_slow.py").write_text("import time; time.sleep(90)")
    found = gpu_tests.run([tmp_path / "test_slow.py"], 50.0, tmp_path, lambda found: None, root=tmp_path)
    assert found["problems"] == ["test_slow.py error"]
    assert found["reasons"]["test_slow.py"].startswith("pytest had not collected the tests after 1 s")


def test_the_order_names_files_that_are_there():
    names = [path.name for path in gpu_tests.files_in_order(gpu_proof.REPO / "tests/gpu")]
    assert names[0] == "test_ranks_gpu.py" and names[-1] == "test_ddp_graph.py"
    assert set(gpu_tests.ORDER) - {"test_one_gpu.py"} < set(names)


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


@contextlib.contextmanager
def broken_contenders(failing_rank, error):
    """Have ``torch`` lack memory on rank 1, and ``torch-view`` fail, in the second step of a rank or on all at once."""

    def without_memory(model, ranks):
        if torch.distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("no memory\nat all")
        return contenders.none(model, ranks)

    def failing(model, ranks):
        step, calls = contenders.ours(model, ranks), []

        def fail(batch):
            calls.append(1)
            if failing_rank is None or (len(calls), torch.distributed.get_rank()) == (2, failing_rank):
                raise error("broken\nin two lines")
            step(batch)

        return fail

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(gpu_steps, "EAGER", ("torch", "torch-view", "ours", "fit"))
        monkeypatch.setattr(gpu_steps, "WARM_UP_STEPS", 3)
        monkeypatch.setattr(gpu_steps, "MOST_STEPS", 2)
        monkeypatch.setattr(gpu_steps, "AGREE_S", 1.0)
        monkeypatch.setitem(contenders.MAKE, "torch", without_memory)
        monkeypatch.setitem(contenders.MAKE, "torch-view", failing)
        yield


def test_a_contender_that_fails_is_missing_and_the_others_are_measured(ranks, tmp_path):
    def measure(world):
        with broken_contenders(None, ValueError):
            return gpu_steps.measure("2,000 tensors", "cpu", time.time(), {}, str(tmp_path / "notes.json"))

    first, second = ranks(2, warnings="default")(measure)
    assert first == second and list(first["rounds_s"]) == ["ours", "fit"]
    lacking = "no memory for it on rank 1: no memory"
    assert first["missing"] == {"torch": lacking, "torch-view": "failed on rank 0: ValueError: broken"}
    assert list(first["failed"]) == ["torch-view"] and "in fail\n" in first["failed"]["torch-view"]
    assert json.loads((tmp_path / "notes.json").read_text())["failed"] == first["failed"]


@pytest.mark.parametrize("error", [ValueError, torch.OutOfMemoryError])
def test_a_model_is_measured_without_the_contender_that_breaks_its_job(error):
    """One rank fails while the other one waits for it in a collective."""

    def measure(*args):
        with broken_contenders(1, error):
            return gpu_steps.measure("2,000 tensors", "cpu", *args)

    figures = gpu_proof.measure_model(1.0, time.time() + 200, 2, measure)
    assert list(figures["rounds_s"]) == ["ours", "fit"] and list(figures["missing"]) == ["torch-view", "torch"]
    if error is ValueError:
        text = figures["failed"].pop("torch-view")
        assert "ValueError: broken" in text and "The other ranks have not come within 1 s." in text
    assert figures["failed"] == {}


class Graph:
    """Stands in for CUDA's; to end a capture that an error broke is an error."""

    def __init__(self, leaves_open):
        self.leaves_open, self.is_capturing, self.is_broken, self.calls = leaves_open, False, False, []

    def capture_end(self):
        self.is_capturing = False
        self.calls.append("end")
        if self.is_broken:
            raise RuntimeError("the capture was broken before")

    def replay(self):
        self.calls.append("replay")

    def reset(self):
        self.calls.append("reset")

    @contextlib.contextmanager
    def capturing(self):
        self.is_capturing = True
        try:
            yield
        except BaseException:
            self.is_broken = True
            raise
        finally:
            if not (self.is_broken and self.leaves_open):
                self.capture_end()


@pytest.mark.parametrize(
    ("error", "leaves_open"), [(None, False), (torch.OutOfMemoryError("no memory"), False), (ValueError("bad"), True)]
)
def test_a_capture_is_ended_and_its_graph_is_released(monkeypatch, error, leaves_open):
    graph, parameter = Graph(leaves_open), torch.ones(1)
    is_kept = weakref.ref(parameter)

    def step(batch, parameter=parameter):
        if error is not None and graph.is_capturing:
            raise error

    trainees = [SimpleNamespace(step=step)]
    del step, parameter
    side = mock.MagicMock()
    monkeypatch.setattr(gpu_steps, "made", lambda *_: trainees.pop())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: graph.capturing())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: graph.is_capturing)
    for name in ("Stream", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda: side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    ranks = contenders.Ranks(None, None, [None], {}, torch.device("cpu"))
    with contextlib.ExitStack() as cleanup:
        if error is None:
            turn = gpu_steps.captured("ours", None, ranks, cleanup)
            turn()
            gc.collect()
            assert is_kept() is not None  # the replay writes there
        else:
            with pytest.raises(type(error), match=str(error)):
                gpu_steps.captured("ours", None, ranks, cleanup)
    assert graph.calls == ["end", "replay", "reset"] if error is None else ["end", "reset"]
    assert not graph.is_capturing


def test_ranks_that_are_late_are_told_apart(monkeypatch):
    """Those that have not started, and those that have not ended."""

    def start_and_stay():
        with gpu_steps.join("cpu"):
            time.sleep(90)

    with pytest.raises(TimeoutError, match=r"^it did not end within 1 s\n(.*\n)*.*in start_and_stay"):
        gpu_proof.launch_within(1.0, time.time() + 90, 1, start_and_stay)
    monkeypatch.setattr(gpu_proof, "START_S", 1.0)
    with pytest.raises(gpu_proof.NotStarted, match=r"^the ranks had not started within 1 s\n"):
        gpu_proof.launch_within(1.0, time.time() + 90, 1, time.sleep, 90)


def test_steps_of_one_rank(ranks):
    """A rank that is alone is measured with its buckets and collectives, too, and two replicas of it."""

    def measure(world):
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(gpu_steps, "WARM_UP_STEPS", 3)
            monkeypatch.setattr(gpu_steps, "MOST_STEPS", 2)
            args = "2,000 tensors", "cpu", time.time()
            return (
                gpu_steps.measure(*args),
                gpu_steps.measure_replicas(*args, num_devices=1),
                counts_of_collectives(world),
            )

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
