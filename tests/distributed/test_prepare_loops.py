"""`prepare`: loops that read several batches before they train, of one or more loaders, and ranks without a part."""

import contextlib
import itertools
import queue
import random
import re
import threading

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from tests.distributed.scripts import OTHER_DATA_ADVICE, on_ranks, other_data, plain, weights, wrong
from tests.models import soak

# Three do not divide the batches, and one or two are without a part of the small ones: what happens on two is among it.
NUM_RANKS = [3, *soak([2])]


def ahead(loader):
    iterator = iter(loader)
    batch = next(iterator)
    for following in iterator:
        yield batch
        batch = following
    yield batch


def in_thread(loader):
    batches = queue.Queue(4)

    def read():
        for batch in loader:
            batches.put(batch)
        batches.put(None)

    threading.Thread(target=read, daemon=True).start()
    yield from iter(batches.get, None)


def without_gradients(loader):
    iterator = iter(loader)
    while True:
        with torch.no_grad():
            batch = next(iterator, None)
        if batch is None:
            return
        yield batch


def windows(loader):
    iterator = iter(loader)
    while window := list(itertools.islice(iterator, 2)):
        yield window


def inner(step, first, second):
    for outer in first:
        for batch in second:
            step(batch)
            break
        step(outer)


def each(read):
    """Return a loop that trains on each batch that ``read`` returns."""
    return lambda step, first, _: [step(batch) for batch in read(first)]


LOOPS = {
    "loop": each(iter),
    "ahead": each(ahead),
    "list": each(list),
    "thread": each(in_thread),
    "no_grad_fetch": each(without_gradients),
    "window": each(lambda loader: itertools.chain.from_iterable(windows(loader))),
    "chunks": lambda step, first, _: [step(*window, backwards=True) for window in windows(first)],
    "chunks, one backward": lambda step, first, _: [step(*window) for window in windows(first)],
    "zip": lambda step, first, second: [step(*pair) for pair in zip(first, second, strict=False)],
    "zip, two backwards": lambda step, first, second: [
        step(*pair, backwards=True) for pair in zip(first, second, strict=False)
    ],
    "next_iter": lambda step, first, _: [step(next(iter(first))) for _ in range(3)],
    "inner": inner,
}


def script(loop, num_samples=11, batch_size=5, *, model=None, shuffle=False, change=lambda x: x, convert=None):
    """Return a script that trains in two epochs of ``loop(step, first loader, second loader)``."""

    def run(prepare):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            net = model() if model else nn.Linear(4, 1)
            x, y = torch.randn(num_samples, 4), torch.randn(num_samples, 1)
            if convert is not None and prepare is not plain:
                net = convert(net)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
            first = DataLoader(TensorDataset(x, y), batch_size, shuffle=shuffle)
            second = DataLoader(TensorDataset(x, -y), 4, shuffle=shuffle)
            net, optimizer, first, second = prepare(net, optimizer, first, second)

            def step(*batches, backwards=False):
                optimizer.zero_grad()
                losses = [F.mse_loss(net(change(x)), y) for x, y in batches]
                for loss in losses if backwards else [sum(losses)]:
                    loss.backward()
                optimizer.step()

            for _ in range(2):
                loop(step, first, second)
            return weights(net)
        finally:
            torch.set_default_dtype(torch.float32)

    return run


@pytest.mark.parametrize("num_ranks", [1, *NUM_RANKS])
def test_the_share_follows_the_batch_through_each_loop(ranks, num_ranks):
    scripts = {name: script(loop) for name, loop in LOOPS.items()}
    scripts |= {f"{name}, shuffled": script(loop, 16, shuffle=True) for name, loop in LOOPS.items()}
    assert wrong(ranks, num_ranks, scripts) == {}


def layers():
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))


def dropping():
    return nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5), nn.Linear(3, 1)).eval()


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_ranks_without_a_part(ranks, num_ranks):
    scripts = {
        f"{name} of {size}": script(loop, size, 4, model=model)
        for size in (1, 2, 3, 9)
        for name, loop, model in [
            *((name, LOOPS[name], layers) for name in ("loop", "no_grad_fetch", "ahead", "list", "inner", "zip")),
            ("in eval mode", LOOPS["loop"], dropping),
        ]
    }
    assert wrong(ranks, num_ranks, scripts) == {}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_model_that_is_in_eval_mode_after_prepare_trains(ranks, num_ranks):
    def run(prepare, size):
        torch.manual_seed(0)
        x = torch.randn(size, 4).double()
        net = dropping().double().train()
        net, loader = prepare(net, DataLoader(TensorDataset(x), 4))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
        net.eval()
        for _ in range(2):
            for (batch,) in loader:
                optimizer.zero_grad()
                net(batch).square().mean().backward()
                optimizer.step()
        return weights(net)

    scripts = {f"of {size}": lambda prepare, size=size: run(prepare, size) for size in (1, 2, 3, 9)}
    assert wrong(ranks, num_ranks, scripts) == {}


