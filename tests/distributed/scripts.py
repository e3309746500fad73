"""Small scripts for one device, run plain and on ranks with `lockstep.prepare`, many in one call of the pool.

A script takes ``prepare``, or what stands for it, and returns a list of numbers, such as its weights.
"""

import gc
import re

import torch

import lockstep
from lockstep.errors import ConfigurationError


def plain(*objects):
    """Return the objects as they are: the script runs on one device."""
    return objects[0] if len(objects) == 1 else objects


def weights(*models):
    return torch.cat([parameter.detach().flatten() for model in models for parameter in model.parameters()]).tolist()


def run_all(world, scripts):
    """Return what each script returns, or the text of its error."""
    found = {}
    for name, script in scripts.items():
        try:
            found[name] = script(lockstep.prepare)
        except ConfigurationError as error:
            found[name] = re.sub("\nRaised by.*", "", str(error))
        gc.collect()  # its models must not count as prepared in the next one
    return found


def on_ranks(ranks, num_ranks, scripts):
    """Return the outcomes of each script, by rank."""
    everyones = ranks(num_ranks)(run_all, scripts)
    return {name: [found[name] for found in everyones] for name in scripts}


def wrong(ranks, num_ranks, scripts):
    """Return the scripts that compute other numbers on some rank than on one device, with both."""
    failures = {}
    for name, found in on_ranks(ranks, num_ranks, scripts).items():
        expected = scripts[name](plain)
        for numbers in found:
            is_error = isinstance(numbers, str) or len(numbers) != len(expected)
            if is_error or max(abs(a - b) for a, b in zip(numbers, expected, strict=True)) > 1e-10:
                failures[name] = {"expected": expected, "found": found}
    return failures


def other_data(ranks_text):
    """Return the begin of the error of ranks that have read other data than rank 0; the names of batches follow."""
    return f"The ranks have read different data: in this step, {ranks_text} trained on another global batch than rank 0"


OTHER_DATA_ADVICE = (
    "\nEvery rank must read the same samples in the same order, and gets its part of them from prepare(). So a data "
    "set or sampler must not take a part by rank, shuffle with a generator that the ranks seed differently, or "
    "weight samples by the losses of one rank: use torch's generator, random or numpy.random, or a seed that is equal "
    "on all ranks."
)
