"""A lost rank, or a lost machine, of a job on two machines: network namespaces, as in test_two_machines.py."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.distributed import commands
from tests.distributed.test_recovery import TASK
from tests.two_machines import two_machines

pytest.importorskip("torchft", reason="the extra `recovery` is not installed")

# Batches follow from the step and the rank alone. The plan names the ranks that are killed, each once: "step:rank".
SCRIPT = """
import hashlib, os, pathlib, sys, time
import torch, lockstep
torch.set_num_threads(1)
steps, pause_s, plan = int(sys.argv[1]), float(sys.argv[2]), pathlib.Path(sys.argv[3])
with lockstep.init() as world:
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )
    model = lockstep.DistributedDataParallel(net, bucket_cap_mb=0.005)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recovery = lockstep.Recovery(world, model=model, optimizer=optimizer)
    while recovery.step < steps:
        with recovery.attempt():
            step = recovery.step
            random = torch.Generator().manual_seed(step * 100 + world.rank)
            x, y = torch.randn(8, 16, generator=random), torch.randint(0, 4, (8,), generator=random)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            words = plan.read_text().split()
            if (word := f"{step}:{world.rank}") in words:
                plan.write_text(" ".join(set(words) - {word}))
                os.kill(os.getpid(), 9)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(pause_s)
        if world.rank == 0:
            progress = plan.with_name("progress.new")
            progress.write_text(f"{recovery.step} {world.world_size}")
            progress.replace(plan.with_name("progress"))
    weights = b"".join(tensor.detach().numpy().tobytes() for tensor in net.state_dict().values())
    print("end", world.rank, world.world_size, recovery.step, hashlib.sha1(weights).hexdigest(), flush=True)
"""


@pytest.fixture
def machines(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "plan").write_text("")
    with two_machines() as found:
        yield found


def start(machines, folder, index, *, steps, pause_s=0.0, devices=2, nnodes="1:2", flags=(), **kwargs):
    where = ["--nnodes", nnodes, "--node-rank", str(index), "--master-addr", "10.78.0.1", "--max-restarts", "9", *flags]
    script = [str(folder / "train.py"), str(steps), str(pause_s), str(folder / "plan")]
    return machines.start(index, "run", *where, "--devices", str(devices), *script, **kwargs)


@contextlib.contextmanager
def all_ended(processes):
    """Kill what is left of them at the end."""
    try:
        yield processes
    finally:
        for process in processes:
            kill_machine(process)


def kill_machine(launcher):
    """Kill a launcher and all that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*psutil.Process(launcher.pid).children(recursive=True), launcher]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


@contextlib.contextmanager
def stopped(launcher):
    """Stop a launcher and all that it has started (SIGSTOP) inside the block."""
    found = [*psutil.Process(launcher.pid).children(recursive=True), psutil.Process(launcher.pid)]
    for each in found:
        each.suspend()
    yield
    for each in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.resume()


def await_progress(folder, step, world_size, timeout_s=90.0):
    """Wait until ``world_size`` ranks have done more than ``step`` steps; return how many."""
    began = time.monotonic()
    while time.monotonic() - began < timeout_s:
        with contextlib.suppress(OSError):
            done, size = map(int, (folder / "progress").read_text().split())
            if done > step and size == world_size:
                return done
        time.sleep(0.02)
    raise AssertionError(f"{world_size} ranks have not done step {step} in time")


def ends(processes, timeout_s=100):
    """Return the last lines of the ranks (rank, number of ranks, steps, hash of the weights), and the errors."""
    try:
        for process in processes:
            process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        for process in processes:
            kill_machine(process)
            print(*process.communicate())
        raise
    outputs = [process.communicate() for process in processes]
    found = re.findall(r"end (\d+) (\d+) (\d+) (\w+)", "".join(out for out, _ in outputs))
    return sorted(found), [err for _, err in outputs], [process.returncode for process in processes]


