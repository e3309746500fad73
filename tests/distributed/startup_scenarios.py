"""One process of the start-up tests: calls ``lockstep.init`` under one set of variables after another.

Several situations in one process, as a new interpreter that imports torch costs seconds. Reads and prints one JSON
line for each.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist

import lockstep

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def attempt(env, timeout_s):
    """Join the world that ``env`` describes, twice, and say how it went."""
    for name in VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(env)
    start = time.monotonic()
    try:
        sums = []
        for _ in range(2):  # A second world on the same address works as well.
            with lockstep.init(timeout_s=timeout_s) as world:
                total = torch.ones(1) * (world.rank + 1)
                dist.all_reduce(total)
                sums.append(total.item())
                inside = os.environ.get("GLOO_SOCKET_IFNAME")
        return {"sums": sums, "inside": inside, "outside": os.environ.get("GLOO_SOCKET_IFNAME")}
    except lockstep.errors.LockstepError as error:
        waited_s = time.monotonic() - start
        return {"error": type(error).__name__, "text": str(error), "waited_s": waited_s, "pid": os.getpid()}


def main():
    """Make one attempt a line of input: variables and timeout, or ``null`` where this process sits out."""
    print("ready", flush=True)
    for line in sys.stdin:
        step = json.loads(line)
        print(json.dumps(None if step is None else attempt(**step)), flush=True)


main()
