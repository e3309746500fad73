"""`predict`: is a task faster on several machines over a network, and which options help?"""

import contextlib
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, final

import psutil
import torch
from rich.console import Group, RenderableType
from rich.text import Text
from torch import Tensor, nn

from lockstep.base.accelerator import mark_on
from lockstep.base.env import machine_timeout_s, usable_cores
from lockstep.comm.collectives import all_reduce
from lockstep.comm.network import sent_to
from lockstep.comm.world import World
from lockstep.errors import ConfigurationError
from lockstep.parallel.ddp.bucket_events import Event
from lockstep.parallel.ddp.buckets import Bucket, ParameterSpec, plan_buckets
from lockstep.parallel.ddp.setup import bucket_caps_bytes
from lockstep.parallel.ddp.wrapper import DistributedDataParallel
from lockstep.study import links
from lockstep.study.common import MIB, Table, load, log, run_ranks
from lockstep.study.compare.benchmark import MANY_STEPS, TURN_TIMEOUT_S, time_steps
from lockstep.study.compare.comparison import GOOD_EFFICIENCY, WORTH
from lockstep.study.goodput import Goodput, JobTimes, predict_goodput
from lockstep.study.links import Computing, Cost, Link, Method, Profile, ReadyBucket, Step
from lockstep.telemetry.cost import Price, more_than_alone
from lockstep.telemetry.provenance import Provenance
from lockstep.telemetry.step_times import Mark, milliseconds, seconds_between
from lockstep.train.plan import check_batch
from lockstep.train.settings import Settings
from lockstep.train.task import Task, build_model, prepare
from lockstep.train.trainer import Trainer

# --- the methods ------------------------------------------------------------------------------------------------------

PLAIN = Method("ddp")
ACCUMULATE = 4
SYNC_EVERY = {"local-sgd": 8, "diloco": 50}


_FEEDBACK = "gradients are rounded, with error feedback"
# How each changes the gradients, and the share of their bytes that is sent; None if it depends on the model.
COMPRESSIONS = {
    "bf16": ("gradients are rounded", 0.5),
    "int8": (_FEEDBACK, 0.25),
    "int4": (_FEEDBACK, 0.13),
    "powersgd:4": ("gradients become products of narrow matrices, with error feedback", None),
}


def list_methods(costs: Mapping[str, Cost], profile: Profile) -> list[Method]:
    """Return the methods, in the order of how much they change the training.

    Args:
        costs: Measured costs by the name of the compression, and of `PLAIN`; others are assumed to be 0.
        profile: Of the task.
    """
    plain = replace(PLAIN, cost=costs.get(PLAIN.name, Cost()))
    methods = [plain]
    for name, (effect, sent) in COMPRESSIONS.items():
        if cost := costs.get(name) or (sent and Cost(sent, staged=True)):
            methods.append(Method(name, f"--compression {name}", effect, cost, is_compressed=True))
    batch = f"--accumulate {ACCUMULATE} --global-batch-size {ACCUMULATE * profile.global_batch_size}"
    larger = f"another training run: each update takes a global batch {ACCUMULATE} times as large"
    methods.append(replace(plain, name=f"accumulate {ACCUMULATE}", flags=batch, effect=larger, accumulate=ACCUMULATE))
    for name, steps in SYNC_EVERY.items():
        flags = f"--strategy {name} --sync-every {steps}"
        effect = f"another training run: parameters are exchanged every {steps} steps"
        methods.append(replace(plain, name=name, flags=flags, effect=effect, sync_every=steps))
    return methods


# --- measured on one rank: a step without an exchange -----------------------------------------------------------------

# For each number of samples: steps for allocation; then steps for so many seconds, within these limits.
_NUM_WARMUP, _TURN_S, _FEWEST, _MOST = 2, 1.5, 3, 20


