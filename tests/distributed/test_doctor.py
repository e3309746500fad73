"""`lockstep doctor` as the ranks of a job: one report, with the versions of all ranks compared."""

import json

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
    assert {"what": "whether the port is free", "because": "this job's own ranks hold it"} in record["not_checked"]
    assert record["seconds"] < 10
    assert [path.name for path in tmp_path.iterdir()] == ["ask.py"]
