"""`LocalSGD` and `DiLoCo`: ranks train independently, and exchange their parameters every few steps.

[Note: one exchange]
Every rank holds the *outer parameters*, the result of the last exchange, with the same bits on all ranks. Its model
holds the *local parameters*, which its own optimizer updates. An exchange of a *fragment*, some consecutive parameters:
    start    outer gradient = outer - local, weighted by what the rank has trained on; its all-reduce begins
    apply    ``sync_delay`` steps later: the outer optimizer steps the outer parameters by the mean of the ranks'
             outer gradients; the local parameters become the outer ones, plus this rank's updates since the start
LocalSGD is the case with SGD and a learning rate of 1 as the outer optimizer: the outer parameters become the mean of
the local ones. Before each start one small all-reduce compares step counts and sums the weights.

[Note: lost ranks]
Between exchanges ranks do not communicate, so the others do not notice that one was lost, or that another has come, and
neither waits. They notice it in their next exchange, leave it, meet, and begin it again with the ranks that there are
(`lockstep.Recovery`). An exchange without delay can be begun again: it changes weights, buffers, outer and local
parameters only after its last message has arrived. If a rank has received that message and another has not, the first
is further, and the other one takes its outer parameters. A rank that has come takes the outer parameters, the outer
optimizer and the number of steps of another, and has trained on nothing: its weight in this exchange is 0.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any, Self, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from lockstep.base.accelerator import check_float64
from lockstep.base.containers import grouped
from lockstep.comm import collectives
from lockstep.comm.collectives import Group, default_group, group_or_default, wait_for
from lockstep.comm.fully_shard import is_sharded
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError, NonFiniteGradient
from lockstep.parallel.compression import CompressedSum, PowerSGD, make
from lockstep.parallel.consistency import check_arguments_agree, check_models_agree
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.parallel.flat import cut_views, total

# Creates the optimizer of the outer parameters, such as ``functools.partial(torch.optim.Adam, lr=0.01)``.
OptimizerFactory = Callable[[list[nn.Parameter]], Optimizer]


@dataclass(frozen=True)
class OuterSGD:
    """Creates SGD with Nesterov momentum, for the outer parameters.

    Args:
        lr: Above 0. With 1, and no momentum, the outer parameters become the mean of the ranks' parameters.
        momentum: From 0 to below 1.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __str__(self) -> str:
        return f"outer_lr={self.lr}, outer_momentum={self.momentum}"

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Return the optimizer."""
        return SGD(parameters, lr=self.lr, momentum=self.momentum, nesterov=self.momentum > 0)

    @property
    def problem(self) -> str | None:
        """An error in the arguments, and how to fix it."""
        if not 0 < self.lr < math.inf:
            return f"outer_lr={self.lr!r} is not allowed.\nGive a number above 0."
        if not 0 <= self.momentum < 1:
            return f"outer_momentum={self.momentum!r} is not allowed.\nGive a number from 0 to below 1."
        return None


# --- the schedule of exchanges ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExchangeSchedule:
    """Which fragments are exchanged after which steps.

    Each fragment is exchanged once in ``sync_every`` steps. The exchanges are evenly spaced; the last fragment follows
    every ``sync_every``-th step.

    Args:
        sync_every: Steps between two exchanges of a fragment.
        fragments: Their number.
        sync_delay: Steps from the start of an exchange until it is applied.
    """

    sync_every: int
    fragments: int = 1
    sync_delay: int = 0

    def __str__(self) -> str:
        return f"sync_every={self.sync_every}, fragments={self.fragments}, sync_delay={self.sync_delay}"

    def due(self, step: int) -> list[int]:
        """Return the fragments whose exchange starts after ``step`` steps."""
        offsets = [(number + 1) * self.sync_every // self.fragments for number in range(self.fragments)]
        return [number for number, offset in enumerate(offsets) if (step - offset) % self.sync_every == 0]


def cut_fragments(sizes: Sequence[int], count: int) -> list[range]:
    """Split parameters in their order into ``count`` parts of about the same size, each with at least one parameter.

    Args:
        sizes: Elements of each parameter.
        count: At most as many as there are parameters.
    """
    ends, cuts = list(accumulate(sizes, initial=0)), [0]
    for part in range(1, count + 1):
        goal, latest = ends[-1] * part / count, len(sizes) - (count - part)
        # The nearest one; of equally near ones the last.
        cuts.append(min(range(latest, cuts[-1], -1), key=lambda stop: abs(ends[stop] - goal)))
    return [range(*bounds) for bounds in pairwise(cuts)]


class Fragment:
    """Parameters that are exchanged together.

    Collective: every rank creates it. On shm, blocks until all have.

    Attributes:
        names, local, outer: Of the parameters: their names, the model's, and the outer ones.
        flats: The outer gradients to reduce, one flat tensor for each dtype and device.
        gradients: Views of these, like ``outer``.
        compressed: Sums the flat tensors, if they are compressed.
    """

    def __init__(
        self, trained: Mapping[str, nn.Parameter], outer: Sequence[nn.Parameter], group: Group, compression: str | None
    ) -> None:
        self.names, self.local, self.outer, self._group = list(trained), list(trained.values()), outer, group
        self.compressed: list[CompressedSum] = []
        self.flats: list[Tensor] = []
        views: dict[nn.Parameter, Tensor] = {}
        for (dtype, device), parameters in grouped(outer, attrgetter("dtype", "device")).items():
            numel = sum(parameter.numel() for parameter in parameters)
            flat = collectives.empty_buffer(numel, dtype=dtype, device=device, group=group)
            self.flats.append(flat)
            if compression is not None and group.size() > 1:  # a single rank does not round
                shapes = [parameter.shape for parameter in parameters]
                self.compressed.append(CompressedSum(flat, shapes, compression, group))
            views.update(zip(parameters, cut_views(flat, parameters), strict=True))
        self.gradients = [views[parameter] for parameter in outer]

    def gather(self) -> None:
        """Write outer - local to the tensors to reduce."""
        for gradient, outer, local in zip(self.gradients, self.outer, self.local, strict=True):
            torch.sub(outer, local, out=gradient)

    def start_sum(self, share: float) -> list[Callable[[str], object]]:
        """Start to sum the outer gradients times ``share`` over the ranks; return functions that wait. Collective."""
        for flat in self.flats:
            flat.mul_(share)
        if self.compressed:
            return [compressed.start() for compressed in self.compressed]
        return [partial(wait_for, collectives.all_reduce_work(flat, group=self._group)) for flat in self.flats]

    def copy_local(self) -> list[Tensor]:
        """Return a copy of the local parameters, with the dtypes of the outer ones."""
        pairs = zip(self.local, self.outer, strict=True)
        return [local.detach().to(outer.dtype, copy=True) for local, outer in pairs]

    def merge(self, base: Sequence[Tensor] | None) -> None:
        """Set the model to the outer parameters, plus its updates since it held ``base``; None: without updates."""
        for number, (local, outer) in enumerate(zip(self.local, self.outer, strict=True)):
            if base is None:
                local.copy_(outer)
            else:  # updates during an exchange are not lost: they are part of the next one
                local.add_(outer - base[number])


@dataclass(frozen=True)
class Exchange:
    """An exchange that was started.

    Args:
        number: Of the fragment.
        step: The step after which it was started.
        waits: Functions that block until its sums have arrived; empty if they have.
        base: The local parameters at its start, if training goes on during the exchange.
    """

    number: int
    step: int
    waits: list[Callable[[str], object]]
    base: Sequence[Tensor] | None


# --- the exchanges of a model -----------------------------------------------------------------------------------------


class LocalSGD:
    """Train on every rank independently, and average the parameters over the ranks every ``sync_every`` steps.

    [Note: one exchange] says how; the outer parameters then become the mean of the local ones. At the start, all ranks
    copy parameters and buffers from rank 0. Parameters that require no gradient are not exchanged later.

    Wrap neither model nor optimizer. Each step of the optimizer is counted, and the exchange is a part of it::

        with lockstep.LocalSGD(model, optimizer, sync_every=8):
            for batch in loader:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()

    The training run differs from that on one device. With ``sync_every=1`` and plain SGD it is that of
    `lockstep.DistributedDataParallel`. At the end of the block, or with `close`, the remaining updates are exchanged.
    Buffers such as running statistics are averaged, too. To average gradients inside a machine in every step, pass a
    `lockstep.DistributedDataParallel` whose ``process_group`` has the ranks of the machine.

    A link that is down between exchanges costs nothing, if it is up again before the kernel closes the connection
    (``LOCKSTEP_LINK_TIMEOUT_S``). If it is down during an exchange, `CollectiveError` is raised after the group's
    timeout. torch's ``GradScaler`` skips steps on single ranks: pass None as the optimizer, and call this object's
    `step` after each ``scaler.step(optimizer)``.

    Ranks may be lost, and come, between two exchanges: give model, optimizer and this object, in this order, to
    `lockstep.Recovery`, without its blocks, and let the loop run until `num_steps` has reached a number. The others go
    on, exchange without the lost rank, and do not wait for the one that takes its place, which begins at an exchange
    with the outer parameters, the optimizer and `num_steps` of another. What the lost rank has trained on since the
    last exchange is lost. Without `sync_delay`, `compression` and a group of one's own only.

    Collective: every rank creates it, and makes the same number of steps.

    Source: Stich 2019 (arXiv:1805.09767).

    Args:
        model: Not sharded. All ranks get the parameters and buffers of rank 0.
        optimizer: Of its parameters. If there are several, the one that steps last; None: call `step`.
        sync_every: Steps between two exchanges.
        fragments: Parts of the model, in the order of its parameters and of about the same size, that are exchanged
            after different steps.
        sync_delay: Steps from the start of an exchange until it is applied, during which training goes on. A rank's
            updates in this time are kept, so models hold the same bits again only after `sync`; 0: it blocks.
        compression: How the differences are sent between machines, as for `lockstep.DistributedDataParallel`.
        process_group: The ranks that take part. Default: all.
        sync_patience: With `lockstep.Recovery`, seconds that ranks wait in an exchange for a slower one; then they go
            on without it, and it begins anew at a later exchange. None: as long as it lives.

    Attributes:
        schedule: Which fragments are exchanged after which steps.
        num_steps: Steps so far.
        outer_optimizer: It may get another learning rate at any time, the same on all ranks.

    Raises:
        ConfigurationError: On every rank: an argument cannot work, or differs between ranks.
        ModelMismatch: On every rank: the models differ.
    """

    _create_outer: OptimizerFactory = OuterSGD(1.0, 0.0)

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        sync_every: int = 8,
        *,
        fragments: int = 1,
        sync_delay: int = 0,
        compression: str | None = None,
        process_group: Group | None = None,
        sync_patience: float | None = None,
    ) -> None:
        self._model, self.schedule = model, ExchangeSchedule(sync_every, fragments, sync_delay)
        self._group = group_or_default(process_group)
        self._device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        check_float64(self._device, type(self).__name__)
        self._compression, self.sync_patience = compression, sync_patience
        problem = _find_problem(model, optimizer, self.schedule, compression, self._group)
        if sync_patience is not None and not sync_patience > 0:
            problem = problem or f"sync_patience={sync_patience!r} is not allowed.\nGive a number of seconds above 0."
        arguments = f"{self.schedule}, compression={compression}"
        if isinstance(outer := self._create_outer, OuterSGD):
            problem, arguments = problem or outer.problem, f"{arguments}, {outer}"
        check_arguments_agree(arguments, problem, group=self._group, device=self._device)
        parameters = model.named_parameters(remove_duplicate=False)
        check_models_agree(parameters, model.named_buffers(), group=self._group, device=self._device)
        tensors = [tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if tensor.numel()]
        collectives.broadcast_coalesced(tensors, group=self._group, src=0)

        self._trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._names = [name for name, _ in self._trained]
        self._outer = [nn.Parameter(_outer_copy(parameter.detach())) for _, parameter in self._trained]
        self._connect()
        self.outer_optimizer = self._create_outer(self._outer)
        buffers = model.named_buffers()
        self._buffers = {name: buffer.clone() for name, buffer in buffers if buffer.numel() and not buffer.is_complex()}
        self.num_steps = 0
        # By fragment: the weight that this rank has trained on since its last exchange, and the step of that exchange.
        self._weights: list[float | Tensor] = [0.0] * fragments
        self._exchanged_at = [0] * fragments
        self._under_way: list[Exchange] = []
        # The fragments whose exchange is due, and not complete.
        self._pending: list[int] = []
        # Returns a context for an exchange, which ends without an error if the exchange is to be begun again. And what
        # raises an error in it, before the first message and after the last one, if that is so.
        self.attempt: Callable[[], AbstractContextManager[None]] = nullcontext
        self.before_update: Callable[[], object] = bool
        # Numbers of this rank that the next exchange sums as well, as many on each rank; and what gets the sums.
        self.flags: list[float] = []
        self.on_flags: Callable[[list[float]], object] = len
        self._hook = None if optimizer is None else optimizer.register_step_post_hook(self._count_step)
        self._is_open = True

    def _connect(self) -> None:
        """Create everything that belongs to the group. Collective: every rank."""
        numels = [parameter.numel() for _, parameter in self._trained]
        parts = [slice(part.start, part.stop) for part in cut_fragments(numels, self.schedule.fragments)]
        members = [(dict(self._trained[part]), self._outer[part]) for part in parts]
        self._fragments = [Fragment(*pair, self._group, self._compression) for pair in members]
        self._sums = [compressed for fragment in self._fragments for compressed in fragment.compressed]

    # --- steps ---

    def _count_step(self, *_: Any) -> None:
        self.step()

    @torch.no_grad()
    def step(self, weight: float | Tensor = 1.0) -> bool:
        """Count a step of this rank, and start the exchanges due after it; return whether an exchange was started.

        Collective after the steps with an exchange: every rank. It then blocks until the results to apply have arrived,
        and for a small all-reduce.

        Args:
            weight: The weight of the step in the mean over the ranks, such as its number of samples.

        Raises:
            CollectiveError: A rank ended, or did not take part in time.
            ConfigurationError: On every rank: the ranks have made different numbers of steps.
            NonFiniteGradient: On every rank: parameters are NaN or infinite.
        """
        self.count(weight)
        self._apply_due(self.schedule.sync_delay)
        self._pending = self.schedule.due(self.num_steps)
        return self.exchange()

    def count(self, weight: float | Tensor) -> None:
        """Count a step without an exchange."""
        self.num_steps += 1
        self._weights = [total + weight for total in self._weights]

    @torch.no_grad()
    def exchange(self) -> bool:
        """Start the exchanges that are due, and apply the ones that have arrived; return whether there were any.

        Collective if there are: every rank. Blocks as `step`.
        """
        is_due = bool(self._pending)
        while self._pending:
            with self.attempt():
                self.before_update()  # not even begun if the ranks have changed since the last one
                self._start(self._pending)
                self._apply_due(self.schedule.sync_delay)
                self._pending = []
        return is_due

    @torch.no_grad()
    def sync(self) -> None:
        """Exchange all updates since the last exchange: afterwards all models hold the same bits.

        Collective: every rank. Blocks until it is done.

        Raises:
            LockstepError: As `step`.
        """
        self._apply_due(0)
        # Without new steps there is nothing to exchange, and outer momentum must not move the parameters.
        self._pending = [number for number, step in enumerate(self._exchanged_at) if step < self.num_steps]
        if not self.exchange() and self.attempt is nullcontext:
            self._start([])  # compares the numbers of steps; a rank that has come late would not take part
        self._apply_due(0)

    def _start(self, numbers: Sequence[int]) -> None:
        """Start to exchange fragments. Collective: every rank. Blocks for the small all-reduce before."""
        chosen = {number: self._fragments[number] for number in numbers}
        for fragment in chosen.values():
            fragment.gather()
        # The sum is NaN or infinite if an element is. It takes one pass at memory speed.
        is_finite = all(bool(total(flat).isfinite()) for fragment in chosen.values() for flat in fragment.flats)
        shares, changed = self._agree(is_finite)
        begun = []
        for number, fragment in chosen.items():
            base = fragment.copy_local() if self.schedule.sync_delay else None
            begun.append(Exchange(number, self.num_steps, fragment.start_sum(shares[number]), base))
        means = self._mean_buffers(changed) if self.schedule.fragments - 1 in chosen and changed else None
        if not self.schedule.sync_delay:
            for exchange in begun:
                self._wait(exchange)
            self.before_update()
        # From here on nothing is sent, and no rank that is lost can interrupt: see [Note: lost ranks].
        self._under_way += begun
        for number in numbers:
            self._weights[number], self._exchanged_at[number] = 0.0, self.num_steps
        if means is not None:
            self._set_buffers(changed, means)

    def _agree(self, is_finite: bool) -> tuple[list[float], list[str]]:
        """Return this rank's share of the mean, by fragment, and the buffers that any rank has changed.

        Collective: every rank. Blocks.
        """
        size, steps = self._group.size(), float(self.num_steps)
        now = {name: self._model.get_buffer(name) for name in self._buffers}
        changed = [float(not torch.equal(now[name], previous)) for name, previous in self._buffers.items()]
        weights = [float(weight) for weight in self._weights]
        # Always of the same size: ranks that arrive after different steps must detect that instead of hanging.
        message = [float(not is_finite), steps, steps**2, *weights, *changed, *self.flags]
        sums = torch.tensor(message, dtype=torch.float64, device=self._device)
        wait_for(collectives.all_reduce_work(sums, group=self._group), f"exchange after step {self.num_steps}")
        num_not_finite, sum_steps, sum_squares, *sums_of = sums.tolist()
        # Equal only if all counts are equal: so all ranks detect a difference on any rank.
        if sum_steps**2 != size * sum_squares:
            raise ConfigurationError(
                f"The ranks have made different numbers of steps: this one {self.num_steps}, the mean is "
                f"{sum_steps / size:g}.\nStep the optimizer equally often on every rank. torch's GradScaler leaves out "
                "steps on single ranks: pass no optimizer, and call step() of this after scaler.step()."
            )
        if num_not_finite:
            raise NonFiniteGradient(
                f"After step {self.num_steps} parameters of {num_not_finite:g} of {size} ranks are NaN or infinite.\n"
                "Lower the learning rate, or clip the gradient; resume from an earlier checkpoint."
            )
        count, end = len(weights), len(weights) + len(changed)
        self.on_flags(sums_of[end:])
        shares = [weight / total if total else 1 / size for weight, total in zip(weights, sums_of[:count], strict=True)]
        return shares, [name for name, number in zip(self._buffers, sums_of[count:end], strict=True) if number]

    def _mean_buffers(self, names: Sequence[str]) -> Tensor:
        """Return the mean of buffers over the ranks, in one tensor. Collective: every rank. Blocks."""
        flat = torch.cat([self._model.get_buffer(name).double().flatten() for name in names])
        collectives.all_reduce(flat, group=self._group)
        return flat / self._group.size()

    def _set_buffers(self, names: Sequence[str], flat: Tensor) -> None:
        """Set buffers to values in one tensor; integers are rounded."""
        buffers = [self._model.get_buffer(name) for name in names]
        for name, buffer, piece in zip(names, buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
            mean = piece.view(buffer.shape)
            buffer.copy_(mean if buffer.is_floating_point() else mean.round())
            self._buffers[name] = buffer.clone()

    def _apply_due(self, delay: int) -> None:
        """Apply the exchanges that were started at least ``delay`` steps ago. Blocks until they have arrived."""
        due = [exchange for exchange in self._under_way if self.num_steps - exchange.step >= delay]
        self._under_way = [exchange for exchange in self._under_way if self.num_steps - exchange.step < delay]
        for exchange in due:
            self._wait(exchange)
            fragment = self._fragments[exchange.number]
            self._step_outer(zip(fragment.outer, fragment.gradients, strict=True))
            fragment.merge(exchange.base if self.num_steps > exchange.step else None)

    def _wait(self, exchange: Exchange) -> None:
        of = f"fragment {exchange.number + 1} of {self.schedule.fragments}"
        for wait in exchange.waits:
            wait(f"exchange of {of}, begun after step {exchange.step},")
        exchange.waits.clear()

    def _step_outer(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
        for outer, gradient in gradients:
            outer.grad = gradient
        self.outer_optimizer.step()  # does not change parameters without a gradient
        self.outer_optimizer.zero_grad(set_to_none=True)

    # --- recovery in place: `lockstep.loop.recovery` ---

    @property
    def can_reconnect(self) -> bool:
        """Whether an exchange can be begun again in another group: nothing of it is kept apart from this."""
        is_bare = not isinstance(self._model, DistributedDataParallel | nn.parallel.DistributedDataParallel)
        is_whole = is_bare and self._group == default_group()
        return is_whole and not self.schedule.sync_delay and self._compression is None

    def reconnect(self, world: World) -> None:
        """Use the default group of ``world`` from now on. Collective: every rank. Blocks until all have called it."""
        self._group = world.group
        self._connect()

    # --- the state ---

    def outer_state(self) -> dict[str, Tensor]:
        """Return the outer parameters, and the buffers of the last exchange, by name: the same bits on all ranks."""
        return {**{name: outer.detach() for name, outer in zip(self._names, self._outer, strict=True)}, **self._buffers}

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a run needs to resume, besides this rank's model and optimizer.

        Everything except ``own`` is the same on all ranks. Exchanges under way are applied when they are due.

        Collective: every rank. Blocks until exchanges under way have arrived.
        """
        own_state: dict[str, Any] = {"rank": self._group.rank(), "world_size": self._group.size()}
        own_state["weights"] = [float(weight) for weight in self._weights]
        own_state["residuals"] = [compressed.residual for compressed in self._sums if compressed.residual is not None]
        under_way: list[dict[str, Any]] = []
        base: dict[str, Tensor] = {}
        for exchange in self._under_way:
            self._wait(exchange)
            fragment = self._fragments[exchange.number]
            gradients = dict(zip(fragment.names, fragment.gradients, strict=True))
            under_way.append({"number": exchange.number, "step": exchange.step, "gradients": gradients})
            base |= dict(zip(fragment.names, exchange.base or (), strict=True))
        return {
            "num_steps": self.num_steps,
            "exchanged_at": self._exchanged_at[:],
            "pending": self._pending,  # of a rank that is in an exchange, for one that joins it
            "outer": self.outer_state(),
            "outer_optimizer": self.outer_optimizer.state_dict(),
            "under_way": under_way,
            "bases": [dict(entry.codec.bases) for entry in self._sums if isinstance(entry.codec, PowerSGD)],
            "own": {**own_state, "base": base},
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state``, after model and optimizer were loaded. Communicates nothing.

        If ``own`` belongs to this rank, and the number of ranks is the same, the run resumes with the same bits.
        Otherwise this rank is new: its model gets the outer parameters, with exchanges under way applied, and its
        optimizer is not changed. Residuals of compression are then lost.

        Raises:
            ValueError: It belongs to another model.
        """
        exchanged = state["outer"]
        if missing := [name for name in (*self._names, *self._buffers) if name not in exchanged]:
            raise ValueError(f"the exchanged parameters lack {missing[0]}")
        for name, outer in zip(self._names, self._outer, strict=True):
            outer.copy_(exchanged[name])
        self._buffers = {name: buffer.copy_(exchanged[name]) for name, buffer in self._buffers.items()}
        self.outer_optimizer.load_state_dict(state["outer_optimizer"])
        self.num_steps, own_state = state["num_steps"], state["own"]
        is_own = (own_state["rank"], own_state["world_size"]) == (self._group.rank(), self._group.size())
        count, since = self.schedule.fragments, state["exchanged_at"]
        is_own = is_own and len(since) == count
        self._exchanged_at = list(since) if len(since) == count else [min(since)] * count
        self._weights = list(own_state["weights"]) if is_own else [0.0] * count
        residuals, bases = own_state["residuals"] if is_own else [], state["bases"]
        for place, compressed in enumerate(self._sums):
            if compressed.residual is not None:
                fits = place < len(residuals) and residuals[place].shape == compressed.residual.shape
                compressed.residual.copy_(residuals[place] if fits else torch.zeros(()))
            if isinstance(compressed.codec, PowerSGD) and place < len(bases):
                compressed.codec.bases = {key: basis.clone() for key, basis in bases[place].items()}
        self._under_way, self._pending = [], state.get("pending", [])
        for entry in state["under_way"]:
            self._load_exchange(entry, own_state["base"] if is_own else None)
        if not is_own:
            self.flags = [0.0] * len(self.flags)  # of an exchange that is complete
            self.restore()

    def _load_exchange(self, entry: Mapping[str, Any], base: Mapping[str, Tensor] | None) -> None:
        """Load an exchange whose outer gradients have arrived; without ``base``, apply it at once."""
        gradients = entry["gradients"]
        if base is None:
            outer = dict(zip(self._names, self._outer, strict=True))
            self._step_outer((outer[name], gradient.to(outer[name])) for name, gradient in gradients.items())
            return
        fragment = self._fragments[entry["number"]]
        for name, gradient in zip(fragment.names, fragment.gradients, strict=True):
            gradient.copy_(gradients[name])
        base_values = [base[name].to(outer) for name, outer in zip(fragment.names, fragment.outer, strict=True)]
        self._under_way.append(Exchange(entry["number"], entry["step"], [], base_values))

    @torch.no_grad()
    def restore(self) -> None:
        """Set the model to the outer parameters, and the buffers of the last exchange."""
        for fragment in self._fragments:
            fragment.merge(None)
        for name, buffer in self._buffers.items():
            self._model.get_buffer(name).copy_(buffer)

    @torch.no_grad()
    def restart(self, num_steps: int) -> None:
        """Set the outer parameters to the model's, which are equal on all ranks, after ``num_steps`` steps."""
        self.num_steps, self._under_way, self._weights = num_steps, [], [0.0] * self.schedule.fragments
        self._exchanged_at = [num_steps] * self.schedule.fragments
        for fragment in self._fragments:
            for outer, local in zip(fragment.outer, fragment.local, strict=True):
                outer.copy_(local)
        self._buffers = {name: self._model.get_buffer(name).clone() for name in self._buffers}

    # --- the end ---

    def close(self) -> None:
        """Exchange the remaining updates, like `sync`, and stop counting steps of the optimizer.

        Collective: every rank. Blocks until it is done.
        """
        self.__exit__(None, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Close; after an error, exchange nothing, since other ranks may not have the error."""
        was_open, self._is_open = self._is_open, False
        if self._hook is not None:
            self._hook.remove()
        if was_open and error is None:
            self.sync()


def _outer_copy(tensor: Tensor) -> Tensor:
    """Return a copy in a wide dtype: sums of small differences would be lost in half precision."""
    dtype = torch.float32 if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.dtype
    return tensor.to(dtype, copy=True)


def _find_problem(
    model: nn.Module, optimizer: Optimizer | None, schedule: ExchangeSchedule, compression: str | None, group: Group
) -> str | None:
    """Return an error in the arguments on this rank: the cause, and how to fix it."""
    for name, least in (("sync_every", 1), ("fragments", 1), ("sync_delay", 0)):
        value = getattr(schedule, name)
        if type(value) is not int or value < least:
            return f"{name}={value!r} is not allowed.\nGive a whole number of at least {least}."
    if schedule.sync_delay >= schedule.sync_every:
        return (
            f"sync_delay={schedule.sync_delay} is not below sync_every={schedule.sync_every}: a fragment would be "
            "exchanged again before it has arrived.\nGive a smaller sync_delay, or a larger sync_every."
        )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        return "The model has no parameter that requires a gradient.\nUnfreeze what is to be trained first."
    if schedule.fragments > len(trained):
        return f"fragments={schedule.fragments} is more than the model's {len(trained)} parameters.\nGive fewer."
    if any(is_sharded(parameter) for parameter in trained):
        return "The model's parameters are sharded, but ranks exchange whole ones.\nUse fully_shard alone."
    wrappers = DistributedDataParallel, nn.parallel.DistributedDataParallel
    if isinstance(model, wrappers) and model.process_group.size() == group.size() > 1:
        return (
            "The model's gradients are averaged over all ranks in every step, so there is nothing to exchange.\n"
            "Pass the bare model, or wrap it over the ranks of a machine only (process_group=...)."
        )
    try:
        if compression is not None:
            make(compression)
    except ConfigurationError as error:
        return str(error)
    if compression is not None and any(parameter.is_complex() for parameter in trained):
        return "Complex parameters cannot be compressed.\nLeave compression out."
    return None if optimizer is None else _find_optimizer_problem(model, optimizer)


def _find_optimizer_problem(model: nn.Module, optimizer: Optimizer) -> str | None:
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):
        return (
            "ZeroRedundancyOptimizer updates each parameter on one rank, but here each rank trains by itself.\n"
            "Pass the inner optimizer, such as torch.optim.AdamW(model.parameters())."
        )
    own_ids = {id(parameter) for parameter in model.parameters()}
    for number, parameter in enumerate(param for group in optimizer.param_groups for param in group["params"]):
        if id(parameter) not in own_ids:
            return (
                f"Parameter {number} of the optimizer, of shape {list(parameter.shape)}, is not in the model: the "
                "optimizer was made for another one.\nCreate it with the parameters of the model that you pass."
            )
    return None


@final
class DiLoCo(LocalSGD):
    """Train on every rank independently; every ``sync_every`` steps an outer optimizer steps with the ranks' mean.

    Used like `LocalSGD`. The gradient of the outer optimizer, SGD with Nesterov momentum, is the mean difference
    between the outer parameters and the ranks' parameters. So it needs fewer exchanges than averaging.

    Collective: every rank creates it, and makes the same number of steps.

    Source: Douillard et al. 2023 (arXiv:2311.08105); fragments and delay from Streaming DiLoCo (arXiv:2501.18512),
    which mixes a rank's updates during the delay with the outer parameters. Here they are kept whole, as in Delayed
    Gradient Averaging (Zhu et al. 2021).

    Args:
        model, optimizer, sync_every: As for `LocalSGD`.
        fragments, sync_delay, compression, process_group, sync_patience: As for `LocalSGD`.
        outer_lr: Learning rate of the outer optimizer.
        outer_momentum: Its Nesterov momentum.
        outer_optimizer: Creates another optimizer of the outer parameters; both arguments above are then ignored.

    Raises:
        ConfigurationError: On every rank: an argument cannot work, or differs between ranks.
        ModelMismatch: On every rank: the models differ.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        sync_every: int = 50,
        *,
        outer_lr: float = OuterSGD.lr,
        outer_momentum: float = OuterSGD.momentum,
        outer_optimizer: OptimizerFactory | None = None,
        fragments: int = 1,
        sync_delay: int = 0,
        compression: str | None = None,
        process_group: Group | None = None,
        sync_patience: float | None = None,
    ) -> None:
        self._create_outer = outer_optimizer or OuterSGD(outer_lr, outer_momentum)
        extra: dict[str, Any] = {"compression": compression, "process_group": process_group}
        extra["sync_patience"] = sync_patience
        super().__init__(model, optimizer, sync_every, fragments=fragments, sync_delay=sync_delay, **extra)
