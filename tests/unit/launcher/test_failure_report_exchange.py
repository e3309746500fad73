"""What the launchers of several machines learn from each other: by requests that do not grow with the machines."""

import threading
import time
from collections import Counter
from dataclasses import asdict
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, PrefixStore

from lockstep.comm import store as store_module
from lockstep.comm.store import InterNodeStore
from lockstep.health import watchdog
from lockstep.health.rank_state import RankState
from lockstep.health.watchdog import Judgement, SharedJudgement, Verdict
from lockstep.launcher import failure_report
from lockstep.launcher.failure_report import NodeFailure, find_cause

requests = Counter()


class Counted:
    """A ``PrefixStore`` that counts the requests of each thread, and the keys that it reads."""

    def __init__(self, prefix, inner):
        self.inner = PrefixStore(prefix, inner)

    def __getattr__(self, name):
        def call(*args):
            is_poll = name == "add" and args[1] == 0 and args[0] in ("ended", "read")
            requests[threading.current_thread().name] += not is_poll
            if name == "multi_get":
                requests["keys"] += len(args[0])
            return getattr(self.inner, name)(*args)

        return call


@pytest.fixture
def launchers(monkeypatch):
    """Return a function that gives so many launchers the store in which they meet, without a network."""
    monkeypatch.setattr(store_module, "PrefixStore", Counted)

    def meet(count):
        shared, stores = HashStore(), [InterNodeStore("127.0.0.1:1", "job") for _ in range(count)]
        for store in stores:
            store._notes = store_module._Notes("job", lambda: shared)
        return stores

    return meet


@pytest.fixture
def clock(monkeypatch):
    """The watchdog's clock, which moves only when it is told to."""
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now.s))
    return now


def list_seen(ranks, num_seen):
    """The judgement of a judge that lists whom it sees, and which of their notes."""
    seen = sorted((each.rank, int(each.idle_s)) for each in ranks)
    assert num_seen == len(seen)
    return Judgement(Verdict.SUSPECT, str(seen), all_wait=False)


class Machines:
    """Launchers that exchange, one after the other, once a second."""

    def __init__(self, stores, clock):
        self.shared = {rank: SharedJudgement(store, len(stores), list_seen) for rank, store in enumerate(stores)}
        self.clock, self.num_posts, self.idle = clock, 0, set(self.shared)

    def exchange(self):
        """Return what each takes for the judgement then, and the requests and notes that it took."""
        self.clock.s += 1.0
        self.num_posts += 1
        found, cost = {}, {}
        for rank, each in self.shared.items():
            requests.clear()
            state = RankState(rank, idle_s=float(self.num_posts))
            judgement = each.update([state], is_idle=rank in self.idle)
            found[rank] = None if judgement is None else judgement.text
            cost[rank] = requests["MainThread"], requests["keys"]
        return found, cost


def test_one_launcher_judges_for_all_and_the_others_make_as_many_requests_on_any_number_of_machines(launchers, clock):
    costs = {}
    for size in (4, 16):
        machines = Machines(launchers(size), clock)
        # How old the first notes are, nobody knows.
        assert machines.exchange()[0] == {0: str([(0, 1)])} | dict.fromkeys(range(1, size))
        machines.exchange()
        machines.exchange()
        found, costs[size] = machines.exchange()
        assert found == dict.fromkeys(range(size), str([(0, 4)] + [(rank, 3) for rank in range(1, size)]))
    (judge_4, *others_4), (judge_16, *others_16) = costs[4].values(), costs[16].values()
    assert set(others_4) == set(others_16) == {(3, 1)}
    assert (judge_4[1], judge_16[1]) == (3, 15)
    assert judge_4[0] == judge_16[0] < 6


