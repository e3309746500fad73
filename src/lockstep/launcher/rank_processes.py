"""The processes of the ranks and of the spares: how they are started and ended, and when each one ended."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import connection
from typing import cast

from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.multiprocessing import SubprocessContext
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler
from torch.numa.binding import NumaOptions

from lockstep.base import rank_files
from lockstep.base.activity import log, one_line
from lockstep.comm.rendezvous import JOINS
from lockstep.health.rank_state import process_state
from lockstep.launcher import failure_report
from lockstep.launcher.job import Job
from lockstep.launcher.reaper import kill_sessions
from lockstep.launcher.replacement import NAME_OF_SPARE, visible_devices

# How long the record of a process's end may take to be written.
_LATE_S = 0.1


@contextmanager
def only_logged() -> Iterator[None]:
    """Log an error of the block, which cleans up: it neither makes a finished job fail, nor hides why a job failed."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, rendezvous.RendezvousError) as error:
        log(f"an error while cleaning up, which changes nothing else: {one_line(error)}")


class RankProcesses(SubprocessContext):
    """The processes of the ranks: forked if there is a server, otherwise new interpreters, which torch starts.

    Records when each one ended, and which ones still ran when the launcher began to stop them.
    """

    job: Job
    numa_options: NumaOptions | None
    watcher: threading.Thread | None = None
    # The spares, by number.
    spares: dict[int, SubprocessHandler]

    def _start(self) -> None:
        for rank in self.envs:
            # Each at once, so that the agent ends the ranks that have started if a signal arrives meanwhile.
            self.subprocess_handlers[rank] = self._start_rank(rank, self.envs[rank])
        self.job.ended_at_ns.clear()  # pids may be reused
        self.watch(self.pids().values())

    def watch(self, pids: Iterable[int]) -> None:
        """Record when these processes end."""
        # No exit status has been read yet, so no pid can belong to another process.
        running = {os.pidfd_open(pid): pid for pid in pids}
        self.watcher = threading.Thread(target=self._note_ends, args=(running,), name="lockstep-rank-ends", daemon=True)
        self.watcher.start()

    def _note_ends(self, running: dict[int, int]) -> None:
        """Record when each process ends: torch notices it at its next poll, in the order of the ranks."""
        while running:
            for descriptor in cast(list[int], connection.wait(running)):  # the kernel makes it readable at the end
                self.job.ended_at_ns[running.pop(descriptor)] = time.time_ns()
                os.close(descriptor)

    def start_late(self, rank: int, local: int, num_ranks: int) -> SubprocessHandler:
        """Start a process for the place of a rank in a running job, which has so many ranks on this machine."""
        env, newest = self.envs[local], rank_files.Generation.read(self.job.folder)
        num_others = int(env["WORLD_SIZE"]) - int(env["LOCAL_WORLD_SIZE"])
        if newest is not None:  # this machine may have begun with other machines, or alone
            num_others = newest.world_size - len(newest.ranks) - len(newest.waiting)
        changed = {"RANK": rank, "WORLD_SIZE": num_others + num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        return self._start_rank(local, env | {name: str(number) for name, number in changed.items()} | {JOINS: "1"})

    def start_spare(self, number: int) -> SubprocessHandler:
        """Start a spare, which prepares as if it were the last rank, with a device of its own."""
        last = len(self.subprocess_handlers) - 1
        env = self.envs[last] | {JOINS: "1", rank_files.SPARE: NAME_OF_SPARE.format(number)}
        if (devices := visible_devices(last + 1 + number)) is not None:
            variable, visible = devices
            visible[last] = visible[last + number]
            env[variable] = ",".join(visible)
        return self._start_rank(last, env)

    def _start_rank(self, rank: int, env: dict[str, str]) -> SubprocessHandler:
        # The output of a spare, which is no rank yet, is that of the launcher.
        streams = ("", "") if rank_files.SPARE in env else (self.stdouts[rank], self.stderrs[rank])
        arguments = cast(str, self.entrypoint), self.args[rank], env, *streams, rank, self.numa_options
        return self._fork(rank, env, streams) or get_subprocess_handler(*arguments)

    def _fork(self, rank: int, env: dict[str, str], streams: tuple[str, str]) -> SubprocessHandler | None:
        server = self.job.server
        # Others are wrapped in numactl, or run an interpreter that the user chose.
        if server is None or self.entrypoint != sys.executable or self.numa_options is not None:
            return None
        with ExitStack() as stack:
            # The path is empty for the launcher's own stream.
            paths = enumerate(streams, 1)
            files = [stack.enter_context(open(path, "w")).fileno() if path else stream for stream, path in paths]
            return cast(SubprocessHandler | None, server.fork(self.args[rank], {**os.environ, **env}, [0, *files]))

    @only_logged()
    def close(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        """End the ranks, as torch does; without a signal it does so because one of them has failed.

        torch calls this during the poll that has found the first failed rank: only at this moment can failed ranks be
        distinguished from ranks that are stopped because of the failure.
        """
        for pid in self.pids().values():
            if process_state(pid)[0]:
                self.job.stopped_at_ns[pid] = time.time_ns()
        super().close(death_sig or signal.SIGTERM, failure_report.SIGTERM_S if death_sig is None else timeout)
        kill_sessions(spare.proc.pid for spare in self.spares.values())
        for spare in self.spares.values():
            spare.proc.wait(failure_report.SIGTERM_S)
        self.spares.clear()
        if self.watcher is not None:
            self.watcher.join(_LATE_S)  # no rank is left
