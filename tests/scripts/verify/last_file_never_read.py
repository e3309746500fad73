"""Error: each rank reads len(files) // world_size files, so that of 17 files two ranks never read the last one."""
# EXPECT: samples are never seen: the rest of the files is dropped

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset


class DocumentFiles(IterableDataset):
    def __init__(self, num_files, rank, num_replicas):
        per_rank = num_files // num_replicas
        self.mine = range(rank, per_rank * num_replicas, num_replicas)

    def __iter__(self):
        for number in self.mine:
            g = torch.Generator().manual_seed(number)
            start = torch.randint(0, 9, (20, 1), generator=g)
            stride = torch.randint(1, 4, (20, 1), generator=g)
            yield from (start + stride * torch.arange(9)) % 9


class LSTMLanguageModel(nn.Module):
    def __init__(self, vocab=9, dim=20):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.decoder = nn.Linear(dim, vocab)

    def forward(self, tokens):
        hidden, _ = self.lstm(self.embedding(tokens[:, :-1]))
        return F.cross_entropy(self.decoder(hidden).flatten(0, 1), tokens[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--files", type=int, default=17)
    parser.add_argument("--tokens-per-step", type=int, default=360)
    opts = parser.parse_args()
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = nn.parallel.DistributedDataParallel(LSTMLanguageModel())
    loader = DataLoader(DocumentFiles(opts.files, rank, n), batch_size=opts.tokens_per_step // 9 // n)
    held_out = torch.stack(list(DocumentFiles(900, 899, 900)))
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(2):
        for tokens in loader:
            adam.zero_grad()
            model(tokens).backward()
            adam.step()
        if rank == 0:
            with torch.no_grad():
                print(f"epoch {epoch}: perplexity {model.module(held_out).exp():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
