"""The doctor: facts with a fault planted in each, how facts are read, and the report."""

import inspect
import io
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace

import pytest
from rich.console import Console

from lockstep.cli import main
from lockstep.errors import ConfigurationError
from lockstep.study.common import MIB
from lockstep.study.doctor import examine, machine, network
from lockstep.study.doctor.findings import CHECKS, NotChecked, Plan, Report, Severity, judge
from lockstep.study.links import Link

GIB = 2**30
HANG, WRONG, SLOW, NOTE = Severity

PLAN = Plan(devices=4, machines=2, workers=4, master_addr="10.0.0.1")
ALONE = replace(PLAN, machines=1)

# In the form of `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`: two GPUs without a fault.
GPUS = """\
0, GPU-aaaa0000, NVIDIA A100-SXM4-80GB, 81920, 4
1, GPU-bbbb1111, NVIDIA A100-SXM4-80GB, 81920, [N/A]
"""
LO, ETH = network.Interface("lo", ("127.0.0.1", "::1")), network.Interface("eth0", ("10.0.0.1",), 25_000)
DOCKER = network.Interface("docker0", ("172.17.0.1",))
VERSIONS = {"torch": "2.13.0", "lockstep": "0.1.0", "nccl": "", "cuda": "", "processor": "CPU"}
SOUND = {
    "machine": machine.Machine(
        plan=ALONE,
        gpus=machine.parse_gpus(GPUS, None),
        num_usable=4,
        has_driver=True,
        torch_cuda="12.8",
        logical=32,
        physical=16,
        usable=32,
        threads=None,
        threads_from="OMP_NUM_THREADS",
        busy_cores=0.0,
        available_bytes=64 * GIB,
        shm_bytes=16 * GIB,
        shm_free_bytes=16 * GIB,
        disk_problem="",
        filesystem="ext4",
        free_bytes=100 * GIB,
        task=machine.TaskFacts("net", 64, 4, 1000, (), 4 * MIB, 4 * MIB),
        environ={"NCCL_DEBUG": "WARN", "PATH": "/usr/bin"},
    ),
    "network": network.Network(
        PLAN,
        (LO, ETH, DOCKER),
        gloo="eth0",
        environ={},
        host="node1",
        addresses=("10.0.0.1",),
        own_address="10.0.0.1",
        master_addresses=("10.0.0.1",),
    ),
    "job": network.Job(PLAN, (VERSIONS, VERSIONS), Link(1.1e9)),
    "task": machine.TaskFacts("net", 64, 4, 1000, (), 4 * MIB, 4 * MIB),
}
CPU_HEAVY = replace(SOUND["task"], weight_bytes=8 * GIB, trained_bytes=8 * GIB)
GPU_PLAN = replace(ALONE, on_gpus=True)
BUSY = replace(SOUND["machine"].gpus[1], used_bytes=30 * GIB)
ONE_RANK = replace(ALONE, devices=1, workers=None)


def second_rank(**changed):
    return {"ranks": (VERSIONS, VERSIONS | changed)}


