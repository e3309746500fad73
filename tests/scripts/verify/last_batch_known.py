"""Sound: a window of batches is read before it is trained on, to count its tokens, as in newer trainers."""
# EXPECT: sound script

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    """Sequences with -100 where no loss is computed: another number in each."""

    def __len__(self):
        return 160

    def __getitem__(self, i):
        ids = (torch.arange(12) * (i % 7 + 1) + i) % 11
        return {"input_ids": ids, "labels": torch.where(torch.arange(12) < i % 9, -100, ids.roll(-1))}


def get_batch_samples(epoch_iterator, num_batches):
    batch_samples = []
    for _ in range(num_batches):
        try:
            batch_samples.append(next(epoch_iterator))
        except StopIteration:
            break
    num_items = sum((batch["labels"] != -100).sum() for batch in batch_samples)
    dist.all_reduce(num_items)
    return batch_samples, num_items


def main(gradient_accumulation_steps=2, batch_size=16):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    sampler = DistributedSampler(Pairs(), seed=42)
    dataloader = DataLoader(Pairs(), batch_size // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Sequential(nn.Embedding(11, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 11)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        epoch_iterator = iter(dataloader)
        for _ in range(len(dataloader) // gradient_accumulation_steps):
            batch_samples, num_items = get_batch_samples(epoch_iterator, gradient_accumulation_steps)
            for inputs in batch_samples:
                logits = model(inputs["input_ids"])
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), inputs["labels"].flatten(), ignore_index=-100, reduction="sum"
                )
                (loss / num_items * dist.get_world_size()).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(model.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