def normalised():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))


@pytest.mark.parametrize("num_ranks", [4, *soak([2, 3])])  # with four, two at once have no part
def test_batch_statistics_if_ranks_have_no_part(ranks, num_ranks):
    convert = lockstep.SyncBatchNorm.convert_sync_batchnorm
    sizes = [(10, 8), (6, 4), (2, 2), (3, 4)]
    scripts = {
        f"{name}, {sizes}": script(LOOPS[name], *sizes, model=normalised, convert=convert)
        for sizes in sizes
        for name in ("loop", "no_grad_fetch", "list")
    }
    assert wrong(ranks, num_ranks, scripts) == {}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_evaluations_of_fewer_samples_than_ranks_with_buffers(ranks, num_ranks):
    def run(prepare, kind):
        torch.manual_seed(1)
        net, x = normalised().double(), torch.randn(12, 4).double()
        if kind == "exchanged" and prepare is not plain:
            net = lockstep.SyncBatchNorm.convert_sync_batchnorm(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.2)
        data = DataLoader(TensorDataset(x), 6), DataLoader(TensorDataset(x[:1]), 4), DataLoader(TensorDataset(x[:9]), 4)
        net, optimizer, loader, *evaluated = prepare(net, optimizer, *data)
        found = []
        for _ in range(2):
            net.train()
            if kind == "frozen":
                getattr(net, "module", net)[1].eval()
            for (batch,) in loader:
                optimizer.zero_grad()
                net(batch).square().mean().backward()
                optimizer.step()
            net.eval()
            with torch.no_grad():
                for held in evaluated:
                    outputs = [net(batch) for (batch,) in held]
                    joined = held.gather(outputs) if prepare is not plain else torch.cat(outputs)
                    found += joined.flatten().tolist()
        return found + weights(net) + [number for each in net.buffers() for number in each.double().flatten().tolist()]

    scripts = {kind: lambda prepare, kind=kind: run(prepare, kind) for kind in ("frozen", "exchanged")}
    assert wrong(ranks, num_ranks, scripts) == {}
    alone = on_ranks(ranks, num_ranks, {"of each rank": lambda prepare: run(prepare, "of each rank")})["of each rank"]
    assert alone == [alone[0]] * num_ranks  # the buffers of rank 0


def unknown(names):
    return (
        f"It is not known from which batch this forward was computed, {names}, and they are divided differently over "
        "the ranks.\nGive the model a tensor of one batch, or a view of it; or compute what it is given where batches "
        "are made, in the data set or collate_fn. Or make all batches a multiple of the number of ranks "
        "(drop_last=True), or call lockstep.backward(loss, mean_over=n), where n is the number of samples in the mean "
        "on this rank."
    )


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_inputs_that_were_computed_from_a_batch(ranks, num_ranks):
    def double(x):
        return x * 2

    names = ("ahead", "list", "window", "chunks", "zip")
    known = {f"{name}, multiples": script(LOOPS[name], 12, 6, change=double) for name in names if name != "zip"}
    known |= {"loop": script(LOOPS["loop"], change=double)}
    known |= {f"{name}, view": script(LOOPS[name], change=lambda x: x.view(-1, 4)) for name in names}
    known |= {f"{name}, slice": script(LOOPS[name], change=lambda x: x[:, :4].unsqueeze(0)[0]) for name in names}
    assert wrong(ranks, num_ranks, known) == {}
    refused = {name: script(LOOPS[name], change=double) for name in ("ahead", "list", "zip")}
    found = on_ranks(ranks, num_ranks, refused)
    first, second = (f"of epoch 0 of DataLoader of TensorDataset (argument {number} of prepare)" for number in (3, 4))
    assert found == {
        "ahead": [unknown(f"batch 1 {first} or batch 2 {first}")] * num_ranks,
        "list": [unknown(f"batch 1 {first} or batch 2 {first}")] * num_ranks,  # the newest of each size
        "zip": [unknown(f"batch 0 {first} or batch 0 {second}")] * num_ranks,
    }


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_labelled_and_unlabelled_batches_of_other_sizes(ranks, num_ranks):
    def run(prepare, sizes, backwards):
        torch.manual_seed(0)
        a, b = torch.linspace(-1, 1, 24).double()[:, None], torch.linspace(0, 3, 60).double()[:, None]
        net = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = (DataLoader(TensorDataset(x), size, shuffle=True) for x, size in zip((a, b), sizes, strict=True))
        net, optimizer, *loaders = prepare(net, optimizer, *data)
        for _ in range(2):
            for (a,), (b,) in zip(*loaders, strict=False):
                optimizer.zero_grad()
                losses = (net(a) - 2 * a).square().mean(), (net(b) - b * b).square().mean()
                for loss in losses if backwards else [sum(losses)]:
                    loss.backward()
                optimizer.step()
        return weights(net)

    scripts = {
        f"{sizes} {backwards}": lambda prepare, sizes=sizes, backwards=backwards: run(prepare, sizes, backwards)
        for sizes in [(6, 15), (5, 7), (1, 4)]
        for backwards in (False, True)
    }
    assert wrong(ranks, num_ranks, scripts) == {}


