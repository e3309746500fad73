"""The collectives beneath the engines."""

import torch
from torch.futures import Future

from lockstep.base import activity
from lockstep.comm import collectives
from lockstep.comm.collectives import RepeatedBroadcast, all_gather_object, broadcast_coalesced
from lockstep.errors import CollectiveError


def tensors(world):
    return [
        torch.full((2, 3), 1.5 + world.rank),
        torch.tensor(7 + world.rank),
        torch.tensor([True, False]) if world.rank == 1 else torch.zeros(2, dtype=torch.bool),
        torch.full((5,), 0.25 + world.rank, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.full((3,), complex(1, world.rank), dtype=torch.complex128),
        torch.arange(8.0).view(2, 2, 2, 1).to(memory_format=torch.channels_last) + world.rank,
        torch.full((3,), 9 + world.rank, dtype=torch.int8),
    ]


def broadcast_from_one(world):
    mine = tensors(world)
    versions = [tensor._version for tensor in mine]
    broadcast_coalesced(mine, group=world.group, src=1)
    assert [tensor._version for tensor in mine] == versions
    return [tensor.tolist() for tensor in mine]


def test_tensors_of_all_kinds_travel_in_one_message(ranks):
    expected = ranks(3)(lambda world: [tensor.tolist() for tensor in tensors(world)])[1]
    assert ranks(3)(broadcast_from_one) == [expected] * 3


def broadcast_repeatedly(world):
    """The same tensors twice, then one of them replaced and one gone, as modules do with their buffers."""
    send = RepeatedBroadcast(world.group)
    mine = [torch.full((3,), 1.0 + world.rank), torch.tensor(5 + world.rank)]
    seen = []
    for step in range(4):
        mine[0].add_(10 * world.rank)
        if step == 2:
            mine[1] = torch.full((2,), 7.0 + world.rank)
        if step == 3:
            del mine[0]
        send(mine, src=1)
        seen.append([tensor.tolist() for tensor in mine])
    return seen


def test_the_same_tensors_again_and_others_later(ranks):
    expected = [[[12.0] * 3, 6], [[22.0] * 3, 6], [[32.0] * 3, [8.0, 8.0]], [[8.0, 8.0]]]
    assert ranks(2)(broadcast_repeatedly) == [expected, expected]


def gather(world):
    return all_gather_object({"rank": world.rank, "text": "é" * world.rank * 100}, group=world.group)


def test_objects_of_different_sizes(ranks):
    expected = [{"rank": rank, "text": "é" * rank * 100} for rank in range(3)]
    assert ranks(3)(gather) == [expected] * 3


def test_an_object_of_one_rank(ranks):
    def body(world):
        value = {"a": [1, 2], "b": "x" * 1000} if world.rank == 1 else world.rank
        return collectives.broadcast_object(value, group=world.group, src=1)

    assert ranks(3)(body) == [{"a": [1, 2], "b": "x" * 1000}] * 3


def test_what_fails_while_it_is_waited_for_names_rank_and_operation(ranks):
    def body(world):
        failed = Future()
        failed.set_exception(RuntimeError("Connection closed by peer [127.0.0.1]:1234\nand more"))
        try:
            collectives.wait_for(failed, "all_reduce of losses")
        except CollectiveError as error:
            return str(error), activity.now.collective

    assert ranks(2)(body)[1] == (
        "Rank 1: all_reduce of losses failed: Connection closed by peer [127.0.0.1]:1234\n"
        "Another rank ended, or did not take part in time: look at its output.",
        "",
    )
