"""The Trainer of Hugging Face transformers on Lockstep: nothing in the script names Lockstep.

lockstep run --devices 2 --adopt examples/with_trainer.py
"""

import torch
from digits import network, train_set
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Classifier(nn.Module):
    """The network of digits.py with the signature that the Trainer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def forward(self, image: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss and the logits."""
        logits = self.network(image)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    """The digits as dictionaries."""

    def __init__(self) -> None:
        self.images, self.labels = train_set().tensors

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return an image and the digit that it shows."""
        return {"image": self.images[index], "labels": self.labels[index]}


torch.manual_seed(0)
settings = TrainingArguments(
    output_dir="runs/with_trainer",
    per_device_train_batch_size=32,
    max_steps=20,
    learning_rate=2e-3,
    save_strategy="no",
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
    ddp_find_unused_parameters=False,
)
trainer = Trainer(model=Classifier(), args=settings, train_dataset=Rows())
found = trainer.train()
if trainer.is_world_process_zero():
    print(f"engine {type(trainer.model_wrapped).__module__}, mean loss {found.training_loss:.6f}")
