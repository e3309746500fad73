"""What the link did: how long buckets of gradients were on their way, and how many bytes a second that is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from lockstep.study.drawing import BLUE, GREEN, SKY, TEXT, Plot, finish_plot, make_axes
from lockstep.study.report.plotting import STYLES, in_bytes, plain_number
from lockstep.study.report.traffic import Traffic
from lockstep.study.report.view import View

_BUSY = 2.0
"""From here on a median trip is worth a sentence, in times of the fastest."""


def draw_latency(views: Sequence[View]) -> Plot | None:
    """Return how the buckets' trips are distributed, beside the fastest of them; all of them, the slowest too."""
    known = [(view, view.traffic) for view in views if view.traffic is not None]
    if not known:
        return None
    figure, axes = make_axes(2.8)
    words, notes = [], []
    for (view, traffic), (colour, _) in zip(known, STYLES, strict=False):
        times = sorted(trip.wire_s * 1e3 for trip in traffic.trips)
        best_ms = min(traffic.best_s.values()) * 1e3
        shares = [100 * (place + 1) / len(times) for place in range(len(times))]
        axes.step(times, shares, where="post", color=colour, linewidth=1.8, label=view.named("buckets"))
        axes.axvline(best_ms, color=GREEN, linestyle=":", linewidth=1.6, label=view.named("the fastest"))
        words.append(
            view.named(
                f"{len(times)} trips of {traffic.num_buckets} buckets, median {traffic.median_s * 1e3:.3g}, best "
                f"{best_ms:.3g}, slowest {traffic.slowest.wire_s * 1e3:.3g} in step {traffic.slowest.step + 1}"
            )
        )
        notes.append(view.named(_note(traffic)))
    axes.set_xscale("log")
    for which in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        which(plain_number)
    axes.set_xlabel("milliseconds a bucket is on its way")
    axes.set_ylabel("percent of buckets, at most")
    axes.grid(linewidth=0.6)
    axes.legend(frameon=False, loc="lower right")
    axes.tick_params(which="both", color=TEXT)
    alt = f"Share of buckets over milliseconds: {'; '.join(words)}."
    return finish_plot("Communication", alt, figure, " ".join(notes))


def _note(traffic: Traffic) -> str:
    size = in_bytes(traffic.total_bytes)
    number = f"{traffic.num_buckets} buckets" if traffic.num_buckets > 1 else "one bucket"
    text = f"In each step, {size} of gradients travel in {number}."
    best_s = median(traffic.best_s.values())
    times = traffic.median_s / best_s if best_s else 0.0
    return f"{text} A trip takes {times:.1f} times what the fastest took." if times >= _BUSY else text


def draw_bandwidth(views: Sequence[View]) -> Plot | None:
    """Return the bus bandwidth of each bucket; None with one of them, whose figures are in the table."""
    known = [(view, view.traffic) for view in views if view.traffic is not None and view.traffic.num_buckets > 1]
    if len(known) != 1:  # bars of two runs hide each other; the tables have both
        return None
    view, traffic = known[0]
    figure, axes = make_axes(2.3)
    usual = [bus_bytes_per_s(traffic, number, len(view.run.ranks)) / 1e9 for number in range(traffic.num_buckets)]
    best = [
        bus_bytes_per_s(traffic, number, len(view.run.ranks), of_best=True) / 1e9
        for number in range(traffic.num_buckets)
    ]
    places = range(traffic.num_buckets)
    axes.bar(places, best, width=0.8, color=SKY, edgecolor=TEXT, linewidth=0.5, label="fastest trip")
    axes.bar(places, usual, width=0.5, color=BLUE, label="median trip")
    axes.set_xlabel("bucket, in the order in which they leave")
    axes.set_ylabel("GB/s on the bus")
    axes.grid(axis="y", linewidth=0.6)
    axes.legend(frameon=False, ncols=2, loc="lower left", bbox_to_anchor=(-0.1, 1.0), handlelength=1.2)
    low, high = min(usual), max(usual)
    alt = (
        f"Bars of bus bandwidth by bucket: at the median trip from {low:.3g} GB/s (bucket {usual.index(low)}) to "
        f"{high:.3g} (bucket {usual.index(high)})."
    )
    return finish_plot("Bus bandwidth by bucket", alt, figure)


def bus_bytes_per_s(traffic: Traffic, number: int, num_ranks: int, *, of_best: bool = False) -> float:
    """Return the bus bandwidth of a bucket at its median trip, or its best: 2 (n - 1) / n of its bytes over the time.

    Zero if the time is.
    """
    times = [trip.wire_s for trip in traffic.trips if trip.number == number]
    seconds = min(times) if of_best else median(times)
    return 2 * (num_ranks - 1) / num_ranks * traffic.sizes_bytes[number] / seconds if seconds > 0 else 0.0
