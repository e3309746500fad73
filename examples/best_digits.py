"""The digits with what longer runs have: averaged weights, early stopping, the best checkpoint, a callback.

lockstep train examples/best_digits.py --devices 2 --epochs 40 --early-stopping accuracy:max --patience 3 \
    --checkpoint runs/best --keep-best accuracy:max --load-best --export runs/best.safetensors
"""

from dataclasses import replace
from typing import Any

import digits
import torch

import lockstep


class Confusions:
    """Logs how often the digit is wrong that the network confuses most, and prints the pair at the end."""

    def __init__(self) -> None:
        self.worst = ""

    @torch.no_grad()
    def on_evaluation(self, run: Any) -> None:
        """Count on the test images; each rank does so, and rank zero's number is shown."""
        images, labels = digits.test_set().tensors
        device = next(run.model.parameters()).device
        found = run.model(images.to(device)).argmax(dim=1).cpu()
        counts = torch.zeros(10, 10).index_put_((labels, found), torch.tensor(1.0), accumulate=True).fill_diagonal_(0)
        digit, taken_for = divmod(int(counts.argmax()), 10)
        self.worst = f"{digit} is taken for {taken_for}, {int(counts.max())} times"
        run.log("worst_confusion", counts.max())

    def on_end(self, run: Any) -> None:
        """Print the worst pair of the last evaluation."""
        if run.is_rank_zero:
            print(self.worst)

    def state_dict(self) -> dict[str, str]:
        """Return what a resumed run continues."""
        return {"worst": self.worst}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Continue from it."""
        self.worst = state["worst"]


task = replace(digits.task, name="best_digits", ema=0.98, callbacks=[Confusions()])

if __name__ == "__main__":
    result = lockstep.fit(task, epochs=40, early_stopping="accuracy:max", patience=3)
    print(f"accuracy of the averaged weights: {result.metrics['accuracy']:.4f}")
    network = result.load(digits.network())  # a plain module
