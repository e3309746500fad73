"""Published figures beside what the model of `lockstep predict` says of the same training runs; no training.

Writes docs/predicted.md and prints its tables. A claim holds what was published and where, the inputs that the source
gives, and the assumptions that we had to add. Nothing is tuned to a claim, except where a claim says that it is a fit.

Usage: python -m bench.published
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, inf
from pathlib import Path

from lockstep.study.common import Table, console
from lockstep.study.links import (
    LAN_LATENCY_S,
    Computing,
    Cost,
    Link,
    Method,
    Profile,
    ReadyBucket,
    break_even,
    given_link,
    predict_step,
)

PAGE = Path(__file__).parents[1] / "docs" / "predicted.md"

# Of a message with RDMA, from a GPU to another: a few microseconds for the network card and switches, and a kernel.
RDMA_LATENCY_S = 1e-5

DATA_PARALLEL = Method("Data parallel")

# --- what a claim is --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """A published number beside ours; ``is_bound``: the published one is a maximum, and no error is counted."""

    what: str
    published: float
    predicted: float
    is_bound: bool = False

    @property
    def error(self) -> float:
        """Relative to the published number."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Claim:
    """What was published, and what the model makes of it.

    Attributes:
        title: Of the section.
        source: Authors, title, year, venue or arXiv id, and the table or figure.
        obtained: How we read the figures.
        inputs: Taken from the source.
        assumptions: Not in the source.
        figures: Of which errors are counted, and bounds.
        tables: As shown.
        remarks: What the errors come from.
        is_measured: By the source, which did not simulate or compute the figures.
    """

    title: str
    source: str
    obtained: str
    inputs: str
    assumptions: str
    figures: Sequence[Figure]
    tables: Sequence[Table]
    remarks: str
    is_measured: bool = True


