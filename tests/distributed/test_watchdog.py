"""The watchdog of `lockstep run`: who waits for whom, in a script of one's own."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.distributed.commands import lockstep

SCRIPT = """\
import atexit, ctypes, os, signal, sys, time
import torch, torch.distributed as dist
import lockstep
mode = sys.argv[1]
dist.init_process_group("shm" if mode == "alone" else "gloo")
rank, one = dist.get_rank(), torch.ones(1)
dist.all_reduce(one)
def load():
    time.sleep(90)
if mode == "stop" and rank == 1:
    time.sleep(1.2); os.kill(os.getpid(), signal.SIGSTOP)
if mode == "gil" and rank == 1:
    lock, native = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
    for _ in range(2): native.pthread_mutex_lock(lock)  # signals do not end it
if mode == "alone" and rank == 0:
    dist.recv(one, 2)  # evaluation
if mode == "busy":
    end = time.monotonic() + 5
    while time.monotonic() < end: torch.ones(1000).sum()
if mode == "download" and rank == 1:
    with open(os.devnull, "wb") as file:
        for _ in range(50): file.write(bytes(4096)); file.flush(); time.sleep(0.1)
if mode == "ours":
    model = lockstep.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)))
    for step in range(3):
        if rank == 1 and step == 2:
            load()
        model(torch.ones(1, 2)).sum().backward()
if mode == "torch":
    class Slow(torch.nn.Linear):
        def forward(self, x):
            time.sleep(0.1)  # so that a look at forward meets it
            return super().forward(x)
    model = torch.nn.Sequential(*(Slow(64, 64) for _ in range(3)))
    model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.015)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(9):
        if rank == 1 and step == 8:
            load()
        loss = model(torch.ones(1, 64)).sum()
        torch.autograd.backward(loss)
        optimizer.step()
if mode == "asleep":
    load()
