"""The doctor: facts with a fault planted in each, how facts are read, and the report."""

import io
import json
import os
import socket
import time
from dataclasses import replace

import pytest
from rich.console import Console

from lockstep.cli import main
from lockstep.errors import ConfigurationError
from lockstep.study.doctor import examine, gpus, machine, network, task
from lockstep.study.doctor.findings import (
    CHECKS,
    GIB,
    HANG,
    MIB,
    NOTE,
    SLOW,
    WRONG,
    NotChecked,
    Plan,
    Report,
    judge,
    report_from,
)

PLAN = Plan(devices=4, machines=2, workers=4, master_addr="10.0.0.1")
ALONE = replace(PLAN, machines=1)

# In the form of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`: two GPUs without a fault.
GPUS = """\
0, NVIDIA A100-SXM4-80GB, GPU-aaaa0000, 81920, 4, 16, 16
1, NVIDIA A100-SXM4-80GB, GPU-bbbb1111, 81920, [N/A], 16, 16
"""

# In the form of `nvidia-smi topo -p2p r`, with the escape codes of its heading.
PEERS = """\
 \t\x1b[4mGPU0\tGPU1\tNIC0\x1b[0m
 GPU0\tX\tOK\tPXB
 GPU1\tOK\tX\tPXB

Legend:

  OK   = (what it stands for)
"""
LO, ETH = network.Interface("lo", ("127.0.0.1", "::1")), network.Interface("eth0", ("10.0.0.1",), True, 25_000)
DOCKER = network.Interface("docker0", ("172.17.0.1",))
VERSIONS = dict.fromkeys(("nccl", "cuda", "driver"), "") | {
    "torch": "2.13.0",
    "lockstep": "0.1.0",
    "python": "3.12.1",
    "processor": "CPU",
}
SOUND = {
    "gpus": gpus.Gpus(gpus.parse_gpus(GPUS), 2, "12.8", True, 2, peers=gpus.parse_matrix(PEERS)),
    "network": network.Network(PLAN, (LO, ETH, DOCKER), gloo="eth0"),
    "host": network.Host(PLAN, "node1", ("10.0.0.1",), "10.0.0.1", "eth0", ("10.0.0.1",)),
    "port": network.Port(29500),
    "versions": network.Versions((VERSIONS, VERSIONS)),
    "cores": machine.Cores(ALONE, logical=32, affinity=32, physical=16),
    "task": task.TaskFacts("net", 64, 4, 1000, False, (), 4 * MIB, 4 * MIB, 1000),
    "memory": machine.Memory(ALONE, 16 * GIB, 16 * GIB, 64 * GIB),
    "limits": machine.Limits(PLAN, 65536, 65536, 8 * MIB),
    "disk": machine.Disk("runs", None, "ext4", 100 * GIB, GIB),
    "switches": machine.Switches({"NCCL_DEBUG": "WARN", "PATH": "/usr/bin"}),
}
CPU_HEAVY = replace(SOUND["task"], weight_bytes=8 * GIB, trained_bytes=8 * GIB)
LARGE_BATCH = replace(SOUND["task"], sample_bytes=3_125_000)
GPU_PLAN = replace(ALONE, on_gpus=True)
ONE_RANK = replace(ALONE, devices=1, workers=None)


def one_gpu(**changed):
    return {"gpus": (SOUND["gpus"].gpus[0], replace(SOUND["gpus"].gpus[1], **changed))}


def second_rank(**changed):
    return {"ranks": (VERSIONS, VERSIONS | changed)}


