"""`lockstep doctor` as the ranks of a job: one report, with the versions of all ranks compared."""

import json
import subprocess
import sys

from tests.distributed.commands import lockstep

SCRIPT = """
import os, sys
import torch

torch.__version__ = f"2.1{os.environ['RANK']}.0"
from lockstep.cli import main

sys.exit(main(["doctor", "--json"]))
"""


def test_ranks_are_compared(tmp_path):
    script = tmp_path / "ask.py"
    script.write_text(SCRIPT)
    done = lockstep("run", "--devices", "2", str(script), cwd=tmp_path)
    assert done.code == 1
    record = json.loads(done.out)
    (finding,) = [finding for finding in record["findings"] if finding["kind"] == "versions-differ"]
    assert finding["severity"] == "hang"
    assert finding["found"] == "The ranks differ in their version of torch: 2.10.0 on rank 0; 2.11.0 on rank 1."
    assert record["plan"]["devices"] == 2
    assert record["plan"]["is_running"] is True
    assert record["seen"]["versions"].endswith("; 2 ranks compared")
    assert record["seconds"] < 10
    assert [path.name for path in tmp_path.iterdir()] == ["ask.py"]


SLOW = """
import sys
import torch
import lockstep

def samples():
    matrix = torch.ones(1000, 1000)
    while True:
        matrix = (matrix @ matrix).tanh()

task = lockstep.Task(
    model=lambda: torch.nn.Linear(1, 1), dataset=samples, loss=lambda model, batch: model(batch).mean(),
    optimizer=lambda params: torch.optim.SGD(params, 0.1), global_batch_size=4,
)
if __name__ == "__main__":
    from lockstep.cli import main
    from lockstep.study.doctor.machine import read_task

    read_task.__kwdefaults__["limit_s"] = 0.5
    sys.exit(main(["doctor", sys.argv[0], "--devices", "1", "--json"]))
"""


def test_a_data_set_that_computes_for_long_does_not_abort_the_process(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    done = subprocess.run([sys.executable, "slow.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    record = json.loads(done.stdout)
    assert {"what": "the data set of the task", "because": "it took too long"} in record["not_checked"]
    assert (done.returncode, "terminate" in done.stderr) == (record["exit_code"], False), done.stderr
