"""The rendezvous of the launchers of a job's machines, and the store in which their ranks find each other."""

import argparse
import contextlib
import errno
import os
import socket
import time
import uuid
from collections.abc import Callable

from torch.distributed.elastic import rendezvous
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import parse_min_max_nnodes

from lockstep.base import torch_internals
from lockstep.base.activity import log
from lockstep.base.env import DEFAULT_MASTER_PORT, Launcher, RankEnv
from lockstep.comm.network import GLOO_INTERFACE, gloo_interface, is_local, reachable_address
from lockstep.comm.store import DEFAULT_STORE_PORT, LOOPBACK, HashStore, start_store_server
from lockstep.errors import ConfigurationError, LockstepError

# The name of the rendezvous of a single machine in torch elastic.
LOCAL_BACKEND = "lockstep-local"

# torch's own variable: ranks do not use the store of a launcher, so launchers do not keep its address.
_NO_SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"

_LOCAL = rendezvous.RendezvousStoreInfo(LOOPBACK, 0)
_STORE_TIMEOUT_S = 600.0
# torchrun's default for how long a machine waits for the others.
_RENDEZVOUS_TIMEOUT_S = 900.0
_RETRY_S = 0.3
_DEFAULT_ETCD_PORT = 2379  # torch elastic's
# How often, and for how long each time, a lost store is probed while the ranks go on.
_TRY_PERIOD_S, _TRY_S = 2.0, 0.3