FAULTS = [
    ("gpus", {"num_usable": 0, "torch_cuda": None}, "gpu-unusable", SLOW, "was built without CUDA"),
    ("gpus", {"num_wanted": 8}, "gpus-too-few", HANG, "8 ranks on this machine, but torch sees 2 GPUs."),
    ("gpus", one_gpu(name="NVIDIA A100-40GB", memory_bytes=40 * GIB), "gpus-differ", SLOW, "GPU 1 NVIDIA A100-40GB"),
    ("gpus", one_gpu(used_bytes=30 * GIB), "gpu-busy", SLOW, "GPU 1 has 30 GiB of 80 GiB in use already."),
    ("gpus", one_gpu(link_width=4), "pcie-narrow", SLOW, "GPU 1 is linked by 4 PCIe lanes of 16."),
    ("gpus", {"peers": {(0, 1): "CNS"}}, "no-peer-access", SLOW, "(GPU 0 and 1): the chipset does not support it."),
    ("gpus", {"peers": {(0, 1): "GNS"}}, "no-peer-access", NOTE, "(GPU 0 and 1): the GPUs do not support it."),
    (
        "network",
        {"environ": {"GLOO_SOCKET_IFNAME": "eno1"}, "gloo": "eno1"},
        "interface-missing",
        HANG,
        "GLOO_SOCKET_IFNAME=eno1, but no interface of that name is up here; there are lo, eth0, docker0.",
    ),
    (
        "network",
        {"environ": {"NCCL_SOCKET_IFNAME": "=bond0"}, "plan": ALONE},
        "interface-missing",
        NOTE,
        "NCCL_SOCKET_IFNAME==bond0, but no interface of that name is up here",
    ),
    ("network", {"gloo": "lo"}, "interface-local", HANG, "Gloo will use lo, which leads to this machine only"),
    ("network", {"gloo": "docker0"}, "interface-local", HANG, "looks like a bridge to containers"),
    ("network", {"interfaces": (LO, replace(ETH, speed_mbps=1000))}, "interface-slow", SLOW, "at 1000 Mbit/s"),
    ("host", {"addresses": ("127.0.1.1",)}, "hostname-loopback", HANG, "its address for them is 10.0.0.1."),
    ("host", {"addresses": ("127.0.1.1",), "plan": ALONE}, "hostname-loopback", NOTE, "leads to 127.0.1.1"),
    ("host", {"addresses": ()}, "hostname-loopback", HANG, "The name of this host, node1, leads to no address."),
    ("host", {"master_addresses": ("127.0.0.1",)}, "master-address", HANG, "leads to 127.0.0.1 on this machine."),
    ("port", {"problem": "is in use", "was_chosen": True}, "port-taken", HANG, "Port 29500 on this machine is in use."),
    ("port", {"problem": "is in use"}, "port-taken", NOTE, "Port 29500 on this machine is in use."),
    ("versions", second_rank(torch="2.11.0"), "versions-differ", HANG, "torch: 2.13.0 on rank 0; 2.11.0 on rank 1."),
    ("versions", second_rank(nccl="2.29.7"), "versions-differ", HANG, "nccl: none on rank 0; 2.29.7 on rank 1."),
    ("versions", second_rank(python="3.11.7"), "versions-differ", NOTE, "python: 3.12.1 on rank 0; 3.11.7 on rank 1."),
    ("versions", second_rank(processor="Old"), "machines-differ", SLOW, "CPU on rank 0; Old on rank 1."),
    ("cores", {"threads": 32}, "threads-too-many", SLOW, "OMP_NUM_THREADS=32 on 4 ranks are 128 threads for 32 cores."),
    ("cores", {"threads": 1, "variable": "MKL_NUM_THREADS"}, "threads-too-few", SLOW, "MKL_NUM_THREADS=1 on 4 ranks"),
    ("cores", {"plan": replace(ALONE, devices=64)}, "ranks-over-cores", SLOW, "64 ranks compute on 32 CPU cores."),
    (
        "cores",
        {"plan": replace(GPU_PLAN, workers=12)},
        "workers-over-cores",
        SLOW,
        "are 52 processes for 32 cores",
    ),
    ("cores", {"quota": 24.0}, "cpu-quota", NOTE, "24 cores' worth of time, but programs see 32 cores."),
    ("cores", {"quota": 2.5, "plan": ONE_RANK, "started_threads": 32}, "cpu-quota", SLOW, "2.5 cores' worth of time"),
    ("cores", {"affinity": 1, "plan": replace(GPU_PLAN, devices=1)}, "cpu-affinity", SLOW, "1 of the machine's 32"),
    ("memory", {"shm_bytes": 0, "shm_free_bytes": 0}, "shared-memory-small", HANG, "There is no /dev/shm."),
    (
        "memory",
        {"shm_bytes": GIB, "shm_free_bytes": GIB, "task": LARGE_BATCH},
        "shared-memory-small",
        HANG,
        "/dev/shm has 1 GiB free of 1 GiB; 2.2 GiB is needed for 4 x 4 loader workers.",
    ),
    (
        "memory",
        {"shm_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB, "plan": replace(GPU_PLAN, workers=None)},
        "shared-memory-small",
        HANG,
        "/dev/shm has 64 MiB free of 64 MiB; 256 MiB is needed for NCCL.",
    ),
    (
        "memory",
        {"shm_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB, "plan": replace(ALONE, workers=None)},
        "shared-memory-small",
        NOTE,
        "/dev/shm has 64 MiB, as containers have by default.",
    ),
    ("memory", {"task": CPU_HEAVY}, "memory-small", HANG, "4 ranks need 129 GiB at least"),
    ("limits", {"open_files": 200}, "open-files", HANG, "A process may have 200 files open; a rank of this run needs"),
    ("limits", {"has_infiniband": True}, "locked-memory", HANG, "A process may lock 8 MiB of memory"),
    ("limits", {"temp_folder": f"/{'x' * 79}"}, "temp-folder", HANG, "has a name of 80 characters"),
    ("disk", {"free_bytes": 2 * GIB}, "disk-full", HANG, "runs has 2 GiB left, too little for 3 checkpoints of 1 GiB."),
    ("disk", {"problem": "Permission denied"}, "checkpoint-folder", HANG, "written to runs: Permission denied."),
    ("disk", {"filesystem": "tmpfs"}, "checkpoint-folder", WRONG, "runs lies in memory (tmpfs)."),
    ("switches", {"environ": {"CUDA_LAUNCH_BLOCKING": "1"}}, "debug-switch", SLOW, "CUDA_LAUNCH_BLOCKING=1 is set."),
    ("task", {"num_samples": 50}, "dataset-too-small", SLOW, "50 samples, fewer than a global batch of 64."),
    ("task", {"num_samples": 1, "drop_last": True}, "dataset-too-small", HANG, "1 sample, fewer than"),
    ("task", {"batchnorms": ("a", "b")}, "batchnorm-not-synchronised", NOTE, "2 BatchNorm layers (a, b)"),
    (
        "task",
        {"batchnorms": ("norm",), "global_batch_size": 8},
        "batchnorm-not-synchronised",
        WRONG,
        "1 BatchNorm layer (norm) will normalise with the 2 samples of their own device, of 8.",
    ),
]
"""One finding each: the facts, what is changed in them, and what must be found."""


@pytest.mark.parametrize("topic", SOUND)
def test_nothing_is_found_where_nothing_is_wrong(topic):
    assert judge(SOUND[topic]) == []
    assert SOUND[topic].summary


@pytest.mark.parametrize(("topic", "changed", "kind", "severity", "found"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_a_planted_fault_is_found(topic, changed, kind, severity, found):
    (finding,) = judge(replace(SOUND[topic], **changed))
    assert (finding.kind, finding.severity) == (kind, severity)
    assert found in finding.found
    assert finding.cost.endswith(".")
    assert finding.fix.endswith(".")
    assert finding.paste


def test_a_tiny_last_batch_matters_to_batchnorm_only():
    tiny = replace(SOUND["task"], num_samples=64 * 3 + 5)
    assert judge(tiny) == []
    assert [finding.kind for finding in judge(replace(tiny, batchnorms=("n",)))][1:] == ["last-batch-tiny"]


def test_every_check_is_documented_and_says_cost_and_fix():
    for check in CHECKS:
        assert check.explanation, check.kind
        assert check.cost, check.kind
        assert check.fix, check.kind
    assert len({check.kind for check in CHECKS}) == len(CHECKS)


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["eth0"]),
        ("", ["eth0"]),
        ("eth,docker", ["eth0", "docker0"]),
        ("=eth", []),
        ("^docker,lo", ["eth0"]),
    ],
)
def test_the_interfaces_that_nccl_takes(chosen, names):
    assert [one.name for one in network.nccl_interfaces((LO, ETH, DOCKER), chosen)] == names
    assert [one.name for one in network.nccl_interfaces((LO, DOCKER), None)] == ["docker0"]


def test_what_the_driver_says_is_read():
    first, second = gpus.parse_gpus(GPUS)
    assert (first.memory_bytes, first.used_bytes, second.used_bytes) == (80 * GIB, 4 * MIB, 0)
    assert gpus.visible((first, second), "1,0") == (second, first)
    assert gpus.visible((first, second), "GPU-bbbb,7,0") == (second,)
    assert gpus.parse_matrix(PEERS) == {(0, 1): "OK"}


def test_this_machine_is_read(tmp_path, monkeypatch):
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    cores = machine.read_cores(Plan(1), {"OMP_NUM_THREADS": "3,2"})
    assert (cores.threads, cores.variable) == (3, "OMP_NUM_THREADS")
    assert 1 <= cores.affinity <= cores.logical
    memory = machine.read_memory(Plan(1), None, shm=tmp_path / "absent")
    assert memory.shm_bytes == 0 < memory.available_bytes
    assert machine.read_limits(Plan(1), has_infiniband=False).temp_folder
    disk = machine.read_disk(str(tmp_path / "not" / "yet"), None)
    assert disk.problem is None
    assert disk.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert machine.read_disk(str(tmp_path / "file"), None).problem == "Not a directory"
    assert "127.0.0.1" in {one for interface in network.read_interfaces() for one in interface.addresses}


def test_a_silent_file_system_does_not_hold_up_the_doctor(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_SILENT_S", 0.1)
    monkeypatch.setattr(machine.os, "fsync", lambda _: time.sleep(5))
    assert machine.read_disk(str(tmp_path), None).problem == "it did not take a MiB within 0.1 s"


def test_a_port_that_somebody_holds_is_found():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        found = network.read_port(Plan(1, master_port=port))
        assert found.problem == "is already in use"
        assert found.free_port not in (0, port)
    assert isinstance(network.read_port(replace(PLAN, is_running=True)), NotChecked)


TASK = """
import torch, lockstep
print("hello")
task = lockstep.Task(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)),
    dataset=lambda: torch.utils.data.TensorDataset(torch.zeros(10, 4)),
    loss=print,
    optimizer=torch.optim.SGD,
    global_batch_size=4,
)
"""


def test_a_task_is_read_without_being_trained(tmp_path, capfd):
    (tmp_path / "t.py").write_text(TASK)
    facts, missed = task.read_task(str(tmp_path / "t.py"), Plan(2), is_named=False)
    assert missed == []
    assert (facts.num_samples, facts.batchnorms, facts.sample_bytes) == (10, ("1",), 16)
    assert facts.trained_bytes == 4 * (8 + 2 + 2 + 2)
    assert capfd.readouterr().out == ""


def test_a_task_that_fails_or_takes_long_is_said(tmp_path):
    file = tmp_path / "t.py"
    file.write_text("1 / 0\n")
    facts, _ = task.read_task(str(file), Plan(2), is_named=False)
    (finding,) = judge(facts)
    assert (finding.kind, finding.severity) == ("task-fails", HANG)
    assert "ZeroDivisionError" in finding.found
    file.write_text(TASK.replace("lambda: torch.nn.Seq", "lambda: __import__('time').sleep(60) or torch.nn.Seq"))
    began = time.monotonic()
    facts, missed = task.read_task(str(file), Plan(2), is_named=False, seconds=1.0)
    assert time.monotonic() - began < 5
    assert facts.batchnorms is None
    assert [one.because for one in missed] == ["it took too long", "the model of the task comes before it"]
    file.write_text("import os\nos._exit(3)\n")
    assert task.read_task(str(file), Plan(2), is_named=False)[1][0].because == "its process ended with exit code 3"
    file.write_text("x = 1\n")
    with pytest.raises(ConfigurationError):
        task.read_task(str(file), Plan(2), is_named=True)


REPORT = Report(
    PLAN,
    "node1",
    {"cores": "32 of 32 cores"},
    tuple(judge(replace(SOUND["cores"], threads=32)) + judge(replace(SOUND["host"], addresses=("127.0.1.1",)))),
    (NotChecked("links", "there is one GPU"),),
    1.5,
)


def test_a_report_survives_the_way_to_another_rank():
    assert report_from(json.loads(REPORT.to_json())) == REPORT
    record = json.loads(REPORT.to_json())
    assert record["counts"] == {"hang": 1, "wrong": 0, "slow": 1, "note": 0}
    assert record["verdict"] == "Found: 1 will hang or fail, 1 will be slow."
    assert record["findings"][0]["link"] == "docs/reference/doctor.md#threads-too-many"
    assert replace(REPORT, findings=()).verdict == "Nothing was found that would hang, falsify or slow this run."


def test_reports_of_machines_are_merged():
    merged = examine.merge([REPORT, REPORT], network.Versions((VERSIONS, VERSIONS)))
    assert merged.host == "node1 (machine 0), node1 (machine 1)"
    slow, note = merged.findings
    assert slow.where == "node1 (machine 0), node1 (machine 1)"
    # The ranks have met, so what one machine feared of its own name was not so.
    assert (note.kind, note.severity) == ("hostname-loopback", NOTE)
    assert note.found.endswith("The ranks met all the same.")
    assert merged.seen["versions"].endswith("2 ranks compared")


def test_the_report_in_a_pipe_is_plain_and_ends_with_the_verdict():
    stream = io.StringIO()
    examine.show(REPORT, Console(file=stream, width=100))
    lines = stream.getvalue().splitlines()
    assert "  threads-too-many" in lines
    assert "           export OMP_NUM_THREADS=4" in lines
    assert "    more   docs/reference/doctor.md#threads-too-many" in lines
    assert lines[-1] == "Found: 1 will hang or fail, 1 will be slow. Exit code 1; took 1.5 s."
    assert all(line == line.rstrip() for line in lines)


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import torch\ntorch.cuda.set_device(0)\nx = (\n")
    assert main(["doctor", "train.py"]) == 2
    assert "train.py, line 3: SyntaxError" in capsys.readouterr().err
    assert main(["doctor", "train"]) == 2
    assert "Did you mean train.py?" in capsys.readouterr().err
    assert main(["doctor", "--devices", "0"]) == 2
    capsys.readouterr()
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group()\nx.to('cuda:0')\n")
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    monkeypatch.setattr(os, "environ", environ)
    assert main(["doctor", "train.py", "--devices", "1", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert [(one["kind"], one["where"]) for one in record["findings"] if one["where"]] == [
        ("device-fixed", "train.py:3")
    ]
    assert record["plan"]["target"] == "train.py"
    assert record["seconds"] < 10
