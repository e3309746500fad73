"""`lockstep run` on two machines: network namespaces, each with a loopback interface and an address of its own."""

import os
import shutil
import subprocess
import sys

import pytest

SCRIPT = """
import lockstep, torch, torch.distributed as dist
with lockstep.init(timeout_s=30) as world:
    total = torch.ones(1) * (world.rank + 1)
    dist.all_reduce(total)
    world.barrier()
    print(world.rank, world.world_size, world.local_rank, world.node_rank, total.item())
"""


def ip(*args):
    return subprocess.run(["ip", *args], capture_output=True, text=True, timeout=20, check=False)


@pytest.fixture
def machines():
    """The names of two namespaces that are joined by a cable."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2")
    names = [f"lockstep{side}{os.getpid()}" for side in "ab"]
    cables = [f"ls{side}{os.getpid()}" for side in "ab"]
    try:
        setup = [
            *(("netns", "add", name) for name in names),
            ("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1]),
        ]
        for index, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
            setup.append(("-n", name, "address", "add", f"10.78.0.{index}/24", "dev", cable))
            setup += [("-n", name, "link", "set", device, "up") for device in ("lo", cable)]
        for command in setup:
            done = ip(*command)
            if done.returncode:
                pytest.skip(f"this system gives no network namespaces: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            ip("netns", "delete", name)


@pytest.mark.parametrize(
    "meeting",
    [
        ["--master-addr", "10.78.0.1"],
        ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.78.0.1:29600", "--rdzv-id", "job"],
    ],
    ids=["static", "c10d"],
)
def test_two_machines_form_one_world(machines, tmp_path, meeting):
    # The host's name leads to the loopback interface in both, as on many systems: torchrun does not get past that.
    (tmp_path / "train.py").write_text(SCRIPT)
    processes = []
    for index, name in enumerate(machines):
        place = ["--node-rank", str(index)] if meeting[0] == "--master-addr" else []
        command = [sys.executable, "-m", "lockstep", "run", "--nnodes", "2", *place, *meeting, "--devices", "1"]
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command, str(tmp_path / "train.py")],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=100) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0], outputs
    fields = [out.split() for out, _ in outputs]
    # With c10d the machines agree among themselves which is first.
    assert sorted(fields) == [["0", "2", "0", "0", "3.0"], ["1", "2", "0", "1", "3.0"]]
