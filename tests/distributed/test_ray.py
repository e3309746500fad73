"""`lockstep.ray` on a local cluster of two nodes: the workers' world, failures, checkpoints, restarts, resizes."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

ray = pytest.importorskip("ray", reason="needs ray[train]")

from pyarrow.fs import FileSelector, S3FileSystem  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, WorkerGroupError  # noqa: E402
from ray.train.torch import TorchTrainer, prepare_model  # noqa: E402

import lockstep.ray  # noqa: E402

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore"),
]  # most of it goes into Ray's start


def run_jobs(folder, names, **env):
    """Return what came of the jobs, by name; in a process of its own, as Ray leaves threads behind."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", __file__, str(folder), names],  # with an option it is not forked off
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_jobs(tmp_path_factory.mktemp("ray"), "killed,raises,elastic")


def check_killed(killed, oracle):
    assert killed["restarts"] == "1"
    # Killed in step 7, perhaps before the checkpoint of step 6 was there.
    assert killed["first_step"] in (4, 6)
    assert killed["num_steps"] == killed["step"] == 12
    assert killed["weights"] == oracle
    assert killed["metrics"] == ["eval/loss", "step", "train/loss"]
    assert killed["latest"] == "step-0000000012"
    assert killed["kept"] == killed["known"] == ["step-0000000010", "step-0000000012"]


def test_workers_are_ranks(found):
    assert found["killed"]["backend"] == "shm"
    assert found["killed"]["ranks"] == [0, 2, 0, 2, 0]
    assert found["killed"]["wrapper"] == "lockstep.parallel.ddp.wrapper.DistributedDataParallel"


def test_a_killed_worker_costs_no_bit_and_ray_keeps_the_checkpoints(found):
    check_killed(found["killed"], found["oracle"])


def test_checkpoints_in_an_object_store(tmp_path):
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        _, port = server.get_host_and_port()
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
        found = run_jobs(tmp_path, "s3", AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}", **keys)
    finally:
        server.stop()
    check_killed(found["s3"], found["oracle"])


def test_an_exception_is_in_rays_error_under_its_rank(found):
    raised = found["raises"]
    assert raised["failures"] == {"1": "ValueError: no more data on this worker"}
    assert "[Rank 1 Error Snippet]" in raised["text"]
    assert "in train_raises" in raised["text"]


def test_a_lost_and_a_new_node_cost_no_bit(found):
    elastic = found["elastic"]
    assert elastic["num_workers"] == 2
    assert elastic["restarts"] == 2
    assert elastic["first_step"] >= 5
    assert elastic["weights"] == found["oracle"]


# --- The jobs: this file as a script, which prints what came of each as JSON ------------------------------------------

FOLDER = Path(sys.argv[1]).resolve() if __name__ == "__main__" else Path()
NUM_STEPS = 12
NODE = {"num_cpus": 1, "object_store_memory": 80 * 1024 * 1024}


def samples():
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(torch.randn(64, 6, generator=generator), torch.randn(64, 4, generator=generator))


def mean_loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


def make_task(loss=mean_loss):
    return lockstep.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4)),
        dataset=samples,
        eval_dataset=samples,
        loss=loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        global_batch_size=16,
    )


def settings(name):
    export = str(FOLDER / f"{name}.safetensors")
    return {"reproducible": 4, "steps": NUM_STEPS, "eval_every": 4, "export": export, "quiet": True}


def digest(name):
    return hashlib.sha256((FOLDER / f"{name}.safetensors").read_bytes()).hexdigest()


def trainer(train, name, num_workers=2, max_failures=0, config=None, storage=None):
    return TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=lockstep.ray.LockstepConfig(),
        scaling_config=ScalingConfig(num_workers=num_workers, elastic_resize_monitor_interval_s=1.0),
        run_config=RunConfig(
            name=name,
            **(storage or {"storage_path": str(FOLDER / "storage")}),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=max_failures),
        ),
    )


# --- a worker is killed, and Ray starts both again --------------------------------------------------------------------


def train_killed(config):
    with lockstep.init() as world:
        wrapped = type(prepare_model(nn.Linear(2, 2)))
        facts = {
            "backend": world.backend,
            "ranks": [world.rank, world.world_size, world.local_rank, world.local_world_size, world.node_rank],
            "wrapper": f"{wrapped.__module__}.{wrapped.__name__}",
            "restarts": os.environ["TORCHELASTIC_RESTART_COUNT"],
        }
    num_calls = 0

    def loss(model, batch):
        nonlocal num_calls
        num_calls += model.training
        if num_calls == 2 * 7 and world.rank == 1 and facts["restarts"] == "0":  # two virtual shards a step
            os.kill(os.getpid(), signal.SIGKILL)
        return mean_loss(model, batch)

    result = lockstep.ray.fit(make_task(loss), checkpoint_every=2, **settings(config["name"]))
    return {**facts, "first_step": result.first_step, "num_steps": result.num_steps}


