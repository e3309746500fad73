"""Kernels of CUDA that the simulated device has beside torch's generic ones: what they compute and what they cost."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import attention

# --- Fused optimizers


def trained(device, make, scaled):
    """Train three steps, the second with an overflow if ``scaled``; return the parameters and the last `Counts`."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = make(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=8.0, enabled=scaled)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4, device=device)).square().sum()
        scaler.scale(loss * torch.inf if scaled and step == 1 else loss).backward()
        with torch.sim.counting() as counts:
            scaler.step(optimizer)
        scaler.update()
    return [parameter.detach().cpu() for parameter in model.parameters()], counts


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Adagrad"])
def test_fused_optimizers_take_no_wait_of_the_host(sim_ranks, name):
    """Not with a GradScaler either, whose scale and overflow their kernel reads (``grad_scale``, ``found_inf``)."""

    def run(world):
        make = getattr(torch.optim, name)
        for scaled in (False, True):
            expected, _ = trained("cpu", make, scaled)
            found, counts = trained("sim", make, scaled)
            assert all(map(torch.equal, found, expected))
            assert counts.synchronizations == counts.event_waits == 0, counts.places
            assert scaled or counts.kernels == (1 if name == "SGD" else 2)  # the step counter has its own

    sim_ranks(1)(run)


# --- Recurrent networks


def waits_of_forward(rnn, packed=False):
    inputs = torch.ones(3, 2, 4, device="sim")
    if packed:
        inputs = nn.utils.rnn.pack_padded_sequence(inputs, torch.tensor([3, 2]))
    with torch.sim.counting() as counts:
        rnn(inputs)
    assert counts.synchronizations == len(counts.waits)
    return [(wait.kind, wait.line.split(" at ")[0], "waits_of_forward" in wait.line) for wait in counts.waits]


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_the_dropout_state_of_an_rnn_is_made_anew_after_each_seed(sim_ranks, name):
    def run(world):
        rnn = getattr(nn, name)(4, 4, num_layers=2, dropout=0.5, device="sim")
        generator = torch.Generator("sim")
        first = [("item", "aten::_local_scalar_dense", True)]
        seeds = {
            "manual_seed": lambda: torch.manual_seed(3),
            "set_rng_state": lambda: torch.sim.set_rng_state(torch.sim.get_rng_state()),
            "manual_seed_all": lambda: torch.sim.manual_seed_all(3),
        }
        for seed in seeds.values():
            seed()
            assert waits_of_forward(rnn) == first
            assert waits_of_forward(rnn) == []  # nor does the second forward draw another state
        generator.manual_seed(3)  # another generator than that of the device
        assert waits_of_forward(rnn, packed=True) == []
        torch.manual_seed(3)
        assert waits_of_forward(rnn.eval()) == []
        assert waits_of_forward(getattr(nn, name)(4, 4, num_layers=2, device="sim")) == []
        with torch.inference_mode():
            assert waits_of_forward(rnn.train()) == first

    sim_ranks(1)(run)


@pytest.mark.parametrize("name", ["LSTM", "GRU", "RNN"])
def test_an_rnn_has_the_gradients_of_the_cpu(sim_ranks, name):
    def run(world):
        torch.manual_seed(0)
        expected = getattr(nn, name)(4, 5, num_layers=2, bidirectional=True, dtype=torch.float64)
        found = copy.deepcopy(expected).to("sim")
        inputs = torch.randn(3, 2, 4, dtype=torch.float64)
        for rnn, given in ((expected, inputs), (found, inputs.to("sim"))):
            outputs, hidden = rnn(given)
            rest = sum(each.square().sum() for each in hidden) if name == "LSTM" else hidden.square().sum()
            (outputs.sin().sum() + rest).backward()
        for ours, theirs in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-12, atol=1e-12)

    sim_ranks(1)(run)


# --- Attention


def gradients(num_keys=512, dtype=torch.float32, device="sim"):
    torch.manual_seed(0)
    parts = [torch.randn(1, 2, num_keys, 8, dtype=dtype).to(device).requires_grad_() for _ in range(3)]
    outputs = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
    outputs.sin().sum().backward()
    return outputs, [part.grad.cpu() for part in parts]


def same_bits(**options):
    first, second = (gradients(**options)[1] for _ in range(2))
    for each, other in zip(first, second, strict=True):
        torch.testing.assert_close(each, other)
    return all(map(torch.equal, first, second))


KERNELS = {
    "FLASH_ATTENTION": "Flash Attention",
    "EFFICIENT_ATTENTION": "Memory Efficient attention",
    "CUDNN_ATTENTION": "cuDNN Attention",
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_backward_of_fused_attention_has_no_fixed_bits_unless_asked(sim_ranks, name):
    def run(world):
        half = torch.bfloat16
        with attention.sdpa_kernel(getattr(attention.SDPBackend, name)):
            assert not same_bits(dtype=half)
            assert same_bits(dtype=half, num_keys=128)  # one block of keys
            torch.use_deterministic_algorithms(True, warn_only=True)
            with pytest.warns(UserWarning, match=f"{KERNELS[name]} defaults to a non-deterministic algorithm"):
                assert not same_bits(dtype=half)
            torch.use_deterministic_algorithms(True)
            if name == "CUDNN_ATTENTION":
                with pytest.raises(RuntimeError, match="No viable backend"):
                    gradients(dtype=half)
            else:
                assert same_bits(dtype=half)
            torch.use_deterministic_algorithms(False)

    sim_ranks(1)(run)


def test_attention_is_chosen_as_on_cuda(sim_ranks):
    def chosen(**options):
        outputs, _ = gradients(**options)
        return outputs.grad_fn.name()

    def run(world):
        assert "FlashAttention" in chosen(dtype=torch.bfloat16)
        assert "EfficientAttention" in chosen()  # flash attention has no float32
        backends, use = attention.SDPBackend, attention.sdpa_kernel
        with use(backends.MATH):
            assert "Attention" not in chosen() and same_bits()
        with use([backends.CUDNN_ATTENTION, backends.FLASH_ATTENTION], set_priority=True):
            assert "CudnnAttention" in chosen(dtype=torch.bfloat16)
            torch.use_deterministic_algorithms(True)
            assert "FlashAttention" in chosen(dtype=torch.bfloat16)
            torch.use_deterministic_algorithms(False)
        torch.testing.assert_close(gradients()[1], gradients(device="cpu")[1])

    sim_ranks(1)(run)
