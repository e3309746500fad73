"""Graphs that are captured while a loop is recorded: nothing of ours breaks them, and they are not recorded."""

import ctypes
import math
import threading

import torch
from torch import nn

import lockstep
from lockstep import accelerator
from lockstep.study.report.view import view_run


def capturing_on_sim(device):
    """Stand in for `accelerator.is_capturing`, which asks CUDA."""
    return device.type == "sim" and torch.sim.is_current_stream_capturing()


def test_a_capture_in_a_loop_that_is_recorded(on_sim, tmp_path, monkeypatch):
    def run(world):
        from lockstep.observe import steps
        from lockstep.parallel.ddp import bucket_events, reducer, weighting
        from lockstep.telemetry import recorder

        # The simulated device has no mode in which another thread may ask during a capture, as CUDA has.
        recorder._FIRST_S = recorder.PERIOD_S = 3600.0
        for module in (steps, bucket_events, reducer, weighting):
            module.is_capturing = capturing_on_sim
        try:
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
                torch.sim.synchronize()
                with torch.sim.counting() as counts, torch.sim.capturing():
                    step()
                assert counts.device_to_host_bytes == 0  # a replay would write to a buffer that serves again
                torch.sim.synchronize()
                num_steps = watch.num_steps
                step()
            return num_steps, watch.num_steps
        finally:
            for module in (steps, bucket_events, reducer, weighting):
                module.is_capturing = accelerator.is_capturing
            recorder._FIRST_S, recorder.PERIOD_S = 0.3, 1.0

    assert on_sim(2)(run) == [(6, 7)] * 2
    for record in view_run(tmp_path).run.ranks.values():
        assert [step.step for step in record.steps] == list(range(7))
        assert all(math.isfinite(step.loss) and step.times.exposed_s is not None for step in record.steps)


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
