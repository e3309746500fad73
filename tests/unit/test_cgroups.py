"""Control groups of both versions, as planted files."""

from lockstep import env
from lockstep.env import cpu_quota, read_groups, usable_cores


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


def test_quotas_of_the_first_version_count(tmp_path):
    root, own = tmp_path / "cgroup", tmp_path / "own"
    plant(root, {"cpu/job/cpu.cfs_quota_us": "150000", "cpu/job/cpu.cfs_period_us": "100000"})
    plant(root, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000", "pids/pids.max": "max"})
    own.write_text("4:cpu,cpuacct:/job\n3:pids:/\n")
    assert cpu_quota(root, own) == 1.5
    assert read_groups("pids", "pids.max", root, own) == ["max"]
