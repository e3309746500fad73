"""Sound: the loss is a mean over tokens, whose number is given to lockstep.backward."""
# EXPECT: sound script

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import lockstep


class Names(Dataset):
    """Words of 3 to 9 letters, as in makemore: -1 marks what does not count."""

    def __init__(self, num):
        g = torch.Generator().manual_seed(10)
        self.words = [torch.randint(1, 27, (3 + n % 7,), generator=g).sort().values for n in range(num)]

    def __len__(self):
        return len(self.words)

    def __getitem__(self, idx):
        x, y = torch.zeros(10, dtype=torch.long), torch.full((10,), -1)
        x[1 : 1 + len(self.words[idx])] = self.words[idx]
        y[: len(self.words[idx])] = self.words[idx]
        y[len(self.words[idx])] = 0
        return x, y


class Bigram(nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = nn.Embedding(27, 27)

    def forward(self, idx, targets):
        logits = self.logits(idx)
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def main():
    with lockstep.init() as world:
        torch.manual_seed(3407)
        loader = DataLoader(Names(250), batch_size=32, shuffle=True)
        model = Bigram()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.01, betas=(0.9, 0.99))
        model, optimizer, loader = lockstep.prepare(model, optimizer, loader)
        for _ in range(2):
            for x, y in loader:
                loss = model(x, y)
                model.zero_grad(set_to_none=True)
                lockstep.backward(loss, mean_over=(y != -1).sum())
                optimizer.step()
        world.print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.4f}")


if __name__ == "__main__":
    main()