def job_killed(name="killed", storage=None):
    result = trainer(train_killed, name, max_failures=1, config={"name": name}, storage=storage).fit()
    folder = f"{result.path}/checkpoints"
    entries = result.filesystem.get_file_info(FileSelector(folder))
    return {
        **result.return_value,
        "metrics": sorted(result.metrics),
        "step": result.metrics["step"],
        "latest": result.checkpoint.path.removeprefix(f"{folder}/"),
        "kept": sorted(entry.base_name for entry in entries if entry.base_name.startswith("step-")),
        "known": sorted(Path(checkpoint.path).name for checkpoint, _ in result.best_checkpoints),
        "weights": digest(name),
    }


def job_s3():
    # Ray uses pyarrow's; ours is s3fs.
    filesystem = S3FileSystem(endpoint_override=os.environ["AWS_ENDPOINT_URL"], allow_bucket_creation=True)
    filesystem.create_dir("bucket")
    return job_killed("s3", {"storage_path": "bucket/ray", "storage_filesystem": filesystem})


# --- a worker raises --------------------------------------------------------------------------------------------------


def train_raises():
    world = lockstep.init()
    wrapped = lockstep.DistributedDataParallel(nn.Linear(2, 2))
    for step in range(5):
        if step == 3 and world.rank == 1:
            raise ValueError("no more data on this worker")
        wrapped(torch.ones(1, 2)).sum().backward()


def job_raises():
    started_at = time.monotonic()
    try:
        trainer(train_raises, "raises").fit()
    except WorkerGroupError as error:
        failures = {rank: f"{type(each).__name__}: {each}" for rank, each in error.worker_failures.items()}
        return {"failures": failures, "text": str(error), "seconds": time.monotonic() - started_at}


# --- a node is lost, and another one comes ----------------------------------------------------------------------------


def train_elastic(config):
    num_workers = ray.train.get_context().get_world_size()
    on_head = ray.get_runtime_context().get_node_id() == config["head"]
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    num_calls = 0

    def loss(model, batch):
        nonlocal num_calls
        num_calls += model.training
        if restarts == 0 and not on_head and num_calls == 2 * 5:
            os.kill(os.getppid(), signal.SIGKILL)  # the node's raylet, which takes its workers along
            time.sleep(60)
        if restarts == 1 and num_calls == 4 * 4:
            (FOLDER / "alone").touch()
        if restarts == 1 and num_calls >= 4 * 4:
            time.sleep(60)
        return mean_loss(model, batch)

    result = lockstep.ray.fit(make_task(loss), checkpoint_every=1, **settings("elastic"))
    return {"num_workers": num_workers, "first_step": result.first_step, "restarts": restarts}


def job_elastic(address):
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", address, "--num-cpus", "1", "--block"]
    nodes = []

    def add_node():
        while not (FOLDER / "alone").exists():
            time.sleep(0.1)
        nodes.append(subprocess.Popen(start, stdout=subprocess.DEVNULL))

    threading.Thread(target=add_node, daemon=True).start()  # `Cluster` and Ray's `fit` want the main thread
    config = {"head": ray.get_runtime_context().get_node_id()}
    try:
        result = trainer(train_elastic, "elastic", num_workers=(1, 2), max_failures=3, config=config).fit()
    finally:
        for node in nodes:
            node.terminate()
            node.wait()
    return {**result.return_value, "weights": digest("elastic")}


if __name__ == "__main__":
    # Ray polls the workers every 2 s, and gives them 60 s to start, if the node that it lost seems to be there.
    os.environ |= {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}
    lockstep.fit(make_task(), **settings("oracle"))
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver="-v" in sys.argv)
    found = {"oracle": digest("oracle")}
    jobs = {"killed": job_killed, "s3": job_s3, "raises": job_raises, "elastic": lambda: job_elastic(cluster.address)}
    for name in sys.argv[2].split(","):
        found[name] = jobs[name]()
        (FOLDER / "found.json").write_text(json.dumps(found))
    ray.shutdown()
    cluster.shutdown()
