"""The ranks of a training of bench/conformance.py.

Usage: python -m bench.conformance_peers PEER CASE     one rank, started by a launcher; CASE is a JSON of `shared.Case`
       python -m bench.conformance_peers --serve PEER  the ranks of many trainings, one after the other

Importing a project takes longer than most of the trainings. The server imports it once, and forks the ranks with the
environment that torchrun gives them; what a training has imported on the way, it imports before the next one. Like
torchrun it ends the others if one fails. Where the launcher matters, in wrong use and with killed ranks, each rank is
started by the launcher itself.
"""

import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import torch

from bench.conformance_peers.shared import Case, record, recorded

_PATIENCE_S = 5.0


def main() -> None:
    torch.set_num_threads(1)
    if sys.argv[1] == "--serve":
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what modules print
        train = importlib.import_module(f"bench.conformance_peers.{sys.argv[2]}").train
        importlib.import_module("torch._dynamo")  # optimizers and wrappers import it late, which takes seconds
        fields = serve(answers)
    else:
        train = importlib.import_module(f"bench.conformance_peers.{sys.argv[1]}").train
        fields = json.loads(sys.argv[2])
    if sys.argv[1] != "--serve":
        recorded(train, Case(**fields or {}))
    elif fields is not None:
        try:
            recorded(train, Case(**fields))
            record("modules", names=list(sys.modules))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # freeing all that was imported takes seconds


def serve(answers: IO[str]) -> dict[str, Any] | None:
    """Run the jobs that come in as lines of JSON; write for each the exit code to ``answers``, None if it hung.

    Returns:
        In a rank, its case. In the server, None at the end.
    """
    for line in sys.stdin:
        job = json.loads(line)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(job["num_ranks"]))
        ranks: list[int] = []
        for rank in range(job["num_ranks"]):
            if not (pid := os.fork()):
                numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "MASTER_PORT": str(port)}
                os.environ.update({**sizes, **numbers, "MASTER_ADDR": "127.0.0.1", **job["environment"]})
                os.chdir(job["folder"] or ".")
                output = os.open(job["output"], os.O_WRONLY | os.O_APPEND)
                os.dup2(output, 1)
                os.dup2(output, 2)
                sys.stdin.close()
                return dict(job["case"])
            ranks.append(pid)
        code = wait_for(ranks, job["deadline_s"])
        for file in Path(job["environment"]["CONFORMANCE_OUT"]).glob("*.jsonl"):
            last = json.loads(file.read_text().splitlines()[-1])
            for name in last.get("names", ()):
                with suppress(Exception):  # not every module can be imported by itself
                    importlib.import_module(name)
        print(json.dumps(code), file=answers, flush=True)
    return None


def wait_for(ranks: list[int], deadline_s: float) -> int | None:
    """Wait for the ranks; return the first exit code that is not 0, or None after the deadline."""
    began, code, failed_at = time.monotonic(), 0, float("inf")
    hangs = False
    while ranks:
        for pid in list(ranks):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ranks.remove(pid)
                code = code or os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if code and failed_at == float("inf"):
            failed_at = now
            for pid in ranks:
                os.kill(pid, signal.SIGTERM)
        hangs = hangs or (now > began + deadline_s and not code)
        if hangs or now > failed_at + _PATIENCE_S:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return None if hangs else code


if __name__ == "__main__":
    main()
