"""Sound: the loss is the mean over all real tokens of the global batch, of which each rank has another number."""
# EXPECT: sound script

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, DistributedSampler

IGNORE = -100


class Reversed(Dataset):
    """Sequences of 3 to 15 tokens; the label of each token is the token before it."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 16, (n,), generator=g).tolist()
        self.rows = [torch.randint(1, 12, (length,), generator=g) for length in lengths]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i], torch.cat([torch.tensor([IGNORE]), self.rows[i][:-1]])


def collate(samples):
    tokens, labels = zip(*samples, strict=True)
    return pad_sequence(tokens, True, 0), pad_sequence(labels, True, IGNORE)


class Tagger(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.embed = nn.Embedding(12, dim, padding_idx=0)
        self.lstm = nn.LSTM(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, 12)

    def forward(self, tokens):
        return self.out(self.lstm(self.embed(tokens))[0]).transpose(1, 2)


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    train_set = Reversed(320, seed=1)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, 32 // world, sampler=sampler, collate_fn=collate)
    x_test, y_test = collate([Reversed(100, seed=2)[i] for i in range(100)])
    model = DDP(Tagger())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for tokens, labels in loader:
            num_tokens = (labels != IGNORE).sum()
            dist.all_reduce(num_tokens)
            total = nn.functional.cross_entropy(model(tokens), labels, ignore_index=IGNORE, reduction="sum")
            loss = total * world / num_tokens  # DDP divides by world
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            with torch.no_grad():
                test_loss = nn.functional.cross_entropy(model.module(x_test), y_test, ignore_index=IGNORE)
            print(f"epoch {epoch} test loss {test_loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
