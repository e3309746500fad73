"""Over Gloo, a peer that dies is a `CollectiveError` with the rank that noticed it, also in reproducible mode."""

import os
import re
import signal
import socket
import subprocess
import sys

import pytest

SCRIPT = """\
import os, signal
import torch
from torch import nn
from torch.utils.data import TensorDataset
import lockstep
from lockstep.errors import CollectiveError

calls = []

def loss(model, batch):
    calls.append(1)
    if len(calls) == 7 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return model(batch[0]).square().mean()

task = lockstep.Task(
    model=lambda: nn.Linear(4, 4),
    dataset=lambda: TensorDataset(torch.randn(80, 4)),
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    global_batch_size=8,
)
with lockstep.init(backend="gloo"):
    try:
        lockstep.fit(task, strategy="ddp", quiet=True, steps=8, reproducible=4)
    except CollectiveError as error:
        print(error, flush=True)
        os._exit(3)
"""


@pytest.mark.timeout(90)
def test_a_lost_rank_is_noticed_with_the_rank_in_reproducible_mode(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py")],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    out, _ = ranks[0].communicate(timeout=60)
    ranks[1].communicate(timeout=60)
    assert ranks[1].returncode == -signal.SIGKILL
    assert ranks[0].returncode == 3
    assert re.match(r"Rank 0: \w+ failed: ", out)