def number(value: float) -> str:
    """Return a value with three digits, and from 100 on without decimals."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def percent(error: float) -> str:
    """Return an error such as ``+14 %``."""
    return f"{round(100 * error):+d} %"


def compared(title: str, figures: Iterable[Figure]) -> Table:
    """Return a table with a row for each figure."""
    rows = []
    for figure in figures:
        published = ("at most " if figure.is_bound else "") + number(figure.published)
        verdict = ("within" if figure.error <= 0 else "above") if figure.is_bound else percent(figure.error)
        rows.append([figure.what, published, number(figure.predicted), verdict])
    return Table(title, ["", "published", "predicted", "error"], rows, numbers=["published", "predicted", "error"])


# --- what the model is asked ------------------------------------------------------------------------------------------


def split(blocks: Sequence[tuple[float, float]], cap_bytes: float) -> list[ReadyBucket]:
    """Return buckets of at most ``cap_bytes``.

    Args:
        blocks: The bytes of a block of layers in the order of backward, and the fraction of backward at its end.
        cap_bytes: Of a bucket. No bucket crosses the border of a block.
    """
    buckets, begin = [], 0.0
    for size_bytes, end in blocks:
        count = ceil(size_bytes / cap_bytes - 1e-9)
        buckets += [ReadyBucket(int(size_bytes / count), begin + (end - begin) * (i + 1) / count) for i in range(count)]
        begin = end
    return buckets


def profile_of(step_s: float, buckets: Sequence[ReadyBucket], num_machines: int, ranks: int = 1) -> Profile:
    """Return a task with one sample for each rank, and a backward that takes two thirds of a step."""
    computing = {1: Computing(step_s / 3, 2 * step_s / 3, 0.0)}
    return Profile(num_machines * ranks, computing, buckets, ranks_per_machine=ranks)


def efficiency(step_s: float, buckets: Sequence[ReadyBucket], link: Link, num_machines: int, ranks: int) -> float:
    """Return the time of a step without an exchange, divided by that with one, in percent."""
    profile = profile_of(step_s, buckets, num_machines, ranks)
    return 100 * step_s / predict_step(profile, DATA_PARALLEL, link, num_machines).seconds


RATES = [100.0 * 1.001**step for step in range(23_040)]  # bytes per second, from 100 to 1e12


def gbits_for(utilization: float, step_s: float, buckets: Sequence[ReadyBucket], method: Method) -> float:
    """Return the Gbit/s between two workers with which so large a part of the time is computing."""
    profile = profile_of(step_s, buckets, 2)
    found = break_even(
        lambda rate: predict_step(profile, method, Link(rate, 0.0), 2).samples_per_s,
        utilization * profile.global_batch_size / step_s,
        RATES,
    )
    assert found is not None
    return 8 * found / 1e9


# --- DiLoCo: the bandwidth for a compute utilisation ------------------------------------------------------------------

UTILIZATIONS = (50, 80, 90, 95, 99)


@dataclass(frozen=True)
class Llm:
    """A model in a published simulation: its size, layers, seconds of a step, and Gbit/s by H for each utilisation."""

    name: str
    billions: float
    num_layers: int
    step_s: float
    gbits: dict[int, tuple[float, ...]]

    def buckets(self) -> list[ReadyBucket]:
        """Return a bucket for each layer, 16 bits for each parameter."""
        size_bytes = 2e9 * self.billions
        return split([(size_bytes, 1.0)], size_bytes / self.num_layers)


SCALING_LAWS = (
    Llm(
        "Chinchilla, 10B",
        10,
        48,
        0.8,
        {
            1: (104.8, 184.2, 222.3, 222.3, 390.7),
            10: (16.0, 49.4, 86.8, 152.6, 222.3),
            50: (3.0, 11.0, 23.3, 41.0, 126.5),
            100: (1.4, 6.2, 13.3, 23.3, 86.8),
            300: (0.5, 2.0, 4.3, 9.1, 41.0),
        },
    ),
    Llm(
        "Llama 3, 405B",
        405,
        126,
        26.0,
        {
            1: (126.5, 222.3, 268.3, 323.8, 323.8),
            10: (19.3, 72.0, 126.5, 184.2, 268.3),
            50: (3.6, 13.3, 28.1, 59.6, 184.2),
            100: (2.0, 7.5, 16.0, 33.9, 126.5),
            300: (0.7, 3.0, 6.2, 13.3, 59.6),
        },
    ),
    Llm(
        "DeepSeek-V3, 671B",
        671,
        61,
        20.0,
        {
            1: (323.8, 569.0, 686.6, 686.6),  # for 99 % it says 1000.0+
            10: (49.4, 152.6, 268.3, 390.7, 686.6),
            50: (7.5, 33.9, 72.0, 126.5, 390.7),
            100: (4.3, 16.0, 41.0, 72.0, 268.3),
            300: (1.7, 6.2, 13.3, 28.1, 126.5),
        },
    ),
)

STREAMING = (
    Llm("1B", 1, 24, 0.1, {1: (86.8, 152.6, 184.2, 222.3, 569.0), 100: (1.4, 6.2, 13.3, 23.3, 86.8)}),
    Llm("10B", 10, 48, 0.8, {1: (104.8, 222.3, 222.3, 268.3, 471.5), 100: (1.7, 7.5, 16.0, 33.9, 104.8)}),
    Llm("100B", 100, 108, 4.9, {1: (184.2, 323.8, 390.7, 390.7, 471.5), 100: (3.0, 11.0, 23.3, 49.4, 184.2)}),
)


def bandwidths(models: Sequence[Llm]) -> tuple[list[Figure], list[Table]]:
    """Return the figures of a simulated table, and a table for each model."""
    figures, tables = [], []
    columns = ["", *(f"{share} %" for share in UTILIZATIONS)]
    for model in models:
        rows, buckets = [], model.buckets()
        for every, published in model.gbits.items():
            name = "data parallel" if every == 1 else f"DiLoCo, H = {every}"
            method, cells = Method(name, sync_every=every), []
            for share, gbits in zip(UTILIZATIONS, published, strict=False):
                predicted = gbits_for(share / 100, model.step_s, buckets, method)
                figures.append(Figure(f"{model.name}, {name}, {share} %, in Gbit/s", gbits, predicted))
                cells.append(f"{gbits:g} / {number(predicted)} ({percent(figures[-1].error)})")
            rows.append([name, *cells, *[""] * (len(UTILIZATIONS) - len(cells))])
        title = f"{model.name}, step {model.step_s:g} s: Gbit/s, published / predicted"
        tables.append(Table(title, columns, rows))
    return figures, tables


def overlapped_error(models: Sequence[Llm]) -> str:
    """Return DiLoCo's mean error if its exchange overlapped with the last backward, as with accumulated gradients."""
    errors = []
    for model in models:
        for every, published in list(model.gbits.items())[1:]:
            for share, gbits in zip(UTILIZATIONS, published, strict=True):
                method = Method("", accumulate=every)
                errors.append(gbits_for(share / 100, model.step_s, model.buckets(), method) / gbits - 1)
    return percent(sum(errors) / len(errors))