def measure(
    task: Task | str,
    settings: Settings,
    profile: Profile,
    shares: Sequence[int],
    num_threads: int,
    link: Link | None,
    saves: bool,
    world: World,
) -> tuple[Profile, Mapping[str, Cost], Link]:
    """Measure the task's step on rank zero alone, then exchanges between all ranks, and the link.

    Sets the number of threads of this process.

    Collective: every rank. The profile is complete on rank zero.

    Args:
        task: The task, or where to find it.
        settings: How to train.
        profile: Of the task, without what is measured.
        shares: Samples of a rank's part of a global batch, for each number of machines.
        num_threads: Of a rank.
        link: The link; it is probed if None.
        saves: Whether to write a checkpoint, to the folder for temporary files.
        world: The ranks.

    Raises:
        Exception: What training a step raised, on rank zero; the launcher ends the others.
    """
    torch.set_num_threads(num_threads)
    task = load(task)
    for share in shares if world.is_rank_zero else ():
        log(f"measuring a step of {share} samples on one rank")
        profile = _measure_steps(task, settings, share, world, profile, saves)
    world.barrier(TURN_TIMEOUT_S)  # the other ranks sleep meanwhile
    costs: dict[str, Cost] = {}
    link = link or links.probe_link(world)
    if world.device.type == "cpu" and world.world_size > 1:  # on GPUs, the exchange does not slow down computing
        if world.is_rank_zero:
            log("measuring exchanges of gradients")
        shapes = [parameter.shape for parameter in build_model(task).parameters() if parameter.requires_grad]
        is_local = world.local_world_size == world.world_size
        # Over a slow link, as many bytes as it transfers in half a second.
        limit = _MOST_COST_BYTES if is_local else min(_MOST_COST_BYTES, int(link.bytes_per_s / 2))
        compressions = {PLAIN.name: None, **{name: name for name in COMPRESSIONS}}
        costs = {name: measure_cost(shapes, compression, world, limit) for name, compression in compressions.items()}
    return profile, costs, link


