"""Why two runs differ: experiments on determinism, on the division of a batch, and on the ranks' state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeVar

from lockstep.comm.world import World
from lockstep.study.verify.fingerprint import DOUBLE, EXACT, SINGLE, Kind, Tolerance, Trace, TraceComparison, compare
from lockstep.study.verify.interventions import PRIVATE, Experiment, Given, Off, Subject, Switch
from lockstep.study.verify.reference_loop import StepWeights, explain, measure_weights, perform
from lockstep.train.plan import plural


class Cause(StrEnum):
    """Why a run on N ranks differs from the run in one process; `FIXES` has what to do about it."""

    DATA = "data order"
    WEIGHTING = "sample weighting"
    RANDOM = "random state"
    BATCHNORM = "BatchNorm statistics"
    RATES = "learning-rate rule"
    BUFFERS = "buffers changed on one rank"
    PARAMETERS = "parameters changed in forward"
    OPERATOR = "non-deterministic operator"
    SUM = "a loss that sums instead of averages"
    COUPLED = "samples that depend on each other"
    CLIPPED = "parts clipped before they are summed"
    CLAMPED = "a loss clamped after its mean is taken"
    TERM = "a regulariser scaled by the local batch"
    STATE = "state in a plain attribute"
    OUTSIDE = "parameters that no module registers"
    RANK = "a forward pass that depends on the rank"
    BACKWARD = "a backward pass that depends on the rank"
    MODEL = "a model that depends on the rank"
    # Of scripts.
    BATCH = "a batch that is not divided"
    SAMPLER = "samples that are not divided"
    PADDED = "samples that count twice"
    EPOCH = "the same order in every epoch"
    MASKS = "the same random numbers on all ranks"
    STEPS = "another number of updates"
    SCALED = "a loss or gradients of another size"
    BESIDE = "parameters outside of the wrapper"
    UNREDUCED = "gradients that were not averaged"
    UPDATE = "an update that depends on the rank"
    EVALUATION = "an evaluation of a part"


# ``{num}`` stands for the number of ranks.
FIXES = {
    Cause.DATA: "Make the data set the same on every rank, in the same order, without rank, sets or own generators.",
    Cause.WEIGHTING: "Return lockstep.Loss(total, count) from the loss: the sum of its parts and their number.",
    Cause.RANDOM: "Train with --reproducible {num}: each part of the batch then has random numbers of its own.",
    Cause.BATCHNORM: (
        "Use lockstep.SyncBatchNorm.convert_sync_batchnorm(model) in Task.model, or train with --reproducible {num}, "
        "or use a norm that treats each sample separately, such as GroupNorm."
    ),
    Cause.RATES: "Let the learning rate depend on the global batch only: in Task.optimizer and in Task.schedule.",
    Cause.BUFFERS: "Change buffers and parameters in the same way on every rank: from values that all ranks have.",
    Cause.PARAMETERS: "Keep what forward computes in a buffer, which --reproducible {num} combines, or all-reduce it.",
    Cause.OPERATOR: "Derive all from the seed; torch.use_deterministic_algorithms(True) replaces or names operators.",
    Cause.SUM: "Return the mean over the batch, or lockstep.Loss(total, count) with the number of summands.",
    Cause.COUPLED: "Train with --reproducible {num}, or gather what samples need of each other from all ranks.",
    Cause.CLIPPED: "Clip the gradient of the whole batch with --clip NORM, or train with --reproducible {num}.",
    Cause.CLAMPED: "Clamp the loss of each sample before taking the mean, or train with --reproducible {num}.",
    Cause.TERM: "Scale such a term by a constant, not by the number of samples that the loss is given.",
    Cause.STATE: "Keep what forward remembers in a buffer (register_buffer), which --reproducible {num} combines.",
    Cause.OUTSIDE: "Make them part of the model: nn.ModuleList for a list of modules, nn.ParameterList for parameters.",
    Cause.RANK: "Remove rank and world size from collate, loss and model: the engine already averages over ranks.",
    Cause.BACKWARD: "Remove rank and world size from hooks and autograd functions: the engine averages over ranks.",
    Cause.MODEL: "Build the same model on every rank: do not seed in Task.model, nor use rank and world size there.",
}
OWN_PART = "Train with --reproducible {num}, which combines what all parts write, or all-reduce it yourself."
OWN_GENERATOR = "Draw from the default generators of torch, Python and NumPy, and do not seed them in the task."


@dataclass(frozen=True)
class Diagnosis:
    """One cause that was found.

    Attributes:
        evidence: What was measured, in a sentence or two.
        fix: What to do, in a sentence.
        tried: Whether the fix helped, if it was tried; empty otherwise.
    """

    cause: Cause
    evidence: str
    fix: str
    tried: str = ""


@dataclass(frozen=True)
class Row:
    """One experiment, for the table.

    Attributes:
        turned_off: What was turned off or done instead.
        compared: Which two runs.
        outcome: In a few words.
        same: Whether the two were the same run.
        error: Why it failed, so that it excludes nothing; empty if it did not.
    """

    turned_off: str
    compared: str
    outcome: str
    same: bool
    error: str = ""


T = TypeVar("T")
# The traces of a run, or why it failed.
Outcome = list[Trace] | str


def attempt(run: Callable[..., T], *args: Any) -> T | str:
    """Run an experiment; return the reason if the task fails in it."""
    try:
        return run(*args)
    except Exception as error:  # any error of the task's code: it is already known that the runs differ
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


# Words for the features that depend on the division of the batch.
_OF_DIVISION: dict[Switch, str] = {
    "random": "random state",
    "batchnorm": "BatchNorm statistics",
    "state": "changes of buffers in forward",
    "weights": "sample weighting",
}
# The largest number of experiments: with draws turned off (2), in `study_division` (12), and later.
NUM_LATER = 11
NUM_MOST = 2 + 12 + NUM_LATER


@dataclass
class Progress:
    """Counts the experiments, and reports each before it runs.

    Attributes:
        report: Called with a text; also in the processes, so it must be picklable.
        most: The largest possible number of experiments, as far as is known.
        num: The number of experiments so far.
    """

    report: Callable[[str], None]
    most: int = NUM_MOST
    num: int = 0

    def begin(self, text: str) -> None:
        """Report the next experiment."""
        self.num += 1
        self.report(f"experiment {self.num} of at most {self.most}: {text}")

    def limit(self, num_left: int) -> None:
        """Reduce the largest number to that of so far and ``num_left``."""
        self.most = min(self.most, self.num + num_left)


@dataclass
class Lab:
    """Runs experiments in this process or, collectively, on the ranks of ``world``; each of them once."""

    subject: Subject
    given: Given
    world: World
    progress: Progress
    known: dict[Experiment, Outcome] = field(default_factory=dict)

    def run(self, experiment: Experiment) -> Outcome:
        """Return the traces of this process, or why the experiment failed."""
        if experiment not in self.known:
            if self.world.rank == 0:
                self.progress.begin(self._describe(experiment))
            self.known[experiment] = attempt(perform, self.subject, experiment, self.given, self.world)
        return self.known[experiment]

    def _describe(self, experiment: Experiment) -> str:
        who = plural(self.world.world_size, "rank") if experiment.division == "ranks" else "one process"
        if experiment.reproducible:
            return f"{who}, --reproducible {experiment.reproducible}"
        names = [name for switch, name in _OF_DIVISION.items() if switch in experiment.off]
        shares = ", share after share" if experiment.division == "shares" else ""
        return f"{who}{shares}, {' and '.join(names) or 'nothing'} turned off"


def tolerance_of(subject: Subject) -> Tolerance:
    """Return how far apart numbers may be."""
    return DOUBLE if subject.double else SINGLE


@dataclass
class Findings:
    """The findings of the experiments so far.

    Attributes:
        explained: Whether the runs are the same if all found causes are turned off.
    """

    subject: Subject
    diagnoses: list[Diagnosis] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    explained: bool = True

    def add(self, cause: Cause, evidence: str, advice: str = "") -> None:
        """Add a cause that was found; ``advice`` replaces the usual one."""
        text = (advice or FIXES[cause]).format(num=self.subject.num_devices)
        self.diagnoses.append(Diagnosis(cause, evidence, text))

    def add_failed(self, trial: str, pair: str, reason: str) -> None:
        """Record an experiment that failed, which excludes nothing."""
        self.rows.append(Row(trial, pair, f"failed: {reason}", False, reason))

    def add_draws(self, draws: Iterable[str]) -> None:
        """Add that forward draws random numbers."""
        evidence = f"Forward draws random numbers ({', '.join(draws) or 'random numbers'}), and each part of the batch"
        self.add(Cause.RANDOM, f"{evidence} gets others than the whole.")

    def add_norms(self, norms: Sequence[str]) -> None:
        """Add that batch norm layers use the statistics of a part."""
        where = f" ({', '.join(norms[:3])}{' ...' if len(norms) > 3 else ''})" if norms else ""
        evidence = f"Each rank normalises with the mean and variance of its own part of the batch{where}."
        self.add(Cause.BATCHNORM, evidence)

    def compare(
        self, trial: str, pair: str, expected: Outcome, found: Outcome, tolerance: Tolerance, skip: Sequence[Kind] = ()
    ) -> TraceComparison | None:
        """Compare two runs and record the result, under what was turned off; None if either failed."""
        if isinstance(expected, str) or isinstance(found, str):
            self.add_failed(trial, pair, found if isinstance(found, str) else str(expected))
            return None
        comparison = compare(expected, found, tolerance, skip=skip)
        self.rows.append(Row(trial, pair, str(comparison), comparison.same))
        return comparison


# Do the ranks differ in random draws and batch statistics only? One process and the ranks are run without both.

PLAIN_PAIR = "one process, ranks"


def study_apart(findings: Findings, given: Given, off: Off, one: Outcome, ranks: Outcome) -> tuple[str, ...]:
    """Find out whether only random draws and batch statistics make the ranks differ; return what does, in words.

    Args:
        findings: Gets the findings.
        given: The data of the single process.
        off: What was turned off of these two.
        one: The run of one process.
        ranks: The run of the ranks.
    """
    turned_off = " and ".join(_OF_DIVISION[switch] for switch in _OF_DIVISION if switch in off)
    found = findings.compare(turned_off, PLAIN_PAIR, one, ranks, tolerance_of(findings.subject))
    if found is None or not found.same:
        return ()
    # All processes must draw in the same way, and from generators that --reproducible seeds.
    draws, *others = {trace.draws for traces in (one, ranks) for trace in traces if isinstance(trace, Trace)}
    if others or any(draw.startswith(PRIVATE) for draw in draws):
        return ()
    apart = []
    if draws:
        findings.add_draws(draws)
        apart.append(
            "dropout masks" if all(draw.startswith("dropout") for draw in draws) else "random numbers in forward"
        )
    if "batchnorm" in off:
        findings.add_norms([*given.norms])
        apart.append("batch norm statistics")
    return tuple(apart)


# Does one process give the same run twice? If not, what has to be turned off?

TWICE = "one process, twice"


def study_repetition(findings: Findings, lab: Lab, plain: TraceComparison) -> Off | None:
    """Find what must be turned off so that one process gives the same run twice; None if nothing achieves that.

    Args:
        findings: Gets the findings.
        lab: Of this process alone.
        plain: Two runs with nothing turned off.
    """
    base: Off = frozenset()
    if plain.first is None:
        return base
    findings.rows.append(Row("nothing", TWICE, str(plain), plain.same))
    if plain.of_kind("sample", "size"):
        base |= {"data"}
        findings.add(Cause.DATA, f"One process loads other samples the second time, whatever the seed: {plain.first}.")
    if plain.of_kind("initial parameter", "initial buffer"):
        base |= {"initial"}
        findings.add(Cause.RANDOM, "One process starts from other weights the second time.", FIXES[Cause.MODEL])
    again = plain
    if base:
        one, two = (replace(lab, known={}).run(Experiment("one", base)) for _ in range(2))
        turned_off = " and ".join(found.cause for found in findings.diagnoses)
        again = findings.compare(turned_off, TWICE, one, two, EXACT) or plain
    if again.first is None:
        return base
    findings.add(Cause.OPERATOR, f"The same process, run twice from the same seed, gives another {again.first}.")
    # A difference in rounding only does not hide differences of the ranks.
    if max(again.worst.values()) <= tolerance_of(findings.subject).relative:
        return base
    findings.explained = False
    return None


# Does the division of the batch matter? One process is compared with itself, computing share after share.

PAIR = "whole batch, in shares"
# Always turned off in the process that simulates the ranks: it has no samples and learning rates of its own.
GIVEN: Off = frozenset({"data", "rates"})


def study_division(findings: Findings, lab: Lab, base: Off) -> None:
    """Find what makes the result depend on the division of the batch.

    Args:
        findings: Gets the findings.
        lab: Of this process alone; gets the factors that the shares' losses need.
        base: The features turned off in all runs.
    """
    draws: dict[str, None] = {}
    written: set[str] = set()
    live: set[Switch] = {"batchnorm"} if lab.given.norms else set()

    def divide(off: Off, turned_off: str) -> TraceComparison | None:
        # The whole batch has no weights; shares only have the given data and rates.
        one = lab.run(Experiment("one", (base | off) - {"weights"}))
        shares = lab.run(Experiment("shares", (base | off).union(GIVEN)))
        for trace in (*one, *shares) if isinstance(one, list) and isinstance(shares, list) else ():
            draws.update(dict.fromkeys(trace.draws))
            written.update(trace.written)
            live.update(switch for switch in _OF_DIVISION if switch in trace.live)
        return findings.compare(turned_off, PAIR, one, shares, tolerance_of(findings.subject), skip=["sample"])

    if (plain := divide(frozenset(), "nothing")) is not None and plain.same:
        return
    lab.progress.begin("one process, the weights of its shares")
    weights = attempt(measure_weights, findings.subject, lab.given, base, lab.world.device)
    if isinstance(weights, str):
        findings.add_failed("sample weighting", PAIR, weights)
    if plain is None or isinstance(weights, str):
        findings.explained = False
        return
    lab.given = replace(lab.given, factors={step.step: step.factors for step in weights})
    kind, differing = explain(weights)
    if kind != "right":
        live.add("weights")
    # Several causes may act at the same time. So all are turned off, and then one at a time is turned on.
    suspects: list[Switch] = [switch for switch in _OF_DIVISION if switch in live]
    everything = frozenset(suspects)
    lab.progress.limit(2 * len(suspects) + 2 * (len(suspects) > 1) + NUM_LATER)
    nothing = divide(everything, "all of the below") if suspects else plain
    found: set[Switch] = set()
    # If the two differ for another reason, the experiments prove nothing.
    if is_same := nothing is not None and nothing.same:
        for switch in suspects:
            other = divide(everything - {switch}, f"all but {_OF_DIVISION[switch]}")
            if other is not None and not other.same:
                found.add(switch)
    if "random" in found:
        findings.add_draws(draws)
    if "batchnorm" in found:
        findings.add_norms([*lab.given.norms])
    if "state" in found:
        changed = [one for one in plain.differences if one.kind in ("buffer", "parameter") and one.name in written]
        what = f"the {changed[0].kind} {changed[0].name}" if changed else "a buffer or parameter"
        evidence = f"Forward changes {what} by the part of the batch that a rank has, so each rank has another."
        is_parameter = bool(changed) and changed[0].kind == "parameter"
        findings.add(*((Cause.PARAMETERS, evidence) if is_parameter else (Cause.BUFFERS, evidence, OWN_PART)))
    # Weights of the shares turn off the other kinds of loss.
    if is_named := "weights" in found or (not is_same and kind not in ("", "right", "mean")):
        # Without a kind that fits all steps, each step needs weights of its own.
        _add_weighting(findings, kind or "mean", differing)
    findings.explained &= bool(found) or is_named


# By kind of loss: its cause and the evidence.
_COUPLED = "the gradient of the whole batch does not add up from its parts: a sample's loss depends on the others"
_EVIDENCE = {
    "coupled": (Cause.COUPLED, _COUPLED),
    "single": (Cause.COUPLED, _COUPLED),
    "clipped": (Cause.CLIPPED, "each part of the batch is scaled or clipped by itself, and then they are summed"),
    "clamped": (Cause.CLAMPED, "a loss, of the whole batch or a part, is not zero but has no gradient: it is clamped"),
    "sum": (Cause.SUM, "the loss of the whole batch is the sum of the losses of its parts, not their mean"),
    "mean": (Cause.WEIGHTING, "the parts of the batch ({sizes} samples) count {counted}; the whole needs {wanted}"),
    "term": (Cause.TERM, "a term of the loss depends on the number of samples, but not on the samples"),
    "state": (Cause.STATE, "the same forward gives another loss the second time: it keeps something that is no buffer"),
}


def _add_weighting(findings: Findings, kind: str, step: StepWeights) -> None:
    """Add the cause for a kind of loss; ``step`` is an example."""
    counted, wanted = (" : ".join(f"{round(weight, 6):.3g}" for weight in each) for each in (step.counted, step.wanted))
    cause, text = _EVIDENCE[kind]
    text = text.format(sizes=" + ".join(map(str, step.sizes)), counted=counted, wanted=wanted)
    findings.add(cause, f"At step {step.step} {text}.")


# Does it matter which rank computes a share? The ranks are compared with one process that simulates them.

RANKS_PAIR = "shares in one process, ranks"
NOTHING: Off = frozenset()
EVERYTHING: Off = frozenset({"random", "state", "data", "initial", "rates"})
BUT_RANDOM, BUT_STATE, BUT_RATES = (EVERYTHING - {switch} for switch in ("random", "state", "rates"))
HIDDEN: Off = EVERYTHING | {"place"}

# By the features turned off, or by the name of the fix that is tried: the traces of all ranks (or shares).
Runs = Mapping[Off | str, Outcome]


def study_ranks(
    findings: Findings, base: Off, shares: Runs, ranks: Runs, reference: Sequence[Trace], run: Callable[..., Runs]
) -> None:
    """Find what makes the ranks differ from one process that simulates them.

    Args:
        findings: Gets the findings.
        base: The features turned off in all runs.
        shares: The run of one process with nothing turned off.
        ranks: The same run on the ranks.
        reference: The run of one process on whole batches.
        run: Returns other runs, of ``shares`` or ``ranks``.
    """
    tolerance = tolerance_of(findings.subject)
    num_before = len(findings.diagnoses)

    def compare_with(off: Off, turned_off: str) -> TraceComparison | None:
        return findings.compare(turned_off, RANKS_PAIR, shares[off], ranks[off], tolerance, skip=["sample", "size"])

    plain = compare_with(NOTHING, "nothing")
    if plain is None or not plain.same:
        shares = {**shares, **run("shares", EVERYTHING, BUT_RANDOM, BUT_STATE)}
        # In one process, the rank is always hidden.
        shares[HIDDEN] = shares[EVERYTHING]
        ranks = {**ranks, **run("ranks", EVERYTHING, HIDDEN, BUT_RANDOM, BUT_STATE, BUT_RATES)}
    _add_values(findings, base, ranks, reference)
    if plain is not None and plain.same:
        return
    if (nothing := compare_with(EVERYTHING, "all of the below")) is not None and nothing.first is None:
        if (found := compare_with(BUT_RANDOM, "all but random state")) is not None and found.first is not None:
            evidence = f"Forward draws other random numbers on a rank: without them the {found.first.kind} is the same."
            findings.add(Cause.RANDOM, evidence, OWN_GENERATOR)
        found = compare_with(BUT_STATE, "all but changes of buffers in forward")
        if found is not None and found.first is not None:
            written = found.of_kind("buffer") or found.first
            findings.add(Cause.BUFFERS, f"Forward writes other values on each rank: {written}.")
    elif nothing is not None and nothing.first is not None:
        # Data, weights, rates and draws are the same, but the ranks differ: the reason is the task's own code.
        hidden = compare_with(HIDDEN, "all of that, and rank and world size hidden from the task")
        if nothing.first.kind == "parameter":
            findings.add(Cause.RATES, f"Gradients and rates are as in one process, the update is not: {nothing.first}.")
        elif hidden is not None and hidden.same:
            evidence = f"The {nothing.first} is as in one process once rank and world size are hidden from the task."
            findings.add(Cause.BACKWARD if nothing.first.kind == "gradient" else Cause.RANK, evidence)
        else:
            findings.explained = False
    findings.explained &= len(findings.diagnoses) > num_before


def _add_values(findings: Findings, base: Off, ranks: Runs, reference: Sequence[Trace]) -> None:
    """Add the causes that the runs show directly: other samples, other initial weights, other rates."""

    def compare_values(off: Off) -> TraceComparison | None:
        if isinstance(found := ranks.get(off, ""), str):
            return None
        of_training: tuple[Kind, ...] = ("loss", "gradient", "parameter", "buffer")
        return compare(reference, found, tolerance_of(findings.subject), skip=of_training)

    if (found := compare_values(NOTHING)) is None:
        return
    if (data := found.of_kind("size", "sample")) is not None and "data" not in base:
        findings.add(Cause.DATA, f"The ranks do not train on what one process trains on: {data}.")
    if (start := found.of_kind("initial parameter", "initial buffer")) is not None and "initial" not in base:
        findings.add(Cause.MODEL, f"The ranks start from another model than one process: {start}.")
    # An epoch of another length also changes the schedule, so with other data the rates are compared without that.
    alone = found if data is None else compare_values(BUT_RATES)
    if rate := found.of_kind("learning rate") and alone and alone.of_kind("learning rate"):
        findings.add(Cause.RATES, f"The ranks train with another {rate}.")
