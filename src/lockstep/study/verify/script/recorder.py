"""The recorder in each rank of a script: joins the recorders of data, updates and draws, and writes the trace."""

import atexit
import os
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from lockstep.data.order import mix, seed_cpu
from lockstep.errors import ConfigurationError
from lockstep.loop.instrument import Instrument, in_backward
from lockstep.parallel.sync_batchnorm import SyncBatchNorm
from lockstep.study.verify.fingerprint import ModelFingerprint
from lockstep.study.verify.interventions import NoBatchStatistics
from lockstep.study.verify.script.data_recorder import NUM_EPOCHS, DataRecorder
from lockstep.study.verify.script.draws import Draws
from lockstep.study.verify.script.trace import ScriptTrace
from lockstep.study.verify.script.update_recorder import UpdateRecorder

# Collectives that may combine what the ranks have evaluated.
_COMBINING = ("allreduce", "allgather", "_allgather", "gather", "reduce")


class ScriptRecorder:
    """Records the script of this rank; the launcher's bootstrap creates one before the script starts.

    Args:
        folder: Gets the trace when the script ends, in a file named after the rank.
        num_steps: Updates of a pass.
        off: What to turn off: ``random``, ``batchnorm``; see `Switch`.
        cuts: See [Note: the script is cut short].
    """

    def __init__(self, folder: str, num_steps: int, off: Sequence[str], cuts: bool) -> None:
        self._file, self._num_steps = Path(folder) / os.environ["RANK"], num_steps
        # A script without seeds draws other numbers in each run and on each rank; now only on each rank.
        value = mix(int(os.environ["RANK"]))
        seed_cpu(value)
        torch.manual_seed(value)
        self._draws = Draws()
        self._data = DataRecorder(num_steps, self._draws, self._end, cuts=cuts)
        self._updates = UpdateRecorder(self._data, self._draws, self._end_after_enough)
        self._instrument = Instrument()  # kept: what it has entered is undone when it is freed
        self._draws.arm(self._instrument)
        self._data.arm(self._instrument)
        self._updates.arm(self._instrument)
        self._instrument.collectives(self._before_collective, in_ddp=False)
        self._instrument.before(sys.modules["torch.multiprocessing.spawn"], "start_processes", _refuse_spawn)
        if "random" in off:
            self._draws.turn_off(self._instrument)
        if "batchnorm" in off:
            self._instrument.enter_context(NoBatchStatistics())
            for kind in (torch.nn.SyncBatchNorm, SyncBatchNorm):  # which compute by themselves otherwise
                self._instrument.replace(kind, "forward", torch.nn.BatchNorm1d.forward)
        atexit.register(self._write)

    def _before_collective(self, name: str, *_args: Any, **_kwargs: Any) -> None:
        if name.startswith(_COMBINING) and not in_backward():
            self._data.combine()

    def _end_after_enough(self) -> None:
        """End a script that trains without an end."""
        if self._data.is_endless and self._data.num_updates >= NUM_EPOCHS * self._num_steps:
            self._end()

    def _end(self) -> None:
        """End the script: each rank comes here after the same update."""
        self._write()
        sys.stdout.flush()
        os._exit(0)

    def _write(self) -> None:
        initial: ModelFingerprint = {"parameter": self._updates.initial, "gradient": {}, "buffer": {}}
        trace = ScriptTrace(
            {"samples of the data set": 0},  # the sampler, not the data set, says how many there are
            initial,
            tuple(self._updates.steps),
            {"random": tuple(sorted(self._draws.watch.seen["random"])), "batchnorm": tuple(self._updates.synchronized)},
            passes=tuple(self._data.passes),
            norms=tuple(sorted(self._updates.norms)),
            precision=self._updates.precision[1],
            engine=self._updates.engine,
            is_augmented=self._data.is_augmented,
            unseen=tuple(self._data.unseen),
        )
        self._file.write_bytes(pickle.dumps(trace))


def _refuse_spawn(*_args: Any, **_kwargs: Any) -> None:
    raise ConfigurationError(
        "The script starts its own ranks with torch.multiprocessing.spawn, in which verify sees nothing.\n"
        "Let it call its function for the rank in RANK if that is set, as torchrun and lockstep run set it, and spawn "
        "otherwise."
    )
