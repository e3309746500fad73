"""The order in which an exchange over Gloo is posted."""

import torch

from lockstep.comm.hierarchy import start_exchange


class Recorder:
    """A backend that notes what it is asked for."""

    def __init__(self):
        self.calls = []

    def send(self, tensors, peer, tag):
        self.calls.append(("send", peer, tensors[0].numel()))

    def recv(self, tensors, peer, tag):
        self.calls.append(("recv", peer, tensors[0].numel()))


def test_receives_are_posted_before_sends_and_nothing_goes_to_oneself_or_is_empty():
    rows = [1, 2, 3, 0], [4, 5, 0, 7]
    sent, received = ({rank: torch.zeros(size) for rank, size in enumerate(sizes)} for sizes in rows)
    gloo = Recorder()
    start_exchange(gloo, sent, received, rank=1)
    assert gloo.calls == [("recv", 0, 4), ("recv", 3, 7), ("send", 0, 1), ("send", 2, 3)]