class RendezvousPerRestart(rendezvous.RendezvousHandler):
    """Runs the rendezvous with a handler of torch's, and creates a new store for the ranks each time.

    [Note: a store for each restart]
    Machines run a new rendezvous whenever ranks are started again. The ranks then use a store that the launcher of the
    first machine hosts. torch's launchers host one at the first rendezvous, and keep its address as long as they live.
    This has two problems:

    - A launcher that joins later, to replace a lost machine, waits until the address is written to the store of its
      rendezvous, but the launchers that know the address do not write it again. Or it is the first by name and hosts
      another store, which the others never use. Either way the ranks wait for each other in vain.
    - Keys that ranks wrote before the restart are still in the store. Scripts that call torch's own init_process_group
      find the addresses of ranks that are gone: "Connection refused".

    So here the first machine of each rendezvous hosts a new store, and writes its address there. Machines also agree on
    one number of restarts, which each of torch's launchers counts separately.

    [Note: a lost store]
    torch's launchers end the job when they lose the store of their rendezvous. Here the ranks go on, since they use
    another store. When they have to start again, the launchers wait until a store answers at the same address, maybe in
    another process or on another machine. A c10d store is empty then. The first machine to join it would start a second
    job in addition to this one. So the launchers run a rendezvous there as soon as it answers, and their ranks save and
    start again.

    Args:
        config: Of the rendezvous; also to create another handler after its store was lost.
        inner: torch's handler of the rendezvous; ``None`` on a single machine, which needs none. There torch's own
            handler would also host a store, which listens at every address of the machine.
        is_ending: Returns whether the ranks have been requested to end, so that no machine can join any more.
    """

    def __init__(
        self, config: LaunchConfig, inner: rendezvous.RendezvousHandler | None, is_ending: Callable[[], bool]
    ) -> None:
        self._config, self._inner, self._is_ending = config, inner, is_ending
        # Of the store for the ranks that are started now, and that store, if it is hosted here.
        self.store_address = LOOPBACK, 0
        self._hosted: object = None
        # How often the ranks of the job have been started again, for any reason; the same on all machines.
        self.num_restarts = -1
        self._is_lost, self._next_try_s = False, 0.0
        # Whether machines join and leave in place, see [Note: machines]: then this one need not take part here.
        self.is_quorum_used = False

    def get_backend(self) -> str:
        """Return the name of the kind of rendezvous."""
        return self._config.rdzv_backend

    @property
    def use_agent_store(self) -> bool:
        """The ranks use a launcher's store."""
        return True

    def next_rendezvous(self) -> rendezvous.RendezvousInfo:
        """Run a new rendezvous; agree on a new store for the ranks, and on the number of restarts: the largest of any.

        Blocks until the other machines have come.
        """
        info = rendezvous.RendezvousInfo(HashStore(), 0, 1, _LOCAL) if self._inner is None else self._meet(self._inner)
        assert info.bootstrap_store_info is not None
        host, store = info.bootstrap_store_info.master_addr, info.store
        self._hosted = None  # the previous store, whose ranks have ended
        store.set(f"lockstep/restarts/{info.rank}", str(self.num_restarts + 1))
        if info.rank == 0:
            self._hosted, port = start_store_server(host, _STORE_TIMEOUT_S)
            numbers = store.multi_get([f"lockstep/restarts/{rank}" for rank in range(info.world_size)])
            store.set("lockstep/start", f"{port} {max(map(int, numbers))}")
        port, self.num_restarts = map(int, store.get("lockstep/start").split())
        self.store_address = host, port
        address = rendezvous.RendezvousStoreInfo(host, port)
        return rendezvous.RendezvousInfo(store, info.rank, info.world_size, address)

    def _meet(self, inner: rendezvous.RendezvousHandler) -> rendezvous.RendezvousInfo:
        try:
            if not self._is_lost:
                return inner.next_rendezvous()
        except rendezvous.RendezvousConnectionError:
            self._note_loss()
        # Once a store answers at the address of the lost one.
        _await_host(self._config, may_be_here=False)
        self._inner = _new_handler(self._config)
        self._is_lost = False
        return self._inner.next_rendezvous()

    def num_nodes_waiting(self) -> int:
        """Return how many machines wait to join, including this one if it needs a new rendezvous."""
        if self._inner is None or self._is_ending():
            return 0
        try:
            if not self._is_lost:
                # The others remove this machine if its keepalives did not arrive in time.
                is_removed = torch_internals.is_removed(self._inner) and not self.is_quorum_used
                return self._inner.num_nodes_waiting() or int(is_removed)
        except rendezvous.RendezvousConnectionError:
            if self._inner.get_backend() != "c10d":  # its store keeps its contents, and may answer again
                return 0
            self._note_loss()
        if time.monotonic() >= self._next_try_s:
            self._next_try_s = time.monotonic() + _TRY_PERIOD_S
            with contextlib.suppress(OSError), socket.create_connection(_address(self._config), timeout=_TRY_S):
                return 1
        return 0

    def _note_loss(self) -> None:
        self._is_lost = True
        torch_internals.stop_heartbeats(self._inner)  # torch's client would log every heartbeat that fails
        log(f"the store at {self._config.rdzv_endpoint}, where the machines meet, does not respond any more")

    def is_closed(self) -> bool:
        """Return whether the job is over."""
        return self._inner is not None and self._inner.is_closed()

    def set_closed(self) -> None:
        """Record that the job is over."""
        if self._inner is not None:
            self._inner.set_closed()

    def get_run_id(self) -> str:
        """Return the name of the job."""
        return self._config.run_id

    def shutdown(self) -> bool:
        """Leave permanently, and end the job, unless only this machine was requested to end."""
        return self._inner is None or self._is_ending() or self._inner.shutdown()


def rendezvous_of(config: LaunchConfig, is_ending: Callable[[], bool]) -> rendezvous.RendezvousHandler:
    """Return torch's handler for ``config``, in a `RendezvousPerRestart` if machines may come and go."""
    if config.rdzv_backend == LOCAL_BACKEND:
        return RendezvousPerRestart(config, None, is_ending)
    handler = _new_handler(config)
    if not isinstance(handler, DynamicRendezvousHandler):
        return handler
    os.environ[_NO_SHARING] = "1"  # for this run: the launcher restores its environment
    return RendezvousPerRestart(config, handler, is_ending)


