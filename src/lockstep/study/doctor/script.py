"""What was seen of a script on two ranks, and the checks: do all ranks do together what they must do together?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from lockstep.study.doctor.findings import HANG, NOTE, WRONG, Problem, check

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Script:
    """What was seen of a script.

    Attributes:
        ranks: The events of each of two ranks.
        alone: The events of a single rank, until its first step.
        again: The events of rank 0 of two that found what the first two had saved, until its first step.
        is_cut: Whether the ranks were ended early, although they did not wait for each other.
    """

    ranks: Sequence[Sequence[Event]]
    alone: Sequence[Event] = ()
    again: Sequence[Event] = ()
    is_cut: bool = False

    def all(self, what: str, rank: int = 0) -> list[Event]:
        """Return the events of a kind."""
        return [event for event in self.ranks[rank] if event["what"] == what]

    @property
    def is_distributed(self) -> bool:
        """Whether it has a model whose gradients are averaged over ranks."""
        return all(self.all("wrapped", rank) for rank in (0, 1))

    @property
    def num_workers(self) -> int | None:
        """The largest number of loader processes."""
        return max((event["workers"] for event in self.all("epoch")), default=None)

    def windows(self, rank: int = 0) -> list[list[Event]]:
        """Return the events of each optimizer step, which comes last."""
        found: list[list[Event]] = [[]]
        for event in self.ranks[rank]:
            found[-1].append(event)
            if event["what"] == "step":
                found.append([])
        return found[:-1]

    @property
    def steps_together(self) -> list[tuple[list[Event], list[Event]]]:
        """The events of each step that both ranks make after the same batch, if gradients must be averaged."""
        pairs = zip(self.windows(0), self.windows(1), strict=False) if self.is_distributed else ()
        return [pair for pair in pairs if len({(events[-1]["epoch"], events[-1]["batch"]) for events in pair}) == 1]

    def training_epochs(self, rank: int) -> dict[str, Event]:
        """Return the epochs with batches that a rank has trained on, by name."""
        trained = {event["epoch"] for event in self.all("backward", rank)} if self.is_distributed else set()
        return {event["epoch"]: event for event in self.all("epoch", rank) if event["epoch"] in trained}


# Data.


@check(Script, WRONG)
def sampler_missing(script: Script) -> Iterator[Problem]:
    """The ranks train on the same samples: each uses the whole data set, or both had equal batches.

    Loaders that are not used for training are ignored.

    Cost: Each rank trains on the whole data set: the work of all devices gives the progress of one.
    Fix: Give the loader a DistributedSampler, which also shuffles.
    Paste: sampler = lockstep.DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=..., sampler=sampler)  # without shuffle
    """
    epochs, problems = [script.training_epochs(rank) for rank in (0, 1)], []
    for one, other in [(epochs[0][name], epochs[1][name]) for name in epochs[0].keys() & epochs[1].keys()]:
        both, total = one.get("indices", 0) + other.get("indices", 0), one.get("samples", 0)
        if total > 3 and both > 1.5 * total == 1.5 * other["samples"] and one["first"] == other["first"] is not None:
            problems.append(Problem(f"Each rank uses {one['indices']} of the same {total} samples.", one["where"]))
    forwards = [[each for event in script.all("backward", rank) for each in event["forwards"]] for rank in (0, 1)]
    mine, theirs = ([each["inputs"] for each in of_rank] for of_rank in forwards)
    if not problems and script.is_distributed and mine == theirs and len(set(mine)) > 1:  # constants are not data
        problems.append(Problem("Each batch is the same on both ranks.", forwards[0][0]["of"]))
    yield from problems


@check(Script, WRONG)
def set_epoch_missing(script: Script) -> Iterator[Problem]:
    """Torch's ``DistributedSampler`` shuffles by seed and epoch; if the epoch is not set, the order never changes.

    lockstep's own sampler counts epochs by itself.

    Cost: Every epoch has the same order of samples and the same batches.
    Fix: Set the sampler's epoch, or use lockstep.DistributedSampler, which counts by itself.
    Paste: sampler.set_epoch(epoch)  # first line of the loop over epochs
    """
    for rank in (0, 1):
        seen = set()
        for epoch in script.training_epochs(rank).values():
            order = epoch["sampler"], epoch.get("order")
            if order[1] and order in seen:
                yield Problem("A sampler that shuffles has the same order in two epochs.", epoch["where"])
            seen.add(order)


# What all ranks must do together, or one rank only.


@check(Script, WRONG)
def saves_on_all_ranks(script: Script) -> Iterator[Problem]:
    """Every rank calls ``torch.save`` with the same path.

    Cost: All ranks write the same file at the same time, and it may be damaged.
    Fix: Save on rank zero only, or call lockstep.save on all ranks.
    Paste: if dist.get_rank() == 0: torch.save(...)
    """
    others = {event["path"] for event in script.all("save", 1)} if script.is_distributed else set()
    for event in script.all("save"):
        if event["path"] in others - {None}:
            yield Problem(f"Every rank writes {event['path']}.", event["where"])


@check(Script, HANG)
def backward_on_one_rank(script: Script) -> Iterator[Problem]:
    """A ``break`` or ``continue`` that depends on the rank, or fewer batches on a rank: not all run each backward.

    Cost: The backwards of different batches are averaged, and at the end a rank waits for one that never comes.
    Fix: Decide on all ranks together, for example by an all-reduce of the condition, or multiply the loss by zero
        instead. If some ranks have fewer batches, train within `with model.join():`.
    Paste: loss = loss * 0.0  # instead of continue
    """
    if not script.is_distributed or script.all("join"):
        return
    # What each rank did with each batch, and where.
    batches: list[dict[tuple[str, int], dict[str, str]]] = [{}, {}]
    for rank in (0, 1):
        for event in script.ranks[rank]:
            if event["what"] == "batch":
                batches[rank][event["epoch"], event["batch"]] = {}
            elif event["what"] in ("forward", "backward") and batches[rank]:
                batches[rank][list(batches[rank])[-1]][event["what"]] = event["where"]
    for rank, other in ((0, 1), (1, 0)):
        theirs, end = batches[other], script.ranks[other][-1]
        last = list(theirs)[-1:] if script.is_cut or _has_failed(end) else []
        for (epoch, number), done in batches[rank].items():
            # The other rank may not have reached this batch.
            is_behind = last and (last[0] == (epoch, number) or (last[0][0] == epoch and (epoch, number) not in theirs))
            missing = done.keys() - theirs.get((epoch, number), {}).keys()
            if missing and not is_behind and (epoch, 0) in theirs:
                found = f"Rank {rank} runs {min(missing)} for batch {number} of an epoch, and rank {other} does not."
                yield Problem(found, done[min(missing)])
                return


@check(Script, HANG)
def collective_on_one_rank(script: Script) -> Iterator[Problem]:
    """A collective that only some ranks call, while the others are in another one or have ended.

    Cost: They wait until the time-out, after 10 to 30 minutes; or two different collectives mix their data.
    Fix: Call it on all ranks, outside of a condition on the rank; only print or save on one.
    """
    if script.all("join") or any(backward_on_one_rank(script)):
        return  # if batches differ, collectives may differ, too
    for calls in zip_longest(script.all("collective", 0), script.all("collective", 1)):
        names = [call and call["name"] for call in calls]
        if names[0] == names[1]:
            continue
        rank = int(calls[0] is None)
        end = script.ranks[1 - rank][-1]
        if None not in names or not (script.is_cut or _has_failed(end)):
            instead = f"is in {names[1 - rank]}" if names[1 - rank] else _doing(end)
            found = f"Rank {rank} is in {names[rank]}, which all ranks must call, and rank {1 - rank} {instead}."
            paste = f"torch.distributed.{names[rank]}(...)  # on every rank, not after `if rank == 0:`"
            yield Problem(found, calls[rank]["where"], paste=paste)
        return


def _has_failed(end: Event) -> bool:
    """Return whether a rank ended with an error of its own, not because another rank was missing."""
    return bool(end.get("error")) and not re.search("gloo|nccl|collective|connection|peer", end["error"], re.IGNORECASE)


def _doing(end: Event) -> str:
    return "has ended" if end["what"] == "ended" else f"is in {end.get('name', end['what'])}, {end['where']}"


@check(Script, WRONG)
def gradients_not_reduced(script: Script) -> Iterator[Problem]:
    """The ranks make a step with different gradients, although they have a DistributedDataParallel.

    It averages only the gradients of its own forward, outside of ``no_sync``. A call of ``model.module`` bypasses it.

    Cost: Each rank trains a model of its own; the saved one has been trained on a part of the data.
    Fix: Call the wrapper in training, and run the last backward before a step outside of ``no_sync``.
    Paste: output = model(inputs)  # not model.module(inputs)
    """
    for one, other in script.steps_together:
        backwards = [event for event in one if event["what"] == "backward"]
        if backwards and one[-1]["grads"] != other[-1]["grads"]:
            past = [each["of"] for event in backwards for each in event["forwards"] if each["past"]]
            why = "forward calls the module within DistributedDataParallel" if past else "nothing has averaged them"
            found = f"The gradients of both ranks differ at the step: {why}."
            yield Problem(found, (past or [backwards[-1]["where"]])[0])


@check(Script, WRONG)
def clipped_before_reduced(script: Script) -> Iterator[Problem]:
    """Gradients are clipped before they are averaged, for example within ``no_sync``: each rank clips its own.

    Cost: Ranks with long gradients count less than the others, and the mean may be longer than the limit.
    Fix: Clip once, after the backward that averages.
    Paste: torch.nn.utils.clip_grad_norm_(model.parameters(), ...)  # right before optimizer.step()
    """
    for window in script.steps_together:
        clips = [[event for event in events if event["what"] == "clip"] for events in window]
        for one, other in zip(*clips, strict=False):
            if one["grads"] != other["grads"] and window[0][-1]["grads"] == window[1][-1]["grads"]:
                yield Problem("The ranks clip different gradients.", one["where"])


# What is wrong on one device, too.


@check(Script, WRONG)
def optimizer_of_another_model(script: Script) -> Iterator[Problem]:
    """The parameters of an optimizer never get a gradient, for example because they belong to a copy of the model.

    Cost: The model that computes the loss is never trained.
    Fix: Create the optimizer after the model that is called, with the parameters of that model.
    Paste: optimizer = torch.optim.SGD(model.parameters(), ...)  # of the model that is called
    """
    steps: dict[str, list[bool]] = {}
    for window in script.windows():
        if any(event["what"] == "backward" for event in window):
            steps.setdefault(window[-1]["of"], []).append(window[-1]["is_used"])
    for where, used in steps.items():
        if not any(used):
            yield Problem("No parameter of the optimizer has a gradient at the step.", where)


@check(Script, NOTE)
def evaluation_mode_left_on(script: Script) -> Iterator[Problem]:
    """A model is trained in evaluation mode.

    It is wrong if the model has dropout or BatchNorm and was trained in training mode before; otherwise a note.

    Cost: Dropout is off, and BatchNorm normalises with statistics that are no longer updated.
    Fix: Turn training mode on at the start of each epoch.
    Paste: model.train()  # first line of the loop over epochs
    """
    has_trained = False
    for forward in [each for event in script.all("backward") for each in event["forwards"]]:
        has_trained = has_trained or forward["training"]
        if not forward["training"] and (has_trained or forward["modes"]):
            severity = WRONG if has_trained and forward["modes"] else NOTE
            since = ", but was in training mode before" if has_trained else ""
            yield Problem(f"The model is trained in evaluation mode{since}.", forward["of"], severity)
            return


@check(Script, WRONG)
def optimizer_state_not_restored(script: Script) -> Iterator[Problem]:
    """The weights of a checkpoint are restored, and the state of the optimizer is not.

    It is found if the script loads its own checkpoint, or a file with the state of an optimizer.

    Cost: Momentum and Adam's averages begin at zero: the loss jumps, and the result differs from a run without a stop.
    Fix: Save the optimizer's state with the weights, and load both.
    Paste: optimizer.load_state_dict(checkpoint["optimizer"])
    """
    saved = {event["path"] for event in script.all("save")}
    for events in (script.ranks[0], script.again):
        loads: dict[str, Event] = {}
        for event in events:
            if event["what"] == "load" and (event["has_optimizer"] or event["path"] in saved):
                loads = {"load": event}
            elif event["what"] == "step" and "model restored" in loads and "optimizer restored" not in loads:
                found = f"{event['name']} starts from scratch with the weights of {loads['load']['path']}."
                if any(step["has_state"] for step in script.all("step")):
                    yield Problem(found, loads["load"]["where"])
                return
            elif loads:
                loads[event["what"]] = event


@check(Script, WRONG)
def learning_rate_times_ranks(script: Script) -> Iterator[Problem]:
    """The learning rate grows with the number of ranks, but the global batch does not.

    The gradient is the mean over the ranks, not their sum, so it has the same length for the same number of samples.

    Cost: The steps are too long, by a factor of the number of ranks.
    Fix: Use the learning rate of one device, or let the global batch grow with the learning rate.
    Paste: lr = base_lr  # without * world_size
    """
    steps = [[event for event in events if event["what"] == "step"] for events in (*script.ranks, script.alone)]
    if all(steps):
        one, other, alone = (of_rank[0] for of_rank in steps)
        rate, samples = one["lr"] / (alone["lr"] or 1.0), one["samples"] + other["samples"]
        if rate > 1.5 and samples < 1.2 * alone["samples"]:
            found = f"The learning rate is {rate:g} times that on one rank, with the same {samples} samples per step."
            yield Problem(found, one["of"])


@check(Script, WRONG)
def accumulation_not_divided(script: Script) -> Iterator[Problem]:
    """The mean losses of several micro-batches are summed for a step, and not divided by their number.

    Cost: The gradient is too long by this factor: so are the steps of SGD, clipping always applies, and Adam's weight
        decay and epsilon no longer fit.
    Fix: Divide each loss by the number of micro-batches.
    """
    for window in () if script.all("weight") else script.windows():
        inputs: dict[str, dict[str, str]] = {}
        grads: list[str] = []
        for event in window:
            grads = [] if event["what"] == "backward" else grads
            if event["what"] == "backward" and event["is_mean"]:
                key, batch = (event["epoch"], event["batch"]) if event["epoch"] else (event["where"], event["forwards"])
                inputs.setdefault(key, {})[str(batch)] = event["where"]
            elif event.get("grads"):
                grads.append(event["grads"])
        batches = max(inputs.values(), key=len, default={})
        # If gradients change after backward, the script divides them instead of the losses.
        if (count := len(batches)) > 1 and grads[0] == grads[1]:
            found = f"{count} backwards of mean losses make one step, and no loss is divided."
            yield Problem(found, [*batches.values()][-1], paste=f"loss = loss / {count}  # before backward")
            return