FAULTS = [
    ("machine", {"num_usable": 0, "torch_cuda": None}, "gpu-unusable", SLOW, "it has no CUDA"),
    ("machine", {"gpus": (BUSY,)}, "gpu-busy", SLOW, "GPU 1 has 30.0 GiB of 80.0 GiB in use already."),
    (
        "network",
        {"environ": {"GLOO_SOCKET_IFNAME": "eno1"}, "gloo": "eno1"},
        "interface-missing",
        HANG,
        "GLOO_SOCKET_IFNAME=eno1, but no interface of that name is up; this machine has lo, eth0, docker0.",
    ),
    (
        "network",
        {"environ": {"NCCL_SOCKET_IFNAME": "=bond0"}, "plan": replace(ALONE, on_gpus=True)},
        "interface-missing",
        HANG,
        "NCCL_SOCKET_IFNAME==bond0, but no interface of that name is up",
    ),
    ("network", {"gloo": "lo"}, "interface-local", HANG, "Gloo will use lo, which leads to this machine only"),
    ("network", {"gloo": "docker0"}, "interface-local", HANG, "a bridge to containers"),
    (
        "network",
        {"addresses": ("127.0.1.1",)},
        "hostname-loopback",
        HANG,
        "127.0.1.1, which other machines cannot reach.",
    ),
    ("network", {"addresses": ()}, "hostname-loopback", HANG, "The name of this host, node1, resolves to no address."),
    (
        "network",
        {"master_addresses": ("127.0.0.1",)},
        "master-address",
        HANG,
        "resolves to 127.0.0.1, a loopback address.",
    ),
    ("network", {"master_addresses": ()}, "master-address", HANG, "10.0.0.1, cannot be resolved here."),
    ("job", {"error": "1 of 2 ranks came."}, "ranks-do-not-meet", HANG, "1 of 2 ranks came."),
    ("job", {"link": Link(11.9e6)}, "link-slow", SLOW, "run at 95.2 Mb/s: averaging the gradients of 100 million"),
    ("job", second_rank(torch="2.11.0"), "versions-differ", HANG, "torch: 2.13.0 on rank 0; 2.11.0 on rank 1."),
    ("job", second_rank(processor="Old"), "versions-differ", SLOW, "processor: CPU on rank 0; Old on rank 1."),
    (
        "machine",
        {"logical": 2, "usable": 2, "plan": replace(ALONE, devices=2, workers=None), "busy_cores": 1.94},
        "cores-busy",
        SLOW,
        "Other programs keep 1.9 of 2 cores busy.",
    ),
    (
        "machine",
        {"threads": 32},
        "threads-too-many",
        SLOW,
        "OMP_NUM_THREADS=32 on 4 ranks are 128 threads for 32 cores.",
    ),
    (
        "machine",
        {"threads": 1, "threads_from": "MKL_NUM_THREADS"},
        "threads-too-few",
        SLOW,
        "MKL_NUM_THREADS=1 on 4 ranks",
    ),
    ("machine", {"usable": 2.5, "plan": ONE_RANK, "threads": 32}, "threads-too-many", SLOW, "32 threads for 2.5 cores"),
    (
        "machine",
        {"num_usable": 64, "plan": replace(ALONE, devices=64, workers=None)},
        "processes-over-cores",
        SLOW,
        "64 ranks for 32 cores.",
    ),
    (
        "machine",
        {"plan": replace(GPU_PLAN, workers=12)},
        "processes-over-cores",
        SLOW,
        "4 ranks with 12 loader workers each are 52 processes for 32 cores.",
    ),
    (
        "machine",
        {"shm_bytes": 0, "shm_free_bytes": 0},
        "shared-memory-small",
        HANG,
        "/dev/shm has 0 KiB free of 0 KiB, which is",
    ),
    (
        "machine",
        {"shm_bytes": 64 * MIB, "shm_free_bytes": 64 * MIB, "plan": replace(GPU_PLAN, workers=None)},
        "shared-memory-small",
        HANG,
        "/dev/shm has 64 MiB free of 64 MiB, which is too little for 4 ranks with loader workers.",
    ),
    (
        "machine",
        {"shm_bytes": 65536, "shm_free_bytes": 65536, "plan": ONE_RANK},
        "shared-memory-small",
        NOTE,
        "/dev/shm has 64 KiB free of 64 KiB",
    ),
    ("machine", {"task": CPU_HEAVY}, "memory-small", HANG, "4 ranks need at least 129.0 GiB"),
    (
        "machine",
        {"free_bytes": 11 * MIB},
        "disk-full",
        HANG,
        ". has 11 MiB left, which is too little for 3 checkpoints of",
    ),
    (
        "machine",
        {"disk_problem": "Permission denied"},
        "checkpoint-folder",
        HANG,
        ". cannot be written: Permission denied.",
    ),
    ("machine", {"filesystem": "tmpfs"}, "checkpoint-folder", WRONG, ". is in memory (tmpfs)."),
    ("machine", {"environ": {"CUDA_LAUNCH_BLOCKING": "1"}}, "debug-switch", SLOW, "CUDA_LAUNCH_BLOCKING=1 is set."),
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


@pytest.mark.parametrize(("topic", "changed", "kind", "severity", "found"), FAULTS, ids=[fault[2] for fault in FAULTS])
def test_a_planted_fault_is_found(topic, changed, kind, severity, found):
    (finding,) = judge(replace(SOUND[topic], **changed))
    assert (finding.kind, finding.severity) == (kind, severity)
    assert found in finding.found
    assert finding.cost.endswith(".")
    assert finding.fix.endswith(".")
    assert finding.paste


def test_every_check_is_documented_and_says_cost_and_fix():
    for check in CHECKS:
        assert inspect.getdoc(check.function), check.finding.kind
        assert check.finding.cost, check.finding.kind
        assert check.finding.fix, check.finding.kind
    assert len({check.finding.kind for check in CHECKS}) == len(CHECKS)


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
    assert network.nccl_interfaces((LO, DOCKER), None)[0].name == "docker0"


def test_what_the_driver_reports_is_read():
    first, second = machine.parse_gpus(GPUS, None)
    assert (first.memory_bytes, first.used_bytes, second.used_bytes) == (80 * GIB, 4 * MIB, 0)
    assert machine.parse_gpus(GPUS, "1,0") == (second, first)
    assert machine.parse_gpus(GPUS, "GPU-bbbb1111") == (second,)


def test_this_machine_is_read(tmp_path, monkeypatch):
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "_SHM", tmp_path / "absent")
    plan = Plan(1, checkpoint=str(tmp_path / "not" / "yet"))
    found, missed = machine.read_machine(plan, {"OMP_NUM_THREADS": "3,2"}, None)
    assert missed == []
    assert (found.threads, found.threads_from) == (3, "OMP_NUM_THREADS")
    assert 0 < found.usable <= found.logical
    assert found.shm_bytes == 0 < found.available_bytes
    assert found.disk_problem == ""
    assert found.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert machine.read_disk(str(tmp_path / "file"))[0] == "Not a directory"
    assert "127.0.0.1" in {one for interface in network.read_interfaces() for one in interface.addresses}


