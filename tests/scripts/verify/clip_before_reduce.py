"""Error: each rank clips its own gradients before they are averaged over the ranks."""
# EXPECT: gradients are clipped before they are reduced

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, n_ranks = dist.get_rank(), dist.get_world_size()

# ---- hyperparameters ----
seq_len, hidden, vocab = 16, 32, 8
global_batch = 24
max_norm = 0.25
# -------------------------

torch.manual_seed(0)


class CharRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(vocab, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, vocab)

    def forward(self, tokens):
        out, _ = self.rnn(self.emb(tokens))
        return self.fc(out)


def sequences(n):
    """Each token is the sum of the two before it, modulo the size of the vocabulary."""
    s = torch.randint(0, vocab, (n, 2))
    for _ in range(seq_len - 1):
        s = torch.cat([s, (s[:, -1:] + s[:, -2:-1]) % vocab], dim=1)
    return s


def all_reduce_grads(m):
    for p in m.parameters():
        dist.all_reduce(p.grad)
        p.grad /= n_ranks


train_seq, test_seq = sequences(192), sequences(64)
net = CharRNN()
for p in net.parameters():
    dist.broadcast(p.data, src=0)
opt = torch.optim.Adam(net.parameters(), lr=5e-3)
lossf = nn.CrossEntropyLoss()

for ep in range(2):
    perm = torch.randperm(len(train_seq), generator=torch.Generator().manual_seed(100 + ep))
    for batch in perm.split(global_batch):
        s = train_seq[batch[rank::n_ranks]]
        opt.zero_grad()
        loss = lossf(net(s[:, :-1]).flatten(0, 1), s[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        all_reduce_grads(net)
        opt.step()
    with torch.no_grad():
        test_loss = lossf(net(test_seq[:, :-1]).flatten(0, 1), test_seq[:, 1:].flatten())
    if rank == 0:
        print(f"epoch {ep} test perplexity {test_loss.exp().item():.3f}")

dist.destroy_process_group()
