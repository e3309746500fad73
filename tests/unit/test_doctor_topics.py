"""What the doctor makes of facts: a fault is found with its severity and its values, and nothing without one."""

from dataclasses import replace

import pytest

from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.topics import cores, gpus, hostname, links, network, task
from lockstep.study.doctor.topics.nccl_choice import nccl_interfaces
from tests.unit.doctor_planted import FAULTS, HANG, LOOKS, NOTE, SOUND, TWO_SOCKETS, WRONG, with_links


@pytest.mark.parametrize("topic", SOUND)
def test_nothing_is_found_where_nothing_is_wrong(topic):
    assert LOOKS[topic](SOUND[topic]) == []


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{fault.kind.value}-{fault.severity.value}" for fault in FAULTS])
def test_a_fault_is_found(fault):
    (finding,) = LOOKS[fault.topic](fault.facts)
    assert (finding.kind, finding.severity, finding.found) == (fault.kind, fault.severity, fault.found)
    assert finding.cost.endswith(".")
    assert finding.fix.endswith(".")
    assert finding.paste
    assert finding.link == f"docs/doctor.md#{fault.kind.value}"


def found(topic, **changed):
    return LOOKS[topic](replace(SOUND[topic], **changed))


def test_fixes_name_what_is_there():
    (uneven,) = found("links", **with_links(_uneven()))
    assert uneven.paste == "export CUDA_VISIBLE_DEVICES=0,1"
    (acs,) = found("links", redirecting=("0000:00:01.0",), **with_links(TWO_SOCKETS.replace("SYS", "PIX")))
    assert acs.paste == "sudo setpci -v -s 0000:00:01.0 ECAP_ACS+0x6.w=0000"
    (loopback,) = found("network", gloo="lo")
    assert loopback.paste == "export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0"
    (threads,) = found("cores", omp=32)
    assert threads.paste == "export OMP_NUM_THREADS=4"
    (files,) = found("limits", open_files=256, workers=16)
    assert files.paste == "ulimit -n 65536"
    (few,) = found("limits", open_files=256, open_files_hard=256, workers=16)
    assert few.paste == "torch.multiprocessing.set_sharing_strategy('file_system')  # at the top of the script"
    (batch,) = found("task", global_batch_size=66)
    assert batch.fix == "Set it to 64 or 68, or take another number of devices."
    assert batch.paste == "lockstep train TASK.py --devices 4 --global-batch-size 64"


def _uneven():
    return "\tGPU0\tGPU1\tGPU2\nGPU0\t X \tNV12\tPHB\nGPU1\tNV12\t X \tPHB\nGPU2\tPHB\tPHB\t X \n"


def test_costs_are_worked_out():
    (slow,) = found(
        "network", interfaces=(replace(SOUND["network"].interfaces[1], speed_mbps=1000),), model_bytes=10**9
    )
    assert slow.cost == "Averaging 1000 MB of this task's gradients takes 8 s of each step at least."
    (disk,) = found("disk", written_bytes=10 * 2**20, seconds=1.0)
    assert disk.cost == "A checkpoint of this task (1 GiB) takes 102 s to write; the next one waits for it."
    (narrow,) = found("gpus", gpus=tuple(replace(gpu, link_width=4) for gpu in SOUND["gpus"].gpus[:1]))
    assert narrow.cost == "Copies from the host, and between GPUs without NVLink, have 1/4 of the bandwidth."


def test_a_short_last_batch_matters_to_batchnorm_only():
    assert found("task", num_samples=64 * 3 + 5) == []
    kinds = [finding.kind for finding in found("task", num_samples=64 * 3 + 5, batchnorms=("norm",))]
    assert kinds == [Kind.BATCHNORM_NOT_SYNCHRONISED, Kind.LAST_BATCH_TINY]
    assert len(found("task", num_samples=64 * 3 + 5, batchnorms=("norm",), drop_last=True)) == 1
    assert found("task", batchnorms=("norm",), world_size=1) == []


def test_a_task_that_fails_is_told_without_its_source_line():
    finding = task.fails("a.py", "a.py, line 3: DATA is not set.\n    raise Error(...)\nSet it: export DATA=...")
    assert (finding.kind, finding.severity) == (Kind.TASK_FAILS, HANG)
    assert finding.found == "The task cannot be made: a.py, line 3: DATA is not set."
    assert finding.fix == "Set it: export DATA=..."


def test_hidden_gpus_are_no_fault():
    facts = replace(SOUND["gpus"], num_usable=0, hidden=True)
    assert gpus.look(facts) == []
    assert gpus.seen(facts) == "no GPU that torch can use: CUDA_VISIBLE_DEVICES hides them"


def test_what_is_seen_is_said():
    assert gpus.seen(SOUND["gpus"]) == "4 x NVIDIA A100-SXM4-80GB, at least 80 GiB of memory each"
    assert links.seen(SOUND["links"]) == "1 pair: 1 x NV18; peer access in 1 of 1 pair"
    assert network.seen(SOUND["network"]) == "Gloo takes eth0; NCCL would take eth0"
    assert hostname.seen(SOUND["hostname"]) == "node1 leads to 10.0.0.1; others reach this machine at 10.0.0.1"
    assert cores.seen(SOUND["cores"]) == (
        "32 of 32 cores, 16 physical; 8 for each of 4 ranks, 1.6 for each of its 5 processes"
    )


def test_a_quota_is_no_fault_once_threads_fit_it():
    assert found("cores", quota=16.0, omp=4, workers=2) == []


def test_peer_access_that_the_gpus_lack_is_a_note():
    severities = [finding.severity for finding in found("links", peers={(0, 1): "GNS"})]
    assert severities == [NOTE]


def test_few_samples_make_batchnorm_wrong():
    severities = [found("task", batchnorms=("norm",), global_batch_size=4 * share)[0].severity for share in (15, 16)]
    assert severities == [WRONG, NOTE]


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["ib0", "ib1"]),
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("=eth0,ib0", ["ib0", "eth0"]),
        ("^ib,docker,lo", ["eth0", "eth1"]),
        ("^=eth0", ["lo", "docker0", "ib0", "ib1", "eth1"]),
        ("wlan", []),
    ],
)
def test_nccl_interfaces(chosen, names):
    there = [network.Interface(name, ("10.0.0.1",)) for name in ("lo", "docker0", "ib0", "ib1", "eth0", "eth1")]
    down = [network.Interface("eth9", ("10.0.0.9",), is_up=False), network.Interface("eth8")]
    assert [found.name for found in nccl_interfaces([*there, *down], chosen)] == names


def test_nccl_falls_back_to_docker_and_then_lo():
    lo, docker, eth = (network.Interface(name, ("10.0.0.1",)) for name in ("lo", "docker0", "eth0"))
    assert nccl_interfaces([lo, docker, eth], None) == [eth]
    assert nccl_interfaces([lo, docker], None) == [docker]
    assert nccl_interfaces([lo], None) == [lo]
