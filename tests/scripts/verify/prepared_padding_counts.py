"""Error: padding counts in the sum over the tokens, so outputs depend on the longest sentence of the rank's part."""
# EXPECT: samples depend on each other: padded to the longest of the part

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
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
    rows = [torch.tensor([ALPHABET.index(letter) for letter in line]) for line in lines]
    return pad_sequence(rows, batch_first=True), torch.tensor([[line.count("ran")] for line in lines]).float()


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
