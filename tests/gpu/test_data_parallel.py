"""DataParallel on GPUs: one GPU named twice, and several where there are several."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.parallel.dp.replicas import sum_in_tree
from lockstep.parallel.dp.wrapper import DataParallel
from tests.models import FAMILIES, build, global_batch
from tests.unit.parallel.dp.test_wrapper import gradients

JOINABLE = sorted(set(FAMILIES) - {"structured"})
TOLERANCE = 1e-10  # cuDNN and cuBLAS sum in other orders for other batch sizes


def device_lists():
    count = torch.cuda.device_count()
    lists = [[0, 0], [0, 0, 0]]
    if count > 1:
        lists += [list(range(count)), [1, 0], [0, 1, 1]]
    return lists


def on(device, module_or_tensors):
    if isinstance(module_or_tensors, nn.Module):
        return module_or_tensors.to(device)
    return tuple(tensor.to(device) for tensor in module_or_tensors)


def assert_close(module, reference):
    actual, expected = gradients(module), gradients(reference)
    for name, wanted in expected.items():
        got = actual[name]
        assert (got is None) == (wanted is None), name
        if got is not None and wanted is not None:
            torch.testing.assert_close(
                got, wanted, rtol=TOLERANCE, atol=TOLERANCE * max(1.0, wanted.abs().max().item())
            )


@pytest.mark.parametrize("family", JOINABLE)
def test_gradients_are_those_of_one_process(family):
    for devices in device_lists():
        first = torch.device("cuda", devices[0])
        module, reference = on(first, build(family)), on(first, build(family))
        model = DataParallel(module, devices)
        for step in range(3):
            batch = on(first, global_batch(family, 7, seed=step))
            FAMILIES[family].loss(model, batch).backward()
            FAMILIES[family].loss(reference, batch).backward()
            assert_close(module, reference)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_backward_sums_the_gradients_of_the_replicas(family):
    for devices in device_lists():
        first = torch.device("cuda", devices[0])
        module, reference = on(first, build(family)), on(first, build(family))
        model = DataParallel(module, devices)
        optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in (module, reference)]
        for step in range(3):
            batch = global_batch(family, 2 * len(devices), seed=step)
            parts = list(zip(*(part.chunk(len(devices)) for part in batch), strict=True))
            shards = [on(device, part) for device, part in zip(model.devices, parts, strict=True)]
            losses = model.backward(FAMILIES[family].loss, shards, [1 / len(devices)] * len(devices))
            assert [loss.device for loss in losses] == list(model.devices)
            FAMILIES[family].loss(reference, on(first, batch)).backward()
            assert_close(module, reference)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def test_inputs_come_from_the_cpu_and_outputs_may_return_there():
    module = on("cuda:0", build("mlp"))
    x, _ = global_batch("mlp", 5, 0)
    expected = module(x.cuda()).detach()
    for inputs in (x, x.pin_memory(), x.cuda()):
        model = DataParallel(module, [0, 0])
        assert model(inputs).device == torch.device("cuda", 0)
        torch.testing.assert_close(model(inputs).detach(), expected)
    back = DataParallel(module, [0, 0], output_device=-1)(x)
    assert back.device.type == "cpu"
    torch.testing.assert_close(back.detach(), expected.cpu())


def test_default_devices_are_all_gpus():
    model = DataParallel(build("mlp"))
    assert model.device_ids == list(range(torch.cuda.device_count())) and model.output_device == 0


def test_a_module_on_the_cpu_is_refused():
    with pytest.raises(
        RuntimeError, match=r"module must have its parameters and buffers on device cuda:0 \(device_ids\[0\]\)"
    ):
        DataParallel(build("mlp"), [0, 0])(global_batch("mlp", 4, 0)[0])


def test_errors_name_the_gpu():
    class Failing(nn.Module):
        def forward(self, x):
            raise KeyError("wonderful")

    with pytest.raises(KeyError) as caught:
        DataParallel(Failing(), [0, 0])(torch.zeros(2, device="cuda"))
    assert str(caught.value).startswith("Caught KeyError in replica 0 on device 0.\nOriginal Traceback")


def test_recurrent_layers_that_flatten_their_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(30, 64, batch_first=True, bidirectional=True)

        def forward(self, x):
            self.rnn.flatten_parameters()
            return self.rnn(x)[0]

    module = Net().double().cuda()  # float32 is TF32 in cuDNN, which rounds according to the size of the batch
    reference = copy.deepcopy(module)
    model = DataParallel(module, device_lists()[-1] if torch.cuda.device_count() > 1 else [0, 0])
    module.to(model.devices[0])
    reference.to(model.devices[0])
    optimizers = [torch.optim.SGD(network.parameters(), lr=1.0) for network in (module, reference)]
    for _ in range(3):
        x = torch.randn(4, 4, 30, device=model.devices[0], dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)
        F.mse_loss(model(x), torch.zeros(4, 4, 128, device=x.device, dtype=torch.float64)).backward()
        F.mse_loss(reference(x), torch.zeros(4, 4, 128, device=x.device, dtype=torch.float64)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for got, wanted in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


def test_autocast_and_the_current_stream_hold_in_the_replicas():
    seen = []

    class Net(nn.Linear):
        def forward(self, x):
            seen.append((torch.cuda.current_stream(), torch.cuda.current_device()))
            return super().forward(x)

    model = DataParallel(Net(8, 8).cuda(), [0, 0])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the weights were made there
    with torch.cuda.stream(stream), torch.autocast("cuda", dtype=torch.bfloat16):
        assert model(torch.randn(4, 8, device="cuda")).dtype is torch.bfloat16
    torch.cuda.current_stream().wait_stream(stream)  # and their memory is free for others when this returns
    assert sorted(device for _, device in seen) == [0, 0]
    assert [each for each, _ in seen] == [stream, stream]


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_it_does_what_torch_does():
    for family in JOINABLE:
        ours, theirs = on("cuda:0", build(family)), on("cuda:0", build(family))
        for step in range(2):
            batch = on("cuda:0", global_batch(family, 7, seed=step))
            FAMILIES[family].loss(DataParallel(ours, [0, 1]), batch).backward()
            FAMILIES[family].loss(nn.DataParallel(theirs, [0, 1]), batch).backward()
            for got, wanted in zip(gradients(ours).values(), gradients(theirs).values(), strict=True):
                if got is None:  # where a parameter is not used, torch fills in zeros
                    assert wanted is None or not wanted.any()
                else:
                    torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


def batch_parts(family, num_replicas, seed):
    batch = global_batch(family, 2 * num_replicas, seed)
    return batch, list(zip(*(part.chunk(num_replicas) for part in batch), strict=True))


def test_a_step_does_not_wait_for_the_device():
    """torch raises where the host waits; what it cannot see (a blocking copy to pageable memory) it says, too."""
    for devices in device_lists():
        first = torch.device("cuda", devices[0])
        module = on(first, build("mlp"))
        model = DataParallel(module, devices)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        parts = batch_parts("mlp", len(devices), 0)[1]
        shards = [on(device, part) for device, part in zip(model.devices, parts, strict=True)]
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                optimizer.zero_grad()
                model.backward(FAMILIES["mlp"].loss, shards, [1 / len(devices)] * len(devices))
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif("torch.cuda.device_count() < 2")
def test_the_sum_over_gpus_has_the_bits_of_the_sum_on_one():
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    rows = [[torch.randn(1_000_003, device=device), torch.randn(17, 5, device=device)] for device in devices]
    on_one = [[each.to(devices[0]) for each in row] for row in rows]
    expected = sum_in_tree(on_one, [devices[0]] * len(devices), in_place=False)
    assert all(map(torch.equal, sum_in_tree(rows, devices, in_place=True), expected))
