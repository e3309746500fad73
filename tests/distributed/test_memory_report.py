"""A rank without memory is reported with what each rank of the machine had, for any script."""

import re

import pytest

from tests.distributed.commands import lockstep

SCRIPT = """\
import os, time
time.sleep(1.3)  # the launcher looks twice a second
if os.environ["RANK"] == "1":
    raise MemoryError("no room for 8 GiB")
time.sleep(60)
"""


@pytest.mark.timeout(60)
def test_each_rank_has_a_line(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = lockstep("run", "--devices", "2", str(tmp_path / "train.py"))
    assert done.code == 1
    said = done.err[done.err.index("lockstep: Rank 1 failed") :].splitlines()
    assert said[0] == "lockstep: Rank 1 failed: MemoryError: no room for 8 GiB"
    assert re.fullmatch(r"At .*train\.py:4, on \S+, PID \d+\.", said[1])
    assert said[2] == "Last known memory of the ranks of this machine:"
    size = r"(\d+ MiB|\d+\.\d GiB)"
    for rank in range(2):
        assert re.fullmatch(rf"rank {rank}: {size} on the host \(at most {size}\)", said[3 + rank])
    assert re.fullmatch(r"The minimum of free memory was \d+\.\d GiB of the host's \d+\.\d GiB\.", said[5])
