"""The files for schedulers: they start what there is, have the form that the schedulers publish, and fit together."""

import contextlib
import json
import os
import re
import subprocess
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from lockstep.errors import RESUME_EXIT_CODE
from lockstep.launcher.command import parse_arguments
from lockstep.launcher.job import stop_timeout_s
from tests.contract.tree import REPO

yaml = pytest.importorskip("yaml")

CLUSTER = REPO / "examples" / "cluster"
MANIFESTS = {path.stem: list(yaml.safe_load_all(path.read_text())) for path in CLUSTER.glob("*.yaml")}
SBATCH = sorted(CLUSTER.glob("*.sbatch"))


def found(node, key):
    """Return the values of ``key``, wherever in the manifest."""
    if isinstance(node, list):
        return [value for each in node for value in found(each, key)]
    if not isinstance(node, dict):
        return []
    here = [node[key]] if key in node else []
    return here + [value for each in node.values() for value in found(each, key)]


def containers_of(manifest):
    return [container for containers in found(manifest, "containers") for container in containers]


def words_of(manifest):
    """Return the command of the pods, word by word: the same for all."""
    commands = [*found(manifest, "trainer"), *containers_of(manifest)]
    (words,) = {tuple(each["command"] + each["args"]) for each in commands if "command" in each}
    return list(words)


def pods(name):
    """Return the variables and the command of each pod, as the operator and Kubernetes set them."""
    manifest, words = MANIFESTS[name], words_of(MANIFESTS[name])
    if name == "jobset":
        (jobs,) = found(manifest, "replicatedJobs")
        number = jobs[0]["template"]["spec"]["completions"]
        return [
            ({}, [word.replace("$(JOB_COMPLETION_INDEX)", str(index)) for word in words]) for index in range(number)
        ]
    job = manifest[-1]["metadata"]["name"]
    if name == "trainjob":
        number, per_pod = (manifest[-1]["spec"]["trainer"][key] for key in ("numNodes", "numProcPerNode"))
        where = {"PET_MASTER_ADDR": f"{job}-node-0-0.{job}", "PET_MASTER_PORT": "29500"}
    else:
        number, per_pod = sum(found(manifest, "replicas")), manifest[-1]["spec"]["nprocPerNode"]
        where = {"PET_MASTER_ADDR": f"{job}-master-0", "PET_MASTER_PORT": "23456"}
        where |= {"MASTER_ADDR": f"{job}-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": str(number * int(per_pod))}
    shape = {"PET_NNODES": str(number), "PET_NPROC_PER_NODE": str(per_pod)}
    return [({**where, **shape, "PET_NODE_RANK": str(index), "RANK": str(index)}, words) for index in range(number)]


