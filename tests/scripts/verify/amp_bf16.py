"""Sound: autocast to bfloat16 in forward, float32 weights and gradients."""
# EXPECT: sound script (bfloat16 rounds)

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train_one_epoch(model, criterion, optimizer, loader, use_amp=True):
    model.train()
    for image, target in loader:
        with torch.amp.autocast("cpu", dtype=torch.bfloat16, enabled=use_amp):
            output = model(image)
            loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def evaluate(model, criterion, loader):
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.inference_mode(), torch.amp.autocast("cpu", dtype=torch.bfloat16):
        for image, target in loader:
            output = model(image).float()
            totals[0] += criterion(output, target).item() * len(target)
            totals[1] += (output.argmax(1) == target).sum()
            totals[2] += len(target)
    dist.all_reduce(totals)
    loss, acc = (totals[:2] / totals[2]).tolist()
    return loss, acc


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data, target = load_digits(return_X_y=True)
    data, target = torch.tensor(data, dtype=torch.float32) / 16, torch.tensor(target)
    dataset = TensorDataset(data[:640], target[:640])
    dataset_test = TensorDataset(data[640:1040], target[640:1040])
    train_sampler = DistributedSampler(dataset)
    test_sampler = DistributedSampler(dataset_test, shuffle=False)
    loader = DataLoader(dataset, 64 // dist.get_world_size(), sampler=train_sampler)
    loader_test = DataLoader(dataset_test, 100, sampler=test_sampler)

    model = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(), nn.Linear(128, 10))
    model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, loader)
        loss, acc = evaluate(model.module, criterion, loader_test)
        if dist.get_rank() == 0:
            print(f"Test: epoch {epoch} loss {loss:.4f} Acc@1 {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
