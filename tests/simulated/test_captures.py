"""Graphs that are captured while a loop is recorded: nothing of ours breaks them, and they are not recorded."""

import contextlib
import ctypes
import math
import threading

import pytest
import torch
from torch import nn

import lockstep
from lockstep.base import accelerator, activity
from lockstep.errors import ConfigurationError
from lockstep.study.report.view import view_run


def capturing_on_sim(device):
    """Stand in for `accelerator.is_capturing`, which asks CUDA."""
    return device.type == "sim" and torch.sim.is_current_stream_capturing()


@contextlib.contextmanager
def seen_by_lockstep():
    """Inside, Lockstep knows when the simulated device captures."""
    from lockstep.comm import collectives
    from lockstep.loop import steps
    from lockstep.parallel.ddp import bucket_events, reducer, weighting

    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (steps, collectives, bucket_events, reducer, weighting):
            monkeypatch.setattr(module, "is_capturing", capturing_on_sim)
        yield monkeypatch


def test_a_capture_in_a_loop_that_is_recorded(on_sim, tmp_path):
    def run(world):
        from lockstep.telemetry import recorder

        with seen_by_lockstep() as monkeypatch:
            # The simulated device has no mode in which another thread may ask during a capture, as CUDA has.
            monkeypatch.setattr(recorder, "_FIRST_S", 3600.0)
            monkeypatch.setattr(recorder, "PERIOD_S", 3600.0)
            torch.manual_seed(0)
            device = world.device
            model = lockstep.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).to(device))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with lockstep.monitor(model, optimizer, run_dir=tmp_path) as watch:

                def step():
                    optimizer.zero_grad()
                    loss = model(torch.ones(2, 6, device=device)).square().mean()
                    loss.backward()
                    optimizer.step()
                    watch.loss(loss)

                for _ in range(6):
                    step()
                assert not activity.now.has_captured
                torch.sim.synchronize()
                with torch.sim.counting() as counts, torch.sim.capturing():
                    step()
                assert counts.device_to_host_bytes == 0  # a replay would write to a buffer that serves again
                torch.sim.synchronize()
                num_steps = watch.num_steps
                step()
            return num_steps, watch.num_steps, activity.now.has_captured

    assert on_sim(2)(run) == [(6, 7, True)] * 2
    for record in view_run(tmp_path).run.ranks.values():
        assert [step.step for step in record.steps] == list(range(7))
        assert all(math.isfinite(step.loss) and step.times.exposed_s is not None for step in record.steps)


def test_a_capture_with_an_unused_parameter_ends_with_its_own_error(on_sim):
    """Not with that of the device, about streams that were not joined."""

    def run(world):
        torch.manual_seed(0)
        layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)]).to(world.device)
        model = lockstep.DistributedDataParallel(OnlyFirst(layers), bucket_cap_mb=1e-5)

        def step():
            model.zero_grad()
            model(torch.ones(2, 6, device=world.device)).square().mean().backward()

        with seen_by_lockstep():
            for _ in range(6):
                step()
            torch.sim.synchronize()
            with pytest.raises(ConfigurationError) as caught, torch.sim.capturing():
                step()
        assert str(caught.value) == (
            "Parameter layers.1.bias received no gradient in a step that is captured in a CUDA graph.\n"
            "Freeze what is not used (requires_grad_(False)) before wrapping, or train eagerly."
        )

    on_sim(2)(run)


class OnlyFirst(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, inputs):
        return self.layers[0](inputs)


class Runtime:
    """Stands in for the CUDA runtime."""

    def __init__(self, name):
        self.name, self.modes = name, []

    def cudaThreadExchangeStreamCaptureMode(self, mode):
        self.modes.append((mode._obj.value, threading.current_thread().name))


def test_a_thread_of_ours_may_ask_for_events_while_another_captures(monkeypatch):
    """In CUDA's mode "relaxed", once it has its device."""
    loaded, order = [], []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: loaded.append(Runtime(name)) or loaded[-1])
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: order.append((device, len(loaded))))
    device = torch.device("cuda", 1)
    accelerator.start_thread(lambda: order.append("target"), name="mine", device=device).join()
    assert order == [(device, 0), "target"]
    assert [(each.name, each.modes) for each in loaded] == [("libcudart.so.12", [(2, "mine")])]
