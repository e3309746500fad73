"""Runs blocks one after the other in this process, as ``__main__``, and writes what each printed.

python run_blocks.py blocks.json printed.json, as ranks of which rank zero writes; or `run` alone.
"""

import contextlib
import io
import json
import os
import sys
import types


def run(place: str, code: str) -> str:
    """Run one block; an error in it has the page's line numbers."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    page = place.partition(":")[0]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, page, "exec"), vars(module))
        worlds = sys.modules.get("lockstep.comm.world")
        if worlds is not None and worlds.World.opened is not None:  # which a script leaves open until it ends
            worlds.World.opened.close()
    return printed.getvalue()


if __name__ == "__main__":
    own = sys.modules["__main__"]  # kept: what a module holds is cleared when the last reference to it goes
    with open(sys.argv[1]) as file:
        todo = json.load(file)
    printed = {place: run(place, code) for place, code in todo}
    if os.environ.get("RANK", "0") == "0":
        with open(sys.argv[2], "w") as file:
            json.dump(printed, file)
