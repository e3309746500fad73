"""What a rank tells of its GPUs' memory, by the figures of torch's allocator."""

from types import SimpleNamespace

import torch

from lockstep.base import torch_internals
from lockstep.health.heartbeat import device_memory, uses_gpu

GIB = 2**30


def pretend(monkeypatch, *, is_in_use, stats):
    properties = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch_internals, "is_allocator_initialized", lambda: is_in_use)
    monkeypatch.setattr(torch.accelerator, "memory_stats", stats)
    monkeypatch.setattr(torch, "get_device_module", lambda: properties)


def test_devices_in_use_are_told(monkeypatch, gpus):
    gpus(2)
    figures = [{}, {"reserved_bytes.all.peak": 6 * GIB, "allocated_bytes.all.current": 2 * GIB}]
    pretend(monkeypatch, is_in_use=True, stats=figures.__getitem__)
    assert device_memory() == ["2.0 GiB in tensors on cuda:1, at most 6.0 GiB of its 80.0 GiB were reserved"]


def test_nothing_is_told_without_any(monkeypatch, gpus):
    gpus(1)
    pretend(monkeypatch, is_in_use=False, stats=lambda index: 1 // 0)
    assert not uses_gpu() and device_memory() == []
    pretend(monkeypatch, is_in_use=True, stats=lambda index: 1 // 0)
    assert uses_gpu() and device_memory() == []