def mean_error(figures: Iterable[Figure], part: str) -> str:
    """Return the mean error of the figures with this text in their names."""
    errors = [figure.error for figure in figures if part in figure.what]
    return percent(sum(errors) / len(errors))


ASSUMED_OF_DILOCO = (
    "Two workers, so that each sends every byte once; 16 bits for each parameter; one bucket for each layer; backward "
    "takes two thirds of a step; no latency and no protocol headers, as in the authors' simulator."
)


DOUILLARD = (
    "A. Douillard, Y. Donchev, K. Rush, S. Kale, Z. Charles, Z. Garrett, G. Teston, D. Lacey, R. McIlroy, J. Shen, "
    "A. Ramé, A. Szlam, M. Ranzato, P. Barham: *Streaming DiLoCo with overlapping communication: Towards a Distributed "
    "Free Lunch*, 2025, arXiv 2501.18512"
)


def scaling_laws() -> Claim:
    figures, tables = bandwidths(SCALING_LAWS)
    small = SCALING_LAWS[0]
    computing_s, gbits = 100 * small.step_s, small.gbits[100][0]
    by_share = ", ".join(f"{share} %: {mean_error(figures, f', {share} %,')}" for share in UTILIZATIONS)
    return Claim(
        "Scaling laws for DiLoCo: bandwidth for a compute utilisation",
        "Z. Charles, G. Teston, L. Dery, K. Rush, N. Fallen, Z. Garrett, A. Szlam, A. Douillard: "
        "*Communication-Efficient Language Model Training Scales Reliably and Robustly: Scaling Laws for DiLoCo*, "
        "2025, arXiv 2503.09799, Table 6 in version 1 (Table 7 later). A simulation by its authors, not a measurement.",
        "table, read in two text versions of the paper that agree; the seconds of a step in one of them",
        "Parameters, seconds of a step, H, and the utilisation.",
        f"{ASSUMED_OF_DILOCO} The number of layers: 48, as the Streaming DiLoCo paper says of 10B; 126 and 61, as the "
        "models have. Two entries are not compared: DeepSeek-V3, data parallel, 99 % is given as 1000.0+, and DiLoCo "
        "with H = 1 repeats data parallel.",
        figures,
        tables,
        "The published rates lie on a logarithmic grid with steps of 21 %; if they are rounded up to it, an exact "
        f"model is up to 17 % below them. Mean errors by utilisation: {by_share}. Two things explain most of them. "
        "First, the authors' DiLoCo hides a part of its exchange behind the last backward (as A. Douillard's page of "
        "the simulator says), and ours waits for all of it: this matters at 99 %, and with few steps between "
        "exchanges. With the timing of accumulated gradients, which overlap, the mean error of DiLoCo is "
        f"{overlapped_error(SCALING_LAWS)} instead of {mean_error(figures, 'DiLoCo')}. Second, the published rates are "
        f"lower than 16 bits for each parameter need: with H = 100, 10B and 50 %, computing takes {computing_s:.0f} s, "
        f"in which {gbits:g} Gbit/s moves {computing_s * gbits:.0f} Gbit, not {16 * small.billions:.0f}. The paper "
        "does not say what the simulator sends.",
        is_measured=False,
    )


