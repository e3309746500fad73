"""examples/digits.py on two workers of Ray Train, each with a core; the checkpoints are in runs/ray/digits.

pip install ".[examples,ray]"
python examples/ray_digits.py
"""

from pathlib import Path
from typing import Any

from digits import task
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

import lockstep.ray


def train(settings: dict[str, Any]) -> dict[str, float]:
    """Train with the other workers; return what the last evaluation found."""
    return lockstep.ray.fit(task, **settings).metrics


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        train_loop_config={"reproducible": 8},  # the same bits on 1 to 8 workers, however often Ray starts them
        torch_config=lockstep.ray.LockstepConfig(),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="digits",  # start it again with the same name, and it goes on
            storage_path=str(Path("runs/ray").resolve()),  # on several machines a folder that all of them share
            checkpoint_config=CheckpointConfig(num_to_keep=2),
            failure_config=FailureConfig(max_failures=3),
        ),
    )
    result = trainer.fit()
    print(f"{result.return_value} in {result.checkpoint}")