def run(machines, folder, plan, **kwargs):
    (folder / "plan").write_text(plan)
    with all_ended([start(machines, folder, index, **kwargs) for index in range(2)]) as processes:
        return ends(processes)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_ranks_that_are_lost_on_either_machine_are_replaced(machines, tmp_path):
    rows, _, codes = run(machines, tmp_path, "", steps=60)
    assert codes == [0, 0]
    repaired, errors, codes = run(machines, tmp_path, "0:1 9:2 25:0 45:3", steps=60, pause_s=0.05)
    assert codes == [0, 0], errors
    assert repaired == rows, errors
    assert len(rows) == 4
    assert len({weights for *_, weights in rows}) == 1
    first, second = errors
    assert first.count("was killed by SIGKILL") == second.count("was killed by SIGKILL") == 2
    assert "restart 1 of" not in first + second


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_machine_is_lost_and_comes_back(machines, tmp_path):
    with all_ended([start(machines, tmp_path, index, steps=600, pause_s=0.05) for index in range(2)]) as processes:
        done = await_progress(tmp_path, 60, 4)  # the launchers have met
        kill_machine(processes[1])
        began = time.monotonic()
        done = await_progress(tmp_path, done + 1, 2)
        print("alone after", time.monotonic() - began)
        processes.append(start(machines, tmp_path, 1, steps=600, pause_s=0.05))
        done = await_progress(tmp_path, done + 1, 4)
        print("together after", time.monotonic() - began)
        processes[1].communicate()
        rows, errors, codes = ends([processes[0], processes[2]])
    assert codes == [0, 0], errors
    assert [(rank, size, steps) for rank, size, steps, _ in rows] == [(str(rank), "4", "600") for rank in range(4)]
    assert len({weights for *_, weights in rows}) == 1
    assert "was lost; ranks 0, 1 go on" in errors[0]
    assert "joins; ranks 0-3 go on" in errors[0]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_machine_that_is_cut_off_ends_its_ranks_and_joins_again(machines, tmp_path):
    with all_ended([start(machines, tmp_path, index, steps=900, pause_s=0.05) for index in range(2)]) as processes:
        done = await_progress(tmp_path, 60, 4)  # the launchers have met
        machines.set_cable("down")
        began = time.monotonic()
        done = await_progress(tmp_path, done + 5, 2)
        print("alone after", time.monotonic() - began)
        machines.set_cable("up")
        done = await_progress(tmp_path, done + 1, 4)
        print("together after", time.monotonic() - began)
        rows, errors, codes = ends(processes)
    assert codes == [0, 0], errors
    assert [(rank, size, steps) for rank, size, steps, _ in rows] == [(str(rank), "4", "900") for rank in range(4)]
    assert len({weights for *_, weights in rows}) == 1
    assert "has not reached the others for 5 s; its ranks end, and join again" in errors[1]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_the_first_machine_is_lost_but_not_the_lighthouse(machines, tmp_path):
    serve = "import signal, torchft.coordination as c; s = c.LighthouseServer('10.78.0.2:29510', 1, 5000, 100, 5000)"
    words = ["ip", "netns", "exec", machines.names[1], sys.executable, "-c", f"{serve}; signal.pause()"]
    arguments = {"steps": 150, "pause_s": 0.05, "flags": ["--lighthouse", "10.78.0.2:29510"]}
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as lighthouse:
        try:
            with all_ended([start(machines, tmp_path, index, **arguments) for index in range(2)]) as processes:
                await_progress(tmp_path, 60, 4)  # the launchers have met
                kill_machine(processes[0])
                rows, errors, codes = ends(processes)
        finally:
            lighthouse.kill()
    assert codes == [-9, 0], errors
    assert [row[:3] for row in rows] == [("0", "2", "150"), ("1", "2", "150")]


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_raises_and_the_ranks_of_its_machine_are_restarted(machines, tmp_path, rank):
    (tmp_path / "train.py").write_text(SCRIPT.replace("os.kill(os.getpid(), 9)", "raise ValueError('boom')"))
    rows, errors, codes = run(machines, tmp_path, f"60:{rank}", steps=80, pause_s=0.1, nnodes="2")
    assert codes == [0, 0], errors
    assert [row[:3] for row in rows] == [(str(rank), "4", "80") for rank in range(4)]
    assert len({weights for *_, weights in rows}) == 1
    assert "restart 1 of 9" in errors[rank // 2]
    assert "restart 2 of 9" not in "".join(errors)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_without_torchft_all_ranks_are_restarted(machines, tmp_path):
    (tmp_path / "library" / "torchft").mkdir(parents=True)
    (tmp_path / "library" / "torchft" / "__init__.py").write_text("raise ImportError")
    path = os.pathsep.join([str(tmp_path / "library"), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path}
    rows, errors, codes = run(machines, tmp_path, "20:1", steps=40, pause_s=0.05, env=env)
    assert codes == [0, 0], errors
    assert [row[:3] for row in rows] == [(str(rank), "4", "40") for rank in range(4)]
    assert "to go on in place, the machines need torchft, which is not installed" in errors[0]
    assert "restart 1 of 9" in errors[0]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_ranks_wait_for_a_machine_that_they_need(machines, tmp_path):
    """With --nnodes 2, a machine that is lost has to come back; nothing is repeated meanwhile."""
    arguments = {"steps": 300, "pause_s": 0.05, "nnodes": "2"}
    with all_ended([start(machines, tmp_path, index, **arguments) for index in range(2)]) as processes:
        done = await_progress(tmp_path, 60, 4)  # the launchers have met
        kill_machine(processes[1])
        processes[1].communicate()
        time.sleep(8)  # longer than its heartbeats count
        processes.append(start(machines, tmp_path, 1, **arguments))
        rows, errors, codes = ends([processes[0], processes[2]])
    assert codes == [0, 0], errors
    assert [row[:3] for row in rows] == [(str(rank), "4", "300") for rank in range(4)]
    assert "was lost; the ranks wait for 1 more of --nnodes" in errors[0]
    (tmp_path / "progress").unlink()
    undisturbed, *_ = run(machines, tmp_path, "", **arguments | {"pause_s": 0.0})
    assert undisturbed == rows
    assert done < 300


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("nnodes", ["2", "1:2"])
@pytest.mark.parametrize("index", [0, 1])
def test_machines_meet_again_after_one_was_stopped(machines, tmp_path, index, nnodes):
    arguments = {"steps": 600, "pause_s": 0.05, "nnodes": nnodes}
    with all_ended([start(machines, tmp_path, index, **arguments) for index in range(2)]) as processes:
        done = await_progress(tmp_path, 60, 4)  # the launchers have met
        with stopped(processes[index]):
            time.sleep(5.5)  # a little longer than its heartbeats count
        await_progress(tmp_path, done + 5, 4)
        rows, errors, codes = ends(processes)
    assert codes == [0, 0], errors
    assert [row[:3] for row in rows] == [(str(rank), "4", "600") for rank in range(4)]
    assert len({weights for *_, weights in rows}) == 1
    # The first one has the lighthouse, without which the other did not go on: no step is lost.
    assert "restart 1 of" not in "".join(errors)
    assert "the ranks start again" not in errors[0]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_machine_that_was_replaced_ends(machines, tmp_path):
    arguments = {"steps": 1200, "pause_s": 0.05, "nnodes": "2"}
    with all_ended([start(machines, tmp_path, index, **arguments) for index in range(2)]) as processes:
        done = await_progress(tmp_path, 60, 4)  # the launchers have met
        with stopped(processes[1]):
            time.sleep(8)
            processes.append(start(machines, tmp_path, 1, **arguments))
            done = await_progress(tmp_path, done + 5, 4)
        # A fourth machine, too many, which was given a place that is taken.
        processes.append(start(machines, tmp_path, 1, **arguments))
        for late in (processes.pop(3), processes.pop(1)):
            _, error = late.communicate(timeout=60)
            assert late.returncode == 1, error
            assert "the job goes on with another launcher that has --node-rank 1" in error
        assert await_progress(tmp_path, done, 4) < 1200
        rows, errors, codes = ends(processes)
    assert codes == [0, 0], errors
    assert [row[:3] for row in rows] == [(str(rank), "4", "1200") for rank in range(4)]


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_a_stop_after_a_replacement_on_the_other_machine_is_saved(machines, tmp_path):
    call = "lockstep.fit(task, epochs=10**6, checkpoint=sys.argv[1], checkpoint_every=10**6)"
    (tmp_path / "task.py").write_text(f"{TASK}\nimport sys\nif __name__ == '__main__':\n    {call}\n")
    where = ["--nnodes", "2", "--master-addr", "10.78.0.1", "--max-restarts", "5", "--devices", "1"]
    environ = {**os.environ, "FAULTS": "before300@1", "ONCE": str(tmp_path / "once")}
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context((tmp_path / f"err{index}").open("wb")) for index in range(2)]
        started = [
            commands.start(
                *("run", *where, "--node-rank", str(index), str(tmp_path / "task.py"), str(tmp_path / "kept")),
                network=machines.names[index],
                stdout=subprocess.DEVNULL,
                stderr=files[index],
                env=environ,
            )
            for index in range(2)
        ]
        stack.enter_context(all_ended(started))
        deadline = time.monotonic() + 90
        while "is back" not in (tmp_path / "err1").read_text() and time.monotonic() < deadline:
            assert started[1].poll() is None, (tmp_path / "err1").read_text()
            time.sleep(0.05)
        time.sleep(0.5)
        for process in started:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(60) for process in started]
    texts = [(tmp_path / f"err{index}").read_text() for index in range(2)]
    assert codes == [75, 75], texts
    assert all("saved in" in text and "is back" in text for text in texts), texts
