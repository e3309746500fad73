"""A process that waits for its place, and a generation that is superseded while its ranks connect."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lockstep.base import activity
from lockstep.base.rank_files import RUN_DIR, Generation
from lockstep.comm import generations
from lockstep.comm.collectives import launching
from lockstep.comm.rendezvous import JOINS, Rendezvous
from lockstep.errors import CollectiveError


@pytest.fixture
def member(tmp_path, monkeypatch):
    """Give a function that makes this process a member, and the list of the generations that it enters."""
    (tmp_path / "run").mkdir()
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "run"))
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "ROLE_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(generations.Membership, "is_used", False)
    world = SimpleNamespace(wanted_backend="gloo", device=torch.device("cpu"), world_size=1, local_world_size=1)
    world.owned = Rendezvous(dist.HashStore(), is_host=False, prefix=""), ExitStack()
    world.enter = lambda env, group, owned: setattr(world, "owned", owned)
    members = []

    def make():
        members.append(generations.Membership(world))
        return members[-1], tmp_path / "run"

    yield make
    for each in members:
        each.close()


def test_a_late_rank_says_that_it_waits_and_ends_with_its_job(member, monkeypatch):
    monkeypatch.setenv(JOINS, "1")
    monkeypatch.setattr(generations, "_REPORT_S", 0.01)
    membership, folder = member()
    lines = []

    def log(text):
        lines.append(text)
        if len(lines) == 3:
            shutil.rmtree(folder)

    monkeypatch.setattr(activity, "log", log)
    with pytest.raises(CollectiveError, match=r"^The job has ended in which this process waited for its place\.$"):
        membership.rejoin()
    assert lines == ["rank 0 still waits for the other ranks to go on with it"] * 3


def test_a_group_that_was_formed_too_late_to_be_interrupted_is_left(member, monkeypatch):
    membership, folder = member()
    formed = []

    def form_group(*given):
        is_over = given[-1]
        formed.append(is_over())
        if len(formed) == 1:  # a rank is lost while the others connect
            Generation(2, {os.getpid(): 0}, 1).post(folder)
            formed.append(is_over())

    monkeypatch.setattr(generations, "form_group", form_group)
    Generation(1, {os.getpid(): 0}, 1).post(folder)
    assert membership.rejoin().number == 2
    assert formed == [False, True, False]
    assert not membership.is_cut


class GroupOnDevice:
    """A group with an accelerator's backend; ``calls`` gets what is called, and whether `launching` is held."""

    _device_types = (torch.device("cpu"), torch.device("meta"))

    def __init__(self, name, calls):
        self.name, self._calls = name, calls

    def _get_backend(self, device):
        assert device.type == "meta"
        return self

    def _note(self, what):
        with ThreadPoolExecutor() as other:
            is_held = not other.submit(launching.acquire, blocking=False).result()
        self._calls.append(f"{what} {self.name}" if is_held else "another thread may launch")

    def _group_start(self):
        self._note("start")

    def _group_end(self):
        self._note("end")

    def abort(self):
        self._note("abort")
        if self.name == "a":
            raise RuntimeError("it has no communicator yet")


def test_groups_on_a_device_are_aborted_as_one_call_while_nothing_is_launched(monkeypatch):
    calls = []
    groups = [GroupOnDevice("a", calls), GroupOnDevice("b", calls)]
    monkeypatch.setattr(generations, "process_groups", lambda: groups)
    generations.interrupt_groups()
    assert calls == ["start a", "abort a", "abort b", "end a"]


def test_a_launch_that_is_stuck_does_not_keep_groups_from_being_aborted(monkeypatch):
    calls = []
    monkeypatch.setattr(generations, "process_groups", lambda: [GroupOnDevice("a", calls)])
    monkeypatch.setattr(generations, "_LAUNCH_S", 0.01)
    with launching, ThreadPoolExecutor() as watcher:
        watcher.submit(generations.interrupt_groups).result()
        assert calls == ["start a", "abort a", "end a"]
    assert launching.acquire(blocking=False)
    launching.release()