def streaming_bandwidth() -> Claim:
    figures, tables = bandwidths(STREAMING)
    return Claim(
        "Streaming DiLoCo: bandwidth for a compute utilisation",
        f"{DOUILLARD}, Table 4. A simulation by its authors, not a measurement.",
        "table, read in the paper's HTML",
        "Parameters, layers, seconds of a step, H = 100, and the utilisation.",
        ASSUMED_OF_DILOCO,
        figures,
        tables,
        f"As above, and the two papers differ from each other: for 10B, {STREAMING[1].step_s} s, H = 100 and 50 % this "
        f"one has {STREAMING[1].gbits[100][0]} Gbit/s, the other one {SCALING_LAWS[0].gbits[100][0]}. Data parallel "
        f"{mean_error(figures, 'data parallel')} on average, DiLoCo {mean_error(figures, 'DiLoCo')}, which would be "
        f"{overlapped_error(STREAMING)} with overlap. The rows of Streaming DiLoCo itself are left out: it exchanges "
        "fragments in turns while it computes, which the model does not have.",
        is_measured=False,
    )


# --- Streaming DiLoCo: hours and bytes --------------------------------------------------------------------------------


def streaming_hours() -> Claim:
    model, hours = STREAMING[0], 0.67
    num_steps = hours * 3600 / model.step_s
    profile = profile_of(model.step_s, model.buckets(), 2)
    fp4 = Method("Streaming DiLoCo, FP4, H = 100", cost=Cost(sent=0.25), sync_every=100)
    figures, terabytes = [], []
    for method, published_hours, published_tb in ((DATA_PARALLEL, 109.0, 441.0), (fp4, 0.88, 1.10)):
        step = predict_step(profile, method, Link(1e9 / 8, 0.0), 2)
        figures.append(Figure(f"{method.name}, hours", published_hours, num_steps * step.seconds / 3600))
        terabytes.append(Figure(f"{method.name}, TB", published_tb, num_steps * step.sent_bytes / 1e12))
    at_most = figures[0].published * 3600 / 8e3
    shown = [*figures, *terabytes]
    return Claim(
        "Streaming DiLoCo: hours and bytes over 1 Gbit/s",
        f"{DOUILLARD}, Table 1: 1B parameters, 25B tokens, hours with 1 Gbit/s and terabytes exchanged.",
        "table, read in two versions of the paper that agree; the rows with 100B and 250B tokens are its multiples, "
        "and are left out",
        f"{hours} hours with an infinite bandwidth; {model.step_s} s for a step and {model.num_layers} layers "
        "(Table 4); H = 100; FP4.",
        f"{ASSUMED_OF_DILOCO} FP4 sends a quarter of that. The steps are those that fit into {hours} hours: "
        f"{num_steps:,.0f}. The model has no streaming: the exchange waits.",
        shown,
        [compared("1B parameters, 25B tokens, 1 Gbit/s", shown)],
        f"The hours agree. The terabytes do not, by a factor of {1 / (1 + terabytes[0].error):.1f} in both rows: in "
        f"{figures[0].published:g} hours, 1 Gbit/s carries at most {at_most:.0f} TB, so the column cannot be the bytes "
        f"on that link. As terabits it would be {terabytes[0].published / 8:.0f} TB; the paper does not say.",
        is_measured=False,
    )


# --- convolutional networks: blocks of layers in the order of backward ------------------------------------------------

# Parameters, and the fraction of the floating-point operations of backward at the end of the block.
RESNET50 = ((2.05e6, 0.001), (14.96e6, 0.2), (7.10e6, 0.56), (1.22e6, 0.81), (0.23e6, 1.0))
RESNET101 = ((44.5e6, 1.0),)
INCEPTION_V3 = ((23.8e6, 1.0),)
VGG16 = ((123.6e6, 0.008), (14.7e6, 1.0))
BERT_LARGE = ((340e6, 1.0),)


def fused(blocks: Sequence[tuple[float, float]], cap_mb: float = 64, bytes_each: int = 4) -> list[ReadyBucket]:
    """Return the buckets; 64 MB is the fusion buffer of Horovod."""
    return split([(bytes_each * number, end) for number, end in blocks], cap_mb * 1e6)


