"""Control groups of both versions, as planted files; and how long a thread waited for a core."""

import contextlib
import os
import subprocess
import time

import pytest

from lockstep import env
from lockstep.activity import core_use, core_wait_s
from lockstep.env import cpu_quota, read_groups, throttled_s, usable_cores


def plant(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def test_the_tightest_quota_counts(tmp_path, monkeypatch):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    plant(root, {"cpu.max": "max 100000", "a/cpu.max": "250000 100000", "a/b/cpu.max": "800000 100000"})
    own.write_text("0::/a/b\n")
    assert cpu_quota(root, own) == 2.5
    monkeypatch.setattr(env, "CGROUP_ROOT", root)
    monkeypatch.setattr(env, "OWN_CGROUPS", own)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(12), raising=False)
    assert usable_cores() == 2
    own.write_text("0::/not/there\n")
    assert cpu_quota(root, own) is None
    assert usable_cores() == 12
    assert cpu_quota(tmp_path / "none", tmp_path / "none") is None


def test_groups_may_have_names_that_are_no_text(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    name = os.fsdecode(b"t\xe4sk\xc2\x85:x")  # Latin-1, and what Unicode counts as the end of a line
    plant(root, {f"{name}/cpu.max": "250000 100000"})
    own.write_bytes(os.fsencode(f"0::/{name}\n"))
    assert cpu_quota(root, own) == 2.5


def test_quotas_of_the_first_version_count(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    plant(root, {"cpu/job/cpu.cfs_quota_us": "150000", "cpu/job/cpu.cfs_period_us": "100000"})
    plant(root, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "pids/pids.max": "max"})
    own.write_text("4:cpu,cpuacct:/job\n3:pids:/\n")
    assert cpu_quota(root, own) == 1.5
    assert read_groups("pids", "pids.max", root, own) == ["max"]


def test_the_time_for_which_quotas_stopped_the_groups_is_found_in_both_versions(tmp_path):
    second, first, own = tmp_path / "second", tmp_path / "first", tmp_path / "own"
    plant(second, {"cpu.stat": "usage_usec 9\nthrottled_usec 5000000", "a/cpu.stat": "throttled_usec 1500000"})
    plant(first, {"cpu/job/cpu.stat": "nr_throttled 3\nthrottled_time 2500000000"})
    own.write_text("0::/a\n")
    assert throttled_s(second, own) == 5.0
    own.write_text("4:cpu,cpuacct:/job\n")
    assert throttled_s(first, own) == 2.5
    assert throttled_s(tmp_path / "none", tmp_path / "none") == 0.0


def test_a_real_quota_is_found_and_its_waits_are_counted():
    first = env.CGROUP_ROOT / "cpu"
    group = (first if first.exists() else env.CGROUP_ROOT) / f"lockstep-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / ("cpu.cfs_quota_us" if first.exists() else "cpu.max")).write_text("30000")
    except OSError:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip("no control groups can be made here")
    if not (child := os.fork()):
        (group / "cgroup.procs").write_text("0")
        before = throttled_s()
        deadline = time.monotonic() + 20
        while work(0.6) < 0.4 or throttled_s() - before < 0.2:  # other programs may keep it off the core
            if time.monotonic() > deadline:
                os._exit(1)
        os._exit(int(cpu_quota() != 0.3))
    status = os.waitpid(child, 0)[1]
    group.rmdir()
    assert os.waitstatus_to_exitcode(status) == 0


def work(seconds):
    began, before = time.perf_counter(), core_use()
    while time.perf_counter() < began + seconds:
        pass
    return core_wait_s([(before, core_use())], time.perf_counter() - began) / seconds


@pytest.mark.parametrize("has_schedstat", [True, False])
def test_a_thread_that_shares_its_core_waits_for_it_half_of_the_time(has_schedstat, monkeypatch):
    if not has_schedstat:  # as on gVisor
        monkeypatch.setattr("os.pread", lambda *_: (_ for _ in ()).throw(OSError()))
    cores = os.sched_getaffinity(0)
    other = subprocess.Popen(["sh", "-c", "while :; do :; done"])
    try:
        for pid in (0, other.pid):
            os.sched_setaffinity(pid, {min(cores)})
        assert work(0.4) > 0.3
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()


def test_a_forked_child_counts_its_own_waiting():
    core_use()
    if pid := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return
    before = [int(text) for text in core_use().split()]
    time.sleep(0)
    os._exit(int(before[0] > 1e9))  # the parent has run for longer, and its file would say so