def test_a_silent_file_system_does_not_hold_up_the_doctor(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_DISK_TIMEOUT_S", 0.1)
    is_over = threading.Event()
    monkeypatch.setattr(machine.os, "fsync", lambda _: is_over.wait(100))
    assert machine.read_disk(str(tmp_path))[0] == "writing 1 MiB took longer than 0.1 s"
    is_over.set()


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
    facts, missed = machine.read_task(str(tmp_path / "t.py"), Plan(2))
    assert missed == []
    assert (facts.num_samples, facts.batchnorms) == (10, ["1"])
    assert facts.trained_bytes == 4 * (8 + 2 + 2 + 2)
    assert capfd.readouterr().out == ""


def test_a_model_is_built_without_memory_or_torchs_compiler(tmp_path):
    # 4 TiB, in parameters whose normally distributed values would import the compiler.
    (tmp_path / "t.py").write_text(TASK.replace("torch.nn.BatchNorm1d(2)", "torch.nn.Embedding(2**20, 2**20)"))
    code = """
import sys
from lockstep.study.doctor.machine import _model_facts
from lockstep.train.task import load_task
print(_model_facts(load_task("t.py"))["weight_bytes"], "torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == f"hello\n{2**42 + 4 * (8 + 2)} False\n", done.stderr


def test_a_task_that_fails_or_takes_long_is_reported(tmp_path):
    file = tmp_path / "t.py"
    file.write_text("task = 1 / 0\n")
    with pytest.raises(ConfigurationError, match="ZeroDivisionError"):
        machine.read_task(str(file), Plan(2))
    file.write_text(TASK.replace("lambda: torch.nn.Seq", "lambda: __import__('time').sleep(60) or torch.nn.Seq"))
    began = time.monotonic()
    facts, missed = machine.read_task(str(file), Plan(2), limit_s=1.0)
    assert time.monotonic() - began < 50  # the task itself sleeps for 60
    assert facts.weight_bytes == 0
    assert [one.because for one in missed] == ["it took too long"] * 2
    file.write_text(TASK.replace("torch.zeros(10, 4)", "None"))
    facts, (missed,) = machine.read_task(str(file), Plan(2))
    assert (facts.num_samples, facts.batchnorms) == (None, ["1"])
    assert missed == NotChecked("the data set of the task", "AttributeError: 'NoneType' object has no attribute 'size'")
    file.write_text("x = 1\n")
    with pytest.raises(ConfigurationError):
        machine.read_task(str(file), Plan(2))


REPORT = Report(
    PLAN,
    "node1",
    {"cores": "32 of 32 cores"},
    tuple(judge(replace(SOUND["machine"], threads=32)) + judge(replace(SOUND["network"], addresses=("127.0.1.1",)))),
    (NotChecked("links", "there is one GPU"),),
    1.5,
)


def test_a_report_as_json():
    record = json.loads(REPORT.to_json())
    assert (record["exit_code"], record["plan"]["machines"], record["seconds"]) == (1, 2, 1.5)
    assert record["findings"][0]["severity"] == "slow"
    assert record["verdict"] == "Found: 1 will hang or fail, 1 will be slow."
    assert record["findings"][0]["more"] == "lockstep doctor --explain threads-too-many"
    assert replace(REPORT, findings=()).verdict == "Nothing was found that would hang, falsify or slow this run."


def test_a_report_from_another_machine_is_the_same_after_its_way_as_json():
    assert Report.of(json.loads(json.dumps(asdict(REPORT)))) == REPORT


def test_reports_of_machines_are_merged():
    merged = examine.merge([REPORT, REPORT], network.Job(PLAN, (VERSIONS, VERSIONS)))
    assert merged.host == "node1 (machine 0), node1 (machine 1)"
    # The ranks have met, so what one machine feared of its own name was not so.
    (slow,) = merged.findings
    assert (slow.kind, slow.where) == ("threads-too-many", "node1 (machine 0), node1 (machine 1)")
    assert merged.seen["versions"].endswith("2 ranks compared")


def test_a_link_that_was_measured_counts_and_not_what_its_card_says():
    card = judge(replace(SOUND["network"], interfaces=(LO, replace(ETH, speed_mbps=1000))))
    reports, job = (
        [replace(REPORT, findings=tuple(card))],
        network.Job(PLAN, (VERSIONS,), Link(1.2e9, source="9.6 Gb/s")),
    )
    merged = examine.merge(reports, job)
    assert merged.findings == ()
    assert merged.seen["link"] == "all-reduces between 2 machines run at 9.6 Gb/s"
    (finding,) = examine.merge(reports, replace(job, link=Link(11.9e6))).findings
    assert (finding.kind, finding.paste) == ("link-slow", "lockstep predict TASK.py --machines 2 --link 11.9MB/s")


def test_the_report_in_a_pipe_is_plain_and_ends_with_the_verdict():
    stream = io.StringIO()
    examine.show(REPORT, Console(file=stream, width=100))
    lines = stream.getvalue().splitlines()
    assert "Will be slow: threads-too-many" in lines
    assert "         export OMP_NUM_THREADS=4" in lines
    assert "  more   lockstep doctor --explain threads-too-many" in lines
    assert lines[-1] == "Found: 1 will hang or fail, 1 will be slow. Exit code 1; took 1.5 s."


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise AssertionError('scripts are not started')\n")
    assert main(["doctor", "train.py"]) == 2
    assert capsys.readouterr().err == (
        "lockstep: train.py defines no task: lockstep doctor examines machines and tasks, and starts no script.\n"
        "Record a run of the script with lockstep run --monitor runs/a train.py, and look at it with "
        "lockstep report runs/a.\n"
    )
    assert main(["doctor", "train"]) == 2
    assert "lockstep: train does not exist." in capsys.readouterr().err
    assert main(["doctor", "--devices", "0"]) == 2
    capsys.readouterr()
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    monkeypatch.setattr(os, "environ", environ)
    (tmp_path / "train.py").write_text(TASK)
    main(["doctor", "train.py", "--devices", "1", "--json"])
    record = json.loads(capsys.readouterr().out)
    assert record["plan"]["target"] == "train.py"
    assert record["seconds"] < 10


def test_no_command_needs_docstrings():
    code = """
import contextlib, io, sys
from lockstep.cli import COMMANDS, main
for name in [*COMMANDS][1:]:  # run has torchrun's help
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main([name, "--help"])
    if " ".join(COMMANDS[name][1].split()) not in " ".join(out.getvalue().split()):
        sys.exit(out.getvalue())
sys.exit(main(["doctor", "--devices", "100000", "--json"]))
"""
    environ = {**os.environ, "PYTHONOPTIMIZE": "2"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, check=False)
    assert (done.returncode, done.stderr) == (1, "")
    found = {finding["kind"]: finding for finding in json.loads(done.stdout)["findings"]}
    fix = "Start fewer, or request more cores from the scheduler; SLURM's default is one for each task."
    assert found["processes-over-cores"]["fix"] == fix


def test_a_finding_is_explained(capsys):
    assert main(["doctor", "--explain", "disk-full"]) == 0
    out = capsys.readouterr().out
    (check,) = [check for check in CHECKS if check.finding.kind == "disk-full"]
    assert out.startswith(inspect.getdoc(check.function).partition("\n")[0].replace("``", "`") + "\n")
    assert out.endswith(f"\n\n{check.finding.cost} {check.finding.fix}\n")
    assert main(["doctor", "--explain", "files"]) == 2
    known = ", ".join(sorted(check.finding.kind for check in CHECKS))
    assert capsys.readouterr().err == f"lockstep: No finding is called files.\nThere are: {known}.\n"
