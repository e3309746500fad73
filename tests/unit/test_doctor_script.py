"""What the doctor reads in a script, and what it must not hold against one."""

import pytest

from lockstep.study.doctor.findings import judge
from lockstep.study.doctor.script import Script
from tests.unit.doctor_scripts import CHANGES, SOUND

HEAD = "import torch\nimport torch.distributed as dist\ndist.init_process_group()\nrank = dist.get_rank()\n"


def read(text):
    return Script(text, "train.py")


def kinds(text):
    return [finding.kind for finding in judge(read(text))]


def test_nothing_is_found_in_a_sound_script():
    assert judge(read(SOUND)) == []
    assert read(SOUND).not_checked == []


@pytest.mark.parametrize("change", CHANGES, ids=[change.kind for change in CHANGES])
def test_a_fault_is_found(change):
    assert SOUND.count(change.old) == 1
    text = SOUND.replace(change.old, change.new)
    (finding,) = judge(read(text))
    assert (finding.kind, finding.severity, finding.found) == (change.kind, change.severity, change.found)
    file, _, number = finding.where.partition(":")
    assert file == "train.py"
    assert change.line in text.splitlines()[int(number) - 1]
    assert finding.cost
    assert finding.fix
    assert finding.paste


def test_fixes_can_be_pasted():
    text = SOUND.replace(
        "        evaluate(model, val_loader, rank)\n",
        "        if rank == 0:\n            evaluate(model, val_loader, rank)\n",
    )
    (collective,) = judge(read(text))
    assert collective.paste == "dist.all_reduce(total)  # on every rank, outside of `rank == 0`"


@pytest.mark.parametrize(
    "text",
    [
        "if rank == 0:\n    torch.save(x, 'a.pt')",
        "if not rank:\n    torch.save(x, 'a.pt')",
        "if rank == 0 and epoch % 2 == 0:\n    torch.save(x, 'a.pt')",
        "master_process = rank == 0\nif master_process:\n    torch.save(x, 'a.pt')",
        "def f():\n    if rank != 0:\n        return\n    torch.save(x, 'a.pt')\nf()",
        "def f():\n    torch.save(x, 'a.pt')\nif is_main_process():\n    f()",
        "class A:\n def f(self):\n  torch.save(x, 'a.pt')\n def g(self):\n  if self.rank == 0:\n   self.f()",
        "@rank_zero_only\ndef f():\n    torch.save(x, 'a.pt')\nf()",
        "torch.save(x, f'a_{rank}.pt')",
        "path = f'a_{rank}.pt'\ntorch.save(x, path)",
        "if rank == 0:\n    dist.barrier()\nelse:\n    dist.barrier()",
        "if dist.is_initialized():\n    dist.barrier()",
        "if local_rank != -1:\n    dist.barrier()",
        "if rank is not None:\n    dist.barrier()",
        "if rank not in (-1, 0):\n    dist.barrier()\nf()\nif rank == 0:\n    dist.barrier()",
        "if rank:\n    dist.barrier()\nf()\nif not rank:\n    dist.barrier()",
        "if args.lora_rank > 0:\n    dist.barrier()",
        "if args.order == 'rank':\n    dist.barrier()",
        "if rank >= world_size:\n    raise ValueError(rank)\ndist.barrier()",
        "if 'RANK' in os.environ:\n    dist.barrier()",
        "if rank >= 0:\n    dist.barrier()",
        "if rank == 0:\n    gather(x)",
    ],
)
def test_what_is_right_is_not_found(text):
    assert kinds(f"{HEAD}{text}\n") == []


@pytest.mark.parametrize(
    "loader",
    [
        "DataLoader(val_set)",
        "DataLoader(MNIST('data', train=False), shuffle=True)",
        "DataLoader(data['validation'])",
        "DataLoader(data, **kwargs)",
        "DataLoader(data, batch_sampler=batches)",
        "DataLoader(data.shard(world_size, rank), shuffle=True)",
        "DataLoader(Stream(), batch_size=4)",
    ],
)
def test_loaders_that_may_be_right_are_not_found(loader):
    stream = "class Stream(torch.utils.data.IterableDataset):\n    pass\n"
    assert kinds(f"{HEAD}from torch.utils.data import DataLoader\n{stream}loader = {loader}\n") == []


def test_our_own_parts_need_no_set_epoch():
    text = (
        "import lockstep\nfrom torch.utils.data import DataLoader\nworld = lockstep.init()\n"
        "model = lockstep.DistributedDataParallel(Net().cuda(), find_unused_parameters=True)\n"
        "sampler = lockstep.DistributedSampler(data)\nloader = DataLoader(data, sampler=sampler)\n"
    )
    assert kinds(text) == []


def test_saves_of_ours_are_for_all_ranks():
    text = "import lockstep\nworld = lockstep.init()\nif world.is_rank_zero:\n    lockstep.save('a', model=m)\n"
    (finding,) = judge(read(text))
    assert (finding.kind, finding.where) == ("collective-on-one-rank", "train.py:4")


def test_a_plain_script_is_not_held_to_what_ranks_need():
    text = "import torch\ntorch.manual_seed(rank)\nloader = DataLoader(data, shuffle=True)\ntorch.save(x, 'a.pt')\n"
    assert kinds(text) == []
    (missed,) = read(text).not_checked
    assert missed.what == "samplers and collectives of the script"


def test_others_that_take_care_are_named():
    text = f"from accelerate import Accelerator\n{HEAD}loader = DataLoader(data, shuffle=True)\n"
    assert kinds(text) == []
    assert read(text).not_checked[0].because == "accelerate takes care of them"


def test_numbers_are_read_from_the_script():
    assert read(SOUND).num_workers == 2
    assert read("x = 1").num_workers is None
