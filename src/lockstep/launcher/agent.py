"""torch elastic's agent, extended: restarts, machines that come and go, and lost ranks that are replaced."""

import math
import os
import signal
import socket
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, cast

from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, ProcessFailure, SignalException
from torch.distributed.elastic.utils import macros
from torch.distributed.launcher.api import LaunchConfig

from lockstep.base import rank_files, torch_internals
from lockstep.base.activity import log, plural
from lockstep.base.env import AGENT_STORE, LAUNCHER_STORE
from lockstep.comm.network import set_keepalive
from lockstep.comm.rendezvous import JOINS, poll_until
from lockstep.comm.store import InterNodeStore
from lockstep.errors import RESUME_EXIT_CODE
from lockstep.launcher import failure_report
from lockstep.launcher.fork_server import END_SIGNALS, signal_handlers
from lockstep.launcher.job import Job, stop_timeout_s
from lockstep.launcher.node_rendezvous import RendezvousPerRestart, rendezvous_of, wait_for_host
from lockstep.launcher.quorum import Lighthouse, Machines, has_begun, running_job
from lockstep.launcher.rank_processes import RankProcesses, only_logged
from lockstep.launcher.reaper import kill_sessions
from lockstep.launcher.replacement import RankReplacement, hide_device

# torch elastic's environment variable for the signals that it handles itself.
_LEFT_TO_ELASTIC = "TORCHELASTIC_SIGNALS_TO_HANDLE"

_POLL_S = 0.1
# How often to try the rendezvous, if one of the machines is lost during it.
_NUM_RENDEZVOUS_ATTEMPTS = 3
# How long it takes until a launcher notices that another one has left; it polls once a second.
_NOTICED_S = 3.0


class StoppedWhileRestarting(SignalException):
    """A signal arrived while the ranks stopped for another machine: they have stopped, and are not started again."""


