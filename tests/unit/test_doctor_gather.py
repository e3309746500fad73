"""Where the doctor's facts come from: what programs and files say, planted, and this machine as it is."""

import os
import socket
import stat
import struct
import time

import psutil
import pytest
import torch

from lockstep.env import RankEnv
from lockstep.errors import ConfigurationError
from lockstep.study.doctor.gather import disk, gpus, nvidia
from lockstep.study.doctor.gather import task as gather_task
from lockstep.study.doctor.gather.cores import core_facts
from lockstep.study.doctor.gather.disk import disk_facts
from lockstep.study.doctor.gather.in_time import in_time
from lockstep.study.doctor.gather.memory import limit_facts, memory_facts
from lockstep.study.doctor.gather.network import find_infiniband, find_interfaces, host_facts, port_facts
from lockstep.study.doctor.gather.nvidia import read_gpus, read_matrix, visible
from lockstep.study.doctor.gather.pci import has_nvidia_gpu, is_redirecting, redirecting_bridges
from lockstep.study.doctor.gather.plan import make_plan
from lockstep.study.doctor.gather.task import ABSENT, FACTS, MISSED, TaskFails, num_bytes, task_facts, view_run
from lockstep.study.doctor.gather.versions import version_facts
from lockstep.study.doctor.plan import Plan
from tests.unit.doctor_planted import CHIPSET_REFUSES, NVLINK_IN_PAIRS, SOUND_GPUS

PLAN = Plan(devices=2)


def test_gpus_are_read_with_what_they_do_not_tell():
    text = "0, Tesla T4, GPU-1, 00000000:00:04.0, 15360, 512, [N/A], 70.00, 16, 16, 3, 3\n"
    (gpu,) = read_gpus(text)
    assert (gpu.name, gpu.memory_bytes, gpu.used_bytes) == ("Tesla T4", 15360 * 2**20, 512 * 2**20)
    assert (gpu.power_limit_w, gpu.default_power_w) == (None, 70.0)
    assert (gpu.link_width, gpu.max_link_width, gpu.system_generation, gpu.gpu_generation) == (16, 16, 3, 3)
    assert read_gpus("No devices were found\n") == ()


def test_links_are_read_for_each_pair_of_gpus():
    links = read_matrix(NVLINK_IN_PAIRS)
    assert links == {(0, 1): "NV12", (0, 2): "SYS", (0, 3): "SYS", (1, 2): "SYS", (1, 3): "SYS", (2, 3): "NV12"}
    assert read_matrix(CHIPSET_REFUSES) == {(0, 1): "CNS"}
    assert read_matrix("") == {}


def test_hidden_gpus_are_left_out():
    there = read_gpus(SOUND_GPUS)
    assert [gpu.index for gpu in visible(there, None)] == [0, 1, 2, 3]
    assert [gpu.index for gpu in visible(there, "2,0")] == [2, 0]
    assert [gpu.index for gpu in visible(there, "GPU-dddd,1")] == [3, 1]
    assert [gpu.index for gpu in visible(there, "1,-1,2")] == [1]
    assert visible(there, "") == ()


