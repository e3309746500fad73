"""Training libraries on the backend shm: the results that they have on Gloo."""

import torch
import torch.distributed as dist
from torch import nn

from lockstep import DistributedDataParallel
from tests.shm import shm_group


def train(world, wrap, make_optimizer, *, dtype=torch.float64, steps=4):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5)).to(dtype)
    wrapped = wrap(model)
    optimizer = make_optimizer(wrapped)
    generator = torch.Generator().manual_seed(world.rank)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(6, 7, generator=generator, dtype=torch.float64).to(dtype)
        wrapped(inputs).square().mean().backward()
        optimizer.step()
    return wrapped


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def on_both(world, run):
    """Return what ``run`` gives on Gloo and on shm."""
    with shm_group() as group:
        return run(world.group), run(group)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def test_torch_ddp(ranks):
    def body(world):
        def run(group):
            model = train(world, lambda m: nn.parallel.DistributedDataParallel(m, process_group=group), adam)
            return weights(model)

        gloo, shm = on_both(world, run)
        return torch.equal(gloo, shm)

    assert ranks(2)(body) == [True] * 2


def test_torch_ddp_with_small_buckets_hooks_and_no_sync(ranks):
    def body(world):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        def run(group):
            def wrap(module):
                model = nn.parallel.DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.0005)
                model.register_comm_hook(group, fp16_compress_hook)
                return model

            model = train(world, wrap, adam, dtype=torch.float32)
            with model.no_sync():
                model(torch.ones(2, 7)).sum().backward()
            model(torch.ones(2, 7)).sum().backward()
            return torch.cat([weights(model), *(parameter.grad.flatten() for parameter in model.parameters())])

        gloo, shm = on_both(world, run)
        return float((gloo - shm).norm() / gloo.norm())

    assert all(error < 1e-6 for error in ranks(2, warnings="ignore")(body))


def test_our_ddp(ranks):
    def body(world):
        def run(group):
            model = train(world, lambda m: DistributedDataParallel(m, process_group=group), adam)
            return weights(model)

        gloo, shm = on_both(world, run)
        return torch.equal(gloo, shm)

    assert ranks(2)(body) == [True] * 2


def test_zero_redundancy_optimizer(ranks):
    def body(world):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        def run(group):
            def optimizer(model):
                return ZeroRedundancyOptimizer(
                    model.parameters(), torch.optim.Adam, process_group=group, lr=0.01, parameters_as_bucket_view=True
                )

            model = train(world, lambda m: nn.parallel.DistributedDataParallel(m, process_group=group), optimizer)
            return weights(model)

        gloo, shm = on_both(world, run)
        return torch.equal(gloo, shm)

    assert ranks(2, warnings="ignore")(body) == [True] * 2


def test_fully_shard(ranks):
    def body(world):
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        def run(group):
            mesh = DeviceMesh.from_group(group, "cpu")

            def wrap(module):
                for layer in module:
                    if isinstance(layer, nn.Linear):
                        fully_shard(layer, mesh=mesh)
                return fully_shard(module, mesh=mesh)

            model = train(world, wrap, adam)
            return torch.cat([parameter.full_tensor().detach().flatten() for parameter in model.parameters()])

        gloo, shm = on_both(world, run)
        return float((gloo - shm).norm() / gloo.norm())

    assert all(error < 1e-14 for error in ranks(2, warnings="ignore")(body))


def test_functional_collectives(ranks):
    def body(world):
        import torch.distributed._functional_collectives as functional

        with shm_group() as group:
            mine = torch.arange(4.0) + world.rank
            total = functional.all_reduce(mine, "sum", group)
            everybody = functional.all_gather_tensor(mine, 0, group)
            part = functional.reduce_scatter_tensor(mine, "sum", 0, group)
            swapped = functional.all_to_all_single(mine, None, None, group)
            return [torch.as_tensor(value).tolist() for value in (total, everybody, part, swapped)]

    first, second = ranks(2, warnings="ignore")(body)
    assert first == [[1.0, 3.0, 5.0, 7.0], [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0], [1.0, 3.0], [0.0, 1.0, 1.0, 2.0]]
    assert second[:2] == first[:2]
    assert second[2:] == [[5.0, 7.0], [2.0, 3.0, 3.0, 4.0]]


def test_a_failure_reaches_torch_ddp_through_its_futures(ranks):
    def body(world):
        with shm_group(timeout_s=1.0) as group:
            model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2), process_group=group)
            if world.rank == 0:
                try:
                    model(torch.ones(1, 3)).sum().backward()
                except RuntimeError as error:
                    return "waited 1 s for rank 1" in str(error)
                return "no error"
            dist.distributed_c10d._get_default_store().wait(["tried"])
        return True

    def both(world):
        try:
            return body(world)
        finally:
            if world.rank == 0:
                dist.distributed_c10d._get_default_store().set("tried", "")

    assert ranks(2, warnings="ignore")(both) == [True, True]
