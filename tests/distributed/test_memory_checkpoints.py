"""Copies of the state in memory: ranks that are started again lose no more than a step, and hosts help each other."""

import contextlib
import io
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import lockstep
from tests.distributed.commands import lockstep as command
from tests.training import make_task

TASK = """\
import os, signal
import torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset
from lockstep.launcher.reaper import memory_of

def data():
    random = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(240, 16, generator=random), torch.randint(0, 4, (240,), generator=random))

def flip_a_bit_in_the_newest_copy():
    folder = memory_of(os.environ["LOCKSTEP_RUN_DIR"]) + "/0"
    files = {}
    for name in os.listdir(folder):
        with open(f"{folder}/{name}", "rb") as file:
            files[int(file.read(4096).split(b'"step": ')[1].split(b",")[0])] = f"{folder}/{name}"
    with open(files[max(files)], "r+b") as file:
        file.seek(6000)
        byte = file.read(1)[0]
        file.seek(6000)
        file.write(bytes([byte ^ 16]))
    print("copies in", folder, "of steps", *sorted(files))

def loss(model, batch):
    restart, rank, step = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], lockstep.activity.now.step
    if "IS_TO_DIE" in os.environ and (restart, rank, step) in {("0", "1", 7), ("1", "0", 12)}:
        if restart == "1":
            flip_a_bit_in_the_newest_copy()
        os.kill(os.getpid(), signal.SIGKILL)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

task = lockstep.Task(
    model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4)),
    dataset=data,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    global_batch_size=24,
)
"""
TRAIN = ["train", "task.py", "--devices", "2", "--reproducible", "2", "--steps", "16", "--export", "w.safetensors"]


@pytest.mark.timeout(200)
def test_killed_ranks_go_on_from_memory_with_the_bits_of_an_undisturbed_run(tmp_path):
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary"), "OMP_NUM_THREADS": "1"}

    def train(name, *flags, **more):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "task.py").write_text(TASK)
        return command(*TRAIN, *flags, cwd=folder, env={**environment, **more}, timeout=180), folder / "w.safetensors"

    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(train, "whole")
        # No checkpoints on disk. The second kill is of the rank that writes, and spoils the newest copy.
        flags = ("--max-restarts", "2", "--memory-checkpoint-every", "1")
        (done, weights), (undisturbed, expected) = train("killed", *flags, IS_TO_DIE="1"), whole.result()
    assert (done.code, undisturbed.code) == (0, 0), done.err
    assert weights.read_bytes() == expected.read_bytes()
    first, second = map(int, re.findall(r"^resumed after step (\d+) of 16, from memory$", done.out, re.MULTILINE))
    assert first in (6, 7)  # 6 if the writer was killed while it copied
    folder, steps = re.search("^copies in (.*) of steps (.*)$", done.out, re.MULTILINE).groups()
    assert steps == "11 12"
    assert second == 11
    said = [line for line in done.out.splitlines() if line.startswith("passed over")]
    assert said == [
        f"passed over the checkpoint in the memory of {os.uname().nodename} after step 12: "
        "it does not match its checksum"
    ]
    assert not list((tmp_path / "temporary").glob("lockstep-*"))
    assert re.fullmatch(r"/dev/shm/lockstep-\w+\.memory/0", folder)
    assert not Path(folder).parent.exists()


def train(world, folder, steps, *, strategy="ddp", in_memory=True, **settings):
    """Train as if each rank were the only one of its host; return the result, the weights, and what is printed."""
    from lockstep.train import fit as module
    from lockstep.train import memory_copies

    memory_copies._CHUNK_BYTES = 1000
    mine = Path(folder) / f"host{world.rank}"
    mine.mkdir(exist_ok=True)

    def make_copies(found):
        return memory_copies.MemoryCopies(mine, found, is_writer=True, several_hosts=True)

    before, module.make_copies = module.make_copies, make_copies
    kept = {}
    task = make_task(
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        after=lambda model: kept.update((name, value.clone()) for name, value in model.state_dict().items()),
    )
    every = {"memory_checkpoint_every": 1} if in_memory else {}
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
            result = lockstep.fit(task, strategy=strategy, steps=steps, **every, **settings)
    finally:
        module.make_copies = before
    return result, kept, out.getvalue() + errors.getvalue()


def lose_a_host(world, folder, strategy):
    whole = train(world, folder, 9, strategy=strategy, in_memory=False)[1]
    train(world, folder, 6, strategy=strategy)
    names = sorted(path.name for path in (Path(folder) / f"host{world.rank}").iterdir())
    world.barrier()
    if world.rank == 0:
        shutil.rmtree(Path(folder) / "host0")
    result, weights, _ = train(world, folder, 9, strategy=strategy)
    same = all(torch.equal(weights[name], value) for name, value in whole.items())
    return names, result.first_step, len(weights), same


@pytest.mark.parametrize("strategy", ["ddp", "ddp-zero1", "fsdp"])
def test_a_host_that_lost_its_copy_gets_it_from_another(ranks, tmp_path, strategy):
    found = ranks(2)(lose_a_host, str(tmp_path), strategy)
    assert [each[:2] for each in found] == [(["copy-0", "copy-1"], 6)] * 2
    assert found[0][2] == 8
    assert found[0][3]


def newest_of_all(world, folder):
    """Go on from memory or disk, whatever is newer; return after how many steps, and what is said of it."""
    from lockstep.train import memory_copies

    steps = []
    disk = {"checkpoint": Path(folder) / "disk", "checkpoint_every": 4}

    def go_on(num_steps, **settings):
        result, _, said = train(world, folder, num_steps, **settings)
        steps.append(result.first_step)
        world.barrier()
        return said

    go_on(3)
    first = go_on(5, **disk)  # 3 in memory
    go_on(6, in_memory=False, **disk)  # 5 on disk; memory is left behind
    second = go_on(7, **disk)
    shutil.rmtree(Path(folder) / f"host{world.rank}")
    with contextlib.ExitStack() as patches:
        if world.rank == 1:
            patches.enter_context(patch.object(memory_copies, "free_and_total_bytes", lambda: (100, 0)))
            patches.enter_context(patch.object(memory_copies.socket, "gethostname", lambda: "host1"))
        third = go_on(9)  # nothing in memory, and no folder given
    go_on(10)
    return steps, [first, second], third, sorted(path.name for path in (Path(folder) / f"host{world.rank}").iterdir())


def test_the_newest_of_memory_and_disk_is_taken_and_a_host_without_room_says_so(ranks, tmp_path):
    (steps, said, _, _), (other_steps, _, without_room, names) = ranks(2)(newest_of_all, str(tmp_path))
    assert steps == other_steps == [0, 3, 5, 6, 0, 9]
    assert "resumed after step 3 of 5, from memory\n" in said[0]
    assert "resumed after step 6 of 7\n" in said[1]
    assert re.sub(r"take [\d.]+ MiB", "take N MiB", without_room) == (
        "lockstep: host1 keeps no copies of the state in memory from here on. "
        "Cannot write the checkpoint in memory: two of them take N MiB, and 0.0 MiB of memory are free.\n"
        "Make room there (docker run --shm-size), or use checkpoints on disk.\n"
    )
    assert names == ["copy-0"]  # the next run found room again
