"""RankEnv: who we are, from what each launcher writes into the environment."""

import contextlib
import os
import subprocess
import sys
import time

import pytest

from lockstep.base import env
from lockstep.base.activity import core_use, core_wait_s
from lockstep.base.env import (
    Launcher,
    RankEnv,
    cpu_quota,
    first_host,
    is_loopback,
    read_groups,
    tasks_on_node,
    throttled_s,
    usable_cores,
)
from lockstep.errors import ConfigurationError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29501",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2),1",
    "SLURM_NODELIST": "gpu[003-005],login",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-4711@1",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "MASTER_ADDR": "host0"}
# The second pod of a PyTorchJob, as the training operator sets it; and of an indexed Job whose manifest sets the rest.
PYTORCHJOB = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "digits-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "digits-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "2",
    "PET_NODE_RANK": "1",
    "PET_NPROC_PER_NODE": "auto",
}
INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "digits-node-0-0.digits",
    "MASTER_PORT": "29500",
}
START = "Start this command with torchrun or `lockstep run`, such as: lockstep run -m lockstep train TASK.py"


def without(env, *names):
    return {name: value for name, value in env.items() if name not in names}


def test_no_launcher_is_a_world_of_one():
    assert RankEnv.from_environ({"PATH": "/bin"}) == RankEnv(0, 0, 1, 1, 0, None, None, Launcher.NONE)


def test_torchrun():
    assert RankEnv.from_environ(TORCHRUN) == RankEnv(5, 1, 8, 4, 1, "host0", 29501, Launcher.TORCHRUN)


def test_torchrun_variables_win_over_those_of_the_scheduler():
    assert RankEnv.from_environ({**SLURM, **OPEN_MPI, **TORCHRUN}).launcher is Launcher.TORCHRUN


def test_the_four_classic_variables_suffice_on_one_machine():
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    assert RankEnv.from_environ(env) == RankEnv(1, 1, 2, 2, 0, "127.0.0.1", 29500, Launcher.TORCHRUN)


def test_a_world_of_one_needs_no_master():
    assert RankEnv.from_environ({"RANK": "0", "WORLD_SIZE": "1"}).master_addr is None


def test_on_several_machines_they_leave_open_which_ranks_share_one():
    assert RankEnv.from_environ(PYTORCHJOB) == RankEnv(1, 0, 2, 1, 1, "digits-master-0", 23456, Launcher.ENV)
    assert RankEnv.from_environ(INDEXED_JOB) == RankEnv(1, 0, 2, 1, 1, "digits-node-0-0.digits", 29500, Launcher.ENV)


def test_pods_of_an_indexed_job_that_know_of_no_others_are_on_their_own():
    assert RankEnv.from_environ({"JOB_COMPLETION_INDEX": "3"}).launcher is Launcher.NONE


def test_ranks_that_torchrun_starts_in_a_pod_have_its_variables_too():
    assert RankEnv.from_environ({**PYTORCHJOB, **INDEXED_JOB, **TORCHRUN}).launcher is Launcher.TORCHRUN


def test_slurm_expands_the_host_list_and_the_tasks_per_node():
    found = RankEnv.from_environ(SLURM)
    assert found == RankEnv(5, 1, 9, 4, 1, "gpu003", found.master_port, Launcher.SLURM)
    assert found.master_port in range(20000, 32000)


def test_slurm_port_depends_on_job_and_step_only():
    def port(**changes):
        return RankEnv.from_environ({**SLURM, **changes}).master_port

    assert port() == port(SLURM_PROCID="6", SLURM_LOCALID="2")
    assert len({port(), port(SLURM_JOB_ID="78"), port(SLURM_STEP_ID="1")}) == 3
    assert port(MASTER_PORT="4000") == 4000


def test_slurm_step_counts_before_the_allocation():
    step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "3(x2)", "SLURM_STEP_NODELIST": "b1,b2"}
    found = RankEnv.from_environ({**SLURM, **step})
    assert (found.world_size, found.local_world_size, found.master_addr) == (6, 3, "b1")


@pytest.mark.parametrize("shell", [{"ENVIRONMENT": "BATCH"}, {"SLURM_JOB_NAME": "bash"}])
def test_a_batch_script_without_srun_is_a_world_of_one(shell):
    env = {**without(SLURM, "SLURM_STEP_ID"), "SLURM_PROCID": "0", **shell}
    assert RankEnv.from_environ(env).world_size == 1


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_the_shell_of_salloc_is_a_world_of_one(step):
    assert RankEnv.from_environ({**SLURM, "SLURM_PROCID": "0", "SLURM_STEP_ID": step}).world_size == 1


