"""Error: per_device_train_batch_size stays 32 on two ranks, so that the global batch is 64."""
# EXPECT: batch size not divided by the number of ranks

import tempfile
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import transformers
from torch import nn

SEQ_LEN, VOCAB = 12, 11


@dataclass
class ToyConfig:
    vocab_size: int = VOCAB
    hidden_size: int = 24


class ToyForCausalLM(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rnn = nn.GRU(config.hidden_size, config.hidden_size, batch_first=True)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids):
        return self.head(self.rnn(self.embed(input_ids))[0])


class LMTrainer(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits = model(inputs["input_ids"])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), inputs["input_ids"][:, 1:].flatten())
        return (loss, {"logits": logits}) if return_outputs else loss


transformers.set_seed(0)
tokens = (torch.randint(0, VOCAB, (384, 1)) + torch.randint(1, 4, (384, 1)) * torch.arange(SEQ_LEN)) % VOCAB
rows = [{"input_ids": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    trainer = LMTrainer(
        model=ToyForCausalLM(ToyConfig()),
        args=transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=32,
            num_train_epochs=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            remove_unused_columns=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=rows,
    )
    result = trainer.train()
if trainer.is_world_process_zero():
    print(f"steps {result.global_step} train_loss {result.training_loss:.4f}")