def _address(config: LaunchConfig) -> tuple[str, int]:
    port = DEFAULT_STORE_PORT if config.rdzv_backend == "c10d" else _DEFAULT_ETCD_PORT
    host, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=port)
    return host, port


def _new_handler(config: LaunchConfig) -> rendezvous.RendezvousHandler:
    location = config.rdzv_backend, config.rdzv_endpoint, config.run_id
    sizes = config.min_nodes, config.max_nodes, config.local_addr
    return get_rendezvous_handler(rendezvous.RendezvousParameters(*location, *sizes, **config.rdzv_configs))


# The settings of the command line.


def _meet_in_slurm_step(args: argparse.Namespace) -> None:
    """Fill in the machines of the SLURM step that has started a launcher on each.

    Raises:
        ConfigurationError: It has started several on one machine.
    """
    env = RankEnv.from_environ(os.environ)
    if env.launcher not in (Launcher.SLURM, Launcher.ENV) or "RANK" in os.environ or env.world_size == 1:
        return
    num_nodes = os.environ.get("SLURM_STEP_NUM_NODES", os.environ.get("SLURM_NNODES"))
    if num_nodes != str(env.world_size):
        raise ConfigurationError(
            f"srun has started {env.world_size} launchers on {num_nodes} machines, and each would start a rank on "
            "every device.\nStart one on each: srun --ntasks-per-node=1 lockstep run ... With --standalone each is a "
            "separate job."
        )
    args.nnodes, args.rdzv_backend = num_nodes, "c10d"
    args.rdzv_endpoint = f"{env.master_addr}:{env.master_port}"
    args.rdzv_id = f"slurm-{os.environ.get('SLURM_JOB_ID')}-{os.environ.get('SLURM_STEP_ID')}"


def choose_rendezvous(args: argparse.Namespace) -> None:
    """Set the address of the rendezvous: as torchrun does, or a free port if there is only this machine.

    Raises:
        ConfigurationError: The number of machines cannot be read, they have no place to meet, or the port is taken.
    """
    # torchrun's own defaults: no flag names the machines.
    if args.nnodes == "1:1" and not args.standalone and not args.rdzv_endpoint and "SLURM_PROCID" in os.environ:
        _meet_in_slurm_step(args)
    is_static = args.rdzv_backend == "static" and not args.rdzv_endpoint
    is_nowhere = not args.rdzv_endpoint and (args.rdzv_backend != "static" or args.master_addr is None)
    if is_nowhere and not args.standalone and max_nodes(args) > 1:
        flags = "--node-rank I --master-addr HOST" if is_static else "--rdzv-endpoint HOST:PORT"
        raise ConfigurationError(
            f"--nnodes {args.nnodes} needs the place where the machines meet.\n"
            f"Add {flags}, with the name or address of the first machine, the same on every machine."
        )
    args.master_addr = args.master_addr or LOOPBACK  # torchrun's default
    if args.standalone or (is_static and args.master_port is None and max_nodes(args) == 1):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = LOCAL_BACKEND, "localhost:0", str(uuid.uuid4())
        # Not the host's name, which may not resolve, or resolve to an address that is filtered.
        args.local_addr = args.local_addr or LOOPBACK
    if args.master_port is None:
        args.master_port = DEFAULT_MASTER_PORT  # torchrun's; only relevant for several machines
    host, port = _endpoint(args)
    if args.rdzv_backend == "static" and args.node_rank == 0 and (reason := _why_not_bindable(port)):
        raise ConfigurationError(
            f"Port {port} on this machine {reason}.\n"
            "Choose another with --master-port, the same on every machine; on one machine leave it out for a free one."
        )
    if args.rdzv_backend == "c10d" and port and "is_host" not in args.rdzv_conf:
        # torch compares the host with the addresses of this machine's name, which may not be all of its addresses.
        is_host = is_local(host) and _why_not_bindable(port) is None
        is_chosen = False
        with contextlib.suppress(socket.gaierror):  # this name does not resolve: torch would raise the same error
            is_chosen = torch_internals.matches_machine_hostname(host) or not is_host
        if not is_chosen:
            args.rdzv_conf = f"{args.rdzv_conf},is_host={int(is_host)}".lstrip(",")