def planted_program(folder, monkeypatch, text):
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_driver_is_asked(tmp_path, monkeypatch):
    (tmp_path / "gpus").write_text(SOUND_GPUS)
    (tmp_path / "links").write_text(NVLINK_IN_PAIRS)
    answers = (
        f'case "$*" in topo*-m) cat {tmp_path}/links;; topo*) echo no such >&2; exit 3;; *) cat {tmp_path}/gpus;; esac'
    )
    planted_program(tmp_path, monkeypatch, answers)
    monkeypatch.setattr(gpus, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(gpus, "redirecting_bridges", lambda: ("0000:00:01.0",))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpu, _ = gpus.gpu_facts(PLAN)
    assert [found.index for found in gpu.gpus] == [0, 1, 2, 3]
    link, missed = gpus.link_facts(gpu)
    assert link.links == {(0, 1): "NV12"}  # of the two that the run uses
    assert link.redirecting == ("0000:00:01.0",)
    assert [(one.what, one.because) for one in missed] == [("peer access between GPUs", "nvidia-smi failed: no such")]


def test_a_driver_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(nvidia, "TIMEOUT_S", 0.2)
    planted_program(tmp_path, monkeypatch, "exec sleep 20")
    began = time.monotonic()
    with pytest.raises(nvidia.Unanswered) as caught:
        nvidia.ask("topo", "-m")
    assert str(caught.value) == "nvidia-smi did not answer within 0.2 s"
    assert time.monotonic() - began < 5


def bridge(control):
    """The configuration space of a bridge whose second extended capability is ACS."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x0001 | 1 << 16 | 0x140 << 20)
    struct.pack_into("<I", config, 0x140, 0x000D | 1 << 16)
    struct.pack_into("<H", config, 0x146, control)
    return bytes(config)


def test_acs_is_read_from_the_bridges(tmp_path):
    assert is_redirecting(bridge(0b0101))  # source validation, request redirect
    assert is_redirecting(bridge(0b1000))
    assert not is_redirecting(bridge(0b0001))
    assert not is_redirecting(bytes(4096))
    assert not is_redirecting(bytes(256))
    devices = {"0000:00:01.0": ("0x060400", bridge(0x1D)), "0000:00:02.0": ("0x060400", bridge(0))}
    devices |= {"0000:01:00.0": ("0x030200", bytes(64))}
    for name, (kind, config) in devices.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "class").write_text(f"{kind}\n")
        (tmp_path / name / "vendor").write_text("0x10de\n")
        (tmp_path / name / "config").write_bytes(config)
    assert redirecting_bridges(tmp_path) == ("0000:00:01.0",)
    assert has_nvidia_gpu(tmp_path)
    (tmp_path / "0000:00:02.0" / "config").write_bytes(bytes(64))
    with pytest.raises(PermissionError) as caught:
        redirecting_bridges(tmp_path)
    assert str(caught.value) == "only root may read the bridges' configuration"


def plant(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")


def test_infiniband_ports_are_read(tmp_path):
    plant(tmp_path, {"mlx5_0/ports/1/state": "4: ACTIVE", "mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)"})
    (port,) = find_infiniband(tmp_path)
    assert (port.device, port.port, port.state, port.rate) == ("mlx5_0", 1, "ACTIVE", "200 Gb/sec (4X HDR)")


def test_the_disk_is_measured_and_left_as_it_was(tmp_path):
    facts = disk_facts(tmp_path / "not" / "made" / "yet", 1000)
    assert facts.problem is None
    assert facts.filesystem
    assert 0 < facts.written_bytes <= disk.MOST_BYTES
    assert facts.bytes_per_s > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    assert disk_facts(file, None).problem == f"{file} is no folder"
    assert disk_facts(disk.Path("/proc"), None).problem is not None


def test_a_silent_file_system_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "_SILENT_S", 0.1)
    monkeypatch.setattr(disk, "_measure", lambda *_: time.sleep(1))
    assert disk_facts(tmp_path, None).problem == "it did not take a few MiB within 0.1 s"


def test_in_time():
    assert in_time(5, lambda: 7).value == 7
    failed = in_time(5, lambda: 1 / 0)
    assert isinstance(failed.error, ZeroDivisionError)
    assert failed.is_over
    late = in_time(0.05, lambda: time.sleep(1))
    assert (late.is_over, late.value, late.error) == (False, None, None)


def test_a_port_that_somebody_holds():
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        facts, missed = port_facts(Plan(devices=2, master_port=taken))
        assert (facts.port, facts.problem, facts.was_chosen) == (taken, "is already in use", True)
        assert facts.holder == f"process {os.getpid()}"
        assert missed == []
    assert port_facts(Plan(devices=2, master_port=facts.free_port))[0].problem is None
    _, (missed,) = port_facts(Plan(devices=2, is_running=True))
    assert missed.because == "this job's own ranks hold it"


def test_this_machine_is_seen():
    assert any(found.is_loopback for found in find_interfaces())
    host = host_facts(PLAN, {}, find_interfaces())
    assert host.name == socket.gethostname()
    cores = core_facts(Plan(devices=2, workers=3), {"OMP_NUM_THREADS": "4,2", "MKL_NUM_THREADS": "many"})
    assert (cores.ranks, cores.workers, cores.omp, cores.mkl) == (2, 3, 4, None)
    assert cores.affinity == len(os.sched_getaffinity(0))
    assert memory_facts(PLAN, None).available_bytes > 0
    limits, _ = limit_facts(PLAN, threads=1, has_infiniband=False)
    assert limits.running >= 0
    versions = version_facts(3, on_gpus=False)
    assert (versions.rank, versions.torch, versions.host) == (3, torch.__version__, socket.gethostname())


def test_a_job_that_has_begun_overrules_what_was_asked():
    ranks = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}
    env = RankEnv.from_environ(ranks | {"MASTER_PORT": "29501", "GROUP_RANK": "1"})
    plan = make_plan(None, env, {}, devices=8)
    assert (plan.devices, plan.machines, plan.master_addr, plan.master_port) == (2, 2, "10.0.0.1", 29501)
    assert plan.is_running
    assert plan.describe() == f"4 ranks on 2 machines with 2 {'GPUs' if plan.on_gpus else 'CPU cores'} each"


TASK = """
import torch
import lockstep

print("not part of the report")
task = lockstep.Task(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)),
    dataset=lambda: torch.utils.data.TensorDataset(torch.ones(10, 4), torch.ones(10)),
    loss=lambda model, batch: model(batch[0]).mean(),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    global_batch_size=6,
)
"""


def write_task(folder, text):
    file = folder / "planted_doctor_task.py"
    file.write_text(text)
    return str(file)


def told_of(text, folder):
    """What the process that looks at a task would tell; in this process."""
    told = []
    view_run(told.append, write_task(folder, text))
    return told


def test_a_task_is_looked_at_without_training(tmp_path):
    basics, model, data = told_of(TASK, tmp_path)
    assert basics == (FACTS, {"name": "task", "global_batch_size": 6, "drop_last": False})
    weights = 4 * (12 + 3 + 3 + 3)
    assert model == (FACTS, {"batchnorms": ("1",), "weight_bytes": weights + 4 * 6 + 8, "trained_bytes": weights})
    assert data[1].pop("sample_s") > 0
    assert data == (FACTS, {"num_samples": 10, "sample_bytes": 20})


def test_a_model_that_looks_at_its_weights_is_built_all_the_same(tmp_path):
    text = TASK.replace("    model=lambda: ", "    model=lambda: float(torch.ones(1).sum()) and ")
    assert told_of(text, tmp_path)[1][1]["batchnorms"] == ("1",)


def test_what_a_task_does_not_give_is_told(tmp_path):
    model = "lambda: torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))"
    assert told_of(TASK.replace(model, "lambda: 1 / 0"), tmp_path)[1] == (MISSED, "ZeroDivisionError: division by zero")
    ((kind, text),) = told_of("import lockstep\n", tmp_path)
    assert kind == ABSENT
    assert text.splitlines()[0].endswith("has no 'task'.")


def test_a_task_runs_in_a_process_of_its_own(tmp_path, capfd):
    file = write_task(tmp_path, TASK)
    facts, missed = task_facts(file, PLAN)
    assert missed == []
    assert (facts.world_size, facts.share, facts.batchnorms, facts.batch_bytes) == (2, 3, ("1",), 60)
    assert capfd.readouterr().out == ""
    with pytest.raises(ConfigurationError) as caught:
        task_facts(f"{file}:other", PLAN)
    assert str(caught.value) == f"{file} has no 'other'.\nName what it has: {file}:task"
    file = write_task(tmp_path, f"{TASK}raise ValueError('no data')\n")
    with pytest.raises(TaskFails) as failed:
        task_facts(file, PLAN)
    assert str(failed.value).startswith(f"{file}, line 13: ValueError: no data\n")


def test_a_task_that_takes_long_or_dies_is_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(gather_task, "STEPS", tuple((what, 0.5) for what, _ in gather_task.STEPS))
    file = write_task(tmp_path, "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n")
    monkeypatch.chdir(tmp_path)
    facts, missed = task_facts(file, PLAN)
    assert facts is None
    assert [(one.what, one.because) for one in missed] == [
        ("the task", "it took too long"),
        ("the model of the task", "the task comes before it"),
        ("the data set of the task", "the task comes before it"),
    ]
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))
    monkeypatch.setattr(gather_task, "STEPS", tuple((what, 5.0) for what, _ in gather_task.STEPS))
    dies = TASK.replace("dataset=lambda: ", "dataset=lambda: __import__('os')._exit(3) or ")
    facts, (missed,) = task_facts(write_task(tmp_path, dies), PLAN)
    assert (missed.what, missed.because) == ("the data set of the task", "its process ended with exit code 3")
    assert facts.batchnorms == ("1",)


def test_bytes_of_a_sample():
    sample = {"x": torch.ones(3, dtype=torch.float64), "y": [b"four", (1, torch.ones(2, dtype=torch.uint8))]}
    assert num_bytes(sample) == 24 + 4 + 8 + 2


def test_gpus_are_described_by_torch_where_the_driver_is_silent(tmp_path, monkeypatch):
    planted_program(tmp_path, monkeypatch, "echo 'Failed to initialize NVML' && exit 18")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    described = type("Properties", (), {"name": "GPU X", "total_memory": 2**34})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: described)
    facts, missed = gpus.gpu_facts(PLAN)
    assert [(gpu.index, gpu.name, gpu.memory_bytes) for gpu in facts.gpus] == [(0, "GPU X", 2**34), (1, "GPU X", 2**34)]
    assert missed[0].because == "nvidia-smi failed: Failed to initialize NVML"
    _, missed = gpus.link_facts(facts)
    assert [one.what for one in missed][:2] == ["links between GPUs", "peer access between GPUs"]
