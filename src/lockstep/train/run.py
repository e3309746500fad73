"""A run of `fit`: steps, evaluations, checkpoints, callbacks, record and display."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lockstep.base import activity
from lockstep.base.activity import plural
from lockstep.checkpoints.best import Monitor
from lockstep.checkpoints.model_state import check_export
from lockstep.comm.collectives import all_gather_object
from lockstep.comm.world import World
from lockstep.data.comparison import check_same_data
from lockstep.data.loader import BadSample, having_epochs
from lockstep.errors import ConfigurationError
from lockstep.loop.recovery import Recovery
from lockstep.telemetry import live_view
from lockstep.telemetry.figures import EVALUATION, StragglerReporter
from lockstep.telemetry.record import EventName, kind_of
from lockstep.train.callbacks import Callbacks, EarlyStopping, RunView
from lockstep.train.evaluate import Evaluation, Evaluator, Inference
from lockstep.train.plan import Plan, devices_of
from lockstep.train.profiling import AroundStep
from lockstep.train.recording import RunRecord
from lockstep.train.result import FitResult, Throughput
from lockstep.train.run_state import Action, RunState
from lockstep.train.settings import FitSettings
from lockstep.train.skipping import NonFiniteStep, Origin
from lockstep.train.stopping import StopSignals, called, exit_code_of
from lockstep.train.task import Task, build_dataset, prepare
from lockstep.train.trainer import StepRecord, Trainer

if TYPE_CHECKING:
    from lockstep.checkpoints.checkpoint import Checkpoints
# Number of unreadable samples that are listed individually.
_NUM_NAMED = 5

# The classes of its state that are plain data.
_PLAIN = (Evaluation, BadSample, NonFiniteStep, Origin)

# --- what rank zero prints -------------------------------------------------------------------------------------------


def describe_plan(task: Task, settings: FitSettings, plan: Plan, device: torch.device, num_devices: int) -> list[str]:
    """Return the first lines of output; all ``num_devices`` are of the same kind as ``device``."""
    order, rate = plan.order, plan.learning_rate
    kind = kind_of(device.type)
    size = "a stream of samples" if order.num_samples is None else f"{order.num_samples:,} samples"
    length = plural(plan.num_steps, "step")
    if order.steps_per_epoch is not None:
        epochs = plan.num_steps / order.steps_per_epoch
        if epochs < 1:
            length += f" = {epochs:.1%} of an epoch"
        else:
            length += " = 1 epoch" if epochs == 1 else f" = {round(epochs, 1):g} epochs"

    batch_size = min(order.batch_size, order.num_samples or order.batch_size)
    batch = f"global batch {batch_size}"
    if settings.reproducible is not None:
        most, threads = settings.reproducible, plural(settings.threads or 1, "CPU thread")
        batch += f" = {most} virtual shards: the same bits on 1 to {most} devices of this kind with {threads} each"
    elif num_devices > 1:
        sizes = [len(plan.split.positions(batch_size, share)) for share in range(plan.split.num_shares)]
        are_alike = len(set(sizes)) == 1  # also with torch's DataParallel, which divides the batch itself
        parts = f"x {batch_size // num_devices}" if are_alike else f"with {' + '.join(map(str, sizes))}"
        batch += f" = {num_devices} devices {parts} samples"
    if plan.split.accumulate > 1:
        batch += f", in {plan.split.accumulate} micro-batches"
    if batch_size < order.batch_size:
        batch += f"; the data set is smaller than the global batch of {order.batch_size}"

    scaling = "not scaled with the global batch"
    if settings.lr_scaling != "none":
        rule = {"linear": "linear scaling", "sqrt": "square-root scaling"}[settings.lr_scaling]
        scaling = f"{rule} from base batch {plan.base_batch_size} to {order.batch_size}"
    decay = "the task's own schedule" if callable(rate.decay) else rate.decay
    warmup = f"warm-up over {plural(rate.warmup, 'step')}, then" if rate.warmup else "no warm-up,"
    values = [f"{name}={value}" for name, value in task.parameters.items()]
    name = f"{task.name} ({', '.join(values)})" if values else task.name
    return [
        f"{name}: strategy {settings.strategy} on {plural(num_devices, kind)}, {settings.precision}, {size}, {length}",
        batch,
        f"learning rate x {rate.scale:.4g}: {scaling}; {warmup} {decay}",
    ]


# --- the run ----------------------------------------------------------------------------------------------------------


class Run:
    """A run of `fit`: steps, evaluations, checkpoints, record and display.

    Collective for strategies with a process for each device: every rank creates one, and calls its methods in the same
    order.
    """

    def __init__(
        self, task: Task, settings: FitSettings, world: World, signals: StopSignals, checkpoints: Checkpoints | None
    ) -> None:
        task = prepare(task, world)
        self._task, self._settings, self._world = task, settings, world
        self._signals, self._checkpoints = signals, checkpoints
        self._monitor = Monitor.of(settings.keep_best or "loss")
        stopping = EarlyStopping(settings.early_stopping or "loss", settings.patience or 5)
        self._callbacks = Callbacks([stopping] * (settings.early_stopping is not None) + [*task.callbacks])
        # The steps after which callbacks of this rank have asked for something, see `request`.
        self._asked: dict[str, int] = {}
        self.state = RunState()
        self._ends_after: int | None = None  # of the run that is resumed
        self._last_step: StepRecord | None = None
        self._recent: list[dict[str, Any]] = []  # events that a lost rank zero may not have delivered
        if settings.export is not None:
            check_export(Path(settings.export))
        devices = devices_of(settings, world)
        self.trainer = trainer = Trainer(task, settings, world, strategy=settings.strategy, devices=devices)
        self._evaluator = self._open_evaluator()
        signals.progress = self.progress
        # Without a folder for checkpoints a stopped run could not save.
        if checkpoints is not None:
            trainer.reports.stops = lambda: signals.asked() is not None
            trainer.reports.fails = lambda: checkpoints.failure is not None
        trainer.reports.requests = self._requests
        self.is_complete = False
        self._summary: str | None = None
        self._whole: nn.Module | None = None
        self._final: nn.Module | None = None
        self._throughput, self._started_at = Throughput(), time.perf_counter()
        is_late = world.is_late  # and not after `Recovery`, which takes it into the job
        lines = [] if is_late else self._resume()
        self.state.first_step = trainer.num_steps_done
        # A resumed run may have done more steps than it is now asked for, or is about to end, as a callback has asked.
        planned = trainer.plan.num_steps
        self.state.num_steps = max(min(planned, self._ends_after or planned), self.state.first_step)
        # A rank that takes the place of a lost one gets the state here.
        self._recovery = self._open_recovery(is_late=is_late)
        if is_late and checkpoints is not None:
            checkpoints.lead()  # a spare was not rank zero before
        self._leads = world.is_rank_zero
        self._record = RunRecord(
            task, settings, world, trainer, num_steps=self.state.num_steps, began_with=self.state.first_step
        )
        self._stragglers = StragglerReporter(functools.partial(self._log, "straggler"))
        self._display = live_view.Display(settings.view, silent=settings.quiet or not world.is_rank_zero)
        self._num_caveats = self._num_skipped = self._num_not_finite = 0  # reported so far
        self._begin(lines, is_late=is_late)

    def _begin(self, lines: list[str], *, is_late: bool) -> None:
        """Show the plan and the state that was resumed, in ``lines``, and call the callbacks."""
        if not is_late:
            self._show_plan(lines)
        self._report()
        self._record.deliver(None if self._settings.quiet else self._display, self._recent)
        self._call("on_start")
        if not is_late and self._callbacks.have("on_start"):
            self.state.due.insert(0, Action.GRANT)
        self.join_exchange()

    def _open_evaluator(self) -> Evaluator | None:
        """Check that all ranks have the same data, and try the evaluation, if there is one. Collective: every rank."""
        task, trainer, seed = self._task, self.trainer, self._settings.seed
        # Each rank computes the order of samples from its own length: with another length the batches would differ.
        check = functools.partial(check_same_data, options=trainer.loading, group=trainer.group, device=trainer.device)
        check(trainer.samples, "Task.dataset", seed=seed, epochs=having_epochs(trainer.samples))
        if task.eval_dataset is None:
            return None
        samples = build_dataset(task, evaluation=True)
        evaluator = Evaluator(task, functools.partial(Inference.of, trainer), samples)
        check(samples, "Task.eval_dataset", seed=seed)
        if not self._world.is_late and (names := evaluator.try_out()):
            stopping = [each.monitor for each in self._callbacks.given if isinstance(each, EarlyStopping)]
            for monitor in (self._monitor, *stopping):
                monitor.score(dict.fromkeys(names, 0.0))  # an error if it has another name
        return evaluator

    def _open_recovery(self, *, is_late: bool) -> Recovery | None:
        """Return what lets the run go on in place when a rank is lost; None if it restarts instead.

        A late rank, which takes the place of a lost one, gets the state of trainer and run from the others here.
        """
        trainer, averaging = self.trainer, self.trainer.strategy.averaging
        # Where all ranks write a checkpoint, the part of a lost one may be missing: they restart from the one before.
        if not trainer.can_reconnect or (self._checkpoints is not None and averaging is not None):
            return None
        recovery = Recovery(
            self._world, doing=self._doing, exchanging=averaging, kinds=_PLAIN, trainer=trainer, run=self
        )
        if not recovery.is_active:  # the launcher replaces no ranks
            return None
        if is_late:
            self._find_recovered()
        recovery.on_rejoined = self._rejoined
        trainer.checks_in_step = False
        if averaging is None:  # else the exchange is the attempt, and not the step
            trainer.before_update = recovery.before_update
        return recovery

    def _show_plan(self, lines: list[str]) -> None:
        """Print what the run will do, ``lines``, and where its figures go."""
        trainer = self.trainer
        first, last = self.state.first_step, self.state.num_steps
        if first:
            changes = f"; changed: {', '.join(trainer.changes)}" if trainer.changes else ""
            lines.append(f"resumed after step {first} of {last}{changes}")
            if first == last:
                lines[-1] = (
                    f"nothing left to do: all {last} steps are done; --epochs N or --steps N for more, or "
                    "--no-resume for a new run"
                )
        num_devices = len(trainer.devices) if trainer.group is None else self._world.world_size
        plan = describe_plan(self._task, self._settings, trainer.plan, trainer.device, num_devices)
        plan += filter(None, (trainer.strategy.note, trainer.strategy.batch_norms))
        for line in (*plan, *lines, *(sink.where for sink in self._record.sinks)):
            self._display.log(line)

    def _resume(self) -> list[str]:
        """Resume from the newest valid checkpoint, if there is one; return lines about invalid ones."""
        if self._checkpoints is None:
            return []
        state = self._checkpoints.load(required=self._settings.resume is True)
        if state is not None:
            self.trainer.load_state_dict(state)
            self.state.checkpoint = self._checkpoints.path(self.num_steps_done)
            self.state.saved = self.num_steps_done, None
            self.state.found = {"step": self.num_steps_done}
            self.state.best = None if state["best"] is None else Evaluation(**state["best"])
            self._callbacks.load_state_dict(state.get("callbacks", {}))
            self._ends_after, self.state.saves_after = state.get("requested", (None, None))
            # A stopped run has saved without the evaluation that was due after the same step.
            self.state.due = [Action.EVALUATE] * (state["owes_evaluation"] and self._evaluator is not None)
            if self._ends_after == self.num_steps_done:  # saved as at the end: then more steps may be asked for
                self.state.due.append(Action.SAVE)
                self.state.saved = None
        return [f"passed over the checkpoint {why}" for why in self._checkpoints.passed_over]

    def progress(self) -> str:
        """Return in words what the run has done. Does not wait for the device."""
        last = self._last_step
        loss = "" if last is None or not last.loss.is_cpu else f", loss {float(last.loss):.4f}"
        return f"step {self.num_steps_done} of {self.state.num_steps}{loss}"

    @property
    def num_steps_done(self) -> int:
        """Number of steps of the whole run so far."""
        return self.trainer.num_steps_done

    def is_due(self, every: int | None) -> bool:
        """Return whether an action is due that happens ``every`` so many steps (None: each epoch), and at the end."""
        every = every or self.trainer.plan.order.steps_per_epoch or self.state.num_steps
        done = self.trainer.num_steps_done
        return done >= self.state.num_steps or done % every == 0

    @property
    def _trains(self) -> bool:
        return self.trainer.num_steps_done < self.state.num_steps and not self.state.stops

    @property
    def has_more(self) -> bool:
        """Whether there is something to do before the run is finished or stopped."""
        trains = self._trains
        if not self.state.due and not trains and not self.state.stops and not self.state.has_evaluated:
            self.state.due = [Action.EVALUATE]  # once, in a run that was resumed at its end
        return trains or bool(self.state.due)

    def attempt(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for `advance`; if a rank is lost in it, the same is done again."""
        # A step of ranks that train alone does not need the others; its exchange is an attempt of its own.
        is_alone = self.trainer.strategy.averaging is not None and not self.state.due and self._trains
        return contextlib.nullcontext() if self._recovery is None or is_alone else self._recovery.attempt()

    def advance(self, around: AroundStep) -> None:
        """Do what comes next: a step, or what is due after it. Collective: every rank.

        Args:
            around: From the number of a step to its context.
        """
        if self.state.due:
            due = self.state.due[0]
            self._do(due)
            if self._recovery is not None:
                self._recovery.refuse_cut()
            self.state.due.pop(0)
            if due == Action.EVALUATE and self.state.has_new_best and Action.SAVE not in self.state.due:
                self.state.due.insert(0, Action.SAVE)
            # Not with the evaluation, which is done again if a rank is lost in it.
            follows = {Action.EVALUATE: Action.ON_EVALUATION, Action.ON_EVALUATION: Action.GRANT}.get(due)
            if follows is not None and self._evaluator is not None and self._callbacks.have("on_evaluation"):
                self.state.due.insert(0, follows)
            return
        with around(self.trainer.num_steps_done + 1):
            self.step()

    def join_exchange(self) -> None:
        """Take part in the exchange that the others are in, if this rank got their state outside of one.

        Ranks that train alone may have come to different places when a rank is lost, or comes: one to an exchange, and
        another to the evaluation before it, which does not know that it is complete.
        """
        averaging = self.trainer.strategy.averaging
        if averaging is not None and averaging.exchange():
            self._find_due(checks=self.trainer.is_check_due, compares=False)

    def _do(self, action: Action) -> None:
        match action:
            case Action.AGREE:
                assert self._checkpoints is not None
                self._checkpoints.agree()
            case Action.CHECK:
                self.trainer.check_replicas()
            case Action.COMPARE:
                self._record.compare_ranks(self._stragglers)
            case Action.EVALUATE:
                self.evaluate()
            case Action.ON_EVALUATION:
                with self.trainer.averaged():
                    self._call("on_evaluation")
            case Action.GRANT:
                self._grant()
            case Action.SAVE:
                self.save()

    def step(self) -> None:
        """Train on the next global batch, and find what is due after it."""
        # With the last collective first: what follows is done by all ranks or by none.
        record = self._last_step = self.trainer.step()
        self._throughput.add(record)
        self._record.on_step_end(record)  # of which the live view and the sinks get their figures
        self._call("on_step_end")
        self._find_due(checks=record.checks, compares=self._record.compares)

    def _find_due(self, *, checks: bool, compares: bool) -> None:
        trainer = self.trainer
        if trainer.bad_samples.skipped or trainer.updater.nonfinite.found or trainer.caveats:
            self._report()
        self.state.stops, failed, ends, saves = trainer.reports.of_all()
        granted_after = self.num_steps_done + trainer.reports_in
        if ends:
            self._end_after(granted_after)
        if saves:
            self.state.saves_after = granted_after
        self.state.due = [Action.AGREE] * failed
        self.state.due += [Action.CHECK] * checks + [Action.COMPARE] * compares
        if not self.state.stops:
            self.state.due += self._planned()

    def _planned(self) -> list[Action]:
        """Return what is planned after the last step."""
        settings, saves = self._settings, self.state.saves_after == self.num_steps_done
        planned = [Action.EVALUATE] * (self._evaluator is not None and self.is_due(settings.eval_every))
        return planned + [Action.SAVE] * (saves or self.is_due(settings.checkpoint_every))

    # --- callbacks ----------------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model without wrappers; with fsdp, with the shards of this rank."""
        return self.trainer.module if self._final is None else self._final

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the run."""
        return self.trainer.optimizer

    def _call(self, point: str) -> None:
        """Call the method ``point`` of the callbacks. What it asks for is done by `_grant`, or with the next steps."""
        if not self._callbacks.have(point):
            return
        made, world = self.state.evaluations, self._world
        view = RunView(
            rank=world.rank,
            world_size=world.world_size,
            step=self.num_steps_done,
            num_steps=self.state.num_steps,
            steps_per_epoch=self.trainer.plan.order.steps_per_epoch,
            last_step=self._last_step,
            due=[action.value for action in self._planned()],
            metrics=made[-1].metrics if made else {},
            best=self.state.best,
            checkpoint=self.state.checkpoint,
            found=self.state.found,
            _run=self,
        )
        self._callbacks.call(point, view)

    def request(self, verb: str, why: str = "") -> None:
        """Ask all ranks, for a callback of this one, to ``stop`` or to ``save``; see `RunView`.

        Raises:
            ConfigurationError: There is no folder for checkpoints.
        """
        if verb == "save" and self._checkpoints is None:
            raise ConfigurationError("A callback called save(), but there is no folder.\nGive checkpoint=DIR to fit.")
        if verb == "stop" and verb not in self._asked:
            self._log("remark", f"stopped early{why and ': '}{why}")
        self._asked[verb] = self.num_steps_done

    def _requests(self) -> tuple[bool, bool]:
        """Return what callbacks of this rank have asked for after the last step: the end of the run, a checkpoint.

        Each step sends what was asked for after the one before it, so that it is sent again if a rank is lost. Ranks
        that train alone send it until they exchange.
        """
        since = 0 if self.trainer.strategy.averaging is not None else self.trainer.num_steps_done
        return self._asked.get("stop", -1) >= since, self._asked.get("save", -1) >= since

    def _end_after(self, step: int) -> None:
        """End the run after this step, as a callback has asked for it."""
        if "stop" not in self._asked and step < self.state.num_steps:
            self._log("remark", "stopped early: a callback of another rank has asked for it")
        self.state.num_steps = min(self.state.num_steps, step)

    def _grant(self) -> None:
        """Do what callbacks of any rank have asked for, after what is due already. Collective: every rank."""
        done, world = self.num_steps_done, self._world
        verbs = set().union(*all_gather_object(list(self._asked), group=world.group, device=world.device))
        if "stop" in verbs:
            self._end_after(done)
        self._asked = {}
        is_measured = self._evaluator is None or (
            bool(self.state.evaluations) and self.state.evaluations[-1].step == done
        )
        wanted = [Action.EVALUATE] * ("stop" in verbs and not is_measured) + [Action.SAVE] * bool(verbs)
        self.state.due += [action for action in wanted if action not in self.state.due]

    def log(self, name: str, value: float | Tensor) -> None:
        """Record a number for a callback; see `RunView.log`."""
        self._record.log(name, value)

    # --- recovery in place: `lockstep.loop.recovery` -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what the ranks know together and the trainer has not; see `Recovery`."""
        trainer = self.trainer
        return {
            "run": self.state.state_dict(),
            "lists": [trainer.updater.nonfinite.found, trainer.bad_samples.skipped],
            "seconds": time.perf_counter() - self._started_at,
            "throughput": self._throughput.state(),
            "callbacks": self._callbacks.state_dict(),
            "recent": self._record.recent_events(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Use the `state_dict` of another rank."""
        self.state = RunState.of(state["run"])
        self.trainer.updater.nonfinite.found[:], self.trainer.bad_samples.skipped[:] = state["lists"]
        self._started_at = time.perf_counter() - state["seconds"]
        self._throughput.load(state["throughput"])
        self._callbacks.load_state_dict(state["callbacks"])
        self._recent = state["recent"]

    def _doing(self) -> str:
        names = {Action.EVALUATE: "evaluation", Action.SAVE: "checkpoint"}
        done = self.num_steps_done
        if self.state.due:
            return f"the {names.get(self.state.due[0], 'check')} after step {done}"
        if done >= self.trainer.plan.num_steps:
            return "the end of the run"
        return f"step {done + 1}" if self.trainer.strategy.averaging is None else f"the exchange after step {done}"

    def _rejoined(self) -> None:
        """Go on in another generation of the ranks, in which this one may be rank zero."""
        led, self._leads = self._leads, self._world.is_rank_zero
        is_new_lead = self._leads and not led
        if is_new_lead and self._checkpoints is not None:
            self._checkpoints.lead()
        if led != self._leads:
            self._display = live_view.Display(self._settings.view, silent=self._settings.quiet or not self._leads)
        self._record.reconnect(self._display if is_new_lead else None)
        self._find_recovered()

    def _find_recovered(self) -> None:
        """Find what is due after a recovery: the ranks compare what they hold."""
        if self.trainer.strategy.averaging is None and self.state.due[:1] != [Action.CHECK]:
            self.trainer.alike_after = None
            self.state.due.insert(0, Action.CHECK)

    def pause_for(self, event: EventName, act: Callable[[], str]) -> None:
        """Pause the training for ``act``, and log the text that it returns. Collective: every rank."""
        self._settle()
        self._log(event, act())

    def _log(self, event: EventName, text: str) -> None:
        self._display.log(text)
        self._record.event(event, text)

    def evaluate(self) -> None:
        """Evaluate the model, if the task has evaluation data. Collective: every rank."""
        self.state.has_evaluated = True
        if self._evaluator is None:
            return
        self._settle()
        activity.now.phase = "evaluation"
        with self.trainer.averaged():
            evaluation = Evaluation(self.num_steps_done, self._evaluator.run())
        self.state.evaluations.append(evaluation)
        self.trainer.note_evaluation(evaluation.metrics["loss"])
        score = self._monitor.score(evaluation.metrics)
        is_comparable = (
            self.state.best is not None and self._monitor.name in self.state.best.metrics
        )  # else of another metric
        if self.state.best is None or not is_comparable or score < self._monitor.score(self.state.best.metrics):
            self.state.best, self.state.has_new_best = evaluation, bool(self._settings.keep_best)
        text = f"evaluation: {'  '.join(f'{name} {value:.4f}' for name, value in evaluation.metrics.items())}"
        if self._evaluator.skipped:
            text += f"  without {len(self._evaluator.skipped)} that cannot be read"
        per_epoch = self.trainer.plan.order.steps_per_epoch
        epoch = "" if per_epoch is None else f"epoch {evaluation.step / per_epoch:.1f}  "
        self._display.log(f"{epoch}step {evaluation.step}/{self.state.num_steps}  {text}")
        self._record.event("evaluation", text, evaluation.metrics)

    def save(self, *, owes_evaluation: bool = False) -> None:
        """Start to write a checkpoint, if there is a folder and the same state has not been saved.

        Collective: every rank. Blocks rank zero until the previous one is on disk and the state is copied.
        """
        made, step = self.state.evaluations, self.num_steps_done
        metrics = made[-1].metrics if made and made[-1].step == step else {}
        loss = metrics.get("loss")
        self.state.has_new_best = False
        if self._checkpoints is None or self.state.saved == (step, loss):
            return  # for example if the last step ends an epoch
        self._settle()
        activity.now.phase = "checkpoint"
        if self._callbacks.have("on_checkpoint"):
            self._complete_checkpoint()
        self.trainer.reports.check_samples(*self.trainer.reports.read)
        self.trainer.check_replicas()  # the saved state must be that of all ranks
        best = None if self.state.best is None else asdict(self.state.best)
        state = self.trainer.state_dict() | {"best": best, "owes_evaluation": owes_evaluation}
        state["callbacks"] = self._callbacks.state_dict()
        # Also if a signal came with the last step that was asked for: the run has not ended.
        is_ending = (
            step < self.state.num_steps or self.state.stops
        ) and self.state.num_steps < self.trainer.plan.num_steps
        state["requested"] = self.state.num_steps if is_ending else None, self.state.saves_after
        self.state.checkpoint = self._checkpoints.save(state, step=step, metrics=metrics)
        self.state.saved = (step, loss)
        self.state.found = {"step": step}
        if self._throughput.losses:  # none if a resumed run only did its pending evaluation
            self.state.found["train/loss"] = self._throughput.losses[-1]
        self.state.found |= {EVALUATION.name_of(name): value for name, value in metrics.items()}
        self._record.event("checkpoint", f"checkpoint after step {step}")

    def _complete_checkpoint(self) -> None:
        """Wait until the newest checkpoint is on disk, and call ``on_checkpoint``. Collective: every rank."""
        if self._checkpoints is not None:
            self._checkpoints.finish()
            if self.state.checkpoint not in (None, self.state.announced):
                self.state.announced = self.state.checkpoint
                self._call("on_checkpoint")
                self.state.due.insert(1, Action.GRANT)  # after the save, in which this one is announced

    def _end(self) -> None:
        """Take the weights that `fit` returns, and call ``on_end``. Collective: every rank."""
        is_first, checkpoints = self._final is None, self._checkpoints
        self._final = self.trainer.final_model()
        if self._settings.load_best and checkpoints is not None and not self.state.stops and self._has_best():
            state = checkpoints.load_best()
            self.trainer.load_weights(state)
            step, best = state["state"]["num_steps_done"], self.state.best
            text = f"weights of the best evaluation, after step {step}"
            if best is not None and step != best.step:  # rank zero was lost while it wrote that checkpoint
                text = (
                    f"weights after step {step}: the checkpoint of the best evaluation, after step {best.step}, is lost"
                )
            self._log("remark", text)
        if is_first:  # else a rank was lost after that
            self._call("on_end")

    def _has_best(self) -> bool:
        """Return whether an evaluation was the best; otherwise log that there is none."""
        has_best = self.state.best is not None and math.isfinite(self._monitor.score(self.state.best.metrics))
        if not has_best:
            self._log("remark", f"{self._monitor.name} was never a number: the weights are those of the last step")
        return has_best

    def stop(self) -> FitResult:
        """Save, and return the result so far.

        Collective: every rank. Blocks until the checkpoint is on disk.
        """
        owes_evaluation = self._evaluator is not None and self.is_due(self._settings.eval_every)
        # What callbacks have asked for after the last steps has not been granted: the resumed run ends after two more.
        asked = all_gather_object(self._asked.get("stop"), group=self._world.group, device=self._world.device)
        self.state.num_steps = min([self.state.num_steps, *(step + 2 for step in asked if step is not None)])
        self.save(owes_evaluation=owes_evaluation)
        self._complete_checkpoint()
        self._end()
        # Not every rank has received the signal.
        names = all_gather_object(self._signals.asked(), group=self._world.group, device=self._world.device)
        name: str = next(name for name in names if name is not None)
        losses = self._throughput.read()
        loss = f", loss {losses[-1]:.4f}" if losses else ""
        text = (
            f"Stopped by {called(name)} after step {self.num_steps_done} of {self.state.num_steps}{loss}, saved in "
            f"{self.state.checkpoint}.\nThe same command resumes from there."
        )
        self._summary = self._record.finish("stop", text)
        self._log_summary()
        if not self._signals.has_launcher:  # the launcher prints it
            self._display.log(text)
        self._signals.report(text)
        return self._result(stopped=name)

    def complete(self) -> None:
        """Complete the run with the other ranks. Collective: every rank. All files are written when it returns."""
        if self.state.first_step < self.state.num_steps:
            self._settle()
        self._complete_checkpoint()
        self.state.due.clear()  # what a callback may just have asked for is done
        self._end()
        self._summary = self._record.finish("end", f"{self.num_steps_done} steps done")
        if self._settings.export is not None:
            self.trainer.export(Path(self._settings.export), writes=self._world.is_rank_zero)
        if self._task.after is not None:
            self._whole = self.trainer.model  # a sharded model is gathered here, which is collective
        self._world.barrier()  # from here on every rank finds the files
        self.is_complete = True

    def finish(self) -> FitResult:
        """Say how the run went, call `Task.after`, and return the result. Not collective."""
        if self._recovery is not None:
            self._recovery.close()
        trainer, throughput = self.trainer, self._throughput
        if throughput.losses:
            rate = f"{live_view.rate(throughput.samples_per_s)} samples/s"
            if throughput.num_counted:
                rate += f", {live_view.rate(throughput.counted_per_s)} {self._task.counts}/s"
            seconds = f"{time.perf_counter() - self._started_at:.1f} s{throughput.compiling()}"
            steps = plural(len(throughput.losses), "step")
            self._display.log(f"{steps} in {seconds}, {rate}, last loss {throughput.losses[-1]:.4f}")
        if skipped := len(trainer.bad_samples.skipped):
            self._display.log(f"{plural(skipped, 'sample')} skipped: could not be read")
        if skipped := len(trainer.updater.nonfinite.found):
            self._display.log(f"{plural(skipped, 'step')} skipped: the gradient was not finite")
        if self._settings.export is not None:
            self._display.log(f"weights written to {self._settings.export}")
        self._log_summary()
        # The live view is closed before the task's own function runs. The other ranks do not wait for it.
        if self._task.after is not None and self._whole is not None and self._world.is_rank_zero:
            self._record.close()
            self._task.after(self._whole.eval())
        return self._result()

    def _log_summary(self) -> None:
        """Print where the time went."""
        if self._summary is not None and self.state.first_step < self.num_steps_done:
            self._display.log(self._summary)

    def _result(self, *, stopped: str | None = None) -> FitResult:
        skipped, throughput, checkpoint = self.trainer.bad_samples.skipped, self._throughput, self.state.checkpoint
        return FitResult(
            first_step=self.state.first_step,
            num_steps=self.num_steps_done,
            losses=throughput.losses,
            evaluations=self.state.evaluations,
            best=self.state.best,
            num_samples=throughput.num_samples - len(skipped),
            samples_per_s=throughput.samples_per_s,
            seconds=time.perf_counter() - self._started_at,
            checkpoint=checkpoint if isinstance(checkpoint, Path | None) else str(checkpoint),
            skipped_samples=len(skipped),
            first_skipped=tuple(skipped[:_NUM_NAMED]),
            not_finite=tuple(self.trainer.updater.nonfinite.found),
            stopped=stopped,
            exit_code=exit_code_of(stopped, has_launcher=self._signals.has_launcher),
            num_counted=throughput.num_counted or None,
            tokens_per_s=throughput.counted_per_s if throughput.num_counted else None,
            model=self._final,
        )

    def close(self) -> None:
        """Close the record and the display, and end the loader processes."""
        # The record first: it may have a last snapshot for the display.
        try:
            self._record.close()
        finally:
            self._display.close()
        if isinstance(sys.exc_info()[1], KeyboardInterrupt) and self._checkpoints is None and self._leads:
            self._signals.say_not_saved("SIGINT")
        self.trainer.close()

    def _report(self) -> None:
        """Log new caveats, skipped samples and skipped steps of the trainer."""
        trainer, skipped, not_finite = (
            self.trainer,
            self.trainer.bad_samples.skipped,
            self.trainer.updater.nonfinite.found,
        )
        for caveat in trainer.caveats[self._num_caveats :]:
            self._display.log(f"the same bits are not guaranteed: {caveat}")
        for number, bad in enumerate(skipped[self._num_skipped :], self._num_skipped):
            if number < _NUM_NAMED:
                self._display.log(f"step {bad.step + 1}  skipped {bad.name}")
            self._record.event("skipped", f"step {bad.step + 1}: sample left out: {bad.name}")
        for problem in not_finite[self._num_not_finite :]:
            self._display.log(f"step {problem.step + 1}  skipped  {problem.headline}")
            self._record.event("skipped", f"step {problem.step + 1}: skipped: {problem.headline}")
        self._num_caveats, self._num_skipped, self._num_not_finite = len(trainer.caveats), len(skipped), len(not_finite)

    def _settle(self) -> None:
        """Wait for the device, and count the wait as training, before something else begins."""
        self._record.pause()
        self._throughput.stop()
        self.trainer.settle()
        self._report()
