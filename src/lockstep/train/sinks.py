"""The sinks that settings ask for, and what they are told of the run."""

from __future__ import annotations

import inspect
import os
import platform
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from lockstep.comm.world import World
from lockstep.telemetry.provenance import gather
from lockstep.telemetry.sinks.facts import Plain, RunFacts
from lockstep.telemetry.sinks.opening import Sinks, open_sinks
from lockstep.telemetry.sinks.targets import parse_targets
from lockstep.train.loop import Loop
from lockstep.train.run_file import how_called
from lockstep.train.settings import FitSettings
from lockstep.train.task import Task


def make_sinks(task: Task, settings: FitSettings, world: World, loop: Loop, *, num_steps: int) -> Sinks:
    """Return the sinks of a run that is about to begin, or to go on; only rank zero has any.

    Collective: every rank. Blocks until rank zero has opened them; see `open_sinks`.

    Raises:
        ConfigurationError: On every rank: one of them cannot be opened; says why.
    """
    if not settings.log_to:
        return Sinks()
    targets = parse_targets(settings.log_to)
    return open_sinks(targets, lambda: facts_of(task, settings, world, loop, num_steps=num_steps), world)


def facts_of(task: Task, settings: FitSettings, world: World, loop: Loop, *, num_steps: int) -> RunFacts:
    """Return what a run is; takes a moment, as it asks for commits."""
    first_step = loop.num_steps_done
    num_restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    is_fresh = not first_step and not num_restarts
    # Where checkpoints are, for whoever goes on with them is to go on here, too.
    memory = settings.checkpoint or settings.run_dir
    if memory is not None:
        with suppress(OSError):  # then nothing is remembered
            Path(memory).mkdir(parents=True, exist_ok=True)
    return RunFacts(
        name=task.name,
        config=_config(task, settings, world, loop, num_steps),
        first_step=first_step,
        is_fresh=is_fresh,
        memory=None if memory is None else Path(memory),
    )


def _config(task: Task, settings: FitSettings, world: World, loop: Loop, num_steps: int) -> dict[str, Plain]:
    """Return all that a run depends on, by name: the settings as they were given, and then what became of them."""
    given = {name: _plain(value) for name, value in asdict(settings).items() if value is not None}
    origin = gather(_file_of(task))
    num_parameters = sum(each.numel() for group in loop.optimizer.param_groups for each in group["params"])
    return {
        **given,
        "task": task.name,
        "global_batch_size": loop.plan.batch_size,
        "num_steps": num_steps,
        "num_parameters": num_parameters,
        "world_size": world.world_size,
        "num_devices": len(loop.devices) if loop.group is None else world.world_size,
        "device": str(loop.device),
        "backend": world.backend if loop.group is not None else "none",
        "host": platform.node(),
        "command": how_called()["command"],
        **{f"version/{name}": version for name, version in origin.versions.items()},
        **{f"commit/{name}": commit for name, commit in origin.commits.items()},
        **{f"machine/{name}": fact for name, fact in origin.machine.items() if name != "load"},
    }


def _plain(value: object) -> Plain:
    if isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (list, tuple)):
        return ", ".join(str(each) for each in value)
    return str(value)


def _file_of(task: Task) -> Path | None:
    with suppress(OSError, TypeError):
        return Path(inspect.getfile(task.loss))
    return None