CHOOSE = {
    "random": lambda: random.choices((0, 1), (1, 3))[0],
    "numpy": lambda: int(np.random.choice(2, p=[0.25, 0.75])),
    "torch": lambda: int(torch.multinomial(torch.tensor([1.0, 3.0]), 1)),
}


def choosing(draw):
    """Return a script that draws in each step from which loader it reads."""

    def forever(loader):
        while True:
            yield from loader

    def run(prepare):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        data = [TensorDataset(torch.linspace(0, 1, 48).double()[:, None] + 10 * each) for each in range(2)]
        net = nn.Linear(1, 2).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        net, optimizer, *loaders = prepare(net, optimizer, *(DataLoader(each, 7, shuffle=True) for each in data))
        batches, chosen = list(map(forever, loaders)), []
        for _ in range(12):
            k = draw()
            chosen.append(k)
            (x,) = next(batches[k])
            optimizer.zero_grad()
            (net(x)[:, k : k + 1] - x).square().mean().backward()
            optimizer.step()
        assert len(set(chosen)) == 2
        return chosen + weights(net)

    return run


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_loader_that_is_chosen_by_random_numbers(ranks, num_ranks):
    assert wrong(ranks, num_ranks, {name: choosing(CHOOSE[name]) for name in ("random", "numpy")}) == {}
    # torch's generators are those of dropout, which differ.
    for text in on_ranks(ranks, num_ranks, {"torch": choosing(CHOOSE["torch"])})["torch"]:
        assert re.match(other_data("ranks? [0-9, ]+") + "; here it was batch . of epoch . of DataLoader", text), text
        assert text.endswith(OTHER_DATA_ADVICE)


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_weights_of_backwards_if_a_rank_has_no_part(ranks, num_ranks):
    """A loss that is the mean over tokens; samples have 1 to 5."""

    def run(prepare, accumulate):
        torch.manual_seed(0)
        x, counts = torch.randn(21, 5).double(), 1 + torch.arange(21) % 5
        net = nn.Linear(1, 1).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        net, optimizer, loader = prepare(net, optimizer, DataLoader(TensorDataset(x, counts), 5, shuffle=True))
        for _ in range(3):
            batches = list(loader)
            for start in range(0, len(batches), accumulate):
                window = batches[start : start + accumulate]
                optimizer.zero_grad()
                total = sum(int(counts.sum()) for _, counts in window)
                for number, (batch, counts) in enumerate(window, 1):
                    is_token = torch.arange(5) < counts[:, None]
                    is_last = prepare is plain or number == len(window)
                    with contextlib.nullcontext() if is_last else net.no_sync():
                        losses = (net(batch[:, :, None])[..., 0] - 1).square()[is_token]
                        if prepare is plain:
                            (losses.sum() / total).backward()
                        else:
                            lockstep.backward(losses.mean(), mean_over=len(losses))
                optimizer.step()
        return weights(net)

    scripts = {f"of {number}": lambda prepare, number=number: run(prepare, number) for number in (1, 2, 5)}
    assert wrong(ranks, num_ranks, scripts) == {}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_share_goes_through_an_encoder_and_a_decoder(ranks, num_ranks):
    def run(prepare, read, between):
        torch.manual_seed(0)
        encoder, decoder = nn.Linear(4, 2).double(), nn.Linear(2, 4).double()
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(11, 4).double()), 5, shuffle=True)
        encoder, decoder, optimizer, loader = prepare(encoder, decoder, optimizer, loader)
        for _ in range(2):
            for (x,) in read(loader):
                optimizer.zero_grad()
                code = encoder(x)
                ((decoder(between(code)) - x).square().mean() + code.square().mean()).backward()
                optimizer.step()
        return weights(encoder, decoder)

    scripts = {
        f"{name}, {how}": lambda prepare, read=read, between=between: run(prepare, read, between)
        for name, read in {"loop": iter, "ahead": ahead, "list": list}.items()
        for how, between in {"as it is": lambda x: x, "detached": torch.Tensor.detach, "tanh": torch.tanh}.items()
        if (name, how) in {("loop", "tanh")} or how != "tanh"
    }
    assert wrong(ranks, num_ranks, scripts) == {}


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_gradient_penalty_after_another_backward(ranks, num_ranks):
    def run(prepare, order):
        torch.manual_seed(0)
        judge = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        optimizer = torch.optim.SGD(judge.parameters(), lr=0.1)
        data = TensorDataset(torch.randn(11, 4).double(), torch.randn(11, 4).double(), torch.rand(11, 1).double())
        judge, optimizer, loader = prepare(judge, optimizer, DataLoader(data, 5, shuffle=True))

        def penalty(outputs, inputs):
            (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
            return (slope.norm(dim=1) - 1).square().mean()

        for _ in range(2):
            for real, fake, place in loader:
                optimizer.zero_grad()
                if order == "of the same forward":
                    real.requires_grad_()
                    outputs = judge(real)
                    pull = penalty(outputs, real)
                    F.softplus(-outputs).mean().backward(retain_graph=True)
                    pull.backward()
                else:
                    between = (place * real + (1 - place) * fake).requires_grad_()
                    before = penalty(judge(between), between) if order == "made before" else None
                    F.softplus(-judge(real)).mean().backward()
                    F.softplus(judge(fake)).mean().backward()
                    (penalty(judge(between), between) if before is None else before).backward()
                optimizer.step()
        return weights(judge)

    orders = ("made after", "made before", "of the same forward")
    assert wrong(ranks, num_ranks, {order: lambda prepare, order=order: run(prepare, order) for order in orders}) == {}


def test_a_forward_of_the_model_that_was_not_prepared(ranks):
    def run(prepare, through_module):
        torch.manual_seed(0)
        bare = nn.Linear(4, 1).double()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.randn(8, 4).double()), 4)
        model, optimizer, loader = prepare(bare, optimizer, loader)
        num_steps = 0
        try:
            for (x,) in loader:
                optimizer.zero_grad()
                (model.module if through_module else bare)(x).square().mean().backward()
                optimizer.step()
                num_steps += 1
        finally:
            assert num_steps == 0

    scripts = {str(each): lambda prepare, each=each: run(prepare, each) for each in (True, False)}
    for num_ranks in (2, 3):
        for found in on_ranks(ranks, num_ranks, scripts).values():
            assert found == [
                f"Rank {rank}: SGD.step() uses gradients that were not averaged over the ranks, first that of "
                "parameter weight.\nRun the last forward and backward before a step outside of no_sync(), not "
                "through .module, and with a loss of tensors that forward returns. Train the "
                "model that prepare() has returned."
                for rank in range(num_ranks)
            ]


