"""`tune` when ranks die: what killed them is left out, and the rest goes on."""

import signal
import tempfile
import time
from dataclasses import replace

import pytest
import torch

from lockstep.errors import ConfigurationError, LaunchTimeout, LockstepError, RankFailed
from lockstep.study.tune import organise
from lockstep.study.tune.ask import MARK, OVERDUE, read_journal, write_entry, write_mark
from lockstep.study.tune.organise import _Runner
from tests.training import make_task
from tests.unit.test_tune_search import ASK, BASELINE, slow_loader

SIZES_SET = {"shares": [1, 1]}
"""So that memory is not looked at."""


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Play what the ranks do at each start: functions that write entries, and raise what ends them."""

    def play(*acts, start=SIZES_SET):
        acts = list(acts)

        def launch_with(fn, args, *, devices, timeout_s, watch):
            assert args == (runner._ask, str(tmp_path)) and devices == 2 and timeout_s > 0
            acts.pop(0)(runner, tmp_path)

        monkeypatch.setattr(organise, "launch_with", launch_with)
        runner = _Runner(replace(ASK, began_at=time.time(), start=start), tmp_path)
        interrupted = runner.run()
        assert acts == []
        return runner, interrupted

    return play


def rounds(runner, folder, until, *, fails=None):
    """Write entries until a contender with some name is to run; then die of something, if there is a reason."""
    search = runner.search()
    while (action := search.next())["do"] != "done":
        entry = BASELINE
        if action["do"] == "race":
            if until in action["contenders"]:
                write_mark(folder, {"stage": action["stage"], "name": until, "round": 0, "over": 0, "stages": 1})
                if fails is not None:
                    raise fails
                return
            rates = {name: slow_loader({**values, "strategy": "ddp"}) for name, values in action["contenders"].items()}
            entry = {"kind": "round", "rates": rates}
        write_entry(folder, {**entry, "at": 0.0})
        search.record(entry)


def failed(cause=None, text="Rank 1 failed: x"):
    error = RankFailed(text, rank=1)
    error.__cause__ = cause
    return error


def dies(until, error):
    return lambda runner, folder: rounds(runner, folder, until, fails=error)


def ends(runner, folder):
    rounds(runner, folder, "never")


def test_a_change_that_fails_is_left_out_and_the_rest_goes_on(play, tmp_path):
    odd = ValueError("Caught ValueError in replica 0.\nTraceback\nValueError: no threads.")
    runner, interrupted = play(
        dies("strategy single", failed(ConfigurationError("It cannot be.\nDo something."))),
        dies("strategy dp", failed(odd)),
        dies("threads 1", failed(None, "Rank 0 was killed by SIGSEGV (signal 11): a bug\nmore")),
        ends,
    )
    assert not interrupted
    search = runner.search(finished=True)
    why = {result.candidate.name: result.why for result in search.results}
    assert why["strategy single"] == "It cannot be"
    assert why["strategy dp"] == "ValueError: ValueError: no threads"
    assert why["threads 1"] == "Rank 0 was killed by SIGSEGV (signal 11): a bug"
    assert search.base["workers"] == 2
    assert [entry["name"] for entry in read_journal(tmp_path) if entry["kind"] == "lost"] == [
        "strategy single",
        "strategy dp",
        "threads 1",
    ]


def test_what_runs_out_of_memory_beside_others_runs_alone_and_is_lost_only_then(play, tmp_path):
    full = failed(torch.OutOfMemoryError("CUDA out of memory."))
    killed = failed(None, "Rank 1 was killed by SIGKILL (signal 9): the kernel\nmore")
    runner, _ = play(dies("workers 4", full), dies("workers 4", killed), ends)
    kinds = [entry["kind"] for entry in read_journal(tmp_path) if entry["kind"] in ("alone", "lost")]
    assert kinds == ["alone", "lost"]
    assert runner.search(finished=True).base["workers"] == 2


def test_an_error_of_the_settings_to_begin_with_is_the_tasks_own(play):
    cause = ConfigurationError("The data set is empty.")
    with pytest.raises(ConfigurationError, match="The data set is empty") as error:
        play(lambda runner, folder: (_ for _ in ()).throw(failed(cause)))
    assert error.value is cause


def test_a_change_that_takes_too_long_loses(play, tmp_path):
    def waits(runner, folder):
        (folder / OVERDUE).touch()
        rounds(runner, folder, "workers 4", fails=failed(None, "Rank 0 left with exit code 97"))

    play(waits, ends)
    lost = [entry["why"] for entry in read_journal(tmp_path) if entry["kind"] == "lost"]
    assert lost == ["Gave up after 75 s"]
    (tmp_path / "journal.jsonl").unlink()

    def records(runner, folder):
        (folder / OVERDUE).touch()
        write_mark(folder, {"stage": "recording", "name": "now", "round": 0, "over": 0, "stages": 1})
        raise failed(None, "Rank 0 left with exit code 97")

    runner, _ = play(records, ends)
    assert runner.search(finished=True).baseline["skipped"] == "it took too long to record a run"
    with pytest.raises(LockstepError) as error:
        (tmp_path / "journal.jsonl").unlink()
        (tmp_path / MARK).unlink()

        def stuck(runner, folder):
            (folder / OVERDUE).touch()
            write_mark(folder, {"stage": "warm-up", "name": "now", "round": 0, "over": 0, "stages": 1})
            raise failed(None, "Rank 0 left with exit code 97")

        play(stuck)
    assert str(error.value) == (
        "There is not enough time: the first steps with the settings to begin with took most of it.\n"
        "Give it more (--minutes M), or a smaller global batch."
    )


def test_ctrl_c_and_the_end_of_the_time_leave_what_was_found(play, tmp_path):
    def interrupted(runner, folder):
        rounds(runner, folder, "strategy dp")
        raise KeyboardInterrupt

    runner, was_interrupted = play(interrupted)
    assert was_interrupted
    search = runner.search(finished=True)
    assert (search.base["workers"], search.is_out_of_time) == (2, True)
    assert runner.notes == ["Stopped by Ctrl-C: this is what was found by then."]
    (tmp_path / "journal.jsonl").unlink()

    def late(runner, folder):
        rounds(runner, folder, "strategy dp")
        runner._ask = replace(runner._ask, seconds=0.0)
        raise LaunchTimeout("late")

    runner, was_interrupted = play(late)
    assert not was_interrupted
    assert runner.search(finished=True).base["workers"] == 2


def test_what_does_not_fit_after_all_begins_again_in_smaller_pieces(play, tmp_path):
    def runs_out(runner, folder):
        for entry in ({"kind": "probe", "size": 2, "peak_bytes": 10}, {"kind": "enough"}):
            write_entry(folder, {**entry, "at": 0.0})
        raise failed(torch.OutOfMemoryError("CUDA out of memory."))

    runner, _ = play(runs_out, ends, start={})
    assert [entry["kind"] for entry in read_journal(tmp_path)][:4] == ["probe", "enough", "too large", "baseline"]
    assert runner.search(finished=True).start == {"accumulate": 16}


def test_sigterm_leaves_nothing_behind(tmp_path, monkeypatch):
    def launch_with(*_, **__):
        assert len(list(tmp_path.iterdir())) == 1
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(organise, "launch_with", launch_with)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        organise.tune(make_task(), quiet=True)
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