def check_train(words):
    """Check what comes after ``lockstep``: a command with flags that it has, and a task that is there."""
    command, task, *flags = words
    known = (REPO / "tests" / "contract" / "cli_flags.txt").read_text().splitlines()
    names = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    assert command == "train" and (REPO / task).is_file() and "--checkpoint" in names
    assert [name for name in names if f"lockstep train {name}" not in known] == []


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_the_launchers_of_all_pods_form_one_job(name):
    places = []
    for environ, (program, command, *words) in pods(name):
        assert (program, command) == ("lockstep", "run"), "no shell, which would keep SIGTERM to itself"
        with patch.dict(os.environ, environ):
            args = parse_arguments(words)
        assert (args.nnodes, args.nproc_per_node, args.module) == ("2", "2", True)
        assert args.training_script == "lockstep"
        check_train(args.training_script_args)
        places.append((args.node_rank, args.master_addr, args.master_port))
    first = {"jobset": "digits-node-0-0.digits", "trainjob": "digits-node-0-0.digits", "pytorchjob": "digits-master-0"}
    port = 23456 if name == "pytorchjob" else 29500
    assert places == [(index, first[name], port) for index in range(2)]


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_an_orderly_stop_has_its_time_and_is_no_failure(name):
    manifest = MANIFESTS[name]
    assert all(seconds >= stop_timeout_s() + 30 for seconds in found(manifest, "terminationGracePeriodSeconds"))
    if name == "pytorchjob":
        assert found(manifest, "restartPolicy") == ["OnFailure"] * 2
        return
    (container,) = {each["name"] for each in containers_of(manifest)}
    assert found(manifest, "onExitCodes") == [
        {"containerName": container, "operator": "In", "values": [RESUME_EXIT_CODE]}
    ]
    assert found(manifest, "restartPolicy") == ["Never"], "as Kubernetes demands with podFailurePolicy"
    (policy,) = found(manifest, "failurePolicy")
    assert [(rule["action"], rule["onJobFailureReasons"]) for rule in policy["rules"]] == [
        ("RestartJobSetAndIgnoreMaxRestarts", ["PodFailurePolicy"])
    ]


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_checkpoints_outlive_the_pods_and_shared_memory_is_large(name):
    (flag,) = re.findall(r"--checkpoint[= ](\S+)", " ".join(words_of(MANIFESTS[name])))
    for spec in [each for each in found(MANIFESTS[name], "spec") if "volumes" in each]:
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert "persistentVolumeClaim" in mounts["/" + flag.split("/")[1]]


@pytest.mark.parametrize("path", SBATCH, ids=[path.name for path in SBATCH])
@pytest.mark.parametrize("code", [0, 1, RESUME_EXIT_CODE])
def test_a_batch_script_goes_back_into_the_queue_after_an_orderly_stop_only(path, code, tmp_path):
    (tmp_path / "bin").mkdir()
    for name, status in {"srun": code, "scontrol": 0}.items():
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/{name}\nexit {status}\n')
        (tmp_path / "bin" / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "4"}
    assert subprocess.run(["bash", "-u", str(path)], env=environ, timeout=20).returncode == code
    queued = tmp_path / "scontrol"
    assert (queued.read_text() if queued.exists() else "") == ("requeue 77\n" if code == RESUME_EXIT_CODE else "")
    words = (tmp_path / "srun").read_text().split()
    assert words[:3] == ["--cpus-per-task=4", "--kill-on-bad-exit=0", "lockstep"]
    if words[3] == "run":
        args = parse_arguments(words[4:])
        assert (args.nproc_per_node, args.max_restarts, args.training_script) == ("4", 3, "lockstep")
    check_train(words[3:] if words[3] == "train" else args.training_script_args)
    (before_s,) = re.findall(r"^#SBATCH --signal=USR1@(\d+)$", path.read_text(), re.MULTILINE)
    assert int(before_s) >= stop_timeout_s() + 30


def read_by_client(document):
    """Return what the scheduler's own client, made from the schema that it publishes, keeps of a manifest."""
    kind = document["kind"]
    if kind == "PyTorchJob":
        training = pytest.importorskip("kubeflow.training", reason="needs kubeflow-training")
        client, answer = training.ApiClient(), SimpleNamespace(data=json.dumps(document))
        return client.sanitize_for_serialization(client.deserialize(answer, f"KubeflowOrgV1{kind}"))
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
    group = "JobsetV1alpha2" if kind == "JobSet" else "TrainerV1alpha1"
    return getattr(models, group + kind).from_dict(document).to_dict()


DOCUMENTS = [document for name in sorted(MANIFESTS) for document in MANIFESTS[name]]


@pytest.mark.parametrize("document", DOCUMENTS, ids=[document["kind"] for document in DOCUMENTS])
def test_the_schedulers_know_every_field(document):
    assert read_by_client(document) == document
    spoilt = json.loads(json.dumps(document).replace('"containers"', '"container"').replace('"numNodes"', '"nodes"'))
    with contextlib.suppress(ValueError):  # a field that must be there is not
        assert read_by_client(spoilt) != spoilt
