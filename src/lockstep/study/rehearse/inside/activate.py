"""Arm this rank with the faults of a rehearsal: the launcher's bootstrap calls it before the program starts."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from torch import Tensor

from lockstep.study.rehearse import notes
from lockstep.study.rehearse.inside import acts, full_disk, transport
from lockstep.study.rehearse.inside.clock import Clock
from lockstep.study.rehearse.rules import Rule


def activate(orders: str) -> None:
    """Follow ``orders``: the folder for notes and the rules, in JSON, from `lockstep.study.rehearse.organise`.

    Reads the rank from the environment; faults of other ranks are left out.
    """
    found = json.loads(orders)
    rank = int(os.environ.get("RANK", 0))
    rules = {number: Rule(**rule) for number, rule in enumerate(found["rules"])}
    mine = {number: rule for number, rule in rules.items() if rule.rank in (None, rank)}
    if mine:
        Faults(Path(found["folder"]), rank, mine).arm()


class Faults:
    """The faults that are to strike this rank.

    Args:
        folder: Where it is noted that they have struck.
        rank: This rank.
        rules: By number.
    """

    def __init__(self, folder: Path, rank: int, rules: dict[int, Rule]) -> None:
        self._folder, self._rank, self._rules = folder, rank, rules
        self._clock = Clock(self._come_to)
        self._last_visit: dict[int, int] = {}
        self._whole = acts.WholeParameters()

    def arm(self) -> None:
        """Put everything in place, for good."""
        self._clock.start()
        if any(rule.place == "backward" for rule in self._rules.values()):
            self._whole.follow()
        if any(rule.place == "collective" for rule in self._rules.values()):
            transport.watch(self._before_send)
        for number, rule in self._rules.items():
            if rule.kind == "disk-full":
                full_disk.fill(lambda number=number, rule=rule: self._is_full(number, rule))  # type: ignore[misc]

    def _come_to(self, place: str) -> None:
        for number, rule in self._rules.items():
            expected = "updated" if rule.kind == "bitflip" else rule.place
            if expected == place and rule.place != "collective" and self._is_due(number, rule):
                self._strike(number, rule)

    def _is_due(self, number: int, rule: Rule) -> bool:
        has_struck = self._last_visit.get(number) == self._clock.visit
        if self._clock.step < rule.step or (has_struck and rule.kind != "nan"):
            return False
        return not self._is_spent(number, rule)

    def _is_spent(self, number: int, rule: Rule) -> bool:
        """Say whether the fault was; a straggler is slow in every step, also after a restart."""
        if rule.kind == "nan" and self._last_visit.get(number) == self._clock.visit:
            return False  # who computes the step again to find out why finds the same
        return rule.kind != "straggler" and notes.is_spent(self._folder, number)

    def _strike(self, number: int, rule: Rule) -> None:
        self._last_visit[number] = self._clock.visit
        model = self._clock.model
        if rule.kind == "bitflip":
            if model is not None:
                self._note(number, rule, acts.flip_bit(model))
            return
        name = "" if model is None else acts.middle_parameter(model)[0]
        parameter = None if model is None else self._whole.middle(model)
        if rule.place == "backward" and parameter is not None:  # in the midst of it

            def act(gradient: Tensor) -> Tensor | None:
                if self._is_spent(number, rule):
                    return None
                self._act(number, rule, f"gradient of {name}")
                return acts.not_a_number(gradient) if rule.kind == "nan" else None

            acts.in_backward(parameter, act)
        elif rule.kind != "nan":
            self._act(number, rule)

    def _act(self, number: int, rule: Rule, detail: str = "") -> None:
        self._note(number, rule, detail)
        if rule.kind == "kill":
            acts.kill()
        elif rule.kind == "oom":
            acts.run_out_of_memory()
        elif rule.kind in ("hang", "drop"):
            acts.hang(rule.amount)
        elif rule.kind == "straggler":
            time.sleep(rule.amount / 1000)

    def _before_send(self, name: str, num_bytes: int, size: int) -> None:
        for number, rule in self._rules.items():
            if rule.place != "collective" or self._clock.step < rule.step:
                continue
            if rule.kind == "slowlink":
                self._note(number, rule)
                time.sleep(transport.seconds_on_link(name, num_bytes, size, rule.amount))
            elif not notes.is_spent(self._folder, number):
                self._act(number, rule, name)

    def _is_full(self, number: int, rule: Rule) -> bool:
        if self._clock.step < rule.step:
            return False
        self._note(number, rule)
        return True

    def _note(self, number: int, rule: Rule, detail: str = "") -> None:
        step = self._clock.step
        if not notes.is_spent(self._folder, number) and notes.write(
            self._folder, number, rank=self._rank, step=step, detail=detail
        ):
            where = f" ({detail})" if detail else ""
            place = f", {rule.place}" if rule.place else ""
            sys.stderr.write(f"rehearse: {rule.text} strikes rank {self._rank} in step {step}{place}{where}\n")
            sys.stderr.flush()
