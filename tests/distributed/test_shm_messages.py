"""Send and receive on the backend shm."""

import torch
import torch.distributed as dist

from lockstep.errors import CollectiveError
from tests.shm import shm_group

LARGE = 300_001
"""Elements: more than a ring between two ranks holds."""


def test_messages_of_all_sizes_in_a_circle(ranks):
    def body(world):
        to, source = (world.rank + 1) % 3, (world.rank - 1) % 3
        with shm_group() as group:
            got = []
            for size in (0, 1, 1000, LARGE):
                tensor = torch.full((size,), float(world.rank))
                received = torch.empty(size)
                operations = [
                    dist.P2POp(dist.isend, tensor, to, group),
                    dist.P2POp(dist.irecv, received, source, group),
                ]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                got.append(received.unique().tolist())
            return got

    results = ranks(3)(body)
    assert results == [[[], [float((rank - 1) % 3)]] + [[float((rank - 1) % 3)]] * 2 for rank in range(3)]


def test_tags_match_out_of_order_and_each_tag_keeps_its_order(ranks):
    def body(world):
        with shm_group() as group:
            if world.rank == 0:
                for index, tag in enumerate([5, 9, 5, 9]):
                    dist.send(torch.full((LARGE,), index), 1, group, tag=tag)
                return None
            boxes = [torch.empty(LARGE, dtype=torch.int64) for _ in range(4)]
            for box, tag in zip(boxes, [9, 5, 9, 5], strict=True):
                dist.recv(box, 0, group, tag=tag)
            return [box.unique().tolist() for box in boxes]

    assert ranks(2)(body)[1] == [[1], [0], [3], [2]]


def test_from_any_rank_and_into_a_transposed_tensor(ranks):
    def body(world):
        with shm_group() as group:
            if world.rank:
                tensor = torch.full((2, 3), float(world.rank)).t()
                with torch.device("meta"):  # a default device of the script does not reach what shm allocates
                    dist.send(tensor, 0, group)
                return None
            boxes = [torch.zeros(2, 3).t() for _ in range(2)]
            sources = [dist.recv(box, None, group) for box in boxes]
            return sorted(zip(sources, (box.tolist() for box in boxes), strict=True))

    assert ranks(3)(body)[0] == [(rank, [[float(rank)] * 2] * 3) for rank in (1, 2)]


def test_a_message_for_a_third_rank_does_not_block_others(ranks):
    def body(world):
        with shm_group() as group:
            tensor = torch.full((LARGE,), float(world.rank))
            box = torch.empty(LARGE)
            if world.rank == 0:
                works = [dist.isend(tensor, 1, group), dist.isend(tensor, 2, group)]
            elif world.rank == 1:
                dist.recv(box, 2, group)  # which sends only after it has heard from rank 0
                works = [dist.irecv(box, 0, group)]
            else:
                dist.recv(box, 0, group)
                works = [dist.isend(tensor, 1, group)]
            for work in works:
                work.wait()
            return box[0].item() if world.rank else None

    assert ranks(3)(body) == [None, 0.0, 0.0]


def test_another_size_is_an_error(ranks):
    def body(world):
        with shm_group() as group:
            if world.rank == 0:
                dist.send(torch.ones(3), 1, group)
                return None
            try:
                dist.recv(torch.ones(4), 0, group)
            except CollectiveError as error:
                return str(error)

    assert ranks(2)(body)[1] == (
        "recv from rank 0 has room for 16 bytes, but rank 0 sent 12.\nPass tensors of the same shape and dtype."
    )


def test_nobody_sends(ranks):
    def body(world):
        with shm_group(timeout_s=0.5) as group:
            error = None
            if world.rank == 0:
                try:
                    dist.recv(torch.ones(4), 1, group)
                except CollectiveError as raised:
                    error = str(raised)
            dist.barrier()
        return error

    assert ranks(2)(body)[0] == (
        "Rank 0 in recv from rank 1 waited 0.5 s.\nThe other rank is stopped or stuck, or does not take part."
    )
