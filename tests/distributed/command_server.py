"""A process that has imported torch and lockstep, and of which processes are forked: see commands.py and forking.py.

What a command starts itself is forked as well, off a copy of the command that is made before it has any threads.
"""

import contextlib
import ctypes
import gc
import json
import os
import selectors
import signal
import socket
import sys
from functools import partial

import torch._dynamo  # noqa: F401 - the first optimizer would import it

import lockstep.launcher.cli
import lockstep.train.fit  # noqa: F401
from lockstep.cli import main
from lockstep.launcher import bootstrap, fork_server
from tests import forking

CLONE_NEWNET = 0x40000000


def serve(requests):
    """Fork a process for each request until there is nobody to ask any more; returns in them, with what each is."""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is requests:
                    message, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
                    if not message:
                        return lambda: None
                    selector.register(socket.socket(fileno=descriptors[0]), selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    selector.unregister(key.fileobj)
                    message, descriptors, _, _ = socket.recv_fds(key.fileobj, fork_server.MOST_BYTES, 3)
                    request = json.loads(message)
                    if (pid := os.fork()) == 0:
                        requests.close()
                        if request is None:  # the tests' own process starts something
                            return partial(fork_children_for, key.fileobj)
                        args = request.pop("args")
                        become(**request, descriptors=descriptors)
                        return partial(run_command, args)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    if request is None:
                        key.fileobj.close()
                        continue
                    key.fileobj.send(str(pid).encode())
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, key.fileobj))
                else:
                    pid, connection = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with connection, contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                        connection.send(str(code).encode())


def become(network, descriptors, **place):
    """Give this process a place of its own, in the network namespace of that name if there is one."""
    if network is not None:
        with open(f"/var/run/netns/{network}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"this process cannot move to {network}")
    fork_server.take_place(place, descriptors)


def run_command(args):
    """Be ``lockstep ARGS``."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if args[:1] == ["rehearse"]:  # others start ranks only
        prepare_children()
    sys.argv = ["lockstep", *args]
    sys.exit(main(args))


def prepare_children():
    """Have what this process starts forked off a copy of it; the copy, and what is forked off it, do not return."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        fork_children_for(theirs)
    theirs.close()
    forking.install(lambda: ours)


def fork_children_for(connection):
    """Serve one process; returns neither here nor in those forked for it."""
    words = fork_server.serve(connection)

    def program():
        forking.take_place()
        if words[:2] == ["-m", "lockstep"]:
            run_command(words[2:])
        if words[0] != "-u":  # no rank
            prepare_children()
        forking.start(words)

    forking.end(program)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for those who asked for processes
    bootstrap.set_title("commands of tests")  # finds the command line, of which the environment is a neighbour, once
    gc.freeze()  # what was imported stays where it is, in all that are forked
    forking.end(serve(socket.socket(fileno=int(sys.argv[1]))))
