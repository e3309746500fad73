"""What tells that two processes read the same samples."""

from collections import OrderedDict, UserDict

import numpy as np
import torch
from PIL import Image
from torch.nn.utils.rnn import pack_sequence

from lockstep.data.comparison import checksum
from tests.unit.parallel.test_module_io import Counted, Frozen


def test_the_same_samples_have_the_same_checksum_whatever_objects_they_are():
    def samples():
        return [
            (1, 2.5, "te" + "xt", None),
            {"a": torch.arange(3), "b": np.ones((2, 2))},
            [b"x", bytearray(b"y")],
            object(),
        ]

    assert checksum(samples()) == checksum(samples())
    assert checksum([{"a": 1}]) == checksum([OrderedDict(a=1)])
    assert checksum([Frozen(torch.ones(2))]) == checksum([Frozen(torch.ones(2))])
    assert checksum([float("nan")]) == checksum([float("nan")])
    assert checksum([torch.ones(2, 3)[:, 1]]) == checksum([torch.ones(2)])


def test_other_samples_have_another():
    image = Image.new("RGB", (2, 2))
    different = [
        [],
        [1],
        [2],
        ["1"],
        [1.0],
        [True],
        [None],
        [b"1"],
        [1, 1],
        [[1, 1]],
        [[1], [1]],
        [{"a": 1}],
        [{"b": 1}],
        [{"a": 2}],
        [torch.ones(2)],
        [torch.zeros(2)],
        [torch.ones(2, dtype=torch.float64)],
        [torch.ones(2, 1)],
        [torch.ones(2, dtype=torch.bfloat16)],
        [torch.tensor(1.0)],
        [torch.tensor(True)],
        [torch.tensor(1j)],
        [torch.tensor(1j).conj()],
        [np.ones(2)],
        [np.ones((1, 2))],
        [np.float32(1)],
        [np.array(["x"], dtype=object)],
        [image],
        [Frozen(torch.ones(2))],
        [Frozen(torch.zeros(2))],
        [Counted(torch.ones(2))],
        [UserDict(a=3)],
        [pack_sequence([torch.ones(2)])],
        [pack_sequence([torch.zeros(2)])],
    ]
    assert len({checksum(samples) for samples in different}) == len(different)
