"""Why two runs differ: experiments on determinism, on the division of a batch, and on the ranks' state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from lockstep.base.activity import plural
from lockstep.comm.world import World
from lockstep.study.verify.fingerprint import EXACT, Kind, Tolerance, Trace, TraceComparison, compare
from lockstep.study.verify.interventions import PRIVATE, Division, Experiment, Given, Off, Subject, Switch
from lockstep.study.verify.reference_loop import StepWeights, explain, measure_weights, perform
from lockstep.study.verify.verdict import FIXES_OF_TASK, Cause, Diagnosis, Row, by_design

OWN_PART = "Train with --reproducible {num}, which combines what all parts write, or all-reduce it yourself."
OWN_GENERATOR = "Draw from the default generators of torch, Python and NumPy, and do not seed them in the task."

T = TypeVar("T")
# The traces of a run, or why it failed.
Outcome = list[Trace] | str
# Returns the traces of one process, its shares, or all ranks, with these features turned off or in reproducible mode.
Run = Callable[[Off | None, Division], Outcome]


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
NOTHING: Off = frozenset()
# Always turned off in the process that simulates the ranks: it has no samples and learning rates of its own.
GIVEN: Off = frozenset({"data", "rates"})


def in_words(off: Off) -> str:
    """Return the features of a division that are turned off."""
    return ", ".join(words for switch, words in _OF_DIVISION.items() if switch in off) or "nothing"


@dataclass
class Lab:
    """Runs experiments, counts them, and reports each before it runs.

    Attributes:
        report: Called with a text, in the process of the experiment.
        base: The features turned off in all of them.
        num: The number of experiments so far.
        most: The largest number that it may become, as far as is known.
    """

    subject: Subject
    given: Given
    report: Callable[[str], None]
    base: Off = NOTHING
    num: int = 0
    most: int = 24

    def begin(self, text: str, world: World) -> None:
        """Count and report the next experiment."""
        self.num += 1
        if world.rank == 0:
            self.report(f"experiment {self.num} of at most {self.most}: {text}")

    def run(self, off: Off | None, division: Division, world: World) -> Outcome:
        """Return the traces of this process, or why it failed; ``off`` is None for reproducible mode.

        Collective for ``ranks``: every rank of ``world``.
        """
        num, given = self.subject.num_devices, GIVEN if division == "shares" else NOTHING
        setup = f"--reproducible {num}" if off is None else f"{in_words(off)} turned off"
        who = {"one": "one process", "shares": "one process, share after share"}.get(division, plural(num, "rank"))
        self.begin(f"{who}, {setup}", world)
        experiment = Experiment(division, self.base | given | (off or NOTHING))
        if off is None:
            experiment = Experiment(division, self.base | GIVEN | {"initial"}, reproducible=num, watched=False)
        return attempt(perform, self.subject, experiment, self.given, world)


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
        text = (advice or FIXES_OF_TASK[cause]).format(num=self.subject.num_devices)
        self.diagnoses.append(Diagnosis(cause, evidence, text))

    def add_by_design(self, draws: Sequence[str], norms: Sequence[str]) -> tuple[str, ...]:
        """Add what makes ranks differ by design, and return it in words."""
        found = [*by_design(draws, norms)]
        for _, cause, evidence in found:
            self.add(cause, evidence)
        return tuple(words for words, *_ in found)

    def compare(
        self, trial: str, pair: str, expected: Outcome, actual: Outcome, tolerance: Tolerance, skip: Sequence[Kind] = ()
    ) -> TraceComparison | None:
        """Compare two runs and record the result, under what was turned off; None if either failed."""
        if isinstance(expected, str) or isinstance(actual, str):
            self.rows.append(Row.failed(trial, pair, actual if isinstance(actual, str) else str(expected)))
            return None
        comparison = compare(expected, actual, tolerance, skip=skip)
        self.rows.append(Row(trial, pair, str(comparison), comparison.same))
        return comparison


# Do the ranks differ in random draws and batch statistics only? One process and the ranks are run without both.

PLAIN_PAIR = "one process, ranks"


def study_apart(findings: Findings, norms: Mapping[str, str], run: Run) -> tuple[str, ...]:
    """Find out whether only random draws and batch statistics make the ranks differ; return what does, in words.

    Args:
        findings: Gets the findings.
        norms: Batch norm layers; layers that use the statistics of all ranks stay as they are.
        run: Runs an experiment.
    """
    local = [name for name, kind in norms.items() if "Sync" not in kind]
    off: Off = frozenset({"random", "batchnorm"}) if local else frozenset({"random"})
    one = run(off, "one")
    draws = () if isinstance(one, str) else one[0].seen["random"]
    # --reproducible does not seed private generators.
    if any(draw.startswith(PRIVATE) for draw in draws) or not (draws or local):
        return ()
    ranks = run(off, "ranks")
    comparison = findings.compare(in_words(off), PLAIN_PAIR, one, ranks, findings.subject.tolerance)
    # All must draw in the same way: a constant hides how likely it was.
    is_alike = all(not isinstance(one, str) and one.seen["random"] == draws for one in ranks)
    return findings.add_by_design(draws, local) if is_alike and comparison is not None and comparison.same else ()


# Does one process give the same run twice? If not, what has to be turned off?

TWICE = "one process, twice"


def study_repetition(findings: Findings, lab: Lab, plain: TraceComparison, world: World) -> Off | None:
    """Find what must be turned off so that one process gives the same run twice; None if nothing achieves that.

    Args:
        findings: Gets the findings.
        lab: Runs the experiments.
        plain: Two runs with nothing turned off.
        world: Of this process alone.
    """
    base = NOTHING
    if plain.first is None:
        return base
    findings.rows.append(Row("nothing", TWICE, str(plain), plain.same))
    if plain.of_kind("sample", "size"):
        base |= {"data"}
        findings.add(Cause.DATA, f"One process loads other samples the second time, whatever the seed: {plain.first}.")
    if plain.of_kind("initial parameter", "initial buffer"):
        base |= {"initial"}
        findings.add(Cause.RANDOM, "One process starts from other weights the second time.", FIXES_OF_TASK[Cause.MODEL])
    again = plain
    if base:
        one, two = (lab.run(base, "one", world) for _ in range(2))
        turned_off = " and ".join(diagnosis.cause for diagnosis in findings.diagnoses)
        again = findings.compare(turned_off, TWICE, one, two, EXACT) or plain
    if again.first is None:
        return base
    findings.add(Cause.OPERATOR, f"The same process, run twice from the same seed, gives another {again.first}.")
    # A difference in rounding only does not hide differences of the ranks.
    if max(again.worst.values()) <= findings.subject.tolerance.relative:
        return base
    findings.explained = False
    return None


# Does the division of the batch matter? One process is compared with itself, computing share after share.

PAIR = "whole batch, in shares"


def study_division(findings: Findings, lab: Lab, world: World) -> Outcome:
    """Find what makes the result depend on the division of the batch; return the plain run of the shares.

    Args:
        findings: Gets the findings.
        lab: Runs the experiments; gets the factors that the shares' losses need.
        world: Of this process alone.
    """
    traces: list[Trace] = []
    others: set[Switch] = {"batchnorm"} if lab.given.norms else set()

    @cache
    def run(off: Off, division: Division) -> Outcome:
        return lab.run(off, division, world)

    def divide(off: Off, turned_off: str) -> TraceComparison | None:
        one, shares = run(off - {"weights"}, "one"), run(off, "shares")  # the whole batch has no weights
        traces.extend(trace for outcome in (one, shares) if isinstance(outcome, list) for trace in outcome)
        return findings.compare(turned_off, PAIR, one, shares, findings.subject.tolerance, skip=["sample"])

    if (plain := divide(NOTHING, "nothing")) is not None and plain.same:
        return run(NOTHING, "shares")
    lab.begin("one process, the weights of its shares", world)
    weights = attempt(measure_weights, findings.subject, lab.given, lab.base, world.device)
    if isinstance(weights, str):
        findings.rows.append(Row.failed("sample weighting", PAIR, weights))
    if plain is None or isinstance(weights, str):
        findings.explained = False
        return run(NOTHING, "shares")
    lab.given = replace(lab.given, factors={step.step: step.factors for step in weights})
    kind, differing = explain(weights)
    if kind != "right":
        others.add("weights")
    # Several causes may act at the same time. So all are turned off, and then one at a time is turned on.
    live = others | {switch for trace in traces for switch, names in trace.seen.items() if names}
    suspects: list[Switch] = [switch for switch in _OF_DIVISION if switch in live]
    everything = frozenset(suspects)
    nothing = divide(everything, "all of the below") if suspects else plain
    switches: set[Switch] = set()
    # If the two differ for another reason, the experiments prove nothing.
    if is_same := nothing is not None and nothing.same:
        for switch in suspects:
            other = divide(everything - {switch}, f"all but {_OF_DIVISION[switch]}")
            if other is not None and not other.same:
                switches.add(switch)
    draws = sorted({draw for trace in traces for draw in trace.seen["random"]}) if "random" in switches else ()
    norms = [*lab.given.norms] or ["F.batch_norm"]
    findings.add_by_design(draws, norms if "batchnorm" in switches else ())
    if "state" in switches:
        written = {name for trace in traces for name in trace.seen["state"]}
        changed = [one for one in plain.differences if one.kind in ("buffer", "parameter") and one.name in written]
        what = f"the {changed[0].kind} {changed[0].name}" if changed else "a buffer or parameter"
        evidence = f"Forward changes {what} by the part of the batch that a rank has, so each rank has another."
        is_parameter = bool(changed) and changed[0].kind == "parameter"
        findings.add(*((Cause.PARAMETERS, evidence) if is_parameter else (Cause.BUFFERS, evidence, OWN_PART)))
    # Weights of the shares turn off the other kinds of loss.
    if is_named := "weights" in switches or (not is_same and kind not in ("", "right", "mean")):
        # Without a kind that fits all steps, each step needs weights of its own.
        _add_weighting(findings, kind or "mean", differing)
    findings.explained &= bool(switches) or is_named
    return run(NOTHING, "shares")


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
    counted, wanted = (" : ".join(f"{round(weight, 6):.3g}" for weight in row) for row in (step.counted, step.wanted))
    cause, text = _EVIDENCE[kind]
    text = text.format(sizes=" + ".join(map(str, step.sizes)), counted=counted, wanted=wanted)
    findings.add(cause, f"At step {step.step} {text}.")


# Does it matter which rank computes a share? The ranks are compared with one process that simulates them.

RANKS_PAIR = "shares in one process, ranks"
# The largest number of experiments: of the plain run, of all below, and of both runs in reproducible mode.
NUM_LATER = 10
EVERYTHING: Off = frozenset({"random", "state", "data", "initial", "rates"})
BUT_RANDOM, BUT_STATE, BUT_RATES = (EVERYTHING - {switch} for switch in ("random", "state", "rates"))
HIDDEN: Off = EVERYTHING | {"place"}


def study_ranks(findings: Findings, base: Off, shares: Outcome, run: Run, reference: Sequence[Trace]) -> None:
    """Find what makes the ranks differ from one process that simulates them.

    Args:
        findings: Gets the findings.
        base: The features turned off in all runs.
        shares: The plain run of that process.
        run: Runs an experiment, or returns its traces if it was run before.
        reference: The run of one process on whole batches.
    """
    tolerance = findings.subject.tolerance
    num_before = len(findings.diagnoses)

    def compare_with(off: Off, turned_off: str) -> TraceComparison | None:
        expected = run(off, "shares") if off else shares
        return findings.compare(turned_off, RANKS_PAIR, expected, run(off, "ranks"), tolerance, skip=["sample", "size"])

    plain = compare_with(NOTHING, "nothing")
    _add_values(findings, base, run, reference)
    if plain is not None and plain.same:
        return
    if (nothing := compare_with(EVERYTHING, "all of the below")) is not None and nothing.first is None:
        if (trial := compare_with(BUT_RANDOM, "all but random state")) is not None and trial.first is not None:
            evidence = f"Forward draws other random numbers on a rank: without them the {trial.first.kind} is the same."
            findings.add(Cause.RANDOM, evidence, OWN_GENERATOR)
        trial = compare_with(BUT_STATE, "all but changes of buffers in forward")
        if trial is not None and trial.first is not None:
            written = trial.of_kind("buffer") or trial.first
            findings.add(Cause.BUFFERS, f"Forward writes other values on each rank: {written}.")
    elif nothing is not None and nothing.first is not None:
        # Data, weights, rates and draws are the same, but the ranks differ: the reason is the task's own code.
        hiding = "all of that, and rank and world size hidden from the task"
        if nothing.first.kind == "parameter":
            findings.add(Cause.RATES, f"Gradients and rates are as in one process, the update is not: {nothing.first}.")
        elif (hidden := compare_with(HIDDEN, hiding)) is not None and hidden.same:
            evidence = f"The {nothing.first} is as in one process once rank and world size are hidden from the task."
            findings.add(Cause.BACKWARD if nothing.first.kind == "gradient" else Cause.RANK, evidence)
        else:
            findings.explained = False
    findings.explained &= len(findings.diagnoses) > num_before


def _add_values(findings: Findings, base: Off, run: Run, reference: Sequence[Trace]) -> None:
    """Add the causes that the runs show directly: other samples, other initial weights, other rates."""

    def compare_values(off: Off) -> TraceComparison | None:
        if isinstance(outcome := run(off, "ranks"), str):
            return None
        skip: tuple[Kind, ...] = ("loss", "gradient", "parameter", "buffer")
        return compare(reference, outcome, findings.subject.tolerance, skip=skip)

    if (comparison := compare_values(NOTHING)) is None:
        return
    if (data := comparison.of_kind("size", "sample")) is not None and "data" not in base:
        findings.add(Cause.DATA, f"The ranks do not train on what one process trains on: {data}.")
    if (start := comparison.of_kind("initial parameter", "initial buffer")) is not None and "initial" not in base:
        findings.add(Cause.MODEL, f"The ranks start from another model than one process: {start}.")
    # An epoch of another length also changes the schedule, so with other data the rates are compared without that.
    alone = comparison if data is None else compare_values(BUT_RATES)
    if rate := comparison.of_kind("learning rate") and alone and alone.of_kind("learning rate"):
        findings.add(Cause.RATES, f"The ranks train with another {rate}.")