def _measure_steps(task: Task, settings: Settings, share: int, world: World, profile: Profile, saves: bool) -> Profile:
    """Train some steps in this process; return ``profile`` with times, buckets, and the number of cores in use."""
    rank_settings = replace(settings, epochs=None, steps=MANY_STEPS, global_batch_size=share)
    arrivals: dict[Tensor, Mark] = {}  # of the gradients of a step

    def arrive(parameter: Tensor) -> None:
        arrivals[parameter] = mark_on(world.device)

    with contextlib.closing(Trainer(task, rank_settings, world, strategy="single", devices=[world.device])) as trainer:
        if not profile.computing:
            profile = replace(profile, start_s=time.time() - psutil.Process().create_time())
        parameters = [parameter for parameter in trainer.model.parameters() if parameter.requires_grad]
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(arrive)
        first_s = min(time_steps(trainer, 1)[0] for _ in range(_NUM_WARMUP))
        steps, ready, cpu_s, held_s = list[Computing](), [], 0.0, 0.0
        for _ in range(min(max(math.ceil(_TURN_S / first_s), _FEWEST), _MOST)):
            arrivals.clear()
            began_s = time.process_time()
            seconds, (record,) = time_steps(trainer, 1)
            times = record.times
            core_wait_s = times.part("core_wait")
            cpu_s, held_s = cpu_s + time.process_time() - began_s, held_s + seconds - core_wait_s
            before_s, backward_s = times.part("data_wait", "forward"), times.part("backward")
            after_s = max(0.0, seconds - before_s - backward_s - core_wait_s)
            steps.append(Computing(before_s, backward_s, after_s, seconds, seconds - core_wait_s))
            begin, end = next(span[1:3] for span in record.timer.marks.spans if span[0] == "backward")
            whole_s = seconds_between(begin, end) or 1.0
            # Without a gradient, at the end.
            ready.append([seconds_between(begin, arrivals.get(parameter, end)) / whole_s for parameter in parameters])
        if saves and not profile.state_bytes:
            # Imported here, because it imports DCP, which takes a second.
            from lockstep.checkpoints.checkpoint_storage import TreePacker, write_shard

            packer = TreePacker(trainer.state_dict(), is_coordinator=True)
            with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
                began_s = time.perf_counter()
                write_shard(Path(folder), "predict", 0, packer.tensors)
                profile = replace(profile, checkpoint_s=time.perf_counter() - began_s, state_bytes=packer.num_bytes)
        order = [median(fractions) for fractions in zip(*ready, strict=True)]
        buckets = [_ready_buckets(parameters, order, is_compressed=is_compressed) for is_compressed in (False, True)]
    # Of the faster half, as other programs only make steps slower.
    half = sorted(steps, key=lambda step: step.fastest_s)[: -(-len(steps) // 2)]
    typical = Computing(*map(median, zip(*map(astuple, half), strict=True)))
    return replace(
        profile,
        computing={**profile.computing, share: replace(typical, fastest_s=half[0].fastest_s)},
        buckets=buckets[0],
        small_buckets=buckets[1],
        busy_cores=cpu_s / held_s * profile.ranks_per_machine,
    )


def _ready_buckets(
    parameters: Sequence[Tensor], ready: Sequence[float], *, is_compressed: bool
) -> Sequence[ReadyBucket]:
    """Return the buckets that the engine would create, and when each is ready, as a fraction of backward."""
    specs = [ParameterSpec(parameter.numel(), parameter.dtype, parameter.device) for parameter in parameters]
    order = sorted(range(len(specs)), key=ready.__getitem__)
    buckets, latest = [], 0.0
    caps_bytes = bucket_caps_bytes(None, None, can_overlap=True, is_compressed=is_compressed)
    for spec in plan_buckets(specs, order, caps_bytes):
        latest = min(1.0, max(latest, *(ready[index] for index in spec.parameters)))
        buckets.append(ReadyBucket(spec.size_bytes, latest))
    # The reducer launches the last bucket at the end of backward.
    return (*buckets[:-1], ReadyBucket(buckets[-1].size_bytes, 1.0))


# --- measured between ranks: the cost of an exchange without the link, and the link -----------------------------------

# Bytes of gradients; the cost for larger models is proportional.
_MOST_COST_BYTES = 32 * MIB
_NUM_COST_STEPS, _NUM_COST_BUCKETS = 5, 4


class _Gradients(nn.Module):
    """A module with parameters of given shapes, whose backward only creates their gradients."""

    def __init__(self, shapes: Sequence[torch.Size]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self._gradients = [torch.randn(shape) for shape in shapes]

    def forward(self) -> Tensor:
        """Return a scalar whose gradients are random."""
        pairs = zip(self.weights, self._gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


@final
class _Stages:
    """Measures the time of the computing thread for each bucket except the last, which it may reduce itself."""

    def __init__(self) -> None:
        self.encode_s = self.decode_s = 0.0
        self.num_bytes = 0
        self._began_s = 0.0

    def on_event(self, kind: Event, bucket: Bucket | None) -> None:
        """Handle an event of the reducer."""
        if bucket is None or bucket.is_last:
            return
        if kind in (Event.READY, Event.WAIT):
            self._began_s = time.thread_time()
        elif kind is Event.LAUNCHED:
            self.encode_s += time.thread_time() - self._began_s
            self.num_bytes += bucket.spec.size_bytes
        elif kind is Event.WAIT_END:
            self.decode_s += time.thread_time() - self._began_s


def measure_cost(
    shapes: Sequence[torch.Size], compression: str | None, world: World, most_bytes: int = _MOST_COST_BYTES
) -> Cost:
    """Return the cost of exchanging gradients of these shapes, without the link. Collective: every rank.

    Args:
        shapes: Of the parameters.
        compression: The compression, or None.
        world: At least two ranks.
        most_bytes: The maximum size of the gradients that are exchanged.
    """
    # The smallest, and more as far as there is room.
    chosen: list[torch.Size] = []
    size_bytes = 0
    for shape in sorted(shapes, key=torch.Size.numel):
        if not chosen or size_bytes + 4 * shape.numel() <= most_bytes:
            chosen.append(shape)
            size_bytes += 4 * shape.numel()
    cap_mb = max(size_bytes / _NUM_COST_BUCKETS / MIB, 1e-3)
    engine = DistributedDataParallel(
        _Gradients(chosen), process_group=world.group, bucket_cap_mb=cap_mb, compression=compression
    )
    # In a hierarchy, each rank of a machine sends a slice.
    num_carriers = world.local_world_size if links.is_staged(world) else 1
    ring_bytes = links.cable_bytes(size_bytes, world.world_size // num_carriers) / num_carriers
    costs: list[Cost] = []
    for _ in range(_NUM_COST_STEPS):
        stages = _Stages()
        engine.reducer.observers = [stages]
        all_reduce(torch.zeros(1), group=world.group)  # so that all ranks begin together
        sent_before = _sent_bytes()
        process_s, thread_s = time.process_time(), time.thread_time()
        engine().backward()
        others_s = time.process_time() - process_s - (time.thread_time() - thread_s)
        all_reduce(torch.zeros(1), group=world.group)  # so that all bytes have arrived
        sent = _sent_bytes() - sent_before
        encode_s, decode_s = (seconds / max(stages.num_bytes, 1) for seconds in (stages.encode_s, stages.decode_s))
        # Without the threads that help the computing thread to encode and decode.
        others_s -= (torch.get_num_threads() - 1) * (encode_s + decode_s) * size_bytes
        cpu_s = max(0.0, others_s / ring_bytes)
        # Rounded gradients use an all-reduce if possible, which adds while it sends.
        is_whole = compression not in (None, "bf16") or num_carriers > 1
        costs.append(Cost(sent / ring_bytes, encode_s, decode_s, cpu_s, staged=compression is not None and is_whole))
    # Without the first step, which creates the buckets.
    cost = Cost(*map(median, zip(*map(astuple, costs[1:]), strict=True)))
    # The nominal value if the kernel does not count the bytes sent.
    return cost if cost.sent else replace(cost, sent=COMPRESSIONS[compression][1] or 1.0 if compression else 1.0)


def _sent_bytes() -> int:
    return sum(sent.num_bytes for sent in sent_to(loopback=True).values())


# --- the forecast -----------------------------------------------------------------------------------------------------

# The figures are of a quiet machine if the median of the measured steps is at most so many times the fastest.
_EVEN = 1.5
_FEWEST_MACHINES_SHOWN = 8


@dataclass(frozen=True)
class Row:
    """The figures of a method.

    Attributes:
        method: The method.
        steps: By number of machines; without numbers that leave a rank without samples.
        pays_from: The rate of the link, in bytes per second and as it is named (see `Link.payload`), from which the
            requested machines are `WORTH` times as fast as one; None if they never are.
    """

    method: Method
    steps: Mapping[int, Step]
    pays_from: float | None


@dataclass(frozen=True)
class Forecast:
    """The result of `predict`.

    Attributes:
        task: Its name.
        num_machines: The requested number of machines.
        rows: `PLAIN` first.
        price: Of the device of a rank for an hour, if known.
        goodput: If machines fail; None if that was not asked.
    """

    task: str
    profile: Profile
    link: Link
    num_machines: int
    rows: Sequence[Row]
    price: Price | None = None
    goodput: Goodput | None = None

    def hours(self, row: Row, num_machines: int) -> float:
        """Return how long the machines need for the samples of an hour of one machine with the same global batch."""
        baseline = row if row.method.accumulate > 1 else self.rows[0]
        return baseline.steps[1].samples_per_s / row.steps[num_machines].samples_per_s

    def speed_up(self, row: Row, num_machines: int | None = None) -> float:
        """Return the speed-up over one machine, rounded as it is shown: verdicts compare what their reader sees."""
        return round(1 / self.hours(row, num_machines or self.num_machines), 2)

    def efficiency(self, row: Row, num_machines: int | None = None) -> float:
        """Return the speed-up over the number of machines, rounded as it is shown."""
        return round(self.speed_up(row, num_machines) / (num_machines or self.num_machines), 2)


def machine_counts(num_machines: int) -> tuple[int, ...]:
    """Return the numbers of machines to show: 1, 2, 4, 8 ... and the requested one."""
    largest = max(num_machines, _FEWEST_MACHINES_SHOWN)
    return tuple(sorted({num_machines, *(1 << power for power in range(largest.bit_length()))}))


def predict_task(
    task: Task | str,
    settings: Settings,
    world: World | None = None,
    *,
    num_machines: int | None = None,
    link: Link | None = None,
    ranks_per_machine: int | None = None,
    mtbf_h: float | None = None,
    replacement_s: float | None = None,
) -> Forecast | None:
    """Measure a task here, and return the forecast for several machines; None on ranks of a job other than rank zero.

    Blocks some tens of seconds.

    Collective if there is a ``world``: every rank; else two processes are started here.

    Args:
        task: A task, or where to find it: ``FILE.py`` or ``FILE.py:NAME``.
        settings: How to train.
        world: Of a job on these machines; None: this process is not a rank.
        num_machines: Machines to predict for; those of the job, or 2, if None.
        link: Between the machines; probed in a job if None.
        ranks_per_machine: Those of the job, or 1, if None.
        mtbf_h: Mean time between failures of one machine, in hours; None: the goodput is not predicted.
        replacement_s: Until ranks in place of a lost machine have built the model; as here if None.

    Raises:
        ConfigurationError: Task, numbers or settings cannot be used, or there is no link.
        RankFailed: The task failed.
    """
    loaded = load(task, prepares=world is None)
    if world is not None:
        prepare(loaded, world)
    batch = settings.global_batch_size or loaded.global_batch_size
    ranks = ranks_per_machine or (1 if world is None else world.local_world_size)
    job_machines = 1 if world is None else world.world_size // world.local_world_size
    num_machines = num_machines or max(2, job_machines)
    if link is None and job_machines == 1:
        raise ConfigurationError(
            "There is no link to predict for.\nName one, such as --link 100Mb, or start predict on each machine, which "
            "probes it: lockstep run --nnodes 2 --node-rank I --master-addr HOST -m lockstep predict TASK.py"
        )
    if mtbf_h is not None and not 0 < mtbf_h < math.inf:
        raise ConfigurationError(f"--mtbf {mtbf_h} is not a time between failures.\nGive hours, such as 1000.")
    if replacement_s is not None and mtbf_h is None:
        raise ConfigurationError("--replacement has no effect without --mtbf.\nAdd --mtbf HOURS, or leave it out.")
    check_batch(loaded, settings, num_machines * ranks)
    profile = Profile(batch, {}, (), usable_cores(), ranks_per_machine=ranks)
    shares = sorted({share for count in machine_counts(num_machines) if (share := profile.share(count))})
    request = (task, settings, profile, shares, max(1, torch.get_num_threads() // ranks), link, mtbf_h is not None)
    if world is None:
        num_ranks = 1 if torch.accelerator.device_count() else 2
        profile, costs, link = run_ranks(measure, *request, devices=num_ranks, backend="gloo")[0]
    else:
        profile, costs, link = measure(*request, world)
        if not world.is_rank_zero:
            return None
    predicted = forecast(loaded.name, profile, list_methods(costs, profile), link, num_machines)
    if mtbf_h is None:
        return predicted
    step_s = (choose(predicted) or predicted.rows[0]).steps[num_machines].seconds
    start_s = profile.start_s if replacement_s is None else replacement_s
    times = JobTimes(step_s, profile.checkpoint_s, machine_timeout_s(), start_s, profile.state_bytes / link.bytes_per_s)
    return replace(predicted, goodput=predict_goodput(times, 3600 * mtbf_h, num_machines))


def forecast(task: str, profile: Profile, methods: Sequence[Method], link: Link, num_machines: int) -> Forecast:
    """Return the figures of all methods; a pure function."""
    counts = [count for count in machine_counts(num_machines) if profile.share(count)]

    def pays_from(method: Method) -> float | None:
        alone = links.predict_step(profile, replace(methods[0], accumulate=method.accumulate), link, 1)

        def speed_up(bytes_per_s: float) -> float:
            link_at_rate = replace(link, bytes_per_s=link.payload * bytes_per_s)
            step = links.predict_step(profile, method, link_at_rate, num_machines)
            return round(step.samples_per_s / alone.samples_per_s, 2)

        # The present link may lie between two rates that are tried.
        present = link.bytes_per_s / link.payload
        rates = [links.break_even(speed_up, WORTH), present if speed_up(present) >= WORTH else None]
        return min(filter(None, rates), default=None)

    rows = [
        Row(method, {count: links.predict_step(profile, method, link, count) for count in counts}, pays_from(method))
        for method in methods
    ]
    return Forecast(task, profile, link, num_machines, rows)


def choose(prediction: Forecast) -> Row | None:
    """Return the method to use; None if none is worthwhile.

    It must be clearly faster than one machine, and than each method that changes the training less. Of the methods that
    are, it is the first with a good efficiency, otherwise the last.
    """
    best, fastest = None, 1.0
    for row in prediction.rows:
        if prediction.speed_up(row) >= WORTH * fastest:
            best = row
            if prediction.efficiency(row) >= GOOD_EFFICIENCY:
                break
        fastest = max(fastest, prediction.speed_up(row))
    return best


def disturbances(profile: Profile) -> list[str]:
    """Return a sentence if measured steps took much longer than the fastest one with a core, otherwise none."""
    worst = max(profile.computing.values(), key=lambda computing: computing.wall_s / (computing.fastest_s or 1.0))
    if worst.wall_s <= _EVEN * worst.fastest_s:
        return []
    return [
        f"The machine was busy, or steps differ: a measured step took {milliseconds(worst.wall_s)}, the fastest had a "
        f"core for {milliseconds(worst.fastest_s)}. The figures may be too large: stop other programs, and run again."
    ]


def sentences(prediction: Forecast) -> list[str]:
    """Return the verdict: the present speed, what to turn on, and the bandwidth from which machines are worthwhile."""
    plain, chosen = prediction.rows[0], choose(prediction)
    step, machines = plain.steps[prediction.num_machines], f"{prediction.num_machines} machines"
    text = (
        f"DistributedDataParallel without options takes {milliseconds(step.seconds)} a step on {machines}, "
        f"{prediction.speed_up(plain):.2f} times the speed of one ({milliseconds(plain.steps[1].seconds)}); each sends "
        f"{links.format_megabytes(step.sent_bytes)} a step."
    )
    threshold = f"{WORTH:.2f} times as fast as one"
    if chosen is None:
        turn_on = f"Not on {machines}: no option makes them {threshold} over this link."
    elif chosen is plain:
        turn_on = f"No option is needed: this is {prediction.efficiency(plain):.0%} of linear scaling on {machines}."
    else:
        turn_on = (
            f"Turn on {chosen.method.name} ({chosen.method.flags}): {prediction.speed_up(chosen):.2f} times the speed "
            f"of one machine with the same global batch, {prediction.efficiency(chosen):.0%} of linear scaling; "
            f"{chosen.method.effect}."
        )
    turn_on += _fastest(prediction, chosen)
    minimums = [(row.method.name, row.pays_from) for row in prediction.rows if row.pays_from]
    rates = [f"{links.format_rate(rate)} on with {name}" for name, rate in minimums]
    nevers = [row.method.name for row in prediction.rows if not row.pays_from]
    never = f"No link makes {machines} {threshold} with any of these methods."
    row, ranks, price = chosen or plain, prediction.profile.ranks_per_machine, prediction.price
    hours = {count: prediction.hours(row, count) for count in row.steps if count > 1}
    cost_texts = [f"{n} machines {more_than_alone(hours[n], n * ranks, ranks, price)}" for n in hours]
    costs = f"Compared with an hour of one machine, for the same samples, {row.method.name}: {'; '.join(cost_texts)}."
    excluded = f"; on no link with {', '.join(nevers)}" if nevers else ""
    paying = f"{machines} are {threshold} from {', '.join(rates)}{excluded}." if rates else never
    failing = [prediction.goodput.sentence()] if prediction.goodput else []
    return [*disturbances(prediction.profile), text, turn_on, paying, costs, *failing]


def _fastest(prediction: Forecast, chosen: Row | None) -> str:
    """Return what is faster than what the verdict chose, and its effect on the training; without a choice, anywhere."""
    cells = [(row, n) for row in prediction.rows for n in row.steps if n == prediction.num_machines or not chosen]
    row, count = max(cells, key=lambda cell: prediction.speed_up(*cell))  # of equal ones, the first
    speed_up = prediction.speed_up(row, count)
    if chosen and speed_up <= prediction.speed_up(chosen):
        return ""
    if count == 1:
        return " Train on one machine, the fastest of the table."
    effect = f" ({row.method.effect})" if row.method.effect else ""
    of = f"on {count} machines" if chosen else "of the table"
    where = "" if chosen else f" on {count} machines"
    return f" The fastest {of} is {row.method.name}{where}: {speed_up:.2f} times the speed of one{effect}."


# --- as a table and JSON ----------------------------------------------------------------------------------------------


def table(prediction: Forecast) -> Table:
    """Return seconds and efficiency by method and number of machines."""
    counts = list(prediction.rows[0].steps)
    task, profile, link = prediction.task, prediction.profile, prediction.link
    ranks = f", {profile.ranks_per_machine} ranks each" if profile.ranks_per_machine > 1 else ""
    size = links.format_megabytes(profile.gradient_bytes)
    title = f"{task}: global batch {profile.global_batch_size}, {size} of gradients{ranks}; link {link.source}"
    columns = [f"{count} machine{'s' * (count > 1)}" for count in counts]
    rows = []
    for row in prediction.rows:
        cells = [f"{milliseconds(row.steps[n].seconds)} {prediction.efficiency(row, n):4.0%}" for n in counts]
        sent = links.format_megabytes(row.steps[prediction.num_machines].sent_bytes)
        pays_from = "never" if row.pays_from is None else links.format_rate(row.pays_from)
        is_another_run = row.method.accumulate > 1 or row.method.sync_every > 1
        rows.append([row.method.name + "*" * is_another_run, *cells, sent, pays_from])
    columns += ["sends", "pays from"]
    return Table(title, ["", *columns], rows, numbers=columns)


def footnote(prediction: Forecast) -> str:
    """Return how to read the figures."""
    return (
        "Time of a step, and efficiency: the speed-up over one machine with the same global batch, divided by the "
        f"number of machines. That batch is {prediction.profile.global_batch_size}, but {ACCUMULATE} times as large "
        f"with accumulate {ACCUMULATE}; * is another training run. The bytes that each machine sends in a step, and "
        f"the link from which it pays ({WORTH:.2f} times the speed of one machine), are for {prediction.num_machines} "
        f"machines. Of a link given in bits, {links.PAYLOAD_SHARE:.0%} carry gradients."
    )


def render(prediction: Forecast) -> RenderableType:
    """Return tables and verdict for a terminal."""
    verdict = (Text(line, style="bold") for line in sentences(prediction))
    failing = [prediction.goodput.table(prediction.price).rich()] if prediction.goodput else []
    return Group(table(prediction).rich(), Text(footnote(prediction), style="dim"), Text(), *failing, *verdict)


def to_record(prediction: Forecast, provenance: Provenance) -> dict[str, Any]:
    """Return the forecast as a dictionary for JSON, with stable keys."""
    chosen = choose(prediction)
    verdict = {"use": None if chosen is None else chosen.method.name, "sentences": sentences(prediction)}
    return {"version": 1, **asdict(prediction), "verdict": verdict, "provenance": asdict(provenance)}
