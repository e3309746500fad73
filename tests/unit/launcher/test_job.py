"""The launcher requests ranks to stop only if all can, gives up at the second signal, and knows how they ended."""

import os
import signal
import time

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher.api import LaunchConfig

from lockstep.base import rank_files
from lockstep.errors import Stopped, exit_code_after
from lockstep.launcher.fork_server import signal_handlers
from lockstep.launcher.job import Job

SIGNALS = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2).signals_to_handle


class FakeReaper:
    def __init__(self, run_dir):
        self.run_dir, self.num_kills = run_dir, 0

    def kill_ranks(self):
        self.num_kills += 1


def outcome(job, *exit_codes):
    stopped = job.stopped(set(exit_codes))
    return None if stopped is None else (str(stopped), stopped.exit_code, stopped.saved)


def test_it_asks_once_all_ranks_can_and_gives_up_at_the_second_signal(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    job = Job(FakeReaper(tmp_path), ranks=range(2))
    with job.handling_signals(SIGNALS):
        rank_files.announce_graceful_stop(tmp_path, 0)
        with pytest.raises(SignalException) as ended:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)
        assert ended.value.sigval is signal.SIGTERM, "rank 1 cannot"
    reaper = FakeReaper(tmp_path)
    job = Job(reaper, ranks=range(2))
    with job.handling_signals(SIGNALS):
        rank_files.announce_graceful_stop(tmp_path, 1)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)  # follows SIGUSR1 when the time is up, and asks for nothing else
        assert rank_files.stop_reason(tmp_path) == "SIGUSR1"
        with pytest.raises(SignalException) as ended:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        assert (ended.value.sigval, reaper.num_kills) == (signal.SIGINT, 1)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


def test_signals_that_are_only_passed_on_end_the_ranks_at_once(tmp_path):
    rank_files.announce_graceful_stop(tmp_path, 0)
    job = Job(FakeReaper(tmp_path), ranks=range(1))
    with job.handling_signals(SIGNALS), pytest.raises(SignalException) as ended:
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(1)
    assert (ended.value.sigval, job.requested_for) == (signal.SIGHUP, None)


@pytest.mark.parametrize("number", rank_files.EARLY_SIGNALS)
def test_signals_that_schedulers_send_ahead_ask_unless_the_caller_handles_them(tmp_path, monkeypatch, number):
    rank_files.announce_graceful_stop(tmp_path, 0)
    job = Job(FakeReaper(tmp_path), ranks=range(1))
    with signal_handlers((number,), signal.SIG_DFL), job.handling_signals(SIGNALS):
        for _ in range(2):  # the second asks for nothing else
            os.kill(os.getpid(), number)
    assert (job.requested_for, rank_files.stop_reason(tmp_path)) == (number, number.name)
    received = []
    with signal_handlers((signal.SIGUSR2,), lambda *_: received.append("own")), job.handling_signals(SIGNALS):
        os.kill(os.getpid(), signal.SIGUSR2)
    assert received == ["own"]


def test_the_user_chooses_which_signals_are_handled(tmp_path):
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2
    before = [signal.getsignal(number) for number in numbers]
    with Job(FakeReaper(tmp_path)).handling_signals("SIGUSR2, SIGTERM"):
        changed = [signal.getsignal(number) != own for number, own in zip(numbers, before, strict=True)]
        assert changed == [True, False, False, True]
    assert [signal.getsignal(number) for number in numbers] == before


def test_how_the_ranks_ended(tmp_path):
    job = Job(FakeReaper(tmp_path), ranks=range(2))
    assert outcome(job, 0) is None
    assert outcome(job, 75) is None, "a script's own 75, for all that is known"
    rank_files.report_stopped(tmp_path, 0, "Stopped by SIGTERM after step 4.")
    assert outcome(job, 0) is None, "nobody was asked here, and they have run to their end"
    assert outcome(job, 75) == ("Stopped by SIGTERM after step 4.", 75, True), "another machine was asked"
    assert outcome(job, 75, 1) is None, "one failed"
    for rank in range(2):
        rank_files.announce_graceful_stop(tmp_path, rank)
    with job.handling_signals(SIGNALS):
        os.kill(os.getpid(), signal.SIGINT)
    assert rank_files.stop_reason(tmp_path) == "SIGINT"
    assert outcome(job, 0) == ("Stopped by SIGTERM after step 4.", 130, True)
    assert outcome(job, -9) is None


def test_exit_codes():
    assert exit_code_after(signal.SIGTERM, saved=True) == exit_code_after(signal.SIGUSR1, saved=True) == 75
    assert exit_code_after(signal.SIGINT, saved=True) == 130
    assert Stopped("", signal=signal.SIGTERM).exit_code == 143


def test_both_sides_name_the_folder_alike(tmp_path, monkeypatch):
    monkeypatch.delenv(rank_files.RUN_DIR, raising=False)
    assert rank_files.launcher_folder() is None
    monkeypatch.setenv(rank_files.RUN_DIR, str(tmp_path))
    assert rank_files.launcher_folder() == tmp_path
    monkeypatch.setenv(rank_files.RUN_DIR, str(tmp_path / "gone"))
    assert rank_files.launcher_folder() is None
