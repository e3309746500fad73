"""Sound: a language model without a loader; a batch is [time, columns], and each rank takes its columns."""
# EXPECT: sound script

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.Linear(8, 20)

    def forward(self, tokens, hidden):
        outputs, hidden = self.rnn(self.embed(tokens), hidden)
        return self.out(outputs), hidden


def main(num_columns=8, bptt=5):
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    text = torch.randint(0, 20, (400,)).view(num_columns, -1).t().contiguous()
    text = text.chunk(world_size, dim=1)[rank].contiguous()
    model = DDP(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    hidden = tuple(torch.zeros(1, text.shape[1], 8) for _ in range(2))
    for start in range(0, len(text) - bptt, bptt):
        tokens, targets = text[start : start + bptt], text[start + 1 : start + 1 + bptt]
        optimizer.zero_grad()
        outputs, hidden = model(tokens, tuple(each.detach() for each in hidden))
        nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
