"""A rank that stops while the others wait for their devices is named by the watchdog: `fit`, and a loop of one's own.

A collective on a device blocks a stream. The host learns nothing: it waits where it reads a result.
"""

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import simulated_device
from tests.distributed.commands import lockstep
from tests.models import soak

SCRIPT = """\
import os, signal, sys, time
import torch
import lockstep
from tests import simulated_device

device = simulated_device.load(2)
mode, calls = sys.argv[1], []

def pause():
    calls.append(1)
    if len(calls) == 2:
        device.set_patience(0.05)  # not before: one rank may start later than the other
    if os.environ["RANK"] == "1" and len(calls) == 4:
        if mode == "stopped": time.sleep(1.2); os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(90)

def loss(model, batch):
    pause()
    return model(batch[0]).square().mean()

task = lockstep.Task(
    model=lambda: torch.nn.Linear(4, 2),
    dataset=lambda: torch.utils.data.TensorDataset(torch.ones(800, 4)),
    loss=loss,
    global_batch_size=8,
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
)
with lockstep.init() as world:
    if mode == "loop":
        model = lockstep.DistributedDataParallel(torch.nn.Linear(4, 2).to(world.device))
        for _ in range(9):
            pause()
            loss = model(torch.ones(1, 4).to(world.device)).sum()
            loss.backward()
            norm = model.module.weight.grad.norm()
            print(norm.item())
    else:
        lockstep.fit(task, strategy="ddp", steps=50, quiet=True)
"""


def at(text):
    """Where in the script something stands."""
    [line] = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line]
    return f"train.py:{line}"


EXPECTED = {
    "stopped": f"rank 1 was stopped by a signal (SIGSTOP), last seen at {at('SIGSTOP')} [in step 4 (forward)]; "
    f"rank 0 waits for its device: RECORD ({at('lockstep.fit(')}) for N s [in step N]\n",
    "asleep": f"rank 1 is in pause ({at('sleep(90)')}) for N s [in step 4 (forward)]; "
    f"rank 0 waits for its device: RECORD ({at('lockstep.fit(')}) for N s [in step N]\n",
    "loop": f"rank 1 is in pause ({at('sleep(90)')}) for N s; "
    f"rank 0 waits for its device: RECORD ({at('item()')}) for N s\n",
}
QUICK = ["stopped", "loop"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, request):
    if reason := simulated_device.missing():
        pytest.skip(reason)
    simulated_device.build()
    script = tmp_path_factory.mktemp("hang") / "train.py"
    script.write_text(SCRIPT)
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}

    def start(mode):
        return mode, lockstep("run", "--devices", "2", "--watchdog", "4", str(script), mode, timeout=90, env=environ)

    modes = {item.callspec.params["mode"] for item in request.session.items if item.path == request.path}
    with ThreadPoolExecutor(3) as pool:  # they mostly sleep
        return dict(pool.map(start, modes))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("mode", [*QUICK, *soak(["asleep"])])
def test_a_rank_that_others_wait_for_on_their_devices_is_named(outcomes, mode):
    done = outcomes[mode]
    assert done.code == 83, done.err
    report = done.err[done.err.index("lockstep: The job hangs") :]
    folder = re.search(r"The Python stacks of all ranks are in (\S+)\.", report)[1]
    shutil.rmtree(folder)
    text = re.sub(r"for \d+ s\b", "for N s", report)
    # The host is ahead of its device.
    text = re.sub(r"(waits for .*)\[in step \d+( \(\w+\))?\]", r"\1[in step N]", text)
    text = re.sub(r"all_?reduce of \d+ elements, number \d+, \w+", "RECORD", text)
    head = "lockstep: The job hangs: ranks have waited for each other for more than 4 s.\n"
    assert text.startswith(head + EXPECTED[mode]), text
