"""A rank of a training of bench/conformance.py: PEER and CASE, a JSON of `shared.Case`."""

import importlib
import json
import sys

import torch

from bench.conformance_peers.shared import Case, recorded


def main() -> None:
    name, fields = sys.argv[1:]
    torch.set_num_threads(1)
    recorded(importlib.import_module(f"bench.conformance_peers.{name}").train, Case(**json.loads(fields)))


if __name__ == "__main__":
    main()