if mode == "reproducible":
    calls = []
    def loss(model, batch):
        calls.append(1)
        output = model(batch[0])
        if rank == 1 and len(calls) == 5:
            output.register_hook(stop)
        return output.square().mean()
    def stop(_):
        time.sleep(1); signal.raise_signal(signal.SIGSTOP)
    data = torch.utils.data.TensorDataset(torch.ones(64, 4))
    task = lockstep.Task(
        model=lambda: torch.nn.Linear(4, 2), dataset=lambda: data, loss=loss, global_batch_size=8,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    lockstep.fit(task, strategy="ddp", reproducible=2, steps=50, quiet=True)
if mode in ("exits", "leaves") and rank == 1:
    atexit.register(time.sleep, 90)
    raise KeyError("boom") if mode == "exits" else SystemExit(3)
dist.barrier()
"""


def at(text):
    """Where in the script something stands."""
    [line] = [number for number, line in enumerate(SCRIPT.splitlines(), 1) if text in line]
    return f"train.py:{line}"


HEAD = "lockstep: The job hangs: ranks have waited for each other for more than 2 s.\n"
LONGER = "If a rank may need more than 2 s, pass a larger --watchdog SECONDS.\n"
EXPECTED = {
    "stop": f"rank 1 was stopped by a signal (SIGSTOP), last seen at {at('getpid(), signal.SIGSTOP')}; "
    f"rank 0 waits in barrier ({at('barrier()')}) for N s\n",
    "alone": f"rank 0 waits in recv from rank 2 ({at('recv(')}) for N s; "
    f"ranks 1, 2 wait in barrier ({at('barrier()')}) for N s\n"
    "The ranks call different collectives: each must be called by all ranks, in the same order.\n",
    "torch": f"rank 1 is in load ({at('sleep(90)')}) for N s [after 8 optimizer steps]; rank 0 waits in backward "
    f"(gradient exchange): all_reduce of 4160 elements, number N, scheduled ({at('autograd.backward')}) for N s "
    f"[after 8 optimizer steps]\n{LONGER}",
    "reproducible": f"rank 1 was stopped by a signal (SIGSTOP), last seen at {at('raise_signal')} "
    "[in step 5 (backward)]; "
    f"rank 0 waits in all_reduce ({at('lockstep.fit(')}) for N s [in step 5 (communication)]\n",
    "ours": f"rank 1 is in load ({at('sleep(90)')}) for N s; "
    f"rank 0 waits in all_reduce of bucket 0 (1.weight ... 0.bias) ({at('backward()')}) for N s\n{LONGER}",
}
PATIENCE = {"asleep": "0.7", "busy": "1.5"}
RUNS = ["ours", "exits", "leaves"]
SOAK_RUNS = ["torch", "reproducible", "stop", "alone", "gil", "busy", "download", "asleep"]


def run_all(folder, modes):
    path = folder / "train.py"
    path.write_text(SCRIPT)

    def start(mode):
        options = ["--devices", "3" if mode == "alone" else "2", "--watchdog", PATIENCE.get(mode, "2")]
        return mode, lockstep("run", *options, str(path), mode, timeout=150)

    with ThreadPoolExecutor(4) as pool:  # they mostly sleep
        return dict(pool.map(start, modes))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("watchdog"), RUNS)


@pytest.fixture(scope="module")
def soak_outcomes(tmp_path_factory):
    return run_all(tmp_path_factory.mktemp("watchdog"), SOAK_RUNS)


def told(text):
    """The report with its numbers of seconds and its folder taken out, and the stacks."""
    text = text[text.index("lockstep: The job") :]
    text = re.sub(r"number \d+", "number N", re.sub(r"for \d+ s\b", "for N s", text))
    report, folder = re.fullmatch(r"(.*?)The Python stacks of all ranks are in (\S+)\..*", text, re.S).groups()
    stacks = {path.name: path.read_text() for path in Path(folder).iterdir()}
    shutil.rmtree(folder)
    return report, stacks


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", [mode for mode in RUNS if mode in EXPECTED])
def test_who_waits_for_whom(outcomes, mode):
    check_report(outcomes, mode)


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", [mode for mode in SOAK_RUNS if mode in EXPECTED])
def test_who_waits_for_whom_in_more_cases(soak_outcomes, mode):
    check_report(soak_outcomes, mode)


def check_report(outcomes, mode):
    report, stacks = told(outcomes[mode].err)
    assert report == HEAD + EXPECTED[mode]
    assert outcomes[mode].code == 83
    assert "train.py" in stacks["rank-0.txt"]


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_call_that_holds_the_interpreter_still_leaves_its_stack(soak_outcomes):
    report, stacks = told(soak_outcomes["gil"].err)
    assert report.startswith(HEAD + "rank 1 does not respond: native code holds the interpreter lock, last seen at ")
    assert report.endswith(f"; rank 0 waits in barrier ({at('barrier()')}) for N s\n{LONGER}")
    assert f", line {at('pthread').partition(':')[2]} in <module>" in stacks["rank-1.txt"]
    assert soak_outcomes["gil"].code == 83


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_ranks_that_all_compute_are_left_alone(soak_outcomes):
    assert soak_outcomes["busy"].code == 0
    assert "The job" not in soak_outcomes["busy"].err


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_a_rank_that_may_be_only_slow_is_told_of_and_not_ended(soak_outcomes):
    report, _ = told(soak_outcomes["download"].err)
    assert report.startswith(
        "lockstep: The job may hang: ranks have waited for each other for more than 2 s.\nrank 1 is in <module> ("
        f"{at('flush()')})"
    )
    assert "rank 1 may only be slow: it " in report
    assert "The job continues; it ends if this lasts and no rank makes progress.\n" in soak_outcomes["download"].err
    assert soak_outcomes["download"].code == 0


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_ranks_that_all_do_nothing_are_noticed_though_none_waits(soak_outcomes):
    head = "lockstep: The job hangs: no rank has done anything for more than 3.5 s.\n"
    ended = soak_outcomes["asleep"].err[soak_outcomes["asleep"].err.index(head) :]
    report, _ = told(ended)
    told(soak_outcomes["asleep"].err)  # the first warning, whose folder goes as well
    assert report == f"{head}ranks 0, 1 are in load ({at('sleep(90)')}) for N s\n{LONGER.replace('2 s', '3.5 s')}"
    assert soak_outcomes["asleep"].code == 83


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "head"),
    [
        ("exits", "Rank 1 failed: KeyError: 'boom'\nAt "),
        ("leaves", rf"Rank 1 left \(SystemExit: 3 at \S*{at('SystemExit(3)')}\)\.\nAt "),
    ],
)
def test_a_rank_that_fails_and_does_not_end_is_ended_at_once(outcomes, mode, head):
    done = outcomes[mode]
    assert re.search(f"lockstep: {head}", done.err)
    assert "The job" not in done.err
    assert done.code == 1
