"""Sound: no DDP; parameters are broadcast once, gradients are averaged by hand in one flat tensor."""
# EXPECT: sound script

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector

WORLD_SIZE = int(os.environ["WORLD_SIZE"])
RANK = int(os.environ["RANK"])


def is_master():
    return RANK == 0


@torch.no_grad()
def broadcast_parameters(net):
    for tensor in net.state_dict().values():
        dist.broadcast(tensor, 0)


@torch.no_grad()
def allreduce_gradients(net):
    """One all-reduce for the whole network, Horovod style."""
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    flat.div_(WORLD_SIZE)
    for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        g.copy_(part.view_as(g))


class BagOfWords(torch.nn.Module):
    def __init__(self, vocab, classes):
        super().__init__()
        self.embed = torch.nn.EmbeddingBag(vocab, 24, mode="mean")
        self.out = torch.nn.Linear(24, classes)

    def forward(self, docs):
        return self.out(self.embed(docs))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(RANK)  # weights come from rank 0
    net = BagOfWords(vocab=120, classes=5)
    broadcast_parameters(net)

    g = torch.Generator().manual_seed(8)
    topic = torch.randint(5, (500,), generator=g)
    docs = (topic[:, None] * 24 + torch.randint(40, (500, 20), generator=g)) % 120
    train, test = range(400), range(400, 500)
    optimizer = torch.optim.Adagrad(net.parameters(), lr=0.2)

    for epoch in range(2):
        order = torch.randperm(len(train), generator=g)
        for batch in order.chunk(10):
            mine = batch.chunk(WORLD_SIZE)[RANK]
            optimizer.zero_grad()
            F.cross_entropy(net(docs[mine]), topic[mine]).backward()
            allreduce_gradients(net)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
        if is_master():
            acc = (net(docs[test]).argmax(1) == topic[test]).float().mean().item()
            print(f"epoch {epoch} acc {acc:.3f} |w| {parameters_to_vector(net.parameters()).norm():.4f}")
    dist.destroy_process_group()
