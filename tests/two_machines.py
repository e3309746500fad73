"""Two machines on one: network namespaces, joined by a cable that can be cut."""

import contextlib
import itertools
import os
import shutil
import subprocess

import pytest

from tests.distributed import commands

_numbers = itertools.count()


def ip(*args):
    return subprocess.run(["ip", *args], capture_output=True, text=True, timeout=20, check=False)


class Machines:
    """Two namespaces with the addresses 10.78.0.1 and 10.78.0.2."""

    def __init__(self, names, cables):
        self.names, self.cables = names, cables

    def start(self, index, *args, **kwargs):
        """Start `lockstep ARGS` on a machine."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return commands.start(*args, network=self.names[index], **pipes, **kwargs)

    def set_cable(self, state):
        """Cut the cable (``down``) or mend it (``up``)."""
        done = ip("-n", self.names[1], "link", "set", self.cables[1], state)
        assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def two_machines():
    """Make them, and take them away again; skips where that needs rights that we do not have."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2")
    mark = f"{os.getpid()}n{next(_numbers)}"
    names = [f"lockstep{side}{mark}" for side in "ab"]
    cables = [f"ls{side}{mark}" for side in "ab"]
    try:
        setup = [
            *(("netns", "add", name) for name in names),
            ("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1]),
        ]
        for index, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
            setup.append(("-n", name, "address", "add", f"10.78.0.{index}/24", "dev", cable))
            setup += [("-n", name, "link", "set", device, "up") for device in ("lo", cable)]
        for command in setup:
            done = ip(*command)
            if done.returncode:
                pytest.skip(f"this system gives no network namespaces: {done.stderr.strip()}")
        yield Machines(names, cables)
    finally:
        for name in names:
            ip("netns", "delete", name)
