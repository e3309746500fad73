"""A process that has imported torch and the launcher, and of which commands are forked: see commands.py."""

import atexit
import contextlib
import json
import os
import selectors
import socket
import sys

import lockstep.launcher.cli  # noqa: F401 - which imports torch
from lockstep.cli import main

MOST_BYTES = 1 << 20


def serve(requests):
    """Fork a process for each request until there is nobody to ask any more; returns its arguments in that process."""
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is requests:
                    message, descriptors, _, _ = socket.recv_fds(requests, 1, 1)
                    if not message:
                        return None
                    selector.register(socket.socket(fileno=descriptors[0]), selectors.EVENT_READ)
                elif isinstance(key.fileobj, socket.socket):
                    selector.unregister(key.fileobj)
                    message, descriptors, _, _ = socket.recv_fds(key.fileobj, MOST_BYTES, 3)
                    if (pid := os.fork()) == 0:
                        return become(json.loads(message), descriptors)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    key.fileobj.send(str(pid).encode())
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, key.fileobj))
                else:
                    pid, connection = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with connection, contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
                        connection.send(str(code).encode())


def become(request, descriptors):
    """Turn this forked process into the one that was asked for; returns its arguments."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    return request["args"]


if __name__ == "__main__":
    arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        sys.argv = ["lockstep", *arguments]
        code = main(arguments)
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)  # taking the interpreter down would copy what was imported
