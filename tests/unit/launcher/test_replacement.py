"""What the launcher decides when a rank is lost: whether the others can go on in place, or why they cannot."""

import os

import pytest

from lockstep.base import rank_files
from lockstep.base.rank_files import FailureRecord, Generation, RecoveryReport
from lockstep.launcher.failure_report import RankExit
from lockstep.launcher.replacement import RankReplacement


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
    monkeypatch.setattr("lockstep.launcher.replacement.kill_sessions", lambda pids: found.append(list(pids)))
    return found


@pytest.fixture
def replacement(tmp_path):
    """Ranks 0 to 2 are the processes 11 to 13, all of which can go on; a new rank r is the process 21 + r."""
    for pid in (11, 12, 13):
        rank_files.announce_recovery(tmp_path, pid)
    ranks = {11: 0, 12: 1, 13: 2}
    return RankReplacement(tmp_path, ranks, 4, lambda rank, *_: Started(21 + rank), Started)


def test_a_killed_rank_is_replaced(replacement, tmp_path, capsys, killed):
    assert replacement.why_not([lost(1, step=6)], {12}) is None
    assert set(replacement.replace([lost(1, step=6)], {1: 12})) == {1}
    assert killed == [[12]], "its loader processes"
    found = Generation.read(tmp_path)
    assert (found.number, found.ranks, found.world_size) == (1, {11: 0, 22: 1, 13: 2}, 3)
    assert (found.lost_at_ns, found.why) == (5_000_000_000, "rank 1 was killed by SIGKILL (signal 9) in step 7")
    assert capsys.readouterr().err == (
        "lockstep: rank 1 was killed by SIGKILL (signal 9) in step 7; ranks 0, 2 go on\n"
    )
    RecoveryReport(1, "rank 1 is back", 8, found.why, 5.0, 0.5).write(tmp_path)
    replacement.poll()
    replacement.poll()
    assert capsys.readouterr().err == "lockstep: rank 1 is back\n", "once"


def test_nothing_is_said_where_nothing_was_promised(replacement, tmp_path):
    assert replacement.why_not([lost(1, 1)], {12}) == "", "an exception"
    replacement.exceptions = True
    assert replacement.why_not([lost(1, 1)], {12}) is None
    assert replacement.why_not([lost(0), lost(1), lost(2)], {11, 12, 13}) == "", "all"
    rank_files.request_stop(tmp_path, "SIGTERM")
    assert replacement.why_not([lost(1)], {12}) == ""


def test_why_the_others_cannot_go_on(replacement, tmp_path):
    rank_files.withdraw_recovery(tmp_path, 13)
    assert replacement.why_not([lost(1)], {12}) == "rank 2 cannot go on in this step"
    rank_files.announce_recovery(tmp_path, 13)
    replacement.most = 1
    assert replacement.why_not([lost(1), lost(2)], {12, 13}) == "no restart is left"
    replacement.most = 0
    assert replacement.why_not([lost(1)], {12}) == "", "recovery was not asked for"


def test_a_new_rank_has_the_state_when_the_recovery_is_complete(replacement, tmp_path):
    replacement.replace([lost(1), lost(2)], {1: 12, 2: 13})
    for pid in (22, 23):
        rank_files.announce_recovery(tmp_path, pid)
    assert replacement.why_not([lost(0)], {11}) == "no rank that holds the state of the run is left"
    RecoveryReport(1, "back", 8).write(tmp_path)
    replacement.poll()
    assert replacement.why_not([lost(0)], {11}) is None


def test_losses_before_a_generation_is_complete_are_reported_together(replacement, tmp_path):
    def lose(rank, pid, time_s):
        replacement.replace([RankExit(rank, -9, FailureRecord(step=6, time_ns=time_s * 10**9))], {rank: pid})
        found = Generation.read(tmp_path)
        return found.number, found.lost_at_ns // 10**9, found.why

    first, second = (f"rank {rank} was killed by SIGKILL (signal 9) in step 7" for rank in (1, 2))
    assert lose(1, 12, 5) == (1, 5, first)
    RecoveryReport(0, "of a generation before", 8).write(tmp_path)
    replacement.poll()
    assert lose(2, 13, 7) == (2, 5, f"{first}; {second}")
    RecoveryReport(1, "back too late", 8).write(tmp_path)
    replacement.poll()
    assert lose(1, 22, 4) == (3, 4, f"{first}; {second}; {first}"), "the earliest time"
    RecoveryReport(3, "back", 8).write(tmp_path)
    replacement.poll()
    assert lose(2, 23, 9) == (4, 9, second), "all those before are made up for"


def test_a_step_in_which_ranks_are_lost_again_and_again_is_to_blame(replacement):
    for pid in (12, 22):
        assert replacement.why_not([lost(1, step=6)], {pid}) is None
        replacement.replace([lost(1, step=6)], {1: pid})
        replacement.most += 1
    assert replacement.why_not([lost(1, step=7)], {22}) is None
    assert replacement.why_not([lost(1, step=6)], {22}) == (
        "3 times ranks were lost in step 7: its samples or its code may be to blame"
    )


def test_the_files_of_a_lost_rank_are_removed(tmp_path):
    rank_files.announce_recovery(tmp_path, os.getpid())
    FailureRecord("ValueError: boom").write(tmp_path, 1)
    rank_files.forget_rank(tmp_path, 1, os.getpid())
    assert rank_files.recovering_processes(tmp_path) == set() and FailureRecord.read_all(tmp_path) == {}


def test_a_rank_whose_loader_process_was_killed_is_lost(replacement):
    for message in (
        "LoaderDied: A loader process of rank 1 died: DataLoader worker (pid 7) is killed by signal: Killed.",
        "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
    ):
        assert replacement.why_not([RankExit(1, 1, FailureRecord(message=message))], {12}) is None
    assert replacement.why_not([RankExit(1, 1, FailureRecord(message="RuntimeError: boom"))], {12}) == ""


class Machines:
    """The machines of a job, which have come together or not."""

    number = 3

    def __init__(self, have_met):
        self.have_met = lambda: have_met

    def replaced(self, pids, at_ns, why):
        self.pids = pids


def test_the_state_may_be_on_another_machine(tmp_path):
    # The only rank of this machine takes a place, and is killed before it has announced itself.
    replacement = RankReplacement(tmp_path, {11: 1}, 4, lambda rank, *_: Started(21), Started)
    rank_files.announce_recovery(tmp_path, 11)
    replacement.machines = Machines(True)
    assert replacement.why_not([lost(1)], {11}) is None
    replacement.replace([lost(1)], {1: 11})
    assert replacement.machines.pids == [21] and replacement.settled_ranks == set()
    assert replacement.why_not([lost(1)], {21}) is None
    # Each machine has the report, in the generation that it has come to.
    Generation(3, {21: 1}, 2, node_rank=1, num_nodes=2).post(tmp_path)
    RecoveryReport(3, "back", 8).write(tmp_path)
    replacement.poll()
    assert replacement.settled_ranks == {1}
    replacement.machines = Machines(False)
    rank_files.announce_recovery(tmp_path, 21)
    assert replacement.why_not([lost(1)], {21}) == "the machines have not come together at a lighthouse"
