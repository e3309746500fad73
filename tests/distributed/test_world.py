"""`World` on real ranks: barriers, leader-first blocks, and what they say about ranks that are missing."""

import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import lockstep
from lockstep.errors import CollectiveError, RankFailed


def test_world_describes_the_group(ranks):
    def describe(world):
        return repr(world), world.is_rank_zero, world.local_world_size, world.group is dist.group.WORLD

    text = "World(rank={0}, world_size=2, local_rank={0}, node_rank=0, device='cpu', backend='gloo')"
    assert ranks(2)(describe) == [(text.format(rank), rank == 0, 2, True) for rank in range(2)]


def test_init_inside_an_existing_group_describes_it_and_leaves_it_alone(ranks):
    def again(world):
        with lockstep.init() as second:
            assert second.group is world.group
        total = torch.ones(1)
        dist.all_reduce(total)
        try:
            lockstep.init(backend="nccl")
        except lockstep.errors.ConfigurationError as error:
            return total.item(), str(error)

    text = (
        "This process has a process group already, with the backend 'gloo', so it cannot have 'nccl'.\n"
        "Call init() once, or leave backend out the second time."
    )
    assert ranks(2)(again) == [(2.0, text)] * 2


def test_only_rank_zero_prints(ranks, capfd):
    def talk(world):
        import io

        out = io.StringIO()
        world.print("epoch", 3, sep="=", end="!", file=out)
        return out.getvalue()

    assert ranks(2)(talk) == ["epoch=3!", ""]


def test_nobody_leaves_a_barrier_before_all_have_come(ranks):
    def meet(world):
        times = []
        for _ in range(3):
            time.sleep(0.15 * world.rank)
            came = time.monotonic()
            world.barrier()
            times.append((came, time.monotonic()))
        return times

    for meeting in zip(*ranks(3)(meet), strict=True):
        assert max(came for came, _ in meeting) <= min(left for _, left in meeting)


def test_barrier_names_who_is_missing(ranks):
    def meet(world):
        if world.rank == 1:
            return None
        start = time.monotonic()
        try:
            world.barrier(timeout_s=0.4)
        except CollectiveError as error:
            return str(error), time.monotonic() - start

    first, second, third = ranks(3)(meet)
    assert second is None
    for rank, (message, waited_s) in ((0, first), (2, third)):
        assert message == (
            f"Rank {rank} waited 0.4 s in World.barrier() number 1; missing: rank 1.\n"
            "Those ranks ended, are stuck, or do not call barrier() as often as the others; "
            "if they are only slow, pass a longer timeout_s."
        )
        assert 0.4 <= waited_s < 10


def test_all_worlds_of_a_group_count_their_barriers_together(ranks):
    def meet(world):
        for one in (world, lockstep.World.from_group(), world)[world.rank :]:
            one.barrier(timeout_s=5)
        if world.rank == 0:
            return "came"
        world.barrier(timeout_s=5)  # with the last one of rank zero
        return "came"

    assert ranks(2)(meet) == ["came", "came"]


def test_barriers_leave_no_keys_behind(ranks):
    def meet(world):
        for _ in range(3):
            world.barrier()
        return [world._store.check([f"barrier/{number}/done"]) for number in (1, 2, 3)]

    assert ranks(2)(meet)[0] == [False, False, True]


def test_rank_zero_goes_first(ranks):
    def block(world):
        with world.rank_zero_first():
            entered = time.monotonic()
            time.sleep(0.2 if world.rank == 0 else 0)
            return entered, time.monotonic()

    (_, zero_left), (one_entered, _), (two_entered, _) = ranks(3)(block)
    assert zero_left <= min(one_entered, two_entered) + 0.01


def test_local_leader_goes_first_on_each_machine(ranks):
    def block(world):
        # Two machines of two ranks each, on the clock of this one.
        world.node_rank, world.local_rank = divmod(world.rank, 2)
        with world.rank_zero_first(local=True):
            entered = time.monotonic()
            time.sleep({0: 0.4, 2: 0.1}.get(world.rank, 0))
            return entered, time.monotonic()

    times = ranks(4)(block)
    assert times[0][1] <= times[1][0] + 0.01
    assert times[2][1] <= times[3][0] + 0.01
    assert times[3][0] < times[0][1]  # the second machine does not wait for the first


def test_a_failure_in_the_first_block_reaches_those_that_wait(ranks):
    def block(world):
        with world.rank_zero_first():
            if world.rank == 0:
                raise OSError("disk full")

    outcomes = ranks(2).each(block)
    assert isinstance(outcomes[0].error, OSError)
    assert isinstance(outcomes[1].error, RankFailed)
    assert str(outcomes[1].error) == "Rank 0 failed in its rank_zero_first() block: OSError: disk full"


def test_waiting_for_the_first_block_ends(ranks):
    def block(world):
        if world.rank == 0:
            return None
        try:
            with world.rank_zero_first(timeout_s=0.3):
                pass
        except CollectiveError as error:
            return str(error)

    assert ranks(2)(block)[1] == (
        "Rank 1 waited 0.3 s for rank 0 to finish its rank_zero_first() block.\n"
        "It ended, is stuck, or never reached the block; if it is only slow, pass a longer timeout_s."
    )


def test_seed_gives_each_rank_random_numbers_of_its_own_also_in_workers(ranks):
    def run(world):
        lockstep.seed(world, 3)
        drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
        numbers = _Drawn()
        return drawn, torch.cat(list(DataLoader(numbers, batch_size=1, num_workers=1))).flatten().tolist()

    first, second = ranks(2)(run)
    assert ranks(2)(run) == [first, second], "the same numbers again"
    assert not {*first[0], *first[1]} & {*second[0], *second[1]}
    torch.manual_seed(3)
    assert torch.rand(()).item() == first[0][2], "rank zero has those of a script for one device"


class _Drawn(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()], dtype=torch.float64)
