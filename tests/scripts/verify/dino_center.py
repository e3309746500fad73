"""Sound: self-distillation with an averaged teacher; the center of its outputs is reduced over the ranks."""
# EXPECT: sound script

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class DINOLoss(nn.Module):
    def __init__(self, out_dim, center_momentum=0.9):
        super().__init__()
        self.center_momentum = center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_output, teacher_output):
        teacher_out = F.softmax((teacher_output - self.center) / 0.04, dim=-1).detach()
        loss = torch.sum(-teacher_out * F.log_softmax(student_output / 0.1, dim=-1), dim=-1).mean()
        self.update_center(teacher_output)
        return loss

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)


def network():
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 16))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data[:512]).float() / 16
    dataset = TensorDataset(images)
    sampler = DistributedSampler(dataset)
    data_loader = DataLoader(dataset, 64 // dist.get_world_size(), sampler=sampler, drop_last=True)
    student, teacher = nn.parallel.DistributedDataParallel(network()), network()
    teacher.load_state_dict(student.module.state_dict())
    teacher.requires_grad_(False)
    dino_loss = DINOLoss(16)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3, weight_decay=0.04)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for (images,) in data_loader:
            crop = images.clone()
            crop[:, 32:] = 0  # the student sees the upper half
            loss = dino_loss(student(crop), teacher(images))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            optimizer.step()
            with torch.no_grad():
                for param_q, param_k in zip(student.module.parameters(), teacher.parameters(), strict=True):
                    param_k.data.mul_(0.996).add_((1 - 0.996) * param_q.detach().data)
    if dist.get_rank() == 0:
        print(f"norm {nn.utils.parameters_to_vector(student.parameters()).norm().item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
