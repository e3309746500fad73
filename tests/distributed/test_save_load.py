"""`lockstep.save` and `lockstep.load` over ranks: each writes its shards, all read, and all hear of a problem."""

import ctypes
import socket
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

import lockstep
from lockstep.checkpoints import checkpoint
from lockstep.checkpoints.checkpoint import Checkpoints
from lockstep.checkpoints.object_store import place_of
from lockstep.errors import CheckpointError, CollectiveError
from lockstep.train.settings import Settings
from lockstep.train.trainer import Trainer
from tests.models import soak
from tests.object_store import folder_store
from tests.shm import shm_group

pytestmark = pytest.mark.timeout(120)


def save_and_load(world, path):
    model = nn.Linear(2, 2)
    wrapped = lockstep.DistributedDataParallel(model)
    lockstep.save(path, model=wrapped, number=world.rank)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        model.weight.zero_()
    found = lockstep.load(path, model=wrapped)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    with pytest.raises(CheckpointError) as caught:
        lockstep.save(path, bad=object())
    return found["number"], str(caught.value).partition("\n")[0], lockstep.load(path)["number"]


def test_rank_zero_writes_and_all_read(ranks, tmp_path):
    path = str(tmp_path / "c")
    message = f"The checkpoint {path} cannot contain builtins.object at state.bad."
    assert list(ranks(2)(save_and_load, path)) == [(0, message, 0)] * 2


def test_what_one_rank_calls_alone_is_said_to_be_collective(ranks, tmp_path):
    def run(world):
        texts = []
        for number in range(3):
            try:
                with shm_group() as group, patch.object(checkpoint, "default_group", return_value=group):
                    parameters = [nn.Parameter(torch.ones(3))]
                    optimizer = lockstep.ZeroRedundancyOptimizer(parameters, torch.optim.Adam, group)
                    if world.rank == 0:
                        calls = lockstep.save, lockstep.load, lambda _, own=optimizer: own.consolidate_state_dict()
                        calls[number](tmp_path / "missing")
                    else:
                        torch.distributed.all_reduce(torch.ones(1), group=group)
            except CollectiveError as error:
                texts.append(str(error).splitlines()[0] if world.rank == 0 else str(error))
            world.barrier()
        return texts

    first, others = ranks(2)(run)
    assert first == [
        f"{name} is collective: call it on every rank, not behind `if rank == 0`."
        for name in ("lockstep.save", "lockstep.load", "consolidate_state_dict")
    ]
    hint = "This all_gather of int64 may be lockstep.save, lockstep.load, consolidate_state_dict or another exchange of"
    assert [hint in text for text in others] == [True] * 3


def test_ranks_that_read_different_folders_are_told_apart(ranks, tmp_path):
    def load(world):
        folder = tmp_path / str(world.rank)
        with pytest.raises(CheckpointError) as caught:
            lockstep.load(folder)
        return str(caught.value)

    for name in ("0", "1"):
        lockstep.save(tmp_path / name, step=1)
    host = socket.gethostname()
    texts = [
        f"Rank 1 on {host} reads another checkpoint {tmp_path / name} than rank 0 on {host}.\n"
        "Use one folder that every rank sees, such as on a network drive, and do not save to it at the same time."
        for name in ("0", "1")
    ]
    assert list(ranks(2)(load)) == texts


