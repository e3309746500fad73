"""The start-up check, with threads for ranks and a store in memory."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lockstep.comm import rendezvous
from lockstep.comm.rendezvous import Participant, check_membership
from lockstep.errors import ConfigurationError, WorldSizeMismatch

# --- how often a store is asked


class CountedStore:
    """A store that counts its requests, without those that only poll for a key."""

    def __init__(self, store):
        self.store, self.num_requests = store, 0
        self._polled = set()

    def __getattr__(self, name):
        function = getattr(self.store, name)

        def call(*args):
            is_poll = name in ("check", "wait") or (name == "add" and args[1] == 0)
            self.num_requests += not (is_poll and (name, str(args[0])) in self._polled)
            self._polled.add((name, str(args[0])))
            return function(*args)

        return call


def participant(rank, *, world_size=3, backend="gloo", pid=None):
    return Participant(rank, world_size, backend, "here", 100 + rank if pid is None else pid)


class Check:
    """Runs `check_membership` once a rank, each in a thread, and keeps how each ended."""

    def __init__(self, timeout_s=0.3):
        self.store = dist.HashStore()
        self.timeout_s = timeout_s
        self.requests = []  # a rank

    def call(self, arrivals, *, objections=None, host=0):
        outcomes = [None] * len(arrivals)
        stores = [CountedStore(self.store) for _ in arrivals]

        def one(index, me):
            try:
                check_membership(
                    stores[index],
                    me,
                    deadline=time.monotonic() + self.timeout_s,
                    timeout_s=self.timeout_s,
                    is_host=index == host,
                    objection=(objections or {}).get(me.rank),
                )
            except Exception as error:
                outcomes[index] = error

        threads = [threading.Thread(target=one, args=pair) for pair in enumerate(arrivals)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        self.requests = [store.num_requests for store in stores]
        return outcomes


def test_complete():
    assert Check(timeout_s=5).call([participant(rank) for rank in range(3)]) == [None, None, None]


def test_every_rank_that_came_learns_who_is_missing():
    outcomes = Check().call([participant(0), participant(2)])
    expected = (
        "2 of 3 ranks came within 0.3 s; missing: rank 1.\n"
        "Came: rank 0 (host here, pid 100), rank 2 (host here, pid 102).\n"
        "Check that 3 processes were started and that none of them died before lockstep.init(); "
        "if some only start slowly, pass a longer timeout_s."
    )
    assert [(type(outcome), str(outcome)) for outcome in outcomes] == [(WorldSizeMismatch, expected)] * 2


def test_a_late_rank_gets_the_failure_at_once():
    check = Check()
    check.call([participant(0), participant(2)])
    check.timeout_s = 60
    start = time.monotonic()
    (outcome,) = check.call([participant(1)], host=None)
    assert str(outcome).startswith("2 of 3 ranks came within 0.3 s; missing: rank 1.")
    assert time.monotonic() - start < 10


def test_two_processes_with_one_rank():
    check = Check(timeout_s=5)
    outcomes = check.call([participant(0), participant(1, pid=7), participant(1, pid=8)])
    first, second = sorted(str(outcome).splitlines()[0] for outcome in outcomes[1:])
    assert first == second == str(outcomes[0]).splitlines()[0]
    assert first in (
        "Two processes have the rank 1: pid 7 on host here and pid 8 on host here.",
        "Two processes have the rank 1: pid 8 on host here and pid 7 on host here.",
    )
    assert str(outcomes[0]).endswith(
        "Give each process a RANK of its own, from 0 to 2; if one belongs to another job, give this "
        "job another MASTER_PORT. `lockstep run` does both."
    )


def test_a_process_too_many_does_not_disturb_a_complete_world():
    check = Check(timeout_s=5)
    assert check.call([participant(rank) for rank in range(3)]) == [None] * 3
    (outcome,) = check.call([participant(2, pid=9)], host=None)
    assert str(outcome).startswith(
        "Two processes have the rank 2: pid 102 on host here and pid 9 on host here."
    )  # fmt: skip
    assert check.store.get("verdict") == b"complete"


@pytest.mark.parametrize(
    ("odd", "name", "values"),
    [
        (participant(1, world_size=2), "WORLD_SIZE", {"2", "3"}),
        (participant(1, backend="nccl"), "backend", {"nccl", "gloo"}),
    ],
)
def test_ranks_with_different_settings(odd, name, values):
    outcomes = Check(timeout_s=5).call([participant(0), odd])
    assert {type(outcome) for outcome in outcomes} == {ConfigurationError}
    for outcome in outcomes:
        cause, advice = str(outcome).splitlines()
        assert cause.startswith(f"The ranks disagree about {name}: ")
        assert all(value in cause for value in values)
        assert advice == f"Start every rank with the same {name}."


def test_a_rank_that_cannot_take_part_says_so_to_all():
    outcomes = Check(timeout_s=5).call(
        [participant(rank) for rank in range(3)], objections={2: "Local rank 2 has no GPU."}
    )  # fmt: skip
    text = "Rank 2 (host here, pid 102) cannot take part: Local rank 2 has no GPU."
    assert [str(outcome) for outcome in outcomes] == [text] * 3


@pytest.mark.parametrize("size", [4, 64])
def test_a_rank_asks_the_store_as_often_in_a_large_job_as_in_a_small_one(size):
    whole = Check(timeout_s=20)
    ranks = [participant(rank, world_size=size) for rank in range(size)]
    assert whole.call(ranks) == [None] * size
    assert max(whole.requests) <= 7
    # Nor if one is missing: the first to find that out asks for the others, in halves, and no other does.
    partial = Check(timeout_s=0.5)
    outcomes = partial.call(ranks[:-1])
    assert {str(outcome).partition("\n")[0] for outcome in outcomes} == {
        f"{size - 1} of {size} ranks came within 0.5 s; missing: rank {size - 1}."
    }
    *others, first = sorted(partial.requests)
    assert max(others) <= 12
    assert first <= 16 + 2 * size.bit_length()


def test_what_takes_long_to_find_is_not_looked_for_by_all_at_once(monkeypatch):
    monkeypatch.setattr(rendezvous, "FAREWELL_S", 0.2)
    shared, calls = dist.HashStore(), []

    def find():
        calls.append(1)
        time.sleep(0.5)
        return "found"

    with ThreadPoolExecutor(32) as pool:
        found = list(pool.map(lambda _: rendezvous.find_once(shared, "key", find, 32), range(32)))
    assert found == ["found"] * 32
    assert len(calls) < 12  # one more for each pause