class Agent(LocalElasticAgent):
    """Starts the ranks, polls them, stops all when one fails, and repeats the rendezvous, as torch does.

    Additions to torch's agent:

    - Ranks that support it are requested to save and stop before they are started again with another machine
      (`_is_done_after_stop`). If a machine's ranks stopped at the request of another machine, this one follows it
      (`_follow_others`).
    - Lost ranks are replaced while the others go on, if these can (`_replace_lost`): see `RankReplacement`. Launchers
      of several machines agree on it in quorums, also about machines that are lost or join: see `Machines`.
    - After a rank was killed, a job on one machine may go on with one fewer (``min_ranks``).
    - The number of restarts is that of the whole job; each of torch's launchers counts the failures that it saw.
    - It records when each rank ended, and which ones still ran when the launcher began to stop them: these ranks are
      never the cause.
    """

    def __init__(self, job: Job, config: LaunchConfig, command: tuple[str, ...]) -> None:
        self.job, self.config = job, config
        # How often the ranks of the job have been started again, for any reason; and how often because a rank of this
        # machine failed.
        self.num_restarts, self.num_failures = -1, 0
        # What torch has found at the last poll of the ranks.
        self._last = RunResult(WorkerState.HEALTHY)
        # Where the launchers of several machines agree on recovery; and the running job that this one joins.
        has_board = config.rdzv_backend in ("static", "c10d") and config.max_nodes > 1 and config.max_restarts > 0
        self._board = InterNodeStore(config.rdzv_endpoint, config.run_id) if has_board else None
        self._joins: Lighthouse | None = None
        # The start of the job that this machine has taken part in last, by its lighthouse.
        self._left = ""
        self._machines: Machines | None = None
        with self._ending_at_once():
            handler = rendezvous_of(config, lambda: rank_files.is_stopped_by_signal(job.folder))
        # What torchrun's flags say about ranks, logs and NUMA bindings: the settings that both have in this torch.
        common = {item.name: getattr(config, item.name) for item in fields(WorkerSpec) if hasattr(config, item.name)}
        common |= {"local_world_size": config.nproc_per_node, "entrypoint": command[0], "args": command[1:]}
        # torch sleeps so long, and refuses 0; `_monitor_workers` waits, which the end of the ranks ends.
        common["monitor_interval"] = 0.001
        spec = WorkerSpec(**common, rdzv_handler=handler)
        # How long ranks may take to end after a signal: an argument since torch 2.13.
        patience: dict[str, Any] = {name: value for name, value in vars(config).items() if name == "shutdown_timeout"}
        super().__init__(spec, cast(LogsSpecs, config.logs_specs), **patience)

    def _ending_at_once(self) -> AbstractContextManager[None]:
        """Make the kernel end this process at a signal, inside the block; the reaper removes what is left.

        While it waits for other machines in torch's C++ code, no handler in Python would run.
        """
        return signal_handlers(END_SIGNALS if self.job.is_command else (), signal.SIG_DFL)

    def run(self, *args: Any) -> RunResult:
        """Run until all ranks have ended, as torch's ``launch_agent`` does."""
        try:
            # A spare machine that was never used has no result.
            return cast(RunResult | None, super().run(*args)) or RunResult(WorkerState.SUCCEEDED)
        finally:
            is_leaving = isinstance(sys.exception(), SignalException)  # else all machines end
            with only_logged():
                self._leave_machines()
            with only_logged():
                if not is_leaving:
                    self.get_worker_group().spec.rdzv_handler.shutdown()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Run the rendezvous; repeat it if a machine is lost before it has written what the others need."""
        handler = worker_group.spec.rdzv_handler
        lighthouse = None
        if (board := self._board) is not None:
            # Only the first machine knows how often the ranks were started, and it may be about to start them again.
            limit_s = stop_timeout_s() * (self.config.rdzv_configs.get("rank", 0) != 0)
            with self._ending_at_once():
                poll_until(lambda: not has_begun(board) or running_job(board) is not None, limit_s, _POLL_S)
            lighthouse = running_job(board)
        # Machines that this one has left before they had come together also go on without it.
        can_join = lighthouse is not None and (lighthouse.have_met or lighthouse.job == self._left)
        self._joins = lighthouse if can_join else None
        self.num_restarts += 1
        if self._joins is not None:
            # The ranks begin alone, as on a single machine.
            worker_group.spec.rdzv_handler = self._alone = RendezvousPerRestart(self.config, None, lambda: False)
            super()._rendezvous(worker_group)
            worker_group.spec.rdzv_handler = handler
            return
        if lighthouse is not None:
            self.num_restarts = lighthouse.start  # the ranks of the first machine wait for those of this one
        for attempt in range(_NUM_RENDEZVOUS_ATTEMPTS):
            try:
                with self._ending_at_once():
                    super()._rendezvous(worker_group)
                    if isinstance(handler, RendezvousPerRestart):
                        self.num_restarts = handler.num_restarts
                        if self.job.store is not None:  # the rendezvous store may be lost, or not be torch's
                            self.job.store.move_to(handler.store_address)
                return
            except (RuntimeError, rendezvous.RendezvousConnectionError):  # an error of the store
                if not isinstance(handler, RendezvousPerRestart) or attempt == _NUM_RENDEZVOUS_ATTEMPTS - 1:
                    raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the ranks with the variables of torchrun, as `RankProcesses`."""
        spec = worker_group.spec
        common_env = {
            "GROUP_RANK": worker_group.group_rank,
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": spec.local_world_size,
            "GROUP_WORLD_SIZE": worker_group.group_world_size,
            "MASTER_ADDR": worker_group.master_addr,
            "MASTER_PORT": worker_group.master_port,
            "TORCHELASTIC_RESTART_COUNT": self.num_restarts,
            "TORCHELASTIC_MAX_RESTARTS": spec.max_restarts,
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            AGENT_STORE: spec.rdzv_handler.use_agent_store,
            # torchrun's is 1: torch's watchdog ends a process whose peer is lost, or in mode 2 aborts its groups before
            # the rank knows why. Ranks that can go on must abort their groups themselves; see comm/generations.py.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0" if spec.max_restarts > self.num_failures else "1"
            ),
        }
        if spec.max_restarts > self.num_failures:
            # After an error, the watchdog would sleep for minutes before it ends, for other ranks to write records of
            # their collectives; heartbeats have these already. A recovery would wait for it.
            for name, value in (("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"), ("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1")):
                common_env[name] = os.environ.get(name, value)
        if spec.rdzv_handler.use_agent_store:
            common_env[LAUNCHER_STORE] = f"{worker_group.master_addr}:{worker_group.master_port}"
        if self._joins is not None:
            common_env[JOINS] = 1
        envs: dict[int, dict[str, str]] = {}
        args = {}
        for worker in worker_group.workers:
            number = worker.local_rank
            own_env = {"RANK": worker.global_rank, "WORLD_SIZE": worker.world_size}
            own_env |= {"ROLE_RANK": worker.role_rank, "ROLE_WORLD_SIZE": worker.role_world_size}
            envs[number] = {name: str(value) for name, value in (common_env | own_env).items()}
            args[number] = tuple(macros.substitute(list(spec.args), str(number)))  # torchrun's ${local_rank}
        torch_internals.prepare_elastic_ranks(self, envs)
        # elastic would install its own handlers at each start of the ranks, and never remove them.
        os.environ[_LEFT_TO_ELASTIC] = ""
        filters = spec.duplicate_stdout_filters, spec.duplicate_stderr_filters
        arguments = spec.role, cast(str, spec.entrypoint), args, envs, cast(LogsSpecs, self.config.logs_specs), None
        ranks = self._pcontext = RankProcesses(*arguments, spec.numa_options, *filters)
        ranks.job, ranks.numa_options, ranks.spares = self.job, spec.numa_options, {}
        self.job.has_started = True
        ranks.start()
        return ranks.pids()

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        super()._initialize_workers(worker_group)
        set_keepalive()  # for connections to the launchers of other machines
        first = worker_group.workers[0].global_rank
        self.job.ranks = range(first, first + len(worker_group.workers))
        self.job.num_restarts_left = worker_group.spec.max_restarts - self.num_failures
        self.job.stopped_at_ns.clear()  # pids may be reused
        ranks, self.job.replacement = self._pcontext, None
        can_agree = self.config.max_nodes == 1 or self._board is not None
        if isinstance(ranks, RankProcesses) and self.job.num_restarts_left > 0 and can_agree:
            workers = {worker.id: worker.global_rank for worker in worker_group.workers}
            replacement = self.job.replacement = RankReplacement(
                self.job.folder,
                workers,
                self.job.num_restarts_left,
                start=ranks.start_late,
                start_spare=ranks.start_spare,
                num_spares=self.job.num_spares,
                exceptions=self.job.recover == "exceptions",
                min_ranks=self.job.min_ranks,
                spares=ranks.spares,
                server=self.job.server,
            )
            if self._board is not None:
                self._machines = replacement.machines = Machines(
                    self.job.folder,
                    list(workers),
                    self._board,
                    self.config.local_addr or socket.getfqdn(),
                    worker_group.group_rank if self._joins is None else self.config.rdzv_configs.get("rank"),
                    cast(int, worker_group.group_world_size),
                    self.config.min_nodes,
                    self.config.max_nodes,
                    self.num_restarts,
                    self.job.lighthouse,
                    self._joins,
                )
        if self.job.log_tail is not None:
            self.job.log_tail.started(self.job.ranks)

    def _leave_machines(self) -> None:
        if self._machines is not None:
            self._machines.close()
            self._left = self._machines.found.job if self._machines.found is not None else ""
            self._machines = None

    def _join_again(self, worker_group: WorkerGroup, reason: str) -> None:
        """End the ranks of this machine, as the others may go on without them, and start others."""
        log(reason)
        assert self._pcontext is not None and self._machines is not None
        kill_sessions(self._pcontext.pids().values())
        rank_files.forget_ranks(self.job.folder)
        spec = worker_group.spec
        with self._ending_at_once():
            wait_for_host(self.config)
            # The store may be another one now.
            self._board = board = InterNodeStore(self.config.rdzv_endpoint, self.config.run_id)
            if self.config.rdzv_backend == "static" and self.config.rdzv_configs["rank"] != 0:
                spec.rdzv_handler = rendezvous_of(self.config, lambda: False)
                spec.rdzv_handler.next_rendezvous()
                self._machines.check_place(board)
                # A new launcher on the first machine begins to count again, and waits for this one before it writes
                # anything.
                if not has_begun(board):
                    self.num_restarts = -1
        self._last = RunResult(WorkerState.HEALTHY)  # not a failure: no restart is used up
        self._restart_workers(worker_group)

    def _replace_lost(self, worker_group: WorkerGroup) -> bool:
        """Replace lost ranks, if the others can go on; return whether torch is to poll the ranks.

        It is not while some run and none is lost for good: it would end the job for one that is lost meanwhile.
        """
        replacement, ranks = self.job.replacement, self._pcontext
        if replacement is None or not isinstance(ranks, RankProcesses):
            return True
        replacement.poll()
        self._follow(replacement, worker_group)
        if (machines := self._machines) is not None:
            handler = worker_group.spec.rdzv_handler
            if isinstance(handler, RendezvousPerRestart):
                handler.is_quorum_used = machines.number >= 0 or self._joins is not None
            if (reason := machines.poll()) is not None:
                self._join_again(worker_group, reason)
                return False
        codes = {local: handler.proc.poll() for local, handler in ranks.subprocess_handlers.items()}
        if not (ended := {local: code for local, code in codes.items() if code}):
            return None not in codes.values()
        failures = {}
        for local, code in ended.items():
            worker = worker_group.workers[local]
            failures[worker.global_rank] = ProcessFailure(local, worker.id, code, ranks.error_files[local])
        pids = {rank: failure.pid for rank, failure in failures.items()}
        exits = failure_report.rank_exits(failures, {}, self.job.ended_at_ns, self.job.folder, self.job.resources)
        lost = [exit for exit in exits if exit.rank in failures]
        if all(replacement.is_harmless(exit, pids[exit.rank]) for exit in lost):
            for local in ended:
                ranks.subprocess_handlers[local].proc.returncode = 0
            log("; ".join(map(failure_report.how_it_ended, lost)) + "; the training was complete")
            return self._replace_lost(worker_group)
        normal = {worker_group.workers[local].id for local, code in codes.items() if code == 0}
        if (reason := replacement.why_not(lost, {*pids.values(), *normal})) is not None:
            if reason:
                log(f"the ranks cannot go on in place: {reason}")
            return True
        if self.job.log_tail is not None:
            self.job.log_tail.keep({exit.rank: exit.record.trace for exit in lost})
        new = replacement.replace(lost, pids)
        handlers = {handler.proc.pid: handler for handler in (*ranks.subprocess_handlers.values(), *new.values())}
        by_rank = sorted(replacement.ranks, key=replacement.ranks.__getitem__)
        ranks.subprocess_handlers = {local: handlers[pid] for local, pid in enumerate(by_rank)}
        torch_internals.set_num_processes(ranks, len(by_rank))
        del worker_group.workers[len(by_rank) :]
        for worker, pid in zip(worker_group.workers, by_rank, strict=True):
            worker.id = pid
        worker_group.spec.local_world_size = len(by_rank)
        self._follow(replacement, worker_group)
        ranks.watch(handler.proc.pid for handler in new.values())
        self.num_failures += len(lost)
        self.job.num_restarts_left -= len(lost)
        torch_internals.set_restarts_left(self, self.job.num_restarts_left)
        self.job.num_replaced += len(lost)
        return False

    def _follow(self, replacement: RankReplacement, worker_group: WorkerGroup) -> None:
        """Take over the ranks' numbers, of which there may be fewer than before."""
        for worker in worker_group.workers:
            worker.global_rank = replacement.ranks[worker.id]
        first = min(replacement.ranks.values())
        if (ranks := range(first, first + len(replacement.ranks))) != self.job.ranks:
            self.job.ranks = ranks
            if self.job.log_tail is not None:
                self.job.log_tail.started(ranks)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # The watcher ends with the last rank. If only some have ended, others may fail before the next poll, as ever.
        watcher = cast(RankProcesses, self._pcontext).watcher
        wait = watcher.join if watcher is not None and watcher.is_alive() else time.sleep
        wait(self.config.monitor_interval)
        is_to_poll = self._replace_lost(worker_group)
        if time.monotonic() > self.job.stop_by_s:
            self.job.reaper.kill_ranks()
            raise SignalException("the ranks have not stopped in time", sigval=self.job.requested_for or signal.SIGTERM)
        if not is_to_poll:
            return RunResult(WorkerState.HEALTHY)
        self._last = cast(RunResult, super()._monitor_workers(worker_group))
        codes = {failure.exitcode for failure in self._last.failures.values()}
        # Users' scripts exit with this code after `fit` has stopped; torch may have stopped the others.
        if RESUME_EXIT_CODE in codes and codes <= {RESUME_EXIT_CODE, -signal.SIGTERM}:
            self._follow_others(worker_group)
        return self._last

    def _follow_others(self, worker_group: WorkerGroup) -> None:
        """Handle ranks that saved and stopped because another launcher stopped its ranks: a machine leaves or joins."""
        handler = worker_group.spec.rdzv_handler
        if not isinstance(handler, RendezvousPerRestart) or not rank_files.stop_reports(self.job.folder):
            return
        # A signal may have been sent to all machines, and arrive here a moment later.
        is_stopped = rank_files.is_stopped_by_signal
        poll_until(lambda: is_stopped(self.job.folder) or handler.num_nodes_waiting() > 0, _NOTICED_S, _POLL_S)
        self._raise_if_signalled()
        if self.config.min_nodes < self.config.max_nodes or handler.num_nodes_waiting() > 0:
            self._last = RunResult(WorkerState.HEALTHY)  # not a failure: no restart is used up
            self._restart_workers(worker_group)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        spec, failures = worker_group.spec, self._last.failures
        if not failures and self._is_done_after_stop(worker_group):
            return
        if self._pcontext is not None:
            self._pcontext.close()
            # The loader processes of a killed rank would go on for some seconds.
            kill_sessions(self._pcontext.pids().values())
        exits = self.job.exits(failures)
        self._leave_machines()
        text = "lockstep: machines joined or left; the ranks start again"
        if failures:
            first = failure_report.first_failure(exits)
            self.num_failures += 1
            restart = f"restart {self.num_failures} of {spec.max_restarts}"
            # A rank that raised would raise again on any number of devices; one that was killed may have lost its own.
            if first.exit_code < 0 and spec.local_world_size > (self.job.min_ranks or math.inf):
                hide_device(failures[first.rank].local_rank, spec.local_world_size)
                spec.local_world_size -= 1
                restart += f" with {plural(spec.local_world_size, 'rank')}"
            text = failure_report.restart_report(first, restart)
        rank_files.forget_ranks(self.job.folder)
        print(text, file=sys.stderr, flush=True)
        super()._restart_workers(worker_group)

    def _is_done_after_stop(self, worker_group: WorkerGroup) -> bool:
        """Make the ranks save and stop for another machine, if all can; return whether their programs are done."""
        if len(rank_files.graceful_ranks(self.job.folder)) != worker_group.spec.local_world_size:
            return False
        rank_files.request_stop(self.job.folder, rank_files.ANOTHER_MACHINE)
        log("another machine waits to join; the ranks stop after this step, and start again with it")
        monitor = super()._monitor_workers
        poll_until(lambda: monitor(worker_group).state != WorkerState.HEALTHY, stop_timeout_s(), _POLL_S)
        self._raise_if_signalled()
        return monitor(worker_group).state == WorkerState.SUCCEEDED and not rank_files.stop_reports(self.job.folder)

    def _raise_if_signalled(self) -> None:
        if rank_files.is_stopped_by_signal(self.job.folder):
            raise StoppedWhileRestarting("a signal arrived meanwhile", sigval=signal.SIGTERM)

    def _exit_barrier(self) -> None:
        if not rank_files.is_stopped_by_signal(self.job.folder):  # else this machine leaves, and the others may go on
            if self._machines is not None and self._machines.number >= 0:
                self._machines.finish()  # the machines may not be those of the rendezvous
                return
            with self._ending_at_once():
                super()._exit_barrier()  # type: ignore[no-untyped-call]