def test_without_the_judge_each_judges_for_itself_and_nobody_waits_for_it(launchers, clock):
    machines = Machines(launchers(4), clock)
    for _ in range(3):
        last = machines.exchange()[0][0]
    judge = machines.shared.pop(0)
    for _ in range(10):
        assert machines.exchange()[0] == dict.fromkeys((1, 2, 3), last)
    # Too old now.
    assert machines.exchange()[0] == dict.fromkeys((1, 2, 3))
    machines.shared = {0: judge, **machines.shared}
    machines.exchange()
    assert set(machines.exchange()[0].values()) == {str([(0, 16), (1, 15), (2, 15), (3, 15)])}


def test_what_was_judged_before_the_ranks_moved_does_not_count_afterwards(launchers, clock):
    machines = Machines(launchers(3), clock)
    for _ in range(3):
        machines.exchange()
    machines.idle = {1}
    assert machines.exchange()[0] == {0: None, 1: str([(0, 3), (1, 2), (2, 2)]), 2: None}
    # Those of the others are idle again: what was posted before may be old.
    machines.idle = {0, 1, 2}
    assert machines.exchange()[0] == {0: str([(0, 5)]), 1: str([(0, 5)]), 2: None}
    machines.idle = {0, 1}
    for _ in range(12):
        found = machines.exchange()[0]
    assert found == {0: str([(0, 17), (1, 16)]), 1: str([(0, 17), (1, 16)]), 2: None}


def test_a_store_that_is_gone_holds_up_nobody(launchers, clock, monkeypatch):
    monkeypatch.setattr(failure_report, "_EXCHANGE_S", 0.2)
    store = InterNodeStore("127.0.0.1:1", "job")
    assert Machines([store, store], clock).exchange()[0] == {0: str([(0, 1)]), 1: None}
    mine = NodeFailure(0, is_consequence=True, text="gone")
    assert find_cause(store, mine, num_nodes=1) is mine


ECHO = NodeFailure(0, is_consequence=True, text="Rank 0 failed: Connection closed by peer")
CAUSE = NodeFailure(5, is_consequence=False, text="Rank 5 failed: ValueError: boom\nAt a.py:3, on host1.")
LATER = NodeFailure(6, is_consequence=False, text="Rank 6 failed: ValueError: boom")
EARLY = NodeFailure(1, is_consequence=False, text="Rank 1 ended normally ...", is_normal=True)
HANG = NodeFailure(7, is_consequence=True, text="Rank 7 ...", hang="The job hangs: ...")


@pytest.mark.parametrize(
    ("ends", "causes"),
    [
        ([ECHO, ECHO], [ECHO, ECHO]),
        ([ECHO, CAUSE, ECHO], [CAUSE, CAUSE, CAUSE]),
        ([ECHO, LATER, CAUSE, HANG], [HANG, LATER, CAUSE, HANG]),
        ([*[ECHO] * 8, CAUSE, LATER], [*[CAUSE] * 9, LATER]),
        ([ECHO, EARLY], [EARLY, EARLY]),
        ([EARLY, CAUSE], [CAUSE, CAUSE]),  # it left because of that
    ],
)
def test_all_machines_name_the_cause_by_as_many_requests_on_any_number_of_them(launchers, monkeypatch, ends, causes):
    monkeypatch.setattr(failure_report, "_EXCHANGE_S", 60.0)  # that is not waited for
    stores, found = launchers(len(ends)), {}
    requests.clear()

    def end(index):
        found[index] = find_cause(stores[index], ends[index], num_nodes=len(ends))

    threads = [threading.Thread(target=end, args=(index,), name=f"launcher {index}") for index in range(len(ends))]
    began_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - began_s < 20.0
    assert [found[index] for index in range(len(ends))] == causes
    # One reads, or writes, which each of the other causes may disturb: not more of them on more machines.
    most = 3 + sum(end is not ECHO for end in ends)
    assert all(requests[thread.name] <= most for thread in threads)


def test_a_machine_that_does_not_come_is_not_waited_for_long(launchers, monkeypatch):
    monkeypatch.setattr(failure_report, "_EXCHANGE_S", 0.2)
    store, other = launchers(2)
    other.least("cause", failure_report._rank_of_cause, asdict(CAUSE))  # and was lost then
    assert find_cause(store, ECHO, num_nodes=2) == CAUSE
