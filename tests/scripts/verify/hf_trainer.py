"""Sound: the Transformers Trainer with a small classifier; per_device_train_batch_size is divided."""
# EXPECT: sound script

import os
import tempfile

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed


class TextLike(Dataset):
    """Bags of tokens; the label is the more frequent half of the vocabulary."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(0, 30, (n, 15), generator=g)
        self.labels = ((self.ids < 15).sum(1) > 7).long()

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


class AverageEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.classifier = nn.Linear(16, 2)

    def forward(self, input_ids, labels=None):
        logits = self.classifier(self.embedding(input_ids).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def compute_metrics(eval_pred):
    logits, labels = eval_pred
    return {"accuracy": float((logits.argmax(-1) == labels).mean())}


def main():
    set_seed(42)
    with tempfile.TemporaryDirectory() as output_dir:
        args = TrainingArguments(
            output_dir=output_dir,
            per_device_train_batch_size=32 // int(os.environ.get("WORLD_SIZE", 1)),
            per_device_eval_batch_size=50,
            num_train_epochs=2,
            learning_rate=2e-2,
            warmup_steps=4,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(
            model=AverageEmbedding(),
            args=args,
            train_dataset=TextLike(320, 0),
            eval_dataset=TextLike(100, 1),
            compute_metrics=compute_metrics,
        )
        trainer.train()
        metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(f"eval_accuracy {metrics['eval_accuracy']:.4f} eval_loss {metrics['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