def choose_interfaces(args: argparse.Namespace) -> list[str]:
    """Set the interfaces that the ranks use, in ``args`` and the environment; return notes for the user."""
    host, port = _endpoint(args)
    if max_nodes(args) == 1:
        # Otherwise Gloo would listen at the address of the host's name, which may be reachable by others.
        if (loopback := gloo_interface(host, one_machine=True)) is not None:
            os.environ.setdefault(GLOO_INTERFACE, loopback)
        return []
    notes = []
    # By default the ranks of other machines get this host's name.
    args.local_addr = args.local_addr or reachable_address(host)
    if (interface := gloo_interface(host, one_machine=False)) is not None and GLOO_INTERFACE not in os.environ:
        os.environ[GLOO_INTERFACE] = interface
        notes.append(f"{GLOO_INTERFACE}={interface}, as no other machine can reach {socket.gethostname()} by its name")
    return [*notes, f"waiting for the other machines of --nnodes {args.nnodes} at {host}:{port}"]


def wait_for_host(config: LaunchConfig) -> None:
    """Wait until the machine that hosts the rendezvous answers.

    Blocks at most for the rendezvous timeout. This is done here because torch's own client logs every attempt with its
    C++ stack, and delays Ctrl-C.

    Raises:
        LockstepError: It did not answer in time.
    """
    is_first = config.rdzv_backend == "static" and config.rdzv_configs["rank"] == 0
    if config.max_nodes > 1 and config.rdzv_backend in ("static", "c10d") and not is_first:
        _await_host(config, may_be_here=True)


def _await_host(config: LaunchConfig, *, may_be_here: bool) -> None:
    (host, port), conf = _address(config), config.rdzv_configs
    timeout_s = float(conf.get("join_timeout") or conf.get("timeout") or _RENDEZVOUS_TIMEOUT_S)
    deadline = time.monotonic() + timeout_s
    # Resolved again each time: the name of a machine that has just started may not be known yet.
    while not (may_be_here and is_local(host)):
        try:
            socket.create_connection((host, port), timeout=2.0).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise LockstepError(
                    f"{socket.gethostname()} could not reach the first machine at {host}:{port} "
                    f"within {timeout_s:g} s: {error.strerror or error}.\n"
                    "Check that the command runs there (with --node-rank 0), that the address and the port are the "
                    "same on every machine, and that no firewall blocks it."
                ) from None
        time.sleep(_RETRY_S)


def max_nodes(args: argparse.Namespace) -> int:
    """Return the largest number of machines.

    Raises:
        ConfigurationError: It cannot be read.
    """
    try:
        return int(parse_min_max_nnodes(args.nnodes)[1])
    except (ValueError, RuntimeError):
        raise ConfigurationError(
            f"--nnodes {args.nnodes} is not a number of machines.\nPass one such as 2, or a range such as 1:4."
        ) from None


def _endpoint(args: argparse.Namespace) -> tuple[str, int]:
    if not args.rdzv_endpoint:
        return args.master_addr.strip("[]"), int(args.master_port)
    try:
        return parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=args.master_port)
    except ValueError:
        raise ConfigurationError(
            f"--rdzv-endpoint {args.rdzv_endpoint} is not an address.\nPass <host>:<port>."
        ) from None


def _why_not_bindable(port: int) -> str | None:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        # Other errors come from binding all addresses, which only this check does; elastic reports its own errors.
        return {errno.EADDRINUSE: "is already in use", errno.EACCES: "may only be used by root"}.get(error.errno or 0)
    return None