BATCH = 64  # for each GPU, of Horovod and BytePS


def horovod() -> Claim:
    link = given_link("25Gb", RDMA_LATENCY_S)
    resnet101 = 2 / (1 / 219 + 1 / 91.8)
    figures = []
    for name, blocks, images_per_s, published in (
        ("Inception V3", INCEPTION_V3, 142, 90),
        ("ResNet-101", RESNET101, resnet101, 90),
        ("VGG-16", VGG16, 154, 68),
    ):
        predicted = efficiency(BATCH / images_per_s, fused(blocks), link, 128, 4)
        figures.append(Figure(f"{name}, 512 GPUs", published, predicted))
    return Claim(
        "Horovod: scaling efficiency on 512 GPUs",
        "A. Sergeev, M. Del Balso: *Horovod: fast and easy distributed deep learning in TensorFlow*, 2018, arXiv "
        "1802.05799; the figures as in Horovod's documentation, page Benchmarks.",
        "text of that page",
        "128 servers with 4 Pascal GPUs each and a RoCE-capable network of 25 Gbit/s.",
        f"Batches of {BATCH} images for each GPU, as in the commands on that page; float32; buckets of 64 MB; "
        "one P100 computes 142, 129 and 154 images/s, from TensorFlow's benchmarks of May 2017 (Inception V3 and "
        "VGG-16 as measured there; ResNet-101 between ResNet-50 and ResNet-152); gradients are ready evenly over "
        f"backward, those of VGG-16's dense layers in its first percent; RDMA with {1e6 * RDMA_LATENCY_S:.0f} µs for "
        "each message.",
        figures,
        [compared("Scaling efficiency, %", figures)],
        "The exchange of the first two networks is hidden, except for the last bucket and the latency; VGG-16 has to "
        "wait for the link. The latency is an assumption that matters: a ring of 128 machines takes 254 messages for "
        "each bucket. Whether the published runs used RDMA or TCP over this network is not said.",
    )


def byteps() -> Claim:
    # BERT-large: 6 operations for each parameter and token, 128 tokens for each sequence, 40 % of 125 Tflop/s.
    bert_s = 6 * 340e6 * 128 * BATCH / (0.4 * 125e12)
    rdma, tcp = given_link("100Gb", RDMA_LATENCY_S), given_link("20Gb", LAN_LATENCY_S)
    figures = [
        Figure("BERT-large, 100 Gb RDMA", 70, efficiency(bert_s, fused(BERT_LARGE, bytes_each=2), rdma, 32, 8)),
    ]
    whole = efficiency(bert_s, fused(BERT_LARGE), rdma, 32, 8)
    for name, blocks, images_per_s, gains in (("ResNet-50", RESNET50, 343, (44, 7)), ("VGG-16", VGG16, 234, (100, 17))):
        for (where, link), gain in zip((("20 Gb TCP", tcp), ("100 Gb RDMA", rdma)), gains, strict=True):
            predicted = efficiency(BATCH / images_per_s, fused(blocks), link, 32, 8)
            figures.append(Figure(f"{name}, {where}", 100 / (1 + gain / 100), predicted, is_bound=True))
    return Claim(
        "BytePS: the all-reduce that it was compared with",
        "Y. Jiang, Y. Zhu, C. Lan, B. Yi, Y. Cui, C. Guo: *A Unified Architecture for Accelerating Distributed DNN "
        "Training in Heterogeneous GPU/CPU Clusters*, OSDI 2020; the figures are those of the project's own README and "
        "docs/performance.md, as we could not read the paper's plots.",
        "text: Horovod with NCCL has about 70 % scaling efficiency for BERT-large; BytePS is faster than it by 44 % "
        "(ResNet-50) and 100 % (VGG-16) over TCP, by 7 % and 17 % over RDMA",
        "V100 GPUs, 8 in a machine, batches of 64 for each. BERT-large: 256 GPUs with NVLink, 100 Gb RDMA (machines as "
        "AWS's p3dn.24xlarge), mixed precision. ResNet-50 and VGG-16, in float32: 20 Gb TCP with NVLink; 100 Gb RoCE "
        "without it.",
        "The model has no parameter servers, so only the all-reduce is predicted. From a gain of 44 % follows only "
        "that the all-reduce has at most 1 / 1.44 of linear scaling, as BytePS has at most all of it; such bounds are "
        "not counted as figures. 32 machines throughout. ResNet-50 at 343 images/s (MXNet's page of V100 results, "
        "batch 64), VGG-16 at 234 (a third of the rate of inference there); BERT-large with 128 tokens for each "
        "sequence at 40 % of 125 Tflop/s.",
        figures,
        [compared("Scaling efficiency of all-reduce, %", figures)],
        "The model is too optimistic. It sees no bottleneck in 100 Gb/s for BERT-large, while 30 % were lost. These "
        "machines have NVLink, so PCIe switches do not explain that, and float32 gradients would not either: with them "
        f"the model has {number(whole)} %. Another version of BytePS's page has a gain of 16 % over a carefully tuned "
        "Horovod on such machines, with which all-reduce has at most 86 %; so a part of the loss may be the tuning. "
        "Over TCP, the model allows ResNet-50 what the measurement excludes: NCCL probably did not fill the link. Only "
        "for ResNet-50 and VGG-16 over RDMA, on machines without NVLink, were the PCIe switches the bottleneck, as "
        "BytePS's page says; they are not in the model.",
    )


