"""What a rank tells of its GPUs' memory, by the figures of torch's allocator."""

from types import SimpleNamespace

from lockstep.telemetry import heartbeat as module
from lockstep.telemetry.heartbeat import device_memory

GIB = 2**30


def pretend(monkeypatch, **cuda):
    monkeypatch.setattr(module, "imported", lambda name: SimpleNamespace(**cuda) if name == "torch.cuda" else None)


def test_devices_in_use_are_told(monkeypatch):
    figures = [{}, {"reserved_bytes": {"all": {"peak": 6 * GIB}}, "allocated_bytes": {"all": {"current": 2 * GIB}}}]
    pretend(
        monkeypatch,
        _initialized=True,
        device_count=lambda: 2,
        memory_stats_as_nested_dict=lambda index: figures[index],
        get_device_properties=lambda index: SimpleNamespace(total_memory=80 * GIB),
    )
    assert device_memory() == ["2.0 GiB in tensors on cuda:1, of whose 80.0 GiB at most 6.0 GiB were taken"]


def test_nothing_is_told_without_any(monkeypatch):
    pretend(monkeypatch, _initialized=False)
    assert device_memory() == []
    pretend(monkeypatch, _initialized=True, device_count=lambda: 1 // 0)
    assert device_memory() == []
