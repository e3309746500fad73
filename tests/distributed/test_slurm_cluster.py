"""A SLURM cluster of two nodes, each a network namespace, runs the batch scripts of `examples/cluster`.

Needs root and Debian's packages slurmctld, slurmd, slurm-client and munge; skips itself without.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.two_machines import two_machines

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1000)]

REPO = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "nsenter", "unshare")
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=n1(10.78.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
ReturnToService=2
MpiDefault=none
NodeName=n1 NodeAddr=10.78.0.1 CPUs=8
NodeName=n2 NodeAddr=10.78.0.2 CPUs=8
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""
TASK = """\
import os, signal, time
import torch
from torch import nn
import lockstep

def loss(model, batch):
    time.sleep(float(os.environ["STEP_S"]))
    if os.environ.get("KILLED") == os.environ["SLURM_NODEID"] + os.environ.get("TORCHELASTIC_RESTART_COUNT", ""):
        os.kill(os.getpid(), signal.SIGKILL)
    return model(batch[0]).square().mean()

task = lockstep.Task(
    model=lambda: nn.Linear(3, 1),
    dataset=lambda: torch.utils.data.TensorDataset(torch.ones(60, 3)),
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    global_batch_size=6,
    epochs=12,
)
"""
PLACE = """\
import lockstep, torch, torch.distributed as dist
with lockstep.init() as world:
    dist.all_reduce(total := torch.ones(1))
    print(world.rank, world.local_rank, world.local_world_size, world.node_rank, total.item())
"""


class Cluster:
    """Commands on the first node run in a folder that both see, as the file system is one."""

    def __init__(self, folder, names):
        self.folder, self._names = folder, names
        self._environ = {
            **os.environ,
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPO / "src"),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, node, *command, **kwargs):
        """Start a command on a node, whose name it has and whose names for the others."""
        inside = f'mount --bind {self.folder}/hosts /etc/hosts && hostname n{node + 1} && exec "$@"'
        words = ["nsenter", f"--net=/run/netns/{self._names[node]}", "unshare", "--mount", "--uts", "sh", "-c", inside]
        words += ["sh", *map(str, command)]
        return subprocess.Popen(words, cwd=self.folder, env=self._environ, stdin=subprocess.DEVNULL, **kwargs)

    def call(self, *command, **environ):
        """Return the exit code and the output of a command on the first node."""
        self._environ |= environ
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = self.start(0, *command, **pipes)
        try:
            out, _ = process.communicate(timeout=200)
            return process.returncode, out
        finally:
            process.kill()

    def submit(self, name, *options, edit=lambda text: text, **environ):
        """Run a batch script of the examples, less its GPUs, until it does not come back; return what SLURM says."""
        (self.folder / "examples").mkdir(exist_ok=True)
        (self.folder / "examples" / "digits.py").write_text(TASK)
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        text = (REPO / "examples" / "cluster" / name).read_text()
        (self.folder / name).write_text(edit(re.sub(r"^#SBATCH --gpus.*\n", "", text, flags=re.MULTILINE)))
        _, out = self.call("sbatch", "--parsable", "--output=log", *options, name, **environ)
        job, deadline = out.strip(), time.monotonic() + 900
        while True:
            _, state = self.call("scontrol", "show", "job", job)
            if re.search(r"JobState=(COMPLETED|FAILED|TIMEOUT|CANCELLED|NODE_FAIL)", state):
                return state, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, state
            time.sleep(1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = tmp_path_factory.mktemp("slurm")
    for each in (folder, *list(folder.parents)[:2]):
        each.chmod(0o755)  # as munged demands
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.78.0.1 n1\n10.78.0.2 n2\n")
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(1024))
    (folder / "key").chmod(0o600)
    files = [f"--{name}={folder}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
    daemons = []
    with two_machines() as machines, open(folder / "daemons.log", "w") as log:
        found = Cluster(folder, machines.names)
        output = {"stdout": log, "stderr": subprocess.STDOUT}
        try:
            where = [f"--socket={folder}/munge.sock", f"--key-file={folder}/key", *files]
            daemons.append(subprocess.Popen(["munged", "-F", "--force", *where], **output))
            daemons.append(found.start(0, "slurmctld", "-D", **output))
            daemons += [found.start(node, "slurmd", "-D", "-N", f"n{node + 1}", **output) for node in range(2)]
            deadline = time.monotonic() + 60
            while found.call("sinfo", "-h", "-o", "%n %T")[1].count("idle") < 2:
                assert time.monotonic() < deadline, (folder / "daemons.log").read_text()[-3000:]
                time.sleep(0.5)
            yield found
        finally:
            found.call("scancel", "--user=root")
            while found.call("squeue", "-h")[1].strip():  # daemons do not end before the steps
                time.sleep(0.5)
            for daemon in reversed(daemons):
                daemon.send_signal(signal.SIGTERM)
            for daemon in daemons:
                daemon.wait(30)


def test_a_job_saves_before_its_time_limit_and_goes_on_until_it_is_done(cluster):
    # SLURM sends the signal up to a minute early: here after 60 to 90 s, in which not all of 108 s are done.
    limits = ["--time=3", "--signal=USR1@60", "--ntasks-per-node=2", "--cpus-per-task=1"]
    state, log = cluster.submit("slurm_train.sbatch", *limits, STEP_S="0.9")
    assert "JobState=COMPLETED" in state, log
    assert int(re.search(r"Restarts=(\d+)", state)[1]) >= 1
    stopped = [int(step) for step in re.findall(r"Stopped by SIGUSR1 after step (\d+) of 120", log)]
    assert stopped and stopped == [int(step) for step in re.findall(r"resumed after step (\d+) of 120", log)]


def test_launchers_meet_and_start_a_killed_rank_again(cluster):
    def edit(text):
        return text.replace("--devices 4", "--devices 1")

    state, log = cluster.submit("slurm_run.sbatch", "--cpus-per-task=1", edit=edit, STEP_S="0.02", KILLED="10")
    assert "JobState=COMPLETED" in state, log
    assert "rank 1 was killed by SIGKILL" in log or "rank 0 was killed by SIGKILL" in log


def test_the_components_of_a_heterogeneous_job_form_one_world(cluster):
    (cluster.folder / "place.py").write_text(PLACE)
    # The hosts in another order than that of their names, by which srun sorts them.
    components = ["-w", "n2", "-n", "1", ":", "-w", "n1", "-n", "2"]
    _, out = cluster.call("salloc", *components, "srun", "--het-group=0,1", sys.executable, "place.py")
    lines = sorted(line for line in out.splitlines() if line[0].isdigit())
    assert lines == ["0 0 1 0 3.0", "1 0 2 1 3.0", "2 1 2 1 3.0"], out


def test_several_launchers_on_a_machine_are_refused_on_all(cluster):
    (cluster.folder / "place.py").write_text(PLACE)
    code, out = cluster.call("srun", "-N2", "-n3", "lockstep", "run", "--devices", "1", "place.py")
    assert code != 0
    assert out.count("srun has started 3 launchers on 2 machines, and each would start a rank on every device.") == 3
