"""What the doctor reads in a script, and what it must not hold against one."""

import pytest

from lockstep.study.doctor.finding import Severity
from lockstep.study.doctor.kinds import Kind
from lockstep.study.doctor.script.look import look, not_checked, seen
from lockstep.study.doctor.script.source import Script
from lockstep.study.doctor.script.traits import ScriptFacts
from tests.unit.doctor_scripts import CHANGES, SOUND

HEAD = "import torch\nimport torch.distributed as dist\ndist.init_process_group()\nrank = dist.get_rank()\n"


def read(text):
    return ScriptFacts(Script(text, "train.py"), devices=2, num_gpus=0)


def kinds(text):
    return [finding.kind for finding in look(read(text))]


def test_nothing_is_found_in_a_sound_script():
    assert look(read(SOUND)) == []
    assert not_checked(read(SOUND)) == []
    assert seen(read(SOUND)) == "train.py uses torch's DistributedDataParallel; it was read, not run"


@pytest.mark.parametrize("change", CHANGES, ids=[change.kind.value for change in CHANGES])
def test_a_fault_is_found(change):
    assert SOUND.count(change.old) == 1
    text = SOUND.replace(change.old, change.new)
    (finding,) = look(read(text))
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
    forward, collective = look(read(text))
    assert forward.kind is Kind.MODEL_ON_ONE_RANK
    assert forward.paste == "evaluate(model.module, val_loader, rank)  # instead of evaluate(model, val_loader, rank)"
    assert collective.paste == "dist.all_reduce(total)  # on every rank, outside of `if rank == 0:`"
    (load,) = look(read("import torch\ntorch.load('a.pt', weights_only=False)\n"))
    assert load.paste == "torch.load('a.pt', weights_only=True)"


def test_notes_of_one_kind_are_said_once():
    text = "import torch\ntorch.load('a.pt')\ntorch.load('b.pt')\ntorch.load('c.pt')\n"
    (finding,) = look(read(text))
    assert finding.found == "torch.load is called without weights_only. The same in lines 3, 4."


@pytest.mark.parametrize(
    "text",
    [
        "if rank == 0:\n    torch.save(x, 'a.pt')",
        "if not rank:\n    torch.save(x, 'a.pt')",
        "if rank == 0 and epoch % 2 == 0:\n    torch.save(x, 'a.pt')",
        "master_process = rank == 0\nif master_process:\n    torch.save(x, 'a.pt')",
        "rank == 0 and torch.save(x, 'a.pt')",
        "def f():\n    if rank != 0:\n        return\n    torch.save(x, 'a.pt')\nf()",
        "def f():\n    torch.save(x, 'a.pt')\nif is_main_process():\n    f()",
        "class A:\n def f(self):\n  torch.save(x, 'a.pt')\n def g(self):\n  if self.gpu_id == 0:\n   self.f()",
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
        "if rank == 0:\n    MNIST('a', download=True)\ndist.barrier()",
        "with world.rank_zero_first():\n    MNIST('a', download=True)",
        "if rank > 0:\n    dist.barrier()\nMNIST('a', download=True)\nif rank == 0:\n    dist.barrier()",
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


def test_our_own_parts_need_no_set_epoch_and_no_device():
    text = (
        "import lockstep\nfrom torch.utils.data import DataLoader\nworld = lockstep.init()\n"
        "model = lockstep.DistributedDataParallel(Net().cuda(), find_unused_parameters=True)\n"
        "sampler = lockstep.DistributedSampler(data)\nloader = DataLoader(data, sampler=sampler)\n"
    )
    assert kinds(text) == []
    assert seen(read(text)) == "train.py uses lockstep's DistributedDataParallel; it was read, not run"


def test_saves_of_ours_are_for_all_ranks():
    text = "import lockstep\nworld = lockstep.init()\nif world.is_rank_zero:\n    lockstep.save('a', model=m)\n"
    (finding,) = look(read(text))
    assert (finding.kind, finding.where) == (Kind.COLLECTIVE_ON_ONE_RANK, "train.py:4")


def test_a_plain_script_is_not_held_to_what_ranks_need():
    text = "import torch\ntorch.manual_seed(rank)\nloader = DataLoader(data, shuffle=True)\ntorch.save(x, 'a.pt')\n"
    assert kinds(text) == []
    (missed,) = not_checked(read(text))
    assert missed.what == "samplers, devices and collectives of the script"
    assert kinds(f"{text}model = torch.nn.DataParallel(model)\n") == [Kind.DATA_PARALLEL]


def test_others_that_take_care_are_named():
    text = f"from accelerate import Accelerator\n{HEAD}loader = DataLoader(data, shuffle=True)\n"
    assert kinds(text) == []
    assert not_checked(read(text))[0].because == "accelerate takes care of them"


def test_a_rank_seed_undoes_what_fit_does():
    text = "import lockstep, os, torch\ntorch.manual_seed(int(os.environ['RANK']))\ntask = lockstep.Task()\n"
    (finding,) = look(read(text))
    assert (finding.kind, finding.severity) == (Kind.SEED_BY_RANK, Severity.WRONG)


def test_a_model_without_buffers_may_be_called_on_one_rank():
    text = f"{HEAD}model = torch.nn.parallel.DistributedDataParallel(net)\nif rank == 0:\n    model(x)\n"
    (finding,) = look(read(text))
    assert (finding.kind, finding.severity) == (Kind.MODEL_ON_ONE_RANK, Severity.NOTE)
    assert kinds(text.replace("(net)", "(net, broadcast_buffers=False)")) == []


def test_exchanges_that_are_left_out_are_not_found():
    text = f"{HEAD}model = torch.nn.parallel.DistributedDataParallel(net)\nif i % accumulate == 0:\n    opt.step()\n"
    assert kinds(text) == [Kind.ACCUMULATION_WITH_SYNC]
    assert kinds(f"{text}with model.no_sync():\n    loss.backward()\n") == []
    assert kinds(text.replace("accumulate", "log_every")) == []


def test_a_sampler_within_a_loader_is_named_by_it():
    text = f"{HEAD}self.loader = DataLoader(data, sampler=DistributedSampler(data))\n"
    (finding,) = look(read(text))
    assert finding.paste == "self.loader.sampler.set_epoch(epoch)  # first line of the loop over epochs"


def test_few_samples_make_batchnorm_wrong():
    text = SOUND.replace("    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)\n", "").replace(
        "batch_size=32, s", "batch_size=4, s"
    )
    (finding,) = look(read(text))
    assert (finding.kind, finding.severity) == (Kind.BATCHNORM_NOT_SYNCHRONISED, Severity.WRONG)
    assert "with the 4 samples of its own rank" in finding.found


def test_numbers_are_read_from_the_script():
    facts = read(SOUND)
    assert (facts.most_workers, facts.smallest_batch) == (2, 32)
    assert read("x = 1").most_workers is None
