"""On one machine nothing of a job can be reached from another: everything listens on the loopback interface."""

import json
import os

from tests.distributed.commands import lockstep

SCRIPT = """
import contextlib, json, os
import psutil, torch, torch.distributed as dist
import lockstep

def print_listening():
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    if dist.get_rank() == 0:
        launcher = psutil.Process(os.getppid())
        found = set()
        for process in [launcher, *launcher.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):  # a helper of the launcher that has ended meanwhile
                for connection in process.net_connections("inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        found.add((process.pid == launcher.pid, connection.laddr.ip))
        print(json.dumps(sorted(found)))
    dist.barrier()

dist.init_process_group("gloo")
print_listening()
dist.destroy_process_group()
lockstep.init(backend="shm")  # and leave it open: a script may end so
print_listening()
"""


def test_only_the_loopback_interface(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = lockstep("run", "--devices", "2", str(tmp_path / "train.py"), env=environment)
    assert (done.code, done.err) == (0, "")
    by_torch, on_shm = (json.loads(line) for line in done.out.splitlines())
    assert by_torch == [[False, "127.0.0.1"], [True, "127.0.0.1"]]
    assert on_shm == [[True, "127.0.0.1"]]