@pytest.mark.skipif(os.readlink("/proc/self/ns/pid") != env._PID_NAMESPACE, reason="other processes may be hidden")
def test_a_task_that_srun_has_not_started_is_told_so():
    def task(rank, *command):
        place = f"SLURM_JOB_ID={os.getpid()}", "SLURM_STEP_ID=0", f"SLURM_PROCID={rank}"
        return subprocess.Popen(["env", *place, *command], stderr=subprocess.PIPE, text=True)

    check = sys.executable, "-c", "from lockstep.base.env import check_step; check_step()"
    alone = task(0, *check)
    assert alone.communicate(timeout=60)[1].endswith(
        f"ConfigurationError: SLURM says that this process is task 0 of several of job {os.getpid()}, but no other "
        "one runs on this machine: srun has not started it, or the others have ended.\nStart all ranks with srun, as "
        "in: srun python train.py. For a single process in the shell of a step, unset SLURM_PROCID.\n"
    )
    with task(1, "sleep", "60") as other:
        assert task(0, *check).communicate(timeout=60) == (None, "")
        other.kill()


def test_open_mpi_on_one_machine_needs_no_master():
    found = RankEnv.from_environ(OPEN_MPI)
    assert found == RankEnv(1, 1, 2, 2, 0, "127.0.0.1", found.master_port, Launcher.OPEN_MPI)
    other_job = RankEnv.from_environ({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-host-4712@1"})
    assert found.master_port != other_job.master_port


def test_mpich():
    assert RankEnv.from_environ(PMI) == RankEnv(3, 1, 4, 2, 1, "host0", 29500, Launcher.PMI)


def test_mpich_started_inside_slurm_counts_its_own_ranks():
    assert RankEnv.from_environ({**SLURM, **PMI}).launcher is Launcher.PMI


def test_srun_with_pmi_counts_as_slurm():
    assert RankEnv.from_environ({**SLURM, "PMI_RANK": "5", "PMI_SIZE": "9"}).launcher is Launcher.SLURM


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            without(TORCHRUN, "RANK"),
            "LOCAL_RANK is set, but RANK is not.\nStart the ranks with `lockstep run`, or set RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each.",
        ),
        (
            without(TORCHRUN, "WORLD_SIZE"),
            "WORLD_SIZE is not set, although other variables of the same launcher are.\n"
            "Start every rank through the launcher itself: set WORLD_SIZE, or use `lockstep run`.",
        ),
        (
            without(TORCHRUN, "MASTER_PORT"),
            "RANK and WORLD_SIZE are set, but MASTER_PORT is not.\n"
            "Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on every rank.",
        ),
        (
            without(TORCHRUN, "LOCAL_RANK"),
            "LOCAL_RANK is not set, although other variables of the same launcher are.\n"
            "Start every rank through the launcher itself: set LOCAL_RANK, or use `lockstep run`.",
        ),
        (
            {**PYTORCHJOB, "WORLD_SIZE": "8", "PET_NPROC_PER_NODE": "4"},
            "WORLD_SIZE=8 ranks are not one in each of the 2 pods of PET_NNODES: torchrun has not started the ranks.\n"
            + START,
        ),
        (
            {name: value for name, value in PYTORCHJOB.items() if name.startswith("PET_")},
            "PET_NNODES=2 asks for several machines, but RANK is not set: torchrun has not started the ranks.\n"
            + START,
        ),
        (
            {**INDEXED_JOB, "JOB_COMPLETION_INDEX": "2"},
            "JOB_COMPLETION_INDEX=2 is out of range: WORLD_SIZE says 2 ranks.\nRanks count from 0 to 1.",
        ),
        (
            without(INDEXED_JOB, "MASTER_ADDR"),
            "JOB_COMPLETION_INDEX and WORLD_SIZE are set, but MASTER_ADDR is not.\n"
            "Set MASTER_ADDR to the host of rank 0 and MASTER_PORT to a free port there, on every rank.",
        ),
        ({**TORCHRUN, "RANK": "two"}, "RANK='two' is not a whole number.\nSet RANK to one, or unset it."),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 is out of range: WORLD_SIZE says 8 ranks.\nRanks count from 0 to 7."),
        ({**TORCHRUN, "RANK": "-1"}, "RANK=-1 is out of range: WORLD_SIZE says 8 ranks.\nRanks count from 0 to 7."),
        (
            {**TORCHRUN, "WORLD_SIZE": "0"},
            "LOCAL_WORLD_SIZE says 4 ranks on this machine, but WORLD_SIZE says 0 in all.\n"
            "Correct one of the two: the first lies between 1 and the second.",
        ),
        (
            {**TORCHRUN, "MASTER_PORT": "70000"},
            "MASTER_PORT=70000 is not a port number.\nSet it to a free port from 1 to 65535.",
        ),
        (
            {**TORCHRUN, "LOCAL_RANK": "4"},
            "LOCAL_RANK=4 is out of range: LOCAL_WORLD_SIZE says 4 ranks.\nRanks count from 0 to 3.",
        ),
        (
            {**TORCHRUN, "LOCAL_WORLD_SIZE": "16"},
            "LOCAL_WORLD_SIZE says 16 ranks on this machine, but WORLD_SIZE says 8 in all.\n"
            "Correct one of the two: the first lies between 1 and the second.",
        ),
        (
            {**SLURM, "WORLD_SIZE": "4"},
            "WORLD_SIZE=4 contradicts what SLURM says (9).\n"
            "Unset WORLD_SIZE, or start the ranks with as many tasks as it says.",
        ),
        (
            {**SLURM, "SLURM_NODEID": "3"},
            "SLURM_TASKS_PER_NODE=4(x2),1 counts 3 nodes, but SLURM_NODEID=3.\n"
            "Start the ranks with srun, so that these variables belong to the same step.",
        ),
        (
            without(SLURM, "SLURM_NODELIST"),
            "SLURM_NODELIST is not set, although other variables of the same launcher are.\n"
            "Start every rank through the launcher itself: set SLURM_NODELIST, or use `lockstep run`.",
        ),
        (
            without(PMI, "MASTER_ADDR"),
            "MASTER_ADDR is not set, and mpirun does not say where rank 0 runs.\n"
            "Pass it on: mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=29500 ... "
            "(MPICH and Intel MPI: -genv MASTER_ADDR <host>).",
        ),
        (
            without(PMI, "MPI_LOCALRANKID"),
            "MPI_LOCALRANKID is not set, although other variables of the same launcher are.\n"
            "Start every rank through the launcher itself: set MPI_LOCALRANKID, or use `lockstep run`.",
        ),
        (
            without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"),
            "OMPI_COMM_WORLD_SIZE is not set, although other variables of the same launcher are.\n"
            "Start every rank through the launcher itself: set OMPI_COMM_WORLD_SIZE, or use `lockstep run`.",
        ),
    ],
)
def test_what_is_wrong_is_named(env, message):
    with pytest.raises(ConfigurationError) as raised:
        RankEnv.from_environ(env)
    assert str(raised.value) == message


