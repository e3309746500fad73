"""`lockstep doctor SCRIPT` watches two steps: a sound script, and the same with a fault planted in each."""

import json
import time

import pytest

from tests.distributed.commands import lockstep

SOUND = """\
import argparse, copy, json, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, required=True)
args = parser.parse_args()
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(64, 4), torch.randint(0, 3, (64,)))
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8 // world_size, sampler=sampler, num_workers=2, persistent_workers=True)
net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
model = DDP(net)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
loss_of = nn.CrossEntropyLoss()
first = 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt")
    net.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first = state["epoch"] + 1
for epoch in range(first, args.epochs):
    model.train()
    sampler.set_epoch(epoch)
    for number, (x, y) in enumerate(loader):
        if number % 2 == 0:
            with model.no_sync():
                loss = loss_of(model(x), y) / 2
                loss.backward()
            continue
        loss = loss_of(model(x), y) / 2
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        total = loss_of(net(dataset.tensors[0]), dataset.tensors[1])
    dist.all_reduce(total)
    if rank == 0:
        print(total.item())
        with open("log.json", "w") as file:
            json.dump(total.item(), file)
        torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "checkpoint.pt")
dist.destroy_process_group()
"""

# Old text, new text, and the line of what is to be found.
FAULTS = {
    "gradients-not-reduced": [("model(x)", "model.module(x)"), "loss = loss_of(model.module(x), y) / 2"],
    "optimizer-of-another-model": [
        ("DDP(net)", "DDP(copy.deepcopy(net))"),
        ("model.parameters(), lr", "net.parameters(), lr"),
        "optimizer = ",
    ],
    "optimizer-state-not-restored": [
        ('    optimizer.load_state_dict(state["optimizer"])\n', ""),
        'torch.load("checkpoint',
    ],
    "backward-on-one-rank: break": [
        ("        if number % 2 == 0", "        if rank and number: break\n        if number % 2 == 0"),
        "loss.backward()",
    ],
    "backward-on-one-rank: continue": [
        ("        if number % 2 == 0", "        if rank and number: continue\n        if number % 2 == 0"),
        "loss.backward()",
    ],
    "evaluation-mode-left-on": [("    model.train()\n", ""), "model(x)"],
    "clipped-before-reduced": [
        ("            continue", "            nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n            continue"),
        "clip_grad_norm_",
    ],
    "learning-rate-times-ranks": [("lr=1e-3", "lr=1e-3 * world_size"), "optimizer = "],
    "accumulation-not-divided": [(" / 2", ""), "loss.backward()"],
    "sampler-missing": [("sampler=sampler", "shuffle=True"), "loader = "],
    "set-epoch-missing": [("    sampler.set_epoch(epoch)\n", ""), "loader = "],
    "saves-on-all-ranks": [("if rank == 0:", "if True:"), "torch.save"],
    "collective-on-one-rank": [
        ("    dist.all_reduce(total)", "    if rank == 0: dist.all_reduce(total)"),
        "dist.all_reduce(total)",
    ],
}
# These can be planted together, as none hides another: what they share is one run.
TOGETHER = (
    "optimizer-state-not-restored",
    "evaluation-mode-left-on",
    "clipped-before-reduced",
    "learning-rate-times-ranks",
    "accumulation-not-divided",
    "set-epoch-missing",
    "saves-on-all-ranks",
)


def plant(*names):
    text = SOUND
    for old, new in (change for name in names for change in FAULTS[name][:-1]):
        assert old in text
        text = text.replace(old, new)
    return text


def check(finding, name, text):
    assert finding["kind"] == name.partition(":")[0]
    assert finding["severity"] == ("hang" if "one-rank" in name else "wrong")
    file, _, number = finding["where"].partition(":")
    assert file == "train.py"
    assert FAULTS[name][-1] in text.splitlines()[int(number) - 1]
    assert finding["paste"]


def examine(folder, text, *arguments):
    (folder / "train.py").write_text(text)
    done = lockstep("doctor", "train.py", "--devices", "2", "--json", "--", *arguments, cwd=folder)
    record = json.loads(done.out)
    found = [finding for finding in record["findings"] if finding["where"]]
    return found, [one["because"] for one in record["not_checked"] if "script" in one["what"]]


def test_nothing_is_found_in_a_sound_script_and_no_file_of_the_user_changes(tmp_path):
    (tmp_path / "log.json").write_text("mine")
    assert examine(tmp_path, SOUND, "--epochs", "3") == ([], [])
    assert (tmp_path / "log.json").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.json", "train.py"]


def test_several_faults_are_found_in_one_run(tmp_path):
    text = plant(*TOGETHER)
    findings, _ = examine(tmp_path, text, "--epochs", "3")
    assert {finding["kind"] for finding in findings} == set(TOGETHER)
    for finding in findings:
        check(finding, finding["kind"], text)


@pytest.mark.soak
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name, tmp_path):
    text = plant(name)
    began = time.monotonic()
    (finding,), _ = examine(tmp_path, text, "--epochs", "3")
    check(finding, name, text)
    assert time.monotonic() - began < 60
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (SOUND, "the following arguments are required: --epochs"),
        pytest.param("import torch\ntorch.zeros(1).cuda()\n", "CUDA", marks=pytest.mark.soak),
        pytest.param(
            "open(__file__).read()\nopen('/etc/hostname', 'a')", "does not let the script", marks=pytest.mark.soak
        ),
    ],
    ids=["arguments", "gpu", "file"],
)
def test_why_a_script_could_not_be_watched(text, because, tmp_path):
    found, missed = examine(tmp_path, text)
    assert found == []
    assert because in missed[0]
