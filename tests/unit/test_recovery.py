"""What the launcher decides when a rank is lost: whether the others can go on in place, or why they cannot."""

import os

import pytest

from lockstep import run_folder
from lockstep.launcher.failure_report import RankExit
from lockstep.launcher.recovery import Recovery
from lockstep.run_folder import FailureRecord, Generation, RecoveryReport


class Started:
    """Stands for a process that takes the place of a rank."""

    def __init__(self, pid):
        self.proc = self
        self.pid = pid


def lost(rank, code=-9, step=None):
    return RankExit(rank, code, FailureRecord(step=step, time_ns=5_000_000_000))


@pytest.fixture(autouse=True)
def killed(monkeypatch):
    """The sessions that would have been killed: the processes here are only numbers, and may be those of others."""
    found = []
    monkeypatch.setattr("lockstep.launcher.recovery.kill_sessions", lambda pids: found.append(list(pids)))
    return found


@pytest.fixture
def recovery(tmp_path):
    """Ranks 0 to 2 are the processes 11 to 13, all of which can go on; a new rank r is the process 21 + r."""
    for pid in (11, 12, 13):
        run_folder.announce_recovery(tmp_path, pid)
    ranks = {11: 0, 12: 1, 13: 2}
    return Recovery(tmp_path, ranks, 4, lambda rank, *_: Started(21 + rank), Started)


def test_a_killed_rank_is_replaced(recovery, tmp_path, capsys, killed):
    assert recovery.why_not([lost(1, step=6)], {12}) is None
    assert set(recovery.replace([lost(1, step=6)], {1: 12})) == {1}
    assert killed == [[12]], "its loader processes"
    found = Generation.read(tmp_path)
    assert (found.number, found.ranks, found.world_size) == (1, {11: 0, 22: 1, 13: 2}, 3)
    assert (found.lost_at_ns, found.why) == (5_000_000_000, "rank 1 was killed by SIGKILL (signal 9) in step 7")
    assert capsys.readouterr().err == (
        "lockstep: rank 1 was killed by SIGKILL (signal 9) in step 7; ranks 0, 2 go on\n"
    )
    RecoveryReport(1, "rank 1 is back", 8, found.why, 5.0, 0.5).write(tmp_path)
    recovery.poll()
    recovery.poll()
    assert capsys.readouterr().err == "lockstep: rank 1 is back\n", "once"


def test_nothing_is_said_where_nothing_was_promised(recovery, tmp_path):
    assert recovery.why_not([lost(1, 1)], {12}) == "", "an exception"
    recovery.exceptions = True
    assert recovery.why_not([lost(1, 1)], {12}) is None
    assert recovery.why_not([lost(0), lost(1), lost(2)], {11, 12, 13}) == "", "all"
    run_folder.request_stop(tmp_path, "SIGTERM")
    assert recovery.why_not([lost(1)], {12}) == ""


def test_why_the_others_cannot_go_on(recovery, tmp_path):
    run_folder.withdraw_recovery(tmp_path, 13)
    assert recovery.why_not([lost(1)], {12}) == "rank 2 cannot go on in this step"
    run_folder.announce_recovery(tmp_path, 13)
    recovery.most = 1
    assert recovery.why_not([lost(1), lost(2)], {12, 13}) == "no restart is left"
    recovery.most = 0
    assert recovery.why_not([lost(1)], {12}) == "", "recovery was not asked for"


def test_a_new_rank_has_the_state_when_the_recovery_is_complete(recovery, tmp_path):
    recovery.replace([lost(1), lost(2)], {1: 12, 2: 13})
    for pid in (22, 23):
        run_folder.announce_recovery(tmp_path, pid)
    assert recovery.why_not([lost(0)], {11}) == "no rank that holds the state of the run is left"
    RecoveryReport(1, "back", 8).write(tmp_path)
    recovery.poll()
    assert recovery.why_not([lost(0)], {11}) is None


def test_a_step_in_which_ranks_are_lost_again_and_again_is_to_blame(recovery):
    for _ in range(2):
        assert recovery.why_not([lost(1, step=6)], {12}) is None
        recovery.replace([lost(1, step=6)], {1: 12})
        recovery.most += 1
        recovery.ranks = {11: 0, 12: 1, 13: 2}
    assert recovery.why_not([lost(1, step=7)], {12}) is None
    assert recovery.why_not([lost(1, step=6)], {12}) == (
        "3 times ranks were lost in step 7: its samples or its code may be to blame"
    )


def test_the_files_of_a_lost_rank_are_removed(tmp_path):
    run_folder.announce_recovery(tmp_path, os.getpid())
    FailureRecord("ValueError: boom").write(tmp_path, 1)
    run_folder.forget_rank(tmp_path, 1, os.getpid())
    assert run_folder.recovering_processes(tmp_path) == set() and FailureRecord.read_all(tmp_path) == {}
