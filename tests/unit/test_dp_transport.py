"""Tensors between devices, on CPU devices of several names: what arrives, who sends how much, and the bits of sums."""

import pytest
import torch

from lockstep.parallel.dp import transport as transports
from lockstep.parallel.dp.gradients import sum_in_tree
from lockstep.parallel.dp.lanes import Lanes
from lockstep.parallel.dp.scattered import sum_over_devices
from lockstep.parallel.dp.transport import CopyTransport, make_transport
from lockstep.parallel.zero.partition import shard_bounds


def devices_of(*numbers):
    """Devices that the CPU answers to; tensors there say "cpu"."""
    return [torch.device("cpu", number) if number else torch.device("cpu") for number in numbers]


@pytest.fixture
def sent(monkeypatch):
    """Record who sends how many elements to whom."""
    made = []
    plain = Lanes.copy

    def copy(self, source, origin, out, target):
        made.append((origin.index or 0, target.index or 0, source.numel()))
        plain(self, source, origin, out, target)

    monkeypatch.setattr(Lanes, "copy", copy)
    return made


def totals(sent, place):
    found = {}
    for turn in sent:
        found[turn[place]] = found.get(turn[place], 0) + turn[2]
    return found


def rows_of(numbers, generator, owned):
    rows = [
        [torch.randn(size, generator=generator) for size in ((5, 3), (700,), (3,))]
        + [torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)]
        + [torch.randn(9, generator=generator).bfloat16(), torch.randn(4, generator=generator).double()]
        for _ in numbers
    ]
    rows[1][1] = rows[0][2] = None  # used by some replicas only
    for row in rows:
        row.append(None)  # by none
        pair = torch.randn(2, 8, generator=generator)
        row += [pair[0].view(8), pair[0].view(2, 4)]  # autograd may give two parameters one gradient
        if not owned:  # what autograd leaves in .grad has memory for every element
            row.append(torch.randn(2, generator=generator)[:1].expand(6))
        row.append(torch.eye(3).to_sparse())
    rows[1][0] = rows[1][0].t().contiguous().t()  # the same shape, other strides
    return rows


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("numbers", [(0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 1, 2, 0), (0, 0, 1)])
def test_the_sum_over_devices_has_the_bits_of_the_tree(numbers, owned):
    devices = devices_of(*numbers)
    rows = rows_of(numbers, torch.Generator().manual_seed(len(numbers)), owned)
    expected = sum_in_tree(rows, devices, owned=False)
    kept = [[None if each is None else each.clone() for each in row] for row in rows]
    found = sum_over_devices([list(row) for row in rows], devices, CopyTransport(devices), owned=owned)
    for got, wanted in zip(found, expected, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            assert got.dtype is wanted.dtype and got.shape == wanted.shape
            assert torch.equal(got.to_dense(), wanted.to_dense())
    if not owned:
        for row, before in zip(rows, kept, strict=True):
            for value, old in zip(row, before, strict=True):
                assert value is None or torch.equal(value.to_dense(), old.to_dense())


@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_every_device_sends_and_receives_as_much(count, sent):
    numel = 84 * 5
    devices = devices_of(*range(count))
    rows = [torch.full((numel,), float(2**index)) for index in range(count)]
    bounds = shard_bounds(numel, count)
    slices = CopyTransport(devices).reduce_scatter(rows, bounds)
    assert [each.tolist() for each in slices] == [[2.0**count - 1] * (numel // count)] * count
    even = dict.fromkeys(range(count), numel // count * (count - 1))
    assert totals(sent, 0) == totals(sent, 1) == even
    for start in range(0, len(sent), count):  # in each round all send and all receive
        assert {turn[0] for turn in sent[start : start + count]} == set(range(count))
        assert {turn[1] for turn in sent[start : start + count]} == set(range(count))
    sent.clear()
    out = rows[0]
    CopyTransport(devices).gather(slices, bounds, out)
    assert out.tolist() == [2.0**count - 1] * numel
    assert totals(sent, 0) == dict.fromkeys(range(1, count), numel // count)  # the first replica's is there already


@pytest.mark.parametrize("cutting", [False, True])
@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_broadcast_leaves_the_first_device_once(count, cutting, sent, monkeypatch):
    monkeypatch.setattr(transports, "_WORTH_CUTTING_NUMEL", 1 if cutting else 10**9)
    devices = devices_of(*range(count))
    flat = torch.randn(103)
    copies = CopyTransport(devices).broadcast(flat, devices[1:])
    assert len(copies) == count - 1
    assert all(torch.equal(copy, flat) and copy.data_ptr() != flat.data_ptr() for copy in copies)
    assert len({copy.data_ptr() for copy in copies}) == count - 1
    assert totals(sent, 0)[0] == (103 if cutting else 103 * (count - 1))
    assert set(totals(sent, 1).values()) == {103}


def test_nccl_is_for_cuda_devices_that_differ():
    assert type(make_transport(devices_of(0, 1))) is CopyTransport
    assert type(make_transport([torch.device("cuda", 0)] * 2)) is CopyTransport
    assert type(make_transport([torch.device("cuda", 0)])) is CopyTransport


def test_nccl_adds_only_what_has_one_sum(monkeypatch):
    """With functions in the place of NCCL's: who is asked, and that what they return is used."""
    asked = []

    def reduce_scatter(inputs, outputs):
        asked.append([each.numel() for each in inputs])
        total = sum(inputs[1:], inputs[0])
        for out, part in zip(outputs, total.clone().chunk(len(outputs)), strict=True):
            out.copy_(part)

    def broadcast(inputs, root):
        asked.append(root)
        for each in inputs:
            each.copy_(inputs[root])

    monkeypatch.setattr(transports.nccl, "reduce_scatter", reduce_scatter)
    monkeypatch.setattr(transports.nccl, "broadcast", broadcast)
    for count, numel, by_nccl in ((2, 10, True), (2, 11, False), (3, 12, False)):
        devices = devices_of(*range(count))
        transport = transports.NcclTransport(devices)
        rows = [torch.arange(numel).float() * (index + 1) for index in range(count)]
        expected = torch.stack(rows).sum(0)
        asked.clear()
        slices = transport.reduce_scatter(rows, shard_bounds(numel, count))
        assert torch.equal(torch.cat(slices), expected)
        assert asked == ([[numel, numel]] if by_nccl else [])
        transport.gather(slices, shard_bounds(numel, count), rows[0])
        assert torch.equal(rows[0], expected)
        copies = transport.broadcast(expected, devices[1:])
        assert all(torch.equal(copy, expected) for copy in copies) and asked[-1] == 0
