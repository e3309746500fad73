"""A rank of a training of bench/conformance.py: PEER and CASE, a JSON of `shared.Case`."""

import importlib
import json
import sys

import torch

from bench.conformance_peers.shared import Case, NotOffered, record


def main() -> None:
    name, fields = sys.argv[1:]
    torch.set_num_threads(1)
    record("start")
    try:
        importlib.import_module(f"bench.conformance_peers.{name}").train(Case(**json.loads(fields)))
    except NotOffered as error:
        record("not offered", error=str(error))
    except BaseException as error:
        if not isinstance(error, SystemExit):
            record("failed", error=f"{type(error).__name__}: {error}")
        raise
    record("done")


if __name__ == "__main__":
    main()
