"""Sound: a prepared loader over a stream of sentences, which every rank reads from its start."""
# EXPECT: sound script

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lockstep

ADJECTIVES, NOUNS = ["red", "old", "big", "shy", "odd"], ["fox", "hen", "ox", "bee", "toad", "crane", "wolf"]
ALPHABET = " abcdefghijklmnopqrstuvwxyz"


class Sentences(IterableDataset):
    """Stands for lines of a large file."""

    def __iter__(self):
        for number in range(200):
            adjective, noun = ADJECTIVES[number * 3 % 5], NOUNS[number * number % 7]
            yield f"the {adjective} {noun}" + " ran" * (number % 3)


def collate(lines):
    rows = [torch.tensor([ALPHABET.index(letter) for letter in line.ljust(28)]) for line in lines]
    return torch.stack(rows), torch.tensor([[line.count("ran")] for line in lines]).float()


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), 16)
        self.conv = nn.Conv1d(16, 16, 3, padding=1)
        self.out = nn.Linear(16, 1)

    def forward(self, tokens):
        return self.out(torch.relu(self.conv(self.embed(tokens).mT)).sum(dim=2) / 8)


def main():
    torch.manual_seed(0)
    loader = DataLoader(Sentences(), batch_size=20, collate_fn=collate)
    model = Counter()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
    for _ in range(2):
        for tokens, counts in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(tokens), counts).backward()
            optimizer.step()
    if torch.distributed.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")


if __name__ == "__main__":
    main()
