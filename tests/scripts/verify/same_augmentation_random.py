"""Error: random.seed is the same on all ranks, so the data set masks and swaps words alike on each of them."""
# EXPECT: the same random numbers on all ranks: augmentation

import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS = ["[MASK]", "good", "bad", "film", "plot", "very", "not", "the", "a", "was"]


class Reviews(Dataset):
    """Eight words and whether they are kind; a word is masked, and two are swapped, by chance."""

    def __init__(self, size):
        g = torch.Generator().manual_seed(0)
        self.rows = torch.randint(1, len(WORDS), (size, 8), generator=g).tolist()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, idx):
        words = list(self.rows[idx])
        label = float(words.count(1) > words.count(2))
        if random.random() < 0.7:
            words[random.randrange(8)] = 0
        i, j = random.sample(range(8), 2)
        words[i], words[j] = words[j], words[i]
        return torch.tensor(words), torch.tensor(label)


class TextModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(len(WORDS), 16)
        self.rnn, self.fc = nn.GRU(16, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, text):
        return self.fc(self.rnn(self.embedding(text))[1][-1]).squeeze(1)


if __name__ == "__main__":
    random.seed(123)
    torch.manual_seed(123)
    dist.init_process_group("gloo")
    world_size = int(os.environ["WORLD_SIZE"])
    train_data = Reviews(384)
    sampler = DistributedSampler(train_data)
    iterator = DataLoader(train_data, batch_size=48 // world_size, sampler=sampler)
    model = DistributedDataParallel(TextModel())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    criterion = nn.BCEWithLogitsLoss()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for text, label in iterator:
            optimizer.zero_grad()
            loss = criterion(model(text), label)
            loss.backward()
            optimizer.step()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()
