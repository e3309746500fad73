"""Machines that are lost, come back, or leave a running job: it goes on, and ends in the bits of an undisturbed run."""

import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.distributed.commands import lockstep as command
from tests.two_machines import two_machines

pytestmark = pytest.mark.soak

TASK = """\
import os, time
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def data():
    random = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(240, 16, generator=random), torch.randint(0, 4, (240,), generator=random))

def loss(model, batch):
    with open("steps", "a") as file:
        print(os.environ.get("WORLD_SIZE", "1"), lockstep.base.activity.now.step, file=file)
    if os.path.exists("slow"):
        time.sleep(0.1)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

with open("starts", "a") as file:
    print(os.environ.get("WORLD_SIZE", "1"), file=file)

task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)),
    dataset=data,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    global_batch_size=24,
)
"""
TRAIN = ["train", "task.py", "--reproducible", "2", "--steps", "200", "--export", "w.safetensors"]
MEETING = [
    *("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "10.78.0.1:29600", "--rdzv-id", "job"),
    *("--rdzv-conf", "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=4"),
    *("--max-restarts", "2", "--devices", "1"),
]


def folder_of(path):
    path.mkdir()
    (path / "task.py").write_text(TASK)
    return path


def await_step(folder, world_size, after=0):
    """Wait until so many ranks train, and have come past a step; return the step."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        lines = (folder / "steps").read_text().splitlines() if (folder / "steps").exists() else []
        if lines and len(lines[-1].split()) == 2:
            size, step = map(int, lines[-1].split())
            if size == world_size and step > after:
                return step
        time.sleep(0.02)
    raise AssertionError(f"no step of {world_size} ranks after {after}: {lines[-3:]}")


def lose_a_machine(start, folder, serve):
    """Train on two machines, one of which is killed and comes back; return in which steps that was."""
    start(0)
    lost = start(1)
    killed_in = await_step(folder, 2, after=3)
    lost.kill()
    alone = await_step(folder, 1, after=killed_in)
    start(1)
    return killed_in, alone, await_step(folder, 2, after=alone)


def join_and_leave(start, folder, serve):
    """Train on one machine, which another one joins, and leaves again as it is told to end."""
    start(0)
    alone = await_step(folder, 1, after=3)
    guest = start(1)
    together = await_step(folder, 2, after=alone)
    guest.send_signal(signal.SIGTERM)  # as before a spot instance ends
    guest.wait(60)
    return alone, together, await_step(folder, 1, after=together)


def lose_the_endpoint(start, folder, serve):
    """Train on two machines; the one at the address of the rendezvous is killed and comes back."""
    both = "--nnodes", "2"
    lost = start(0, *both)
    start(1, *both)
    killed_in = await_step(folder, 2, after=3)
    lost.kill()
    lost.wait(20)
    start(0, *both)
    return killed_in, await_step(folder, 2, after=killed_in)


STORE = """
import signal
from torch.distributed import TCPStore
store = TCPStore("10.78.0.1", 29600, None, True, wait_for_workers=False)
print("serves", flush=True)
signal.pause()
"""


def lose_the_store(start, folder, serve):
    """Train on two machines that meet in a store of another process; that is lost and comes back, then a machine."""

    def num_starts():
        return len((folder / "starts").read_text().splitlines())

    store = serve()
    first = start(0)
    start(1)
    lost_in = await_step(folder, 2, after=3)
    store.kill()
    store.wait()
    back_in, before, deadline = await_step(folder, 2, after=lost_in + 20), num_starts(), time.monotonic() + 60
    serve()
    while num_starts() < before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    together = await_step(folder, 2, after=back_in)
    first.kill()
    return lost_in, back_in, together, await_step(folder, 1, after=together)


def play(folder, act, *keeping):
    """Let ``act`` start a job and disturb it, and wait for its end."""
    (folder / "slow").touch()
    processes, stores = [], []
    with two_machines() as machines:

        def start(index, *flags):
            job = ["run", *MEETING, *flags, "-m", "lockstep", *TRAIN, *keeping]
            processes.append(machines.start(index, *job, cwd=folder))
            return processes[-1]

        def serve():
            command = ["ip", "netns", "exec", machines.names[0], sys.executable, "-c", STORE]
            stores.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            assert stores[-1].stdout.readline() == "serves\n"
            return stores[-1]

        try:
            steps = act(start, folder, serve)
            (folder / "slow").unlink()
            told = [process.communicate(timeout=100) for process in processes]
        finally:
            for process in [*processes, *stores]:
                process.kill()
                process.communicate()
    return [process.returncode for process in processes], told, steps


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    def folder(name):
        return folder_of(tmp_path_factory.mktemp("machines") / name)

    often = ("--checkpoint", "ck", "--checkpoint-every", "1")
    runs = {
        "lost": (lose_a_machine, *often),
        "guest": (join_and_leave, "--checkpoint", "ck"),
        "endpoint": (lose_the_endpoint, *often),
        "store": (lose_the_store, *often),
    }
    with ThreadPoolExecutor(3) as pool:  # they mostly wait
        folders = {name: folder(name) for name in (*runs, "whole")}
        whole = pool.submit(command, *TRAIN, "--devices", "1", cwd=folders["whole"])
        found = {name: pool.submit(play, folders[name], *run) for name, run in runs.items()}
        assert whole.result().code == 0, whole.result().err
        return {name: each.result() for name, each in found.items()}, folders


def same_weights(folders, name):
    """Tell whether a run ended in the bits of the one that nobody disturbed."""
    found, expected = ((folders[each] / "w.safetensors").read_bytes() for each in (name, "whole"))
    return found == expected


def resumed(*outputs):
    """After which steps the run went on: the machine that has rank 0 says so."""
    steps = re.findall(r"^resumed after step (\d+) of 200$", "\n".join(outputs), re.MULTILINE)
    return sorted(map(int, steps))


@pytest.mark.timeout(300)
def test_a_lost_machine_comes_back_and_goes_on_from_the_last_checkpoint(outcomes):
    codes, told, (killed_in, alone, together) = outcomes[0]["lost"]
    assert codes == [0, -signal.SIGKILL, 0], told
    assert same_weights(outcomes[1], "lost")
    first, second = resumed(told[0][0])[-2:]  # there is one more if the second machine was late to begin with
    assert killed_in - 1 <= first  # the checkpoint that was being written is lost, and no more
    assert alone <= second <= together


@pytest.mark.timeout(300)
def test_with_checkpoints_machines_come_and_leave_without_a_step_done_twice(outcomes):
    codes, told, (alone, together, later) = outcomes[0]["guest"]
    assert codes == [0, 75], told
    assert same_weights(outcomes[1], "guest")
    first, second = resumed(told[0][0])
    assert alone < first <= together < second <= later
    assert (
        "lockstep: another machine waits to join; the ranks stop after this step, and start again with it\n"
        "lockstep: machines joined or left; the ranks start again\n"
    ) in told[0][1]
    assert re.search(f"lockstep: Stopped by SIGTERM after step {second} of 200, loss [0-9.]+, saved in ck/", told[1][1])
    passes = (outcomes[1]["guest"] / "steps").read_text().splitlines()
    assert len(passes) == 2 * 200  # one for each of two virtual shards, and none again


@pytest.mark.timeout(300)
def test_the_machine_at_the_endpoint_is_lost_and_the_others_wait_until_it_is_back(outcomes):
    codes, told, (killed_in, together) = outcomes[0]["endpoint"]
    assert codes == [-signal.SIGKILL, 0, 0], told
    assert same_weights(outcomes[1], "endpoint")
    assert "lockstep: the store at 10.78.0.1:29600, where the machines meet, does not respond any more\n" in told[1][1]
    assert killed_in - 1 <= resumed(told[1][0], told[2][0])[-1] <= together


@pytest.mark.timeout(300)
def test_a_lost_store_stops_no_rank_and_the_machines_meet_in_the_next_one(outcomes):
    codes, told, (lost_in, back_in, together, alone) = outcomes[0]["store"]
    assert codes == [-signal.SIGKILL, 0], told
    assert same_weights(outcomes[1], "store")
    for _, err in told:
        assert err.count("where the machines meet, does not respond any more\n") == 1
    assert lost_in + 20 < back_in < together
    # The machine that was killed may have taken its last lines with it, such as that of the start before.
    *before, after_the_machine = resumed(told[0][0], told[1][0])
    assert all(back_in <= step <= together for step in before)
    assert together - 1 <= after_the_machine <= alone  # steps are counted from 0 there