def test_empty_variables_count_as_unset():
    assert RankEnv.from_environ({"RANK": "", "WORLD_SIZE": " "}).launcher is Launcher.NONE


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.1", True), ("::1", True), ("[::1]", True), ("10.0.0.1", False), ("gpu1", False)],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected


def test_streams_that_are_closed_lead_nowhere(tmp_path):
    program = (
        "import os, sys; from lockstep.base.env import open_closed_streams; open_closed_streams(); print('lost');"
        "file = open('kept', 'w'); assert file.fileno() > 2 and os.get_inheritable(1);"
        "assert sys.stdout.fileno() == sys.__stdout__.fileno() == 1 and sys.stdin.read() == ''"
    )
    command = ["sh", "-c", '"$0" -c "$1" <&- >&-', sys.executable, program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr, (tmp_path / "kept").read_text()) == (0, "", "")


def test_a_display_without_standard_output_prints_nothing(monkeypatch):
    from lockstep.telemetry.live_view import Display

    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.delenv("CI", raising=False)
    Display("auto", silent=False).log("a line")


# Control groups of both versions, as planted files; and how long a thread waited for a core.


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
        deadline = time.monotonic() + 100  # a busy machine may need most of it
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


# SLURM's compressed lists.


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("login", "login"),
        ("a1,a2", "a1"),
        ("gpu[003-005,9],login", "gpu003"),
        ("gpu[7,9]", "gpu7"),
        ("rack[2-3]node[01-16]", "rack2node01"),
        ("n[1-2]-ib.cluster.org,x", "n1-ib.cluster.org"),
    ],
)
def test_first_host(hosts, first):
    assert first_host(hosts, variable="SLURM_NODELIST") == first


@pytest.mark.parametrize("hosts", ["", ",a", "gpu[", "gpu[a-b]", "gpu]3"])
def test_unreadable_hosts_name_the_variable(hosts):
    with pytest.raises(ConfigurationError) as raised:
        first_host(hosts, variable="SLURM_NODELIST")
    assert str(raised.value) == (
        f"SLURM_NODELIST={hosts!r} cannot be read.\n"
        "Set MASTER_ADDR to the host of rank 0 yourself, and unset SLURM_NODELIST."
    )


def test_tasks_on_each_node():
    assert [tasks_on_node("4(x2),1,8", node, variable="V") for node in range(4)] == [4, 4, 1, 8]


def test_unreadable_tasks_name_the_variable():
    with pytest.raises(ConfigurationError, match="SLURM_TASKS_PER_NODE='many' cannot be read"):
        tasks_on_node("many", 0, variable="SLURM_TASKS_PER_NODE")
