"""Send and receive as c10d calls them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lockstep.comm.shm.member import Member
from lockstep.comm.shm.p2p import ANY_SOURCE, Post
from lockstep.comm.shm.staging import Staged
from lockstep.comm.shm.transfer import Transfer


class Messages:
    """What one rank sends to and receives from single other ranks."""

    def __init__(self, member: Member, post: Post) -> None:
        self._member, self._post = member, post

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Transfer:
        """Send a tensor to rank ``to`` of the group."""
        self._member.ensure_usable("send")
        (tensor,) = tensors
        # Not a view of the tensor if it has to be copied: then the copy is the message.
        with Staged([tensor], write_back=False) as (data,):
            transfer = Transfer(f"send to rank {self._member.ranks[to]}", to, tag, data, self._member.timeout_s)
        self._post.send(transfer)
        return transfer

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Transfer:
        """Receive a tensor from rank ``source`` of the group."""
        self._member.ensure_usable("recv")
        (tensor,) = tensors
        staged = Staged([tensor])
        (data,) = staged.__enter__()
        who = "any rank" if source == ANY_SOURCE else f"rank {self._member.ranks[source]}"

        def finish() -> None:
            staged.__exit__(None, None, None)

        transfer = Transfer(f"recv from {who}", source, tag, data, self._member.timeout_s, finish)
        self._post.receive(transfer)
        return transfer

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Transfer:
        """Receive a tensor from whichever rank sends one first."""
        return self.recv(tensors, ANY_SOURCE, tag)
