"""``SyncBatchNorm``: batch normalisation over the samples of all ranks, including ranks with fewer samples or none."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lockstep.base.accelerator import widest_dtype
from lockstep.base.activity import plural
from lockstep.base.torch_internals import BatchNorm, LazyNorm, check_batch_norm_input, has_kernel, submodules
from lockstep.comm.collectives import Group, all_gather, all_reduce, group_or_default, is_initialized
from lockstep.comm.world import World
from lockstep.errors import CollectiveError, ConfigurationError, LockstepError
from lockstep.parallel.compile import keep_out_of_graphs

# torch's own class, even after ``adopt()`` has replaced it by ours.
TorchSyncBatchNorm = nn.SyncBatchNorm


# --- The engine that trains the layer


class Event(IntEnum):
    """The next action of a rank; its number is sent."""

    NOTHING = 0  # this rank has no batch
    FORWARD = 1
    TRACKED_FORWARD = 2  # a forward that updates the running statistics
    BACKWARD = 3
    END_OF_FORWARD = 4  # a backward follows
    END = 5


# By layer, its `SyncLayerShadow` of ddp/uneven_inputs.py.
_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def register_engine(engine: Any, layers: Sequence[nn.Module]) -> None:
    """Set ``engine`` as the engine that trains ``layers`` from now on."""
    _engines.update(dict.fromkeys(layers, weakref.ref(engine)))


# --- Statistics, and their exchange between ranks


class Statistics(NamedTuple):
    """Statistics of the values of all ranks, by channel: mean, biased variance, and the number of values in float64.

    [Note: what travels]
    A rank sends its statistics as one float64 vector, whatever the dtype of its input: the number of values in a
    channel, then the means of the C channels, then their M2, the sums of squared distances from the mean. So ranks can
    exchange them without knowing each other's dtypes, a count beyond 2**24 stays exact, and a rank without any input
    sends zeros.
    """

    mean: Tensor
    var: Tensor
    total: Tensor


def measure(input: Tensor) -> Tensor:
    """Return count, means and M2 of ``input``, whose second dimension is the channels; see [Note: what travels]."""
    num_channels = input.size(1)
    if input.numel() == 0:
        return empty_statistics(num_channels, input.device)
    like: tuple[Tensor | None, Tensor | None] = (None, None)
    if input.device.type == "cpu" and input.dtype in (torch.bfloat16, torch.float16):
        # The kernel rounds its results to half precision unless running statistics have another dtype.
        like = torch.zeros(num_channels), torch.ones(num_channels)
    mean, var = torch.batch_norm_update_stats(input, *like, 1.0)
    count = input.numel() // num_channels
    vector = torch.cat([mean.new_full((1,), count, dtype=widest_dtype(input.device)), mean, var])
    # From the biased variance back to a sum, in float64.
    vector[1 + num_channels :] *= count
    return vector


def empty_statistics(num_channels: int, device: torch.device) -> Tensor:
    """Return the statistics of no values."""
    return torch.zeros(1 + 2 * num_channels, dtype=widest_dtype(device), device=device)


def merge(vectors: Tensor) -> Statistics:
    """Return the statistics of the values of all ranks, in float64; zeros if there are no values.

    The squared distances between the ranks' means are added to the squared distances within ranks, so there is no
    cancellation if the mean is large. Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances", 1979.

    Args:
        vectors: What `measure` returned on each rank, of shape (ranks, 1 + 2 C).
    """
    num_channels = vectors.size(1) // 2
    counts, means, within = vectors[:, :1], vectors[:, 1 : 1 + num_channels], vectors[:, 1 + num_channels :]
    total = counts.sum()
    # If no rank has a value, mean and variance are zero, and there is no division by zero.
    divisor = total.clamp(min=1)
    mean = (counts * means).sum(0) / divisor
    between = (counts * (means - mean).square()).sum(0)
    return Statistics(mean, (within.sum(0) + between) / divisor, total)


_ANOTHER_LAYER = "other ranks run another layer."


class LayerPlace(NamedTuple):
    """The place of a layer in its model; not assigned if the model is not wrapped."""

    number: int = -1
    name: str = "a SyncBatchNorm layer"


# The layers that are known to have the same number of channels on every rank of a group, which is another one after a
# recovery.
_compared: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Group]] = weakref.WeakKeyDictionary()


class StatisticsExchange:
    """The collectives of one forward of ``layer`` and its backward over the ranks of ``group``.

    [Note: the same layer everywhere]
    Collectives are matched by their order alone. If a layer runs on some ranks only, or ranks use layers in different
    orders, the statistics of two layers with equally many channels would be merged without an error. So each vector
    contains the layer's place in the model, which `DistributedDataParallel` assigns. On the CPU it is compared; on
    other devices reading it would make the host wait for the device in every layer.

    Backends do not handle tensors of different sizes well: Gloo ends the process. So the first use of a layer compares
    the number of channels.

    Args:
        layer: The layer.
        group: The ranks that take part.

    Attributes:
        counts: Whether the samples of this rank count.
    """

    def __init__(self, layer: SyncBatchNorm, group: Group) -> None:
        self._layer, self._place, self._group = layer, layer.place, group
        reference = _engines.get(layer)
        self._engine: Any = None if reference is None else reference()
        # Read now: at its backward, the engine may be in another step.
        self._announces = self._engine is not None and self._engine.is_open
        self._step = 0 if self._engine is None else self._engine.step
        self.counts = self._engine is None or self._engine.counts

    def refuse_second_backward(self) -> None:
        """Raise LockstepError if some rank may be without a batch: it can only take part in one backward."""
        if self._announces:
            raise LockstepError(
                f"{self._place.name}: a gradient with create_graph=True, while other ranks may have no batch.\nThey "
                "can follow the SyncBatchNorm layers of one forward and one backward only."
            )

    def announce(self, event: Event) -> None:
        """Announce ``event`` to ranks without a batch, if there may be any. Collective then: every rank. Blocks."""
        if self._announces:
            self._engine.announce(event, self._layer, self._step)

    def compare_channels(self, num_channels: int, device: torch.device) -> None:
        """Make sure, once for each layer and group, that it has the same number of channels on every rank.

        Collective the first time: every rank. Blocks until complete.

        Raises:
            CollectiveError: On every rank: the numbers differ, or other ranks do something else.
        """
        compared = _compared.get(self._layer)
        if compared is not None and compared() is self._group:
            return
        rows = self.gather(torch.tensor([num_channels], device=device), check=True)
        on_rank = [int(count) for count in rows.flatten().tolist()]
        if any(count != num_channels for count in on_rank):
            channels = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(on_rank))
            raise self._error("forward", f"it has different numbers of channels: {channels}.")
        _compared[self._layer] = weakref.ref(self._group)

    def gather(self, vector: Tensor, *, check: bool = False) -> Tensor:
        """Return every rank's ``vector`` as the rows of a matrix.

        Collective: every rank. Blocks until complete (on CUDA: the current stream waits, or the host with ``check``).

        Args:
            vector: Of the same size on every rank.
            check: Whether to check on devices, too, that all ranks run this layer.

        Raises:
            CollectiveError: Other ranks run another layer, or ended, or did not take part in time.
        """
        try:
            rows = all_gather(self._marked(vector), group=self._group)
        except CollectiveError as error:
            raise self._error("forward", error) from error
        if (check or vector.is_cpu) and any(number != self._place.number for number in rows[:, -1].tolist()):
            raise self._error("forward", _ANOTHER_LAYER)
        return rows[:, :-1]

    @property
    def unit(self) -> float:
        """The unit of this rank's gradients in the current backward."""
        return 1.0 if self._engine is None else self._engine.unit

    def sum(self, vector: Tensor, unit: float) -> Tensor:
        """Return the sum of every rank's ``vector``, in this rank's ``unit``. Collective: as `gather`."""
        # Multiplied and divided in float64, so that a weight costs no digits.
        marked = self._marked(vector if unit == 1 else vector * unit)
        try:
            all_reduce(marked, group=self._group)
        except CollectiveError as error:
            raise self._error("backward", error) from error
        if vector.is_cpu and float(marked[-1]) / self._group.size() != self._place.number:
            raise self._error("backward", _ANOTHER_LAYER)
        return marked[:-1] if unit == 1 else marked[:-1] / unit

    def _marked(self, vector: Tensor) -> Tensor:
        return torch.cat([vector, vector.new_full((1,), self._place.number)])

    def _error(self, phase: str, cause: object) -> CollectiveError:
        return CollectiveError(
            f"Rank {self._group.rank()}: the {phase} of {self._place.name} could not be done together with the other "
            f"ranks: {cause}\n"
            "Every rank must run the same SyncBatchNorm layers in the same order, on as many channels, forward and "
            "backward; if another rank ended or failed, look at the first error of the job."
        )


