"""Collectives on groups that cannot do all of them."""

from types import SimpleNamespace

import torch

from lockstep.comm import collectives


def test_gloo_sums_tensors_of_a_gpu_one_by_one(monkeypatch):
    """Its allreduce_coalesced refuses them."""
    calls = []
    group = SimpleNamespace(allreduce=lambda tensors, options: calls.append(tensors))
    monkeypatch.setattr(collectives, "is_native", lambda group: True)
    monkeypatch.setattr(collectives, "_is_gloo", lambda group, device: device.type != "cpu")
    tensors = [torch.empty(3, device="meta"), torch.empty(2, device="meta", dtype=torch.float64)]
    collectives.all_reduce_together(tensors, group=group)
    assert [len(call) for call in calls] == [1, 1] and calls[0][0] is tensors[0] and calls[1][0] is tensors[1]
