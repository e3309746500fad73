"""Say who waits for whom: pure functions of what was seen of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lockstep.telemetry.seen import RankSeen, operation, place, user_frame
from lockstep.telemetry.verdict import GRACE, Verdict


def report(
    ranks: Sequence[RankSeen],
    patience_s: float,
    folder: str,
    verdict: Verdict,
    *,
    workers: Sequence[str] = (),
    num_nodes: int = 1,
    num_seen: int = 1,
) -> str:
    """Return the report: the ranks that keep the others waiting first.

    Args:
        ranks: What is seen of each.
        patience_s: What was set as patience.
        folder: Where the stacks are.
        verdict: What was found.
        workers: Where loader processes are.
        num_nodes: Machines in the job.
        num_seen: Machines whose ranks are among ``ranks``.
    """
    groups: dict[tuple[str, str], list[RankSeen]] = {}
    for seen in sorted(ranks, key=lambda seen: (operation(seen) is not None, seen.rank)):
        groups.setdefault((place(seen), _step(seen)), []).append(seen)
    lines = [_head(ranks, patience_s, verdict)]
    told = [_told(where, step, members, patience_s) for (where, step), members in groups.items()]
    lines += ["; ".join(told)] if len(told) <= 2 else told
    lines += workers
    lines += _meaning(ranks, num_nodes=num_nodes, num_seen=num_seen)
    lines += [f"rank {seen.rank} may be only slow: {seen.life}." for seen in _slow(ranks)]
    if num_seen < num_nodes:
        lines.append(
            f"Only {num_seen} of {num_nodes} machines could be seen; the others' launchers tell of their ranks."
        )
    lines.append(f"The Python stacks of {'all' if num_nodes == 1 else 'the'} ranks are in {folder}.")
    return "\n".join(lines)


def numbered(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 0-2, 5``."""
    numbers = sorted(ranks)
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"ranks {', '.join(parts)}"


def _head(ranks: Sequence[RankSeen], patience_s: float, verdict: Verdict) -> str:
    nobody = not any(operation(seen) for seen in ranks)
    if verdict is Verdict.SUSPECT:
        what = "no rank has done anything" if nobody else "ranks have waited for each other"
        return f"The job may hang: {what} for {_least(ranks, nobody=nobody):.0f} s."
    what = "no rank has done anything" if nobody else "ranks have waited for each other"
    limit_s = GRACE * patience_s if nobody else patience_s
    return f"The job hangs: {what} for more than {limit_s:g} s."


def _least(ranks: Sequence[RankSeen], *, nobody: bool) -> float:
    return min(seen.idle_s for seen in ranks if not seen.has_left and (nobody or operation(seen)))


def _told(where: str, step: str, members: Sequence[RankSeen], patience_s: float) -> str:
    many = len(members) > 1
    text = where
    if many:
        for one, several in (("waits ", "wait "), ("is ", "are "), ("has ", "have "), ("was ", "were ")):
            if text.startswith(one):
                text = several + text.removeprefix(one)
        text = text.replace("does not answer", "do not answer", 1)
    first = members[0]
    if not first.has_left and not first.is_stopped and any(seen.idle_s >= patience_s for seen in members):
        text += f" for {max(seen.idle_s for seen in members):.0f} s"
    return f"{numbered(seen.rank for seen in members)} {text}{step}"


def _step(seen: RankSeen) -> str:
    if seen.has_left:
        return ""
    if seen.step is None:
        return f" [after {seen.num_steps} optimizer step{'s' * (seen.num_steps != 1)}]" if seen.num_steps else ""
    return f" [step {seen.step + 1}{f', {seen.phase}' if seen.phase else ''}]"


def _meaning(ranks: Sequence[RankSeen], *, num_nodes: int, num_seen: int) -> list[str]:
    calls = [operation(seen) for seen in ranks]
    called = sorted({call.partition(" of bucket")[0].partition(" (")[0] for call in calls if call})
    if any(call is None for call in calls):
        return []
    if len(called) > 1 or len({user_frame(seen.frames)[:2] for seen in ranks}) > 1:
        what = "different collectives" if len(called) > 1 else f"{called[0]} from different lines"
        return [f"The ranks call {what}: each must be called by all ranks, in the same order."]
    if num_seen < num_nodes:
        return ["All ranks of this machine wait in the same call: look at the report of the other machines."]
    return ["All ranks wait in the same call: the transfer itself hangs, or is slower than --watchdog allows."]


def _slow(ranks: Sequence[RankSeen]) -> list[RankSeen]:
    return [seen for seen in ranks if seen.life and operation(seen) is None and not seen.has_left]
