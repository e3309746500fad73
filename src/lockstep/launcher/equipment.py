"""What a rank is equipped with before its program runs, by the launcher or by variables of its environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

REHEARSAL = "LOCKSTEP_REHEARSAL"
"""The variable with which `lockstep rehearse` tells the ranks what is to go wrong in them."""

_SHORT_ENOUGH = 64
"""The name of a folder for temporary files that loader processes have no trouble with, for sure."""

MONITOR = "LOCKSTEP_MONITOR"
"""The variable with which ``lockstep run --monitor`` tells the ranks into which folder they are recorded."""


def equip(orders: dict[str, Any], record: Callable[[BaseException], None]) -> None:
    """Equip this rank.

    Args:
        orders: Of the launcher.
        record: Writes down what has ended this rank.
    """
    if orders["patience_s"] > 0:
        _light_beacon(orders["run_dir"], orders["patience_s"], record)
    if len(os.environ.get("TMPDIR", "")) > _SHORT_ENOUGH:
        _make_sockets_possible(orders["run_dir"])
    if REHEARSAL in os.environ:
        from lockstep.study.rehearse.inside.activate import activate

        activate(os.environ[REHEARSAL])
    if orders["adopt"]:
        from lockstep.adoption import adopt

        adopt()
    if MONITOR in os.environ:
        folder = os.environ.pop(MONITOR)  # programs that this one starts are not recorded
        from lockstep.observe.attach import attach

        attach(folder)


def _make_sockets_possible(run_dir: str) -> None:
    """Have loader processes of the program make their sockets where their names are not too long."""
    from lockstep.errors import ConfigurationError
    from lockstep.socket_folder import make_sockets_possible

    with contextlib.suppress(ConfigurationError):  # it may have no loader processes
        make_sockets_possible(run_dir)


def _light_beacon(run_dir: str, patience_s: float, record: Callable[[BaseException], None]) -> None:
    """Have the launcher's watchdog see what this rank is doing."""
    from lockstep import progress
    from lockstep.telemetry.beacon import Beacon

    beacon = Beacon(run_dir, int(os.environ["RANK"]), patience_s=patience_s)

    def tell(error: BaseException) -> None:
        record(error)
        beacon.write()

    progress.now.on_failure = tell
    beacon.start()