# --- Kernels: torch's own, given the statistics of all ranks


def contiguous_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` in a memory format for which kernels are fast: that of ``like``, if it is such a format."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(like.dim(), torch.contiguous_format)
    is_last = not like.is_contiguous() and like.is_contiguous(memory_format=last)
    return tensor.contiguous(memory_format=last if is_last else torch.contiguous_format)


# On the CPU these use the kernels of ``batch_norm`` in evaluation mode, which normalise with given statistics and whose
# backward gives the two sums that all ranks need. On devices that have them, such as CUDA, these use the kernels of
# torch's ``SyncBatchNorm``. ``batch`` is in float64 for an input in float64, else in float32.
_KERNEL = "aten::batch_norm_elemt"


def sums_of_gradient(gradient: Tensor, input: Tensor, batch: Statistics, eps: float) -> Tensor:
    """Return this rank's sums by channel of ``gradient``, then of ``gradient`` times the normalised input: float64."""
    if input.numel() == 0:
        return torch.zeros(2 * input.size(1), dtype=widest_dtype(input.device), device=input.device)
    if not has_kernel(_KERNEL, input.device.type):
        ones = torch.ones_like(batch.mean)
        _, of_product, of_gradient = torch.ops.aten.native_batch_norm_backward(
            gradient, input, ones, batch.mean, batch.var, None, None, False, eps, [False, True, True]
        )
        return torch.cat([of_gradient, of_product]).to(widest_dtype(input.device))
    inverse = torch.rsqrt(batch.var + eps)
    of_gradient, of_distances, _, _ = torch.batch_norm_backward_reduce(
        gradient, input, batch.mean, inverse, None, True, False, False
    )
    return torch.cat([of_gradient, of_distances * inverse]).to(widest_dtype(input.device))


def gradient_of_input(
    gradient: Tensor, input: Tensor, weight: Tensor | None, batch: Statistics, sums: Tensor, eps: float
) -> Tensor:
    """Return the gradient with respect to ``input``, given the sums over all ranks of `sums_of_gradient`."""
    if input.numel() == 0:
        return torch.zeros_like(input)
    weight = None if weight is None else weight.to(batch.mean.dtype)
    inverse = torch.rsqrt(batch.var + eps)
    if not has_kernel(_KERNEL, input.device.type):
        # scale * (gradient - mean gradient - normalised input * mean product), in two passes
        scale = inverse if weight is None else inverse * weight
        mean_gradient, mean_product = ((sums / batch.total).to(scale.dtype).view(2, -1) * -scale).unbind()
        # The second and third term are the input normalised again, with another weight and bias.
        result = _affine(input.to(scale.dtype), mean_product, mean_gradient, batch, eps)
        by_channel = scale.view(1, -1, *[1] * (input.dim() - 2))
        return result.addcmul_(gradient.to(scale.dtype), by_channel).to(input.dtype)
    of_gradient, of_product = sums.to(inverse.dtype).chunk(2)
    count = batch.total.to(torch.int32).view(1)
    return torch.batch_norm_backward_elemt(
        gradient, input, batch.mean, inverse, weight, of_gradient, of_product / inverse, count
    )


def _affine(input: Tensor, weight: Tensor | None, bias: Tensor | None, batch: Statistics, eps: float) -> Tensor:
    output: Tensor = torch.native_batch_norm(input, weight, bias, batch.mean, batch.var, False, 0.0, eps)[0]
    return output


# --- The autograd functions


class _SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' vectors, each times its unit, divided by the unit: what the losses of all ranks depend on.

    A gradient has the unit that the gradients of its rank have in this backward, see `NormaliseFunction`. So what comes
    back in a later one is divided by this unit, and has the unit of that backward.
    """

    @staticmethod
    def forward(ctx: Any, vector: Tensor, exchange: StatisticsExchange, unit: float) -> Tensor:
        """Collective: every rank. Blocks."""
        ctx.exchange, ctx.unit = exchange, unit
        return exchange.sum(vector, unit)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Collective: every rank. Blocks."""
        return _SumOverRanks.apply(gradients[0], ctx.exchange, ctx.exchange.unit / ctx.unit), None, None  # type: ignore[no-untyped-call]


def gradients_with_graph(
    gradient: Tensor,
    input: Tensor,
    weight: Tensor | None,
    batch: Statistics,
    eps: float,
    exchange: StatisticsExchange,
    needs_input: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of input, weight and bias for another backward through them, as in a gradient penalty.

    Collective if ``needs_input``, and again in each backward through the result: every rank. Blocks.
    """
    exchange.refuse_second_backward()
    dims, by_channel = [0, *range(2, input.dim())], [1, -1, *[1] * (input.dim() - 2)]
    value, gradient = input.to(batch.mean.dtype), gradient.to(batch.mean.dtype)

    def mean(part: Tensor, unit: float = 1.0) -> Tensor:
        own = part.sum(dims).to(widest_dtype(input.device)) * float(exchange.counts)
        total: Tensor = _SumOverRanks.apply(own, exchange, unit)  # type: ignore[no-untyped-call]
        return (total / batch.total).to(part.dtype).view(by_channel)

    # The statistics depend on the input, too.
    centred = value - (mean(value) if needs_input else batch.mean.view(by_channel))
    variance = mean(centred.square()) if needs_input else batch.var.view(by_channel)
    inverse = (variance + eps).rsqrt()
    normalised = centred * inverse
    product = gradient * normalised
    of_input = gradient
    if needs_input:
        of_input = gradient - mean(gradient, exchange.unit) - normalised * mean(product, exchange.unit)
        of_input = of_input * inverse * (1.0 if weight is None else weight.to(value.dtype).view(by_channel))
    return of_input * float(exchange.counts), product.sum(dims), gradient.sum(dims)


class NormaliseFunction(torch.autograd.Function):
    """Normalises with the statistics of all ranks, which include the input.

    The loss depends on an input through every output of its channel, on all ranks, so the backward sums two numbers
    per channel over the ranks. The gradients of weight and bias are this rank's part only.

    An engine may multiply a rank's gradients by a weight after backward, to get the gradient of the weighted sum of the
    ranks' losses. Then the other ranks' terms must already be in that unit: `StatisticsExchange.sum`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        batch: Statistics,
        eps: float,
        exchange: StatisticsExchange,
    ) -> Tensor:
        """Return ``(input - mean) / sqrt(var + eps) * weight + bias`` by channel."""
        dtype = torch.float64 if input.dtype is torch.float64 else torch.float32  # float32 also for half precision
        batch = batch._replace(mean=batch.mean.to(dtype), var=batch.var.to(dtype))
        ctx.save_for_backward(input, weight, *batch)
        ctx.eps, ctx.exchange = eps, exchange
        ctx.dtypes = [None if tensor is None else tensor.dtype for tensor in (weight, bias)]
        if input.numel() == 0:
            return torch.empty_like(input)
        weight, bias = (None if vector is None else vector.to(dtype) for vector in (weight, bias))
        if not has_kernel(_KERNEL, input.device.type):
            return _affine(input, weight, bias, batch, eps)
        return torch.batch_norm_elemt(input, weight, bias, batch.mean, torch.rsqrt(batch.var + eps), eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients. Collective if the input requires one: every rank. Blocks."""
        input, weight, *statistics = ctx.saved_tensors
        batch = Statistics(*statistics)
        if torch.is_grad_enabled():  # create_graph=True
            found = gradients_with_graph(gradient, input, weight, batch, ctx.eps, ctx.exchange, ctx.needs_input_grad[0])
            of_parts = zip(found, (input.dtype, *ctx.dtypes), ctx.needs_input_grad, strict=False)
            return *(part.to(dtype) if needed else None for part, dtype, needed in of_parts), None, None, None
        gradient = contiguous_like(gradient, input)  # kernels need both in one memory format
        sums = sums_of_gradient(gradient, input, batch, ctx.eps)
        of_bias, of_weight = sums.chunk(2)  # this rank's part: the engine sums parameters' gradients over the ranks
        of_input = None
        if ctx.needs_input_grad[0]:
            ctx.exchange.announce(Event.BACKWARD)
            of_input = gradient_of_input(
                gradient, input, weight, batch, ctx.exchange.sum(sums, ctx.exchange.unit), ctx.eps
            )
            if not ctx.exchange.counts:  # the mean and the variance do not depend on it
                of_input = torch.zeros_like(of_input)
        needed = zip((of_weight, of_bias), ctx.dtypes, ctx.needs_input_grad[1:3], strict=True)
        of_parameters = [part.to(dtype) if is_needed else None for part, dtype, is_needed in needed]
        return of_input, *of_parameters, None, None, None


# --- The layer


class SyncBatchNorm(TorchSyncBatchNorm):
    """Batch normalisation in which all ranks normalise with the statistics of the whole global batch.

    A drop-in for ``torch.nn.SyncBatchNorm``, and a subclass of it: same arguments, attributes and ``state_dict`` keys.
    It also runs on the CPU, and is exact for ranks with different numbers of samples, or none: outputs, gradients of
    the input, and running statistics are those of one process with the whole batch. This requires that each rank's loss
    is its part of one sum over the batch, or that all losses are means, weighted by their counts.

    The gradients of weight and bias are this rank's part. `DistributedDataParallel` sums them over the ranks.

    Collective: ``forward`` in training mode, and its backward if the input requires a gradient: every rank. Both block
    until complete, at most for the group's timeout. In evaluation mode, and in a single process, it behaves like
    ``torch.nn.BatchNorm*d``.

    Args:
        num_features: C of inputs of shape (N, C, ...), which have 2 to 5 dimensions and any floating dtype.
        eps: Added to the variance.
        momentum: The share of the running statistics that a batch replaces; None: their mean over all batches.
        affine: Whether there are weight and bias.
        track_running_stats: Whether there are running statistics; without them evaluation mode uses the batch, too.
        process_group: The ranks that take part. Default: all.
        device, dtype: Of parameters and buffers.
        bias: Whether there is a bias, if there is a weight; in torch versions whose layer has this argument.

    Raises:
        ValueError: The input's shape is wrong, or all ranks together have only one value per channel.
        CollectiveError: Another rank ended, did not take part in time, or runs another layer.
    """

    # The place of this layer in its model, the same on every rank; see `StatisticsExchange`.
    place = LayerPlace()

    # Whether this process normalises alone although it is in a process group: other ranks do not train its model.
    alone = False

    @override
    @keep_out_of_graphs
    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``input``, of shape (N, C, ...). Collective in training mode: every rank."""
        group = self.group_in_use()
        if group is None or not self.training:
            return BatchNorm.forward(self, input)  # type: ignore[no-any-return]
        check_batch_norm_input(self, input)
        if input.size(1) != self.num_features:
            raise ValueError(f"expected input with {self.num_features} channels (got {tuple(input.shape)})")
        # The kernels of forward and backward must see one format.
        input = contiguous_like(input, input)
        # It outlives the forward: autograd keeps it for the backward.
        exchange = StatisticsExchange(self, group)
        tracked = self.track_running_stats and self.running_mean is not None
        exchange.announce(Event.TRACKED_FORWARD if tracked else Event.FORWARD)
        num_here = input.numel() // input.size(1) if exchange.counts else 0
        with torch.no_grad():
            own = measure(input) if exchange.counts else empty_statistics(input.size(1), input.device)
            batch = self._take_part(exchange, own, num_here, tracked=tracked)
        output: Tensor = NormaliseFunction.apply(input, self.weight, self.bias, batch, self.eps, exchange)  # type: ignore[no-untyped-call]
        return output

    def group_in_use(self) -> Group | None:
        """Return the ranks that take part, or None if there are no others."""
        if self.alone or not is_initialized():
            return None
        group = group_or_default(self.process_group)
        return group if group.size() > 1 else None

    @torch.no_grad()
    def forward_without_input(self, group: Group, device: torch.device, *, tracked: bool) -> None:
        """Take part in the other ranks' forward without a batch. Collective: every rank.

        Args:
            group: The ranks that take part.
            device: A device whose tensors can be exchanged.
            tracked: Whether the others update their running statistics.
        """
        nothing = empty_statistics(self.num_features, device)
        self._take_part(StatisticsExchange(self, group), nothing, 0, tracked=tracked)

    @torch.no_grad()
    def backward_without_input(self, group: Group, device: torch.device) -> None:
        """Take part in the other ranks' backward. Collective: every rank."""
        zeros = torch.zeros(2 * self.num_features, dtype=widest_dtype(device), device=device)
        StatisticsExchange(self, group).sum(zeros, 1.0)

    def _take_part(self, exchange: StatisticsExchange, sums: Tensor, num_here: int, *, tracked: bool) -> Statistics:
        """Update the running statistics; return those of the whole batch. Collective: every rank."""
        exchange.compare_channels(self.num_features, sums.device)
        batch = merge(exchange.gather(sums))
        if num_here <= 1:  # otherwise there are enough; reading the total would make the host wait for a GPU
            num_in_all = int(batch.total)
            if num_in_all == 1:
                raise ValueError(
                    "Expected more than 1 value per channel when training, got 1 on all ranks together.\n"
                    "Leave such a batch out (drop_last), or make it larger."
                )
            tracked = tracked and num_in_all > 0
        if tracked:
            assert self.running_mean is not None and self.running_var is not None
            assert self.num_batches_tracked is not None
            self.num_batches_tracked.add_(1)
            factor = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(batch.mean.to(self.running_mean.dtype), factor)
            unbiased = batch.var * (batch.total / (batch.total - 1))
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)
        return batch

    @override
    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Group | None = None) -> nn.Module:
        """Replace every batch norm in ``module`` by a layer of this class with the same tensors.

        Replaces ``BatchNorm1d`` to ``3d``, their lazy variants once they have seen a batch, and torch's
        ``SyncBatchNorm``. Convert before creating the optimizer, and before wrapping the model.

        Args:
            module: A model, which is changed in place, or a batch norm, for which a new layer is returned.
            process_group: The ranks that take part. Default: the layer's own group if it is already synchronised, else
                all.

        Returns:
            The model, or the new layer.

        Raises:
            ConfigurationError: A lazy layer has not seen its first batch.
        """
        return _convert(module, cls, process_group, "", {})


# --- Conversion of a model

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronise(module: nn.Module, world: World) -> str | None:
    """Make the plain batch norms of ``module`` normalise over all ranks, and return a line that says so.

    A single rank needs none of this, unless it will take the place of a lost one.

    Unlike `SyncBatchNorm.convert_sync_batchnorm`, it keeps the layers themselves, with what the script has put on them.
    Classes derived from torch's stay as they are: their forward is their own.
    """
    if world.world_size == 1 and not world.is_late:
        return None
    for layer in module.modules():
        if type(layer) in _PLAIN:
            layer.__class__ = SyncBatchNorm
            vars(layer)["process_group"] = None  # the default group, which is another one after a recovery
    number = sum(isinstance(layer, SyncBatchNorm) for layer in module.modules())
    line = f"batch norm: {plural(number, 'layer')} over all ranks, as on one device (sync_batchnorm=False: each alone)"
    return line if number else None


def describe_apart(module: nn.Module) -> str | None:
    """Return a line that says that the batch norms of ``module`` normalise over a device's own samples, if they do."""
    number = sum(isinstance(each, BatchNorm) and not isinstance(each, TorchSyncBatchNorm) for each in module.modules())
    return f"batch norm: {plural(number, 'layer')}, each over the samples of its device" if number else None


def _convert(
    module: nn.Module, to: type[nn.SyncBatchNorm], group: Group | None, name: str, converted: dict[nn.Module, nn.Module]
) -> nn.Module:
    if module in converted:  # a layer that the model contains twice stays one layer
        return converted[module]
    new = _layer_like(module, to, group, name or "the layer") if isinstance(module, BatchNorm) else module
    converted[module] = converted[new] = new
    for child_name, child in submodules(module).items():
        if child is not None:
            submodules(new)[child_name] = _convert(child, to, group, f"{name}.{child_name}".lstrip("."), converted)
    return new


def _layer_like(old: Any, to: type[nn.SyncBatchNorm], group: Group | None, name: str) -> nn.SyncBatchNorm:
    if isinstance(old, LazyNorm) and old.has_uninitialized_params():
        raise ConfigurationError(
            f"{name} is a {type(old).__name__} that has not seen a batch, so its number of channels is not known yet.\n"
            "Run one batch through the model before converting it."
        )
    if type(old).forward not in (BatchNorm.forward, TorchSyncBatchNorm.forward) and not isinstance(old, to):
        warnings.warn(
            f"{name} is a {type(old).__name__} with a forward of its own, which the layer in its place does not have.",
            stacklevel=4,
        )
    process_group = getattr(old, "process_group", None) if group is None else group
    layer = to(old.num_features, old.eps, old.momentum, old.affine, old.track_running_stats, process_group)
    if old.affine:
        layer.weight, layer.bias = old.weight, old.bias
    layer.running_mean, layer.running_var = old.running_mean, old.running_var
    layer.num_batches_tracked = old.num_batches_tracked
    layer.training = old.training
    if (qconfig := vars(old).get("qconfig")) is not None:
        layer.qconfig = qconfig
    return layer
