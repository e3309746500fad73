"""Python imports this module at its start when its folder is in PYTHONPATH: it records what a program trains.

After every step of an optimizer, PROGRAMS_RECORD/RANK.jsonl gets a line: a hash of the optimizer's parameters, their
sums in float64, and the values on which ``backward`` was called since the last line. Random generators are seeded at
the start, for programs that do not seed them. The program is not changed for it.
"""

import hashlib
import importlib.abc
import importlib.util
import json
import os
import random
import sys


class After(importlib.abc.MetaPathFinder):
    """Calls a function after the import of a module."""

    def __init__(self, name, act):
        self.name, self.act = name, act

    def find_spec(self, name, path=None, target=None):  # noqa: D102
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            self.act(module)

        spec.loader.exec_module = exec_module
        return spec


def record(torch):
    losses = []
    backward = torch.Tensor.backward

    def noting(tensor, *args, **options):
        if tensor.numel() == 1:
            losses.append(float(tensor.detach()))
        return backward(tensor, *args, **options)

    def after_step(optimizer, *_):
        digest, sums = hashlib.sha256(), []
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            held = param.detach().cpu().contiguous()
            digest.update(held.view(-1).view(torch.uint8).numpy().tobytes())
            sums.append(float(held.double().sum()))
        line = {"weights": digest.hexdigest(), "sums": sums, "losses": list(losses)}
        losses.clear()
        with open(os.path.join(os.environ["PROGRAMS_RECORD"], os.environ.get("RANK", "0") + ".jsonl"), "a") as file:
            file.write(json.dumps(line) + "\n")

    torch.Tensor.backward = noting
    sys.modules["torch.optim.optimizer"].register_optimizer_step_post_hook(after_step)


def complete(torch):
    """Define the operators that torchvision's import needs; its binaries from PyPI are for torch with CUDA."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.programs_library = library  # which ends with it otherwise


def seed(torch):
    rank = int(os.environ.get("RANK", "0"))
    random.seed(rank)
    sys.modules["numpy"].random.seed(rank)
    torch.manual_seed(rank)


def prepare(torch):
    if os.environ.get("PROGRAMS_TORCHVISION"):
        complete(torch)
    if os.environ.get("PROGRAMS_RECORD"):
        record(torch)
        seed(torch)


def begins(event, args):
    """Seed again when the program begins: `lockstep run` forks ranks after torch's import, and seeds them by chance."""
    if event != "exec" or "torch" not in sys.modules or getattr(args[0], "co_name", "") != "<module>":
        return
    if os.path.abspath(args[0].co_filename) == os.environ["PROGRAMS_SCRIPT"]:
        seed(sys.modules["torch"])


if os.environ.get("PROGRAMS_RECORD"):
    sys.addaudithook(begins)
sys.meta_path.insert(0, After("torch", prepare))
