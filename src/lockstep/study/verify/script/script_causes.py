"""Why a script differs on N ranks: what its loaders and schedules show, and what the numbers show."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from lockstep.base.activity import plural
from lockstep.study.verify.fingerprint import (
    Difference,
    StepTrace,
    Trace,
    TraceComparison,
    compare,
    distance,
)
from lockstep.study.verify.script.trace import SHAPES, Pass, ScriptStep, ScriptTrace
from lockstep.study.verify.verdict import FIXES_OF_SCRIPT, Cause, Diagnosis

_DIVIDE_ONCE = "Divide it once: batch_size=BATCH // world_size."
_SAMPLER_ON_ONE = (
    "Use the DistributedSampler, or lockstep.prepare, on one rank, too: it has the same order on any number."
)
_OWN_DIVISION = (
    "The script divides the data in its own way: to get the batches of one process, let every rank choose the samples "
    "of the whole batch from one seed, and take [rank::world_size] of them, or use lockstep.prepare. If the order need "
    "not be the same, nothing has to be fixed."
)


def diagnosis(cause: Cause, evidence: str) -> Diagnosis:
    """Return a cause with the advice for a script."""
    return Diagnosis(cause, evidence, FIXES_OF_SCRIPT[cause])


def numbers_of(one: ScriptTrace, ranks: Sequence[ScriptTrace]) -> tuple[int, ...]:
    """Return the numbers of the updates that all have made."""
    return tuple(range(min(len(trace.steps) for trace in (one, *ranks))))


def compare_traces(one: ScriptTrace, ranks: Sequence[ScriptTrace]) -> TraceComparison:
    """Compare the updates of one rank with those of N."""
    numbers = numbers_of(one, ranks)
    both = _together([one], numbers), _together(ranks, numbers)
    comparison = compare(*both, one.tolerance, skip=("gradient",) if _are_averaged_in_updates(ranks, numbers) else ())
    # A script may scale the loss of a part as it likes, if its gradients are right.
    is_same = all(difference.kind == "loss" for difference in comparison.differences)
    return replace(comparison, differences=()) if is_same else comparison


def _are_averaged_in_updates(ranks: Sequence[ScriptTrace], numbers: Sequence[int]) -> bool:
    """Return whether optimizers average: gradients differ on the ranks before updates, no parameter does after them."""
    of_steps = [[rank.steps[number] for rank in ranks] for number in numbers]
    return any(_unequal(s, "gradient") for s in of_steps) and not any(_unequal(s, "parameter") for s in of_steps)


def _together(ranks: Sequence[ScriptTrace], numbers: Sequence[int]) -> list[Trace]:
    """Return the traces of the ranks for a comparison: each with the loss of all, the first with the samples of all."""
    steps: list[list[ScriptStep]] = [[] for _ in ranks]
    for number in numbers:
        of_ranks = [rank.steps[number] for rank in ranks]
        counts = [max(1, len(step.indices)) for step in of_ranks]
        loss = sum(step.loss * count for step, count in zip(of_ranks, counts, strict=True)) / sum(counts)
        # By index if the values of a sample vary; sorted, as ranks may take those of a batch in turn.
        parts = [step.indices if ranks[0].is_augmented or ranks[0].is_padded else step.samples for step in of_ranks]
        samples = tuple(sorted(sample for part in parts for sample in part))
        trained = [pass_.is_stream for pass_ in ranks[0].passes if pass_.is_training]
        if ranks[0].is_padded and (any(trained) or not trained):
            # Only their number is known; without a loader not even that, as the batch may be another dimension.
            samples = (b"",) * len(samples) * any(trained)
        for rank, step in enumerate(of_ranks):
            steps[rank].append(replace(step, loss=loss, samples=() if rank else samples))
    return [replace(rank, steps=tuple(rank_steps)) for rank, rank_steps in zip(ranks, steps, strict=True)]


# What loaders, generators and schedules show, whatever the numbers are.


def structural(one: ScriptTrace, ranks: Sequence[ScriptTrace]) -> Iterator[Diagnosis]:
    """Yield the causes that can be seen without comparing gradients."""
    comparison = compare_traces(one, ranks)
    who = plural(len(ranks), "rank")
    samples = list(_of_samples(one, ranks))
    yield from samples[:1]
    for before, after in _consecutive(ranks[0].passes):
        if before.shuffles and before.indices == after.indices and len(before.indices) > 1:
            yield diagnosis(Cause.EPOCH, f"Two passes over {before.dataset} have the same shuffled order.")
            break
    if len(ranks) > 1 and (evidence := _equal_draws(ranks)):
        yield diagnosis(Cause.MASKS, evidence)
    if start := comparison.of_kind("initial parameter"):
        yield diagnosis(Cause.MODEL, f"The ranks start from other weights than one process: {start}.")
    if rate := comparison.of_kind("learning rate"):
        yield diagnosis(Cause.RATES, f"The ranks train with another {rate}.")
    counts = [len(rank.steps) for rank in ranks]
    if not samples and {*counts} != {len(one.steps)}:
        text = " and ".join(f"rank {rank} {count}" for rank, count in enumerate(counts))
        yield diagnosis(Cause.STEPS, f"One process makes {len(one.steps)} updates, {text}.")
    evaluated = [[pass_ for pass_ in rank.passes if not pass_.is_training and pass_.indices] for rank in (one, *ranks)]
    for whole, *parts in zip(*evaluated, strict=False):
        if problem := problem_of_evaluation(whole, parts):
            yield diagnosis(Cause.EVALUATION, f"An evaluation of {whole.dataset} on {who}: {problem}.")
            break


def _consecutive(passes: Sequence[Pass]) -> Iterator[tuple[Pass, Pass]]:
    """Yield each two passes for training over the same data set."""
    trained = [pass_ for pass_ in passes if pass_.is_training]
    yield from (pair for pair in pairwise(trained) if pair[0].dataset == pair[1].dataset)


def _equal_draws(ranks: Sequence[ScriptTrace]) -> str:
    """Return where all ranks draw the same numbers from torch's generators, or for samples from any; or an empty text.

    Forward may draw from ``random`` what all ranks must decide alike.
    """
    ends = "and the generators of all ranks are equal."
    for number in numbers_of(ranks[0], ranks):
        if _have_equal([rank.steps[number].drawn for rank in ranks], ("torch", "device")):
            return f"At step {number}, forward draws random numbers, {ends}"
    for passes in zip(*(rank.passes for rank in ranks), strict=False):
        if ranks[0].is_augmented and _have_equal([pass_.drawn for pass_ in passes], passes[0].drawn):
            return f"Samples of {passes[0].dataset} draw random numbers when they are loaded, {ends}"
    return ""


def _have_equal(drawn: Sequence[dict[str, bytes]], names: Iterable[str]) -> bool:
    return any(name in drawn[0] and all(other.get(name) == drawn[0][name] for other in drawn) for name in names)


def _of_samples(one: ScriptTrace, ranks: Sequence[ScriptTrace]) -> Iterator[Diagnosis]:
    """Yield why the ranks train on other samples than one process; the first says it best."""
    whole, parts = len(one.steps[0].indices), [len(rank.steps[0].indices) for rank in ranks]
    numbers, who = numbers_of(one, ranks), plural(len(ranks), "rank")
    of_steps = [[sorted(rank.steps[number].samples) for rank in ranks] for number in numbers]
    if len(ranks) > 1 and all(lists[0] and all(part == lists[0] for part in lists) for lists in of_steps):
        evidence = (
            f"All ranks train on the same samples: {parts[0]} in the first update, where one process has {whole}."
        )
        yield diagnosis(Cause.SAMPLER, evidence)
    for expected, *passes in passes_of(one, ranks):
        for rank, pass_ in enumerate(passes):
            if not (one.is_augmented or one.is_padded) and (wrong := other_samples(expected, pass_)):
                evidence = f"Sample {wrong[0]} of {pass_.dataset} on rank {rank} is not that of one process."
                yield diagnosis(Cause.DATA, evidence)
    is_known = not one.is_padded or any(pass_.is_training for pass_ in ranks[0].passes)
    if sum(parts) == len(ranks) * whole and len(ranks) > 1 and is_known:
        evidence = f"An update takes {sum(parts)} samples instead of {whole}: {parts[0]} on each of {who}."
        yield diagnosis(Cause.BATCH, evidence)
    if sum(parts) * len(ranks) == whole and len(ranks) > 1:
        evidence = f"An update takes {sum(parts)} samples instead of {whole}: the batch is divided twice."
        is_prepared = any(pass_.is_prepared for pass_ in ranks[0].passes)
        advice = "Give the loader the batch size of all ranks together: lockstep.prepare divides each batch."
        yield Diagnosis(Cause.BATCH, evidence, advice if is_prepared else _DIVIDE_ONCE)
    for expected, *passes in passes_of(one, ranks):
        counts, wanted = Counter(index for pass_ in passes for index in pass_.indices), Counter(expected.indices)
        twice = sum(max(0, count - max(1, wanted[index])) for index, count in counts.items())
        never = len(wanted.keys() - counts.keys())
        if not twice and counts.total() == wanted.total():
            continue  # of an epoch that drops the last samples, the rest may be others
        if 0 < twice < len(ranks) and not never:
            yield diagnosis(Cause.PADDED, f"{plural(twice, 'sample')} of {expected.dataset} count twice in an epoch.")
        elif twice and never:
            evidence = f"In an epoch, {never} of {len(wanted)} samples are on no rank, and {twice} on more than one."
            yield diagnosis(Cause.SAMPLER, evidence)
        elif never:
            yield diagnosis(Cause.DATA, f"In an epoch, {never} of {len(wanted)} samples are on no rank.")
    sample = compare_traces(one, ranks).of_kind("sample")
    draws = one.is_augmented or any(step.drawn for step in one.steps)
    if sample and draws and any(pass_.is_prepared for pass_ in one.passes):
        return  # on one rank, its sampler and forward draw from one generator: so without draws, the order may be equal
    if sample and sum(parts) == whole and any(True for _ in passes_of(one, ranks)):
        evidence = f"In an epoch, the ranks use each sample as often as one process, in another order: {sample}."
        is_divided = any(pass_.is_divided for pass_ in ranks[0].passes)
        yield Diagnosis(Cause.DATA, evidence, _SAMPLER_ON_ONE if is_divided else _OWN_DIVISION)
    elif sample:
        evidence = f"The ranks do not train on what one process trains on: {sample}."
        advice = FIXES_OF_SCRIPT[Cause.DATA]
        if not any(pass_.is_divided or pass_.is_prepared for pass_ in ranks[0].passes):
            has_loader = any(pass_.is_training for pass_ in ranks[0].passes)
            advice = f"{advice} {_OWN_DIVISION}" if has_loader else _OWN_DIVISION
        yield Diagnosis(Cause.DATA, evidence, advice)


def passes_of(one: ScriptTrace, ranks: Sequence[ScriptTrace]) -> Iterator[tuple[Pass, ...]]:
    """Yield each pass that trains, of one process and of each rank, if all have the same data set.

    A rank may also have a data set of its own, with its part of the samples.
    """
    trained = [[pass_ for pass_ in rank.passes if pass_.is_training] for rank in (one, *ranks)]
    for passes in zip(*trained, strict=False):
        if len({pass_.dataset for pass_ in passes}) == 1 and not passes[0].is_stream:
            yield passes


def other_samples(expected: Pass, actual: Pass) -> list[Any]:
    """Return the indices at which two passes have loaded different samples."""
    return [index for index, digest in actual.contents.items() if expected.contents.get(index, digest) != digest]


def are_padded(one: ScriptTrace, ranks: Sequence[ScriptTrace]) -> bool:
    """Return whether samples differ on the ranks in their shapes alone, as if padded with the rest of their batch."""
    has_others = False
    for number in numbers_of(one, ranks):
        whole = {*one.steps[number].samples}
        others = {sample for rank in ranks for sample in rank.steps[number].samples} - whole
        if {sample[:SHAPES] for sample in others} & {sample[:SHAPES] for sample in whole}:
            return False
        has_others |= bool(others)
    return has_others


def problem_of_evaluation(whole: Pass, parts: Sequence[Pass]) -> str:
    """Return what is wrong with an evaluation, in which one process has read all; empty if nothing is."""
    wanted, read = {*whole.indices}, [{*part.indices} for part in parts]
    if whole.is_stream or any(len(part) >= len(wanted) for part in read):
        return ""
    # Ranks may have data sets of their own, with other samples at the same indices.
    is_same = all(part.dataset == whole.dataset for part in parts)
    num = len(set[object]().union(*read)) if is_same else sum(map(len, read))
    if num < len(wanted):
        return f"{num} of {len(wanted)} samples are evaluated"
    if any(part.is_combined for part in parts):
        return ""
    sizes = " and ".join(str(len(part)) for part in read)
    return f"each evaluates its part ({sizes} of {len(wanted)} samples), and the results are not combined"


# What the numbers show.

# Of these, and where ranks differ, the numbers follow.
EXPLAINS = {Cause.BATCH, Cause.SAMPLER, Cause.PADDED, Cause.DATA, Cause.MODEL, Cause.RATES, Cause.STEPS}
EXPLAINS |= {Cause.BESIDE, Cause.UNREDUCED, Cause.UPDATE, Cause.CLIPPED, Cause.BUFFERS, Cause.STATE}


def of_ranks(ranks: Sequence[ScriptTrace], norms: Collection[str]) -> Iterator[Diagnosis]:
    """Yield why ranks do not hold the same: their gradients at an update, their attributes, their buffers."""
    starts = len({tuple(tensor.digest for tensor in rank.initial["parameter"].values()) for rank in ranks}) > 1
    for number in numbers_of(ranks[0], ranks):
        steps = [rank.steps[number] for rank in ranks]
        unequal = _unequal(steps, "gradient")
        if outside := [name for name in steps[0].outside if name in unequal]:
            evidence = f"The optimizer updates {', '.join(outside[:3])}, which no data-parallel wrapper has."
            yield diagnosis(Cause.BESIDE, evidence)
        elif unequal and not _are_averaged_in_updates(ranks, [number]):
            reason = ": forward was called on the module in the wrapper, or backward in no_sync" * steps[0].bypassed
            text = f"The gradient of {unequal[0]} differs between the ranks at the update of step {number}{reason}."
            yield diagnosis(Cause.UNREDUCED, text)
        has_same = not unequal and not starts and all(step.rates == steps[0].rates for step in steps)
        if has_same and (names := _unequal(steps, "parameter")):
            text = f"{names[0]} differs between the ranks after the update of step {number}, its gradient does not."
            yield diagnosis(Cause.UPDATE, text)
        if len({step.before_clipping for step in steps}) > 1 and not unequal:
            text = f"At step {number}, each rank clips its own gradients, and then they are averaged."
            yield diagnosis(Cause.CLIPPED, text)
        # Batch norm's statistics differ until the next forward.
        buffers = [
            name for name in _unequal(steps, "buffer") if name.rpartition(".")[0].rpartition(":")[2] not in norms
        ]
        if buffers:
            yield diagnosis(Cause.BUFFERS, f"{buffers[0]} differs between the ranks at step {number}.")
        for name, value in steps[0].attributes.items():
            others = [step.attributes.get(name) for step in steps[1:]]
            begun = [rank.steps[0].attributes.get(name) for rank in ranks]
            if any(other not in (None, value) for other in others) and begun != [value, *others]:
                text = f"The attribute {name} has other values on the ranks at step {number}, and changes."
                yield diagnosis(Cause.STATE, text)


def of_means(one: ScriptTrace, ranks: Sequence[ScriptTrace], first: Difference) -> Iterator[Diagnosis]:
    """Yield why gradients or updates, which are the same on all ranks, are not those of one process."""
    assert first.step is not None
    number, expected = first.step, one.steps[first.step]
    steps = [rank.steps[number] for rank in ranks]
    if buffer := _changed_buffer(one, ranks[0], number):
        text = f"{buffer} is not that of one process at step {number}: it follows from the samples of one rank."
        yield diagnosis(Cause.BUFFERS, text)
        return
    sizes = [len(step.indices) for step in steps]
    losses = [step.loss for step in steps]
    if first.kind == "parameter":
        yield diagnosis(Cause.UPDATE, f"Gradients and rates are those of one process, the update is not: {first}.")
    elif first.kind == "gradient" and (factor := _factor(expected, steps[0])) is not None:
        mean = sum(losses) / len(losses) / expected.loss if expected.loss else 1.0
        ends = " < ".join(steps[0].operations[:3])
        text = f"At step {number}, gradients are {factor:.3g} times those of one process, and losses {mean:.3g} times"
        yield diagnosis(Cause.SCALED, f"{text}. The loss ends in {ends} (the last operation first).")
    elif first.kind == "gradient" and expected.num_backwards != steps[0].num_backwards:
        text = f"At step {number}, one process accumulates {expected.num_backwards} micro-batches, and a rank "
        text += f"{steps[0].num_backwards}: each counts alike, however many samples it has."
        yield diagnosis(Cause.WEIGHTING, text)
    elif first.kind == "gradient" and len({*sizes}) > 1:
        text = f"At step {number}, the ranks have {' and '.join(map(str, sizes))} samples, but their means count alike."
        yield diagnosis(Cause.WEIGHTING, text)
    elif first.kind == "gradient" and (times := _times_weights(one, number, steps[0])) is not None:
        text = (
            f"At step {number}, gradients differ by {times:.3g} times the weights: a penalty counts {len(ranks)} times"
        )
        yield diagnosis(Cause.TERM, f"{text}, or not at all.")
    elif first.kind == "gradient" and min(losses) < expected.loss < max(losses):
        text = f"At step {number}, the loss of one process is {expected.loss:.4g}, and those of the ranks are "
        text += f"{' and '.join(f'{loss:.4g}' for loss in losses)}: the parts do not count as they do in the whole."
        text += " Samples are padded to the longest of their batch, and padding may count, too." * one.is_padded
        yield diagnosis(Cause.WEIGHTING, text)
    elif first.kind == "gradient":
        text = f"At step {number}, samples and weights are those of one process, but the losses of the ranks, "
        text += f"{' and '.join(f'{loss:.4g}' for loss in losses)}, are not parts of its loss, {expected.loss:.4g}."
        yield diagnosis(Cause.COUPLED, text)


def _changed_buffer(one: ScriptTrace, rank: ScriptTrace, number: int) -> str:
    """Return the name of a buffer of a trained model that is first another one in this step; empty if there is none."""
    wanted, found = (trace.steps[number].tensors["buffer"] for trace in (one, rank))
    others = [
        name
        for name, tensor in wanted.items()
        # Copies of the model, such as averages, have the name of their class.
        if not re.match("[A-Za-z_]+:", name) and name.rpartition(".")[0].rpartition(":")[2] not in one.norms
        if name in found and distance(found[name], tensor) > one.tolerance.relative * tensor.norm
    ]
    return others[0] if others else ""


def _unequal(traces: Sequence[StepTrace], kind: str) -> list[str]:
    """Return the names of the tensors that do not have the same bits on all ranks."""
    tensors = traces[0].tensors[kind]
    others = [trace.tensors[kind] for trace in traces[1:]]
    return [name for name, t in tensors.items() if any(name in o and o[name].digest != t.digest for o in others)]


def _times_weights(one: ScriptTrace, number: int, actual: StepTrace) -> float | None:
    """Return how many times the weights the gradients differ by; None if they do in another way."""
    before = one.steps[number - 1].tensors if number else one.initial
    wanted, gradients = one.steps[number].tensors["gradient"], actual.tensors["gradient"]
    pairs = [
        (gradients[name].values - wanted[name].values, weights.values)
        for name, weights in before["parameter"].items()
        # A penalty may leave some out, such as biases.
        if name in wanted and name in gradients and distance(gradients[name], wanted[name]) > 1e-3 * wanted[name].norm
    ]
    if not pairs:
        return None
    apart, weights = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    times = float(weights @ apart / (weights @ weights).clamp(min=1e-30))
    return times if float((apart - times * weights).norm()) < 0.05 * float(apart.norm()) else None


def _factor(expected: StepTrace, actual: StepTrace) -> float | None:
    """Return the factor by which all gradients differ; None if there is none, or if it is 1."""
    reference, gradients = (step.tensors["gradient"] for step in (expected, actual))
    if not reference or reference.keys() != gradients.keys():
        return None
    wanted, gradient = (torch.cat([tensors[name].values for name in reference]) for tensors in (reference, gradients))
    factor = float(wanted @ gradient / (wanted @ wanted).clamp(min=1e-30))
    is_scaled = float((gradient - factor * wanted).norm()) < 0.01 * float(gradient.norm())
    return factor if is_scaled and abs(factor - 1) > 0.01 else None
