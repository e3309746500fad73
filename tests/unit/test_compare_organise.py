import mmap
import sys

import pytest
import torch

from lockstep.errors import ConfigurationError, LockstepError, RankFailed
from lockstep.study.common import peak_bytes, reset_peak
from lockstep.study.compare import benchmark
from lockstep.study.compare.benchmark import choose, compare, replica_threads, threads_of
from lockstep.study.compare.comparison import LeftOut
from tests.training import make_task

MIB = 2**20


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fail if processes are started: what is wrong with a call is to be found before."""
    monkeypatch.setattr(benchmark, "launch", lambda *_, **__: pytest.fail("processes were started"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def message(*args, **kwargs):
    with pytest.raises(ConfigurationError) as caught:
        compare(*args, **kwargs)
    return str(caught.value)


@pytest.mark.usefixtures("nothing_starts")
def test_what_cannot_be_compared_is_refused_before_anything_starts(tmp_path):
    task = make_task()
    assert message(str(tmp_path / "no.py")) == (
        f"{tmp_path / 'no.py'} does not exist.\nName a Python file that has a lockstep.Task."
    )
    assert message(task, strategies=["ddp", "fsdp"]) == (
        "There is no strategy 'fsdp'.\nChoose from: single, torch-dp, dp, torch-ddp, ddp, ddp-zero1."
    )
    assert message(task, devices=0) == "devices=0 is not allowed.\nGive a whole number of at least 1."
    assert message(task, num_rounds=0) == "rounds=0 is not allowed.\nGive a whole number of at least 1."
    assert message(task, num_steps=0) == "steps=0 is not allowed.\nGive a whole number of at least 1."
    assert message(task, num_warmup=0) == "warmup=0 is not allowed.\nGive a whole number of at least 1."


@pytest.mark.usefixtures("nothing_starts")
def test_more_devices_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert message(make_task(), devices=2) == (
        "devices=2, but this machine has 1 GPU.\n"
        "Ask for at most 1, or hide the GPUs to train on CPUs: CUDA_VISIBLE_DEVICES= ."
    )


@pytest.mark.parametrize("cause", [ConfigurationError("The batch is empty."), KeyError("boom")])
def test_what_ranks_found_wrong_with_the_task_is_told_without_a_traceback(monkeypatch, cause):
    def launch(*_, **__):
        raise RankFailed("Rank 1 failed:\nTraceback ...") from cause

    monkeypatch.setattr(benchmark, "launch", launch)
    with pytest.raises(LockstepError) as caught:
        compare(make_task())
    assert str(caught.value) == (
        "The batch is empty." if isinstance(cause, ConfigurationError) else "Rank 1 failed:\nTraceback ..."
    )


def test_torchs_data_parallel_is_left_out_on_cpus_with_a_reason():
    assert choose(benchmark.STRATEGIES, cuda=False) == (
        ("single", "dp", "torch-ddp", "ddp"),
        (LeftOut("torch-dp", "torch.nn.DataParallel does nothing on CPUs; ours runs there, as dp."),),
    )
    assert choose(benchmark.STRATEGIES, cuda=True) == (benchmark.STRATEGIES, ())


def test_single_takes_part_always_and_the_order_is_the_tables():
    assert choose(["ddp", "dp"], cuda=False) == (("single", "dp", "ddp"), ())
    assert choose([], cuda=False) == (("single",), ())


def test_all_cores_go_to_single_and_equal_parts_to_the_others():
    assert [threads_of(name, 8, 4) for name in benchmark.STRATEGIES] == [8, 8, 8, 2, 2]
    assert [replica_threads(name, 8, 4) for name in benchmark.STRATEGIES] == [8, 2, 2, 2, 2]
    assert threads_of("ddp", 2, 4) == replica_threads("dp", 2, 4) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be reset on Linux only")
def test_the_peak_is_of_what_was_held_since_the_reset():
    with mmap.mmap(-1, 64 * MIB) as block:
        block.write(b"1" * (64 * MIB))
    reset_peak()
    before = peak_bytes()
    with mmap.mmap(-1, 32 * MIB) as block:
        for start in range(0, 32 * MIB, mmap.PAGESIZE):
            block[start] = 1
    assert 30 * MIB < peak_bytes() - before < 40 * MIB