@pytest.mark.parametrize("num_ranks", [1, *NUM_RANKS])
@pytest.mark.parametrize("trains", [False, True])
def test_a_pass_within_a_pass_over_the_same_loader(ranks, num_ranks, trains):
    def run(prepare):
        torch.manual_seed(0)
        net = nn.Linear(1, 1).double()
        loader = DataLoader(TensorDataset(torch.arange(12).double()[:, None]), 6, shuffle=True)
        net, loader = prepare(net, loader)
        found = []
        for (outer,) in loader:
            for (inner,) in loader:
                found += [outer.sum().item(), inner.sum().item()]
                if trains:
                    net(inner).mean().backward()
        return found

    for found in zip(*on_ranks(ranks, num_ranks, {"": run})[""], run(plain), strict=True):
        assert sum(found[:-1]) == found[-1]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_a_look_at_another_loader_before_training_on_computed_inputs(ranks, num_ranks):
    """Such as to show some samples."""

    def looking(step, first, second):
        next(iter(second))
        for batch in first:
            step(batch)

    def evaluated(step, first, second):
        for batch in first:
            step(batch)
        with torch.no_grad():  # by a model that is not prepared, such as an average of the weights
            for _ in second:
                pass

    scripts = {
        name: script(loop, 13, 5, change=lambda x: x / 2)
        for name, loop in {"looking": looking, "evaluated": evaluated}.items()
    }
    assert wrong(ranks, num_ranks, scripts) == {}