def network():
    """Return a model with parameters that cannot be cut evenly."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 5, 2), nn.Flatten(), nn.Linear(20, 3), nn.Linear(3, 2))


def trained(world, kind):
    """Return a model and an optimizer after a step: sharded by ``fully_shard``, by ZeRO-1, or not at all."""
    model = network()
    if kind == "fsdp":  # which refuses channels_last
        model = fully_shard(model, mesh=init_device_mesh("cpu", (world.world_size,)))
    else:
        model = lockstep.DistributedDataParallel(model.to(memory_format=torch.channels_last))
    if kind == "zero":
        parameters = model.parameters()
        optimizer = lockstep.ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.1, shard_gradients=True)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 3, 3, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def whole_state(model, optimizer):
    """Return all tensors of the state of model and optimizer, of every rank."""
    if isinstance(optimizer, lockstep.ZeroRedundancyOptimizer):
        optimizer.consolidate_state_dict(to=None)
    state = {f"model.{name.removeprefix('module.')}": value for name, value in model.state_dict().items()}
    for index, entries in optimizer.state_dict()["state"].items():
        state |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in entries.items()}
    return {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}


def save_sharded(world, path, kind, in_store=False):
    model, optimizer = trained(world, kind)
    lockstep.save(folder_store(path) if in_store else path, model=model, optimizer=optimizer, step=1)
    return {name: value.tolist() for name, value in whole_state(model, optimizer).items()}


def load_sharded(world, path, kind, in_store=False):
    model, optimizer = trained(world, kind)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    place = folder_store(path) if in_store else path
    assert lockstep.load(place, model=model, optimizer=optimizer) == {"step": 1}
    model(torch.ones(2, 3, 3, 3)).sum().backward()  # with ZeRO-1 shards may be laid only now
    optimizer.zero_grad()
    return {name: value.tolist() for name, value in whole_state(model, optimizer).items()}


@pytest.mark.parametrize(
    ("kind", "readers", "in_store"),
    [
        ("fsdp", [(2, "zero"), (1, "plain")], False),
        ("zero", [(2, "fsdp"), (2, "zero")], False),
        ("plain", [(2, "fsdp")], False),
        ("fsdp", [(2, "zero")], True),
        *soak([("zero", [(2, "fsdp")], True)]),
    ],
)
def test_every_rank_writes_its_shards_and_any_number_of_ranks_reads_them(ranks, tmp_path, kind, readers, in_store):
    path = tmp_path / "c"
    saved, *others = ranks(3)(save_sharded, path, kind, in_store)
    assert all(other == saved for other in others)
    assert len(saved) == 6 * 4
    shards = sorted(path.glob("shard-*"))
    assert len(shards) == (1 if kind == "plain" else 3)
    if kind != "plain":
        # Of a file of safetensors: without the header, which has the names of the tensors.
        sizes = [len(data) - 8 - int.from_bytes(data[:8], "little") for data in map(Path.read_bytes, shards)]
        assert max(sizes) < (0.6 if kind == "fsdp" else 0.4) * sum(sizes), "no rank has written all"
    for num_ranks, other in readers:
        for found in ranks(num_ranks)(load_sharded, path, other, in_store):
            assert found == saved


def test_a_shard_that_is_damaged_is_noticed_by_all(ranks, tmp_path):
    path = tmp_path / "c"
    ranks(2)(save_sharded, path, "fsdp")
    shard = next(path.glob("shard-00001-*"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    def load(world):
        with pytest.raises(CheckpointError) as caught:
            lockstep.load(path)
        return str(caught.value)

    text = f"The checkpoint {path} is damaged: {shard.name} does not match its checksum.\nLoad another one."
    for found in ranks(2)(load):
        assert found in (text, f"Rank 1: {text}")


@pytest.mark.parametrize("in_store", [False, True])
def test_a_rank_that_dies_while_it_writes_leaves_the_checkpoint_before(ranks, tmp_path, in_store):
    def run(world):
        place = place_of(folder_store(tmp_path)) if in_store else tmp_path
        model, optimizer = trained(world, "fsdp")
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        with Checkpoints(place, world) as checkpoints:
            checkpoints.save(state, step=1)
            checkpoints.finish()
            with patch.object(checkpoint, "LAST_PARTS_TIMEOUT_S", 0.2):
                if world.rank == 1:
                    patch.object(checkpoint.storage, "write_shard", lambda *_: None).start()  # no record ever comes
                checkpoints.save(state, step=2)
                began_at = time.monotonic()
                checkpoints.close()  # as on an error
                patch.stopall()
        world.barrier()
        with Checkpoints(place, world) as checkpoints:
            found = checkpoints.load(required=True)
        return checkpoints.passed_over, len(found["model"]), time.monotonic() - began_at

    for passed_over, num_tensors, waited_s in ranks(2)(run):
        assert (passed_over, num_tensors) == ([], 6)
        assert waited_s < 10
    whole = [path.parent.name for path in tmp_path.glob("step-*[0-9]/manifest.json")]
    assert whole == ["step-0000000001"]


class OwnMemory:
    """By how many MiB the memory of this process rises within; not the pages of files."""

    def __enter__(self):
        ctypes.CDLL(None).malloc_trim(0)  # what was freed would take what comes without a trace
        self._before = self._most = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _now(self):
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) / 1024

    def _sample(self):
        while not self._done.wait(0.001):
            self._most = max(self._most, self._now())

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()
        self.rose = max(self._most, self._now()) - self._before


@pytest.mark.flaky("samples the memory of a process, which other load delays")
@pytest.mark.parametrize(("strategy", "in_store"), [("fsdp", False), ("ddp-zero1", True)])
def test_no_rank_holds_more_than_its_part_while_it_saves_and_loads(ranks, tmp_path, strategy, in_store):
    """Of a model of 48 MiB, whose optimizer has 96: a third of them, on each of three ranks."""

    def run(world):
        place = place_of(folder_store(tmp_path)) if in_store else tmp_path
        task = lockstep.Task(
            model=lambda: nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(12)]),
            dataset=lambda: TensorDataset(torch.randn(6, 1024)),
            loss=lambda model, batch: model(batch[0]).square().mean(),
            optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
            global_batch_size=6,
        )

        def make():
            return Trainer(task, Settings(), world, strategy=strategy, devices=[torch.device("cpu")])

        trainer = make()
        for _ in range(2):
            trainer.step()
        rose = []
        for blocking in (True, False):
            with Checkpoints(place, world, blocking=blocking) as checkpoints, OwnMemory() as memory:
                checkpoints.save(trainer.state_dict(), step=2)
                checkpoints.finish()
            rose.append(memory.rose)
        with OwnMemory() as memory:
            trainer.export(tmp_path / "weights.safetensors", writes=world.is_rank_zero)
        rose.append(memory.rose)
        del trainer, checkpoints
        trainer = make()
        with Checkpoints(place, world) as checkpoints, OwnMemory() as memory:
            trainer.load_state_dict(checkpoints.load(required=True))
        rose.append(memory.rose)
        return rose

    share, slack = (48 + 96) / 3, 24  # of some layers and buffers, and of memory that is free but in pieces
    for blocking, copied, exported, loaded in ranks(3)(run):
        assert blocking < slack
        assert copied < share + slack
        assert exported < 44, "not the model"
        assert loaded < 96 / 3 + slack, "the model is there already"


def test_a_file_of_torch_save_is_no_checkpoint(ranks, tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "x.pt")

    def load(world):
        with pytest.raises(CheckpointError, match=r"x.pt is a file, and no checkpoint.*\n.*with torch.load, and give"):
            lockstep.load(tmp_path / "x.pt")

    ranks(2)(load)
