"""What a step frees is there for the next one, without page faults."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import torch
from lockstep.parallel.dp.wrapper import DataParallel

def allocate():
    parts = [torch.ones(2**20) for _ in range(20)]  # 80 MiB, in blocks of 4
    torch.ones(2**24)  # 64 MiB in one block

def settles(step):
    # Until the threads have met in every order the heap may grow: it must come to an end.
    num_quiet = 0
    for _ in range(100):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        step()
        is_quiet = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 400  # 36,000 by itself
        num_quiet = (num_quiet + 1) * is_quiet
        if num_quiet == 4:
            return True
    return False

class Allocating(torch.nn.Module):
    def forward(self, x):
        allocate()
        return x

model = DataParallel(Allocating(), ["cpu", "cpu"])
model(torch.zeros(2))
print(settles(allocate), settles(lambda: model(torch.zeros(2))))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide otherwise")
def test_the_memory_of_a_step_is_kept_also_in_the_threads_of_replicas():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "True True\n"
