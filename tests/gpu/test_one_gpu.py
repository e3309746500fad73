"""What needs several ranks, on one GPU: two over NCCL, which pass for two hosts, and two over Gloo.

NCCL refuses two ranks on one GPU of one host ("Duplicate GPU detected"), but believes what NCCL_HOSTID says. Between
two hosts it uses the network: here, sockets over the loopback. NVIDIA does not support this, so one all-reduce with a
short limit is tried first. The kernels of the two processes take turns, some 10 ms each: figures of speed mean nothing.
"""

import functools
import itertools
import os
import time

import pytest
import torch
import torch.distributed as dist

import lockstep
from lockstep.errors import JobHangs, LockstepError
from lockstep.launcher import api
from lockstep.launcher.output import LogSettings
from tests.distributed.test_recovery import TASK
from tests.distributed.test_scenarios import LOST, SCENARIOS, launch_losing
from tests.gpu.test_ranks_gpu import Scenarios, names_of
from tests.training import make_task, whole_batch

pytestmark = pytest.mark.timeout(150)

DEVICE = "cuda:0"
NUM_RANKS = 2
PROBE_S, JOB_S = 30.0, 100.0
ONLY_SOCKETS = {
    **dict.fromkeys(["NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"], "1"),
    **dict.fromkeys(["NCCL_NVLS_ENABLE", "NCCL_MNNVL_ENABLE"], "0"),
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
}
OVER_GLOO = [
    "torch's gradients, cnn",
    "weights, transformer",
    "zero, overlapping",
    "zero, sharded gradients",
    "optimizer in backward",
    "compression, int8",
]
"""Not all: what Gloo does is tested on the CPU, and it cannot be captured."""


def be_a_host():
    """Let NCCL take this rank for the only one of its host. It reads the variable once in a process."""
    os.environ["NCCL_HOSTID"] = f"rank {os.environ['RANK']}"


def on_one_gpu(backend, fn, *args, timeout_s=JOB_S, **options):
    """Run ``fn(world, *args)`` on two ranks, which both use the first GPU; return the results by rank."""

    def work():
        be_a_host()
        with lockstep.init(backend=backend, device=DEVICE) as world:
            return fn(world, *args)

    logs = LogSettings(merges=False)
    return api.launch_with(work, (), devices=NUM_RANKS, timeout_s=timeout_s, logs=logs, **options)


@pytest.fixture(autouse=True, scope="module")
def shared_gpu():
    """Let the launcher start more ranks than there are GPUs: each says by itself which one it uses."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(api, "check_count", lambda wanted: None)
        for name, value in ONLY_SOCKETS.items():
            monkeypatch.setenv(name, value)
        yield


def one_all_reduce(world):
    total = torch.ones(1000, device=world.device)
    dist.all_reduce(total)
    return total.sum().item()


def reason_of(error):
    """Return the line that says why NCCL refuses."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    last = [after for before, after in itertools.pairwise(lines) if before.strip() == "Last error:"]
    return (last or lines)[0].strip()


@pytest.fixture(scope="module")
def two_hosts():
    """Skip the test if NCCL does not connect two ranks on one GPU."""
    if not dist.is_nccl_available():
        pytest.skip("could not be shown: this torch was built without NCCL")
    try:
        totals = on_one_gpu("nccl", one_all_reduce, timeout_s=PROBE_S)
    except LockstepError as error:
        pytest.skip(f"could not be shown: {reason_of(error)}")
    assert totals == [NUM_RANKS * 1000.0] * NUM_RANKS


# --- over NCCL


def scenarios_over(backend, request):
    run = functools.partial(on_one_gpu, backend)
    folders = request.getfixturevalue("tmp_path_factory")
    return Scenarios(run, lambda: folders.mktemp("passed"), JOB_S, names_of(request))


@pytest.fixture(scope="module")
def scenarios(two_hosts, request):
    return scenarios_over("nccl", request)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks(scenarios, name):
    scenarios.check(name)


@pytest.mark.parametrize("how", LOST)
def test_a_lost_rank_is_named(two_hosts, how):
    launch_losing(NUM_RANKS, how, device=DEVICE, prepare=be_a_host)


def stays_away(world):
    """In the fourth step, rank 1 does not come; the other one waits for it on its device."""
    model = lockstep.DistributedDataParallel(torch.nn.Linear(4, 2).to(world.device))
    for step in range(9):
        if world.rank == 1 and step == 3:
            time.sleep(90)
        model(torch.ones(1, 4, device=world.device)).sum().backward()
        model.module.weight.grad.norm().item()


def test_a_rank_that_does_not_come_is_named(two_hosts):
    with pytest.raises(JobHangs, match=r"rank 1 is in stays_away \(.*; rank 0 waits .*: all_?reduce"):
        on_one_gpu("nccl", stays_away, watchdog_s=6.0)


def abort(world):
    """Rank 1 leaves a group in which rank 0 waits for it; an abort releases the device, and other groups go on."""
    group, tensor = dist.new_group(), torch.ones(4, device=world.device)
    dist.all_reduce(tensor, group=group)
    torch.accelerator.synchronize()
    world.barrier()
    if world.rank == 0:
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        event = torch.Event(world.device)
        event.record()
        time.sleep(1.0)
        assert not event.query()
        dist.distributed_c10d._abort_process_group(group)
        torch.accelerator.synchronize()  # would wait for ever
    world.barrier()
    if world.rank == 1:
        dist.distributed_c10d._abort_process_group(group)  # a connection that ended before would be an error of NCCL's
    return one_all_reduce(world)


def test_an_abort_releases_the_device(two_hosts):
    assert on_one_gpu("nccl", abort, timeout_s=PROBE_S) == [NUM_RANKS * 1000.0] * NUM_RANKS


# --- over either


@pytest.fixture(params=["gloo", "nccl"])
def backend(request):
    if request.param == "nccl":
        request.getfixturevalue("two_hosts")
    return request.param


def fit_task(world, path):
    """Train the task of tests/distributed/test_recovery.py, whose ranks end themselves where FAULTS says."""
    names = {}
    exec(TASK, names)
    lockstep.fit(names["task"], strategy="ddp", steps=27, export=path, quiet=True)


def test_a_rank_is_replaced_in_place_with_the_same_bits(backend, tmp_path, monkeypatch, capfd):
    """Over NCCL the others abort their communicator and make another one."""
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    found = []
    for faults in ("", "backward@1 before3@0"):
        monkeypatch.setenv("FAULTS", faults)
        path = tmp_path / f"weights{len(found)}.safetensors"
        on_one_gpu(backend, fit_task, str(path), max_restarts=5)
        found.append(path.read_bytes())
    assert found[0] == found[1]
    err = capfd.readouterr().err
    assert err.count("is back after") == 2 and "restart" not in err


# --- over Gloo


def losses_of_fit(world, num_steps):
    return lockstep.fit(make_task(), strategy="ddp", steps=num_steps, quiet=True).losses


def test_fit_over_gloo_equals_one_process():
    expected = whole_batch(make_task(), 6)["losses"]
    assert on_one_gpu("gloo", losses_of_fit, 6) == [pytest.approx(expected, rel=1e-10)] * NUM_RANKS


@pytest.fixture(scope="module")
def scenarios_over_gloo(request):
    return scenarios_over("gloo", request)


@pytest.mark.parametrize("name", OVER_GLOO)
def test_two_ranks_over_gloo(scenarios_over_gloo, name):
    scenarios_over_gloo.check(name)
