"""On one machine nothing of a job can be reached from another: everything listens on the loopback interface."""

import json

import pytest

from tests.distributed.commands import lockstep

SCRIPT = """
import json, os, sys
import psutil, torch, torch.distributed as dist
if sys.argv[1] == "torch":
    dist.init_process_group("gloo")
else:
    import lockstep
    world = lockstep.init(backend=sys.argv[1])
dist.all_reduce(torch.ones(1))
dist.barrier()
if dist.get_rank() == 0:
    launcher = psutil.Process(os.getppid())
    found = set()
    for process in [launcher, *launcher.children(recursive=True)]:
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                found.add((process.pid == launcher.pid, connection.laddr.ip))
    print(json.dumps(sorted(found)))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["torch", "shm"])
def test_only_the_loopback_interface(tmp_path, how):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = lockstep("run", "--devices", "2", str(tmp_path / "train.py"), how)
    assert done.code == 0, done.err
    ranks = [] if how == "shm" else [[False, "127.0.0.1"]]
    assert json.loads(done.out) == [*ranks, [True, "127.0.0.1"]]