# --- the Ultra-Scale Playbook: a fit and a blind prediction -----------------------------------------------------------

TOKENS_PER_S = {8: 40149.94, 16: 37609.69, 32: 35367.61, 64: 31112.23, 128: 26446.44, 256: 15700.38}
NUM_FITTED = 4


def playbook_step(exchange_s: float, latency_s: float, num_buckets: int, num_machines: int) -> float:
    """Return the time of a step, in times of one on a single machine; both delays are those of all buckets."""
    size_bytes = 1e9
    link = Link(size_bytes / exchange_s if exchange_s else inf, latency_s / num_buckets)
    profile = profile_of(1.0, split([(size_bytes, 1.0)], size_bytes / num_buckets), num_machines, 8)
    return predict_step(profile, DATA_PARALLEL, link, num_machines).seconds


Fit = tuple[float, float, int]


def playbook_rate(fit: Fit, num_gpus: int) -> float:
    """Return the tokens/s of a GPU."""
    return TOKENS_PER_S[8] / playbook_step(*fit, num_gpus // 8)


def fits() -> list[Fit]:
    """Return the parameters of `playbook_step` by least squares of the first points, for 1, 4 and 16 buckets.

    The best of them is the first one.
    """

    def badness(fit: Fit) -> float:
        points = list(TOKENS_PER_S.items())[1:NUM_FITTED]
        return sum((playbook_rate(fit, count) / rate - 1) ** 2 for count, rate in points)

    found = []
    for num_buckets in (1, 4, 16):
        fit, width = (0.5, 0.05, num_buckets), (0.5, 0.05)
        for _ in range(8):  # each time on a grid around the best, half as wide
            axes = [[max(0.0, fit[i] + width[i] * k / 6) for k in range(-6, 7)] for i in range(2)]
            fit = min(((a, b, num_buckets) for a, b in product(*axes)), key=badness)
            width = (width[0] / 2, width[1] / 2)
        found.append(fit)
    return sorted(found, key=badness)


def playbook() -> Claim:
    guess, *worse = fits()
    others = " and ".join(f"{number(playbook_rate(fit, 256))} ({fit[2]})" for fit in worse)
    figures = [Figure(f"{count} GPUs", rate, playbook_rate(guess, count)) for count, rate in TOKENS_PER_S.items()]
    table = compared("Tokens/s for each GPU", figures)
    rows = [[row[0], *row[1:3], f"{row[3]} (fit)" if i < NUM_FITTED else row[3]] for i, row in enumerate(table.rows)]
    return Claim(
        "The Ultra-Scale Playbook: data parallelism from 8 to 256 GPUs",
        "N. Tazi, F. Mom, H. Zhao, P. Nguyen, M. Mekkouri, L. von Werra, T. Wolf: *The Ultra-Scale Playbook: Training "
        "LLMs on GPU Clusters*, Hugging Face, 2025, section Data Parallelism, plot of throughput (dp_scaling.html).",
        "the numbers in the data of the interactive plot, exact; it ends at 256 GPUs, so 512 is left out",
        "8 GPUs in a machine, and the throughput on 8, 16, 32 and 64 GPUs.",
        "The playbook does not give the model, the batch and the link with this plot. So three parameters are fitted "
        f"to 8 to 64 GPUs: the link's seconds for all bytes ({guess[0]:.3f} of a step), the seconds of a message for "
        f"all buckets ({guess[1]:.4f} of a step), and the number of buckets, of 1, 4 and 16 ({guess[2]}). 128 and 256 "
        "GPUs are predicted blind, and only these are counted.",
        figures[NUM_FITTED:],
        [Table(table.title, table.columns, rows, numbers=table.numbers)],
        "Three points for three parameters: the fit is a description, not an explanation. It puts the loss into "
        "latency, which grows with the number of machines, as the bytes in a ring hardly do. With other numbers of "
        f"buckets it would predict {others} on 256 GPUs, so this agreement is partly luck.",
    )


# --- PyTorch: the gain by overlapping ---------------------------------------------------------------------------------


def largest_gain(buckets: Sequence[ReadyBucket]) -> float:
    """Return the largest part of a step that overlapping saves on 4 machines, over all rates, in percent."""
    whole = [ReadyBucket(sum(bucket.size_bytes for bucket in buckets), 1.0)]

    def gain(rate: float) -> float:
        times = [
            predict_step(profile_of(1.0, each, 4, 8), DATA_PARALLEL, Link(rate, 0.0), 4).seconds
            for each in (buckets, whole)
        ]
        return 100 * (1 - times[0] / times[1])

    total = whole[0].size_bytes
    return max(gain(total * 1.02**power) for power in range(-100, 200))


def overlap() -> Claim:
    limits = [largest_gain(fused(blocks, 25)) for blocks in (RESNET50, BERT_LARGE)]
    rows = [
        [f"{name}, {backend}", f"{published} %", f"at most {limit:.0f} %"]
        for name, limit, gains in (("ResNet-50", limits[0], (38.0, 26.8)), ("BERT", limits[1], (35.2, 21.5)))
        for backend, published in zip(("NCCL", "Gloo"), gains, strict=True)
    ]
    return Claim(
        "PyTorch DDP: the gain by overlapping the exchange with backward",
        "S. Li, Y. Zhao, R. Varma, O. Salpekar, P. Noordhuis, T. Li, A. Paszke, J. Smith, B. Vaughan, P. Damania, "
        "S. Chintala: *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020, arXiv "
        "2006.15704, section Latency Breakdown.",
        "text, in a literal quotation of the paper; its bars have no absolute times",
        "The networks and the backends.",
        "4 machines with 8 GPUs; buckets of 25 MB; BERT-large; a gain is the part of the step that is saved. Batches "
        "and seconds of a step are unknown, so that the model gives only a limit: the largest gain over all rates of "
        "the link. Not counted.",
        [],
        [Table("Time saved", ["", "published", "model"], rows, numbers=["published", "model"])],
        "The exchange can hide only behind backward, and the last bucket cannot hide. The gains with NCCL are near the "
        "limit, so the exchange took about as long as backward. Gloo's are smaller, as a longer "
        "exchange can hide no more.",
    )


# --- the page ---------------------------------------------------------------------------------------------------------

LEFT_OUT = (
    "BytePS, OSDI 2020: the plots of the paper (GPT-2, UGATIT, Transformer). We could read only the project's pages.",
    "Horovod: the plot with 1 to 512 GPUs, and the gain by RDMA. Only the text was read.",
    "The Ultra-Scale Playbook: data parallelism on 512 GPUs. The data of the plot ends at 256.",
    "Streaming DiLoCo, Table 4: the rows with streaming. The model has none.",
    "PyTorch DDP: the plots over bucket sizes and GPUs. Their times are only in pictures.",
)

CANNOT = (
    "**Congestion**: a machine always has its link to itself. **Stragglers**: all ranks compute equally fast.",
    "**Inside a machine**, the exchange is free: no PCIe switch, no NVLink, and NCCL takes nothing from computing.",
    "**Streaming**: with `sync_every`, an exchange waits until it is complete; no fragments, no overlap.",
    "**Parameter servers**, trees and in-network reduction: only rings and a hierarchy of machines.",
    "**The link at its best**: 90 % of the nominal rate is always reached, over TCP as well as RDMA.",
    "**Model and pipeline parallelism**, and optimizers that take longer on fewer ranks.",
)


def claims() -> list[Claim]:
    """Return all claims with their predictions."""
    return [scaling_laws(), streaming_bandwidth(), streaming_hours(), horovod(), byteps(), playbook(), overlap()]


def summary(made: Sequence[Claim]) -> str:
    """Return how many figures the model predicts how well."""

    def counts(which: Sequence[Claim]) -> tuple[list[Figure], str]:
        figures = [figure for claim in which for figure in claim.figures if not figure.is_bound]
        within = [sum(abs(figure.error) <= limit for figure in figures) for limit in (0.10, 0.25)]
        return figures, f"{within[0]} are predicted within 10 % and {within[1]} within 25 %"

    figures, counted = counts(made)
    measured, counted_measured = counts([claim for claim in made if claim.is_measured])
    worst = max(figures, key=lambda figure: abs(figure.error))
    return (
        f"Of {len(figures)} published figures, {counted}. The worst is {worst.what}: {number(worst.published)} "
        f"published, {number(worst.predicted)} predicted ({percent(worst.error)}). Most were simulated by their "
        f"authors: of the {len(measured)} that were measured, {counted_measured}."
    )


def markdown(table: Table) -> Iterator[str]:
    """Yield the lines of a table, its title in the first column's head."""
    columns = list(table.columns)
    yield f"| {' | '.join([table.title, *columns[1:]])} |"
    yield f"|{'|'.join('---:' if name in table.numbers else '---' for name in columns)}|"
    yield from (f"| {' | '.join(map(str, row))} |" for row in table.rows)


def page(made: Sequence[Claim]) -> str:
    """Return docs/predicted.md."""
    lines = [
        "# Published figures, predicted",
        "",
        "<!-- written by `python -m bench.published` -->",
        f"**{summary(made)}**",
        "",
        "`lockstep predict` computes the time of a step from the time of computing, the bytes of each bucket and the "
        "rate of the link. This page puts figures that others have published through the same model "
        "(`lockstep/study/links.py`). Each section names the source, what it gives, and what we had to assume. No "
        "constant was tuned; the one fit is marked. An error is relative to the published figure: +10 % means that the "
        "model predicts a tenth more. `python -m bench.published` writes this page; it takes seconds.",
    ]
    for claim in made:
        lines += ["", f"## {claim.title}", "", claim.source]
        for table in claim.tables:
            lines += ["", *markdown(table)]
        lines += [
            "",
            f"- Read from: {claim.obtained}.",
            f"- Inputs: {claim.inputs}",
            f"- Assumptions: {claim.assumptions}",
            "",
            claim.remarks,
        ]
    lines += ["", "## What the model cannot say", "", *(f"- {line}" for line in CANNOT)]
    lines += ["", "## Left out", "", "Figures that we could not read, or that the model has no means for.", ""]
    return "\n".join([*lines, *(f"- {line}" for line in LEFT_OUT), ""])


def main() -> None:
    """Write the page, and print its tables."""
    made = claims()
    PAGE.write_text(page(made))
    screen = console()
    for claim in made:
        screen.rule(claim.title)
        for table in claim.tables:
            screen.print(table.rich())
    screen.print(summary(made))


if __name__ == "__main__":
    main()
