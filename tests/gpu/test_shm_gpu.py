"""The backend shm beside NCCL in one process group: each device's tensors take their own way."""

import torch
import torch.distributed as dist

import lockstep


def beside_nccl(world):
    dist.destroy_process_group()
    dist.init_process_group("cpu:shm,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert lockstep.__name__  # its import makes the name known
    try:
        here, there = torch.ones(3), torch.ones(3, device="cuda")
        dist.all_reduce(here)
        dist.all_reduce(there)
        works = [dist.all_reduce(tensor, async_op=True) for tensor in (here, there)]
        for work in works:
            work.wait()
        backend = dist.group.WORLD._get_backend(torch.device("cuda"))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2).cuda())
        model(there).sum().backward()
        return here.tolist(), there.tolist(), type(backend).__name__, next(model.parameters()).grad is not None
    finally:
        dist.destroy_process_group()


def test_each_device_takes_its_own_way(ranks):
    assert ranks(1, warnings="ignore")(beside_nccl) == [([1.0] * 3, [1.0] * 3, "ProcessGroupNCCL", True)]
