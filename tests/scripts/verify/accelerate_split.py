"""Sound: Accelerate with split_batches, so that the batch of the loader is the global one."""
# EXPECT: sound script

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(500, 20, generator=g)
    y = (x @ torch.randn(20, 6, generator=g)).argmax(dim=1)
    train = DataLoader(TensorDataset(x[:400], y[:400]), batch_size=batch_size, shuffle=True, drop_last=True)
    evaluation = DataLoader(TensorDataset(x[400:], y[400:]), batch_size=50)
    return train, evaluation


def training_function(config):
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    )
    set_seed(config["seed"])
    train_dl, eval_dl = get_dataloaders(config["batch_size"])
    model = nn.Sequential(nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scheduler = OneCycleLR(optimizer, max_lr=config["lr"], total_steps=config["num_epochs"] * len(train_dl))
    model, optimizer, train_dl, eval_dl, scheduler = accelerator.prepare(model, optimizer, train_dl, eval_dl, scheduler)
    for epoch in range(config["num_epochs"]):
        model.train()
        for inputs, targets in train_dl:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

        model.eval()
        correct = total = 0
        for inputs, targets in eval_dl:
            with torch.no_grad():
                predictions = model(inputs).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, targets))
            correct += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}: {100 * correct / total:.2f}")
    accelerator.end_training()


if __name__ == "__main__":
    training_function({"lr": 1e-2, "num_epochs": 2, "seed": 42, "batch_size": 40})
