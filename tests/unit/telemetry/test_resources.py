"""Figures of memory and shared memory, and who was told what elsewhere."""

import os
from types import SimpleNamespace

import pytest

from lockstep.telemetry import resources
from lockstep.telemetry.resources import Resources

GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A made-up /proc and control group; returns a function that sets what they say."""
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "job").mkdir(parents=True)
    (proc / "self/cgroup").write_text("0::/job\n")
    monkeypatch.setattr(resources, "PROC", proc)
    monkeypatch.setattr(resources, "CGROUPS", groups)

    def say(*, kills, free_gib, limit, used_gib=0, pages=0):
        (proc / "vmstat").write_text(f"pgfault 9\noom_kill {kills}\n")
        (groups / "job/memory.events").write_text(f"oom 0\noom_kill {kills}\n")
        memory = SimpleNamespace(total=16 * GIB, available=free_gib * GIB)
        monkeypatch.setattr(resources.psutil, "virtual_memory", lambda: memory)
        (groups / "job/memory.max").write_text(f"{limit}\n")
        (groups / "job/memory.current").write_text(f"{used_gib * GIB}\n")
        (proc / str(os.getpid())).mkdir(exist_ok=True)
        (proc / str(os.getpid()) / "statm").write_text(f"0 {pages + 10} 10 0 0 0 0\n")

    return say


def test_figures_of_memory(machine):
    pages = GIB // os.sysconf("SC_PAGE_SIZE")
    machine(kills=3, free_gib=9, limit="max", pages=2 * pages)
    found = Resources()
    found.update({1: os.getpid()})
    machine(kills=3, free_gib=4, limit="max", pages=pages)
    found.update({1: os.getpid()})
    assert found.of_each() == (
        "Last known memory of the ranks of this machine:\n"
        "rank 1: 1.0 GiB on the host (at most 2.0 GiB)\n"
        "The minimum of free memory was 4.0 GiB of the host's 16.0 GiB."
    )
    assert found.was_short_of_memory() is False
    machine(kills=4, free_gib=4, limit="max")
    assert found.was_short_of_memory() is True


def test_each_rank_has_a_line(machine):
    machine(kills=0, free_gib=9, limit="max", pages=GIB // os.sysconf("SC_PAGE_SIZE"))
    found = Resources()
    assert found.of_each() == ""
    found.devices[2] = ["3.0 GiB in tensors on cuda:0, at most 5.0 GiB of its 79.0 GiB were reserved"]
    found.update({0: os.getpid(), 2: os.getpid()})
    assert found.of_each() == (
        "Last known memory of the ranks of this machine:\n"
        "rank 0: 1.0 GiB on the host (at most 1.0 GiB)\n"
        "rank 2: 3.0 GiB in tensors on cuda:0, at most 5.0 GiB of its 79.0 GiB were reserved; "
        "1.0 GiB on the host (at most 1.0 GiB)\n"
        "The minimum of free memory was 9.0 GiB of the host's 16.0 GiB."
    )


def test_the_limit_of_a_container_counts(machine):
    machine(kills=0, free_gib=9, limit=4 * GIB, used_gib=3, pages=1)
    found = Resources()
    found.update({0: os.getpid()})
    assert found.of_each().endswith("The minimum of free memory was 1.0 GiB of the host's 4.0 GiB.")


def test_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "SHM", str(tmp_path))
    found = Resources()
    assert found.of_shm() == ""
    found.update({})
    found.shm_least_free_bytes, found.shm_total_bytes = 2**20, 64 * 2**20
    found.update({})
    assert found.shm_least_free_bytes == 2**20
    assert found.of_shm().startswith("The minimum of free space in /dev/shm was 1 MiB of ")
