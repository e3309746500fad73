"""`lockstep.ray` without a cluster: what it refuses, and what Ray reads of the configuration."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("ray.train", reason="needs ray[train]")

import lockstep.ray
from lockstep.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("checkpoint", "RunConfig(storage_path=..., name=...)"),
        ("keep", "CheckpointConfig(num_to_keep=...)"),
        ("keep_best", "CheckpointConfig(num_to_keep=..., checkpoint_score_attribute=...)"),
        ("resume", "RunConfig(name=...): a run of the same name goes on, one of another name starts anew"),
    ],
)
def test_what_ray_decides_is_no_setting(name, instead):
    with pytest.raises(ConfigurationError) as caught:
        lockstep.ray.fit(None, steps=1, **{name: True})
    assert str(caught.value) == (
        f"lockstep.ray.fit has no setting {name}, as Ray keeps the checkpoints.\nGive Ray's {instead}."
    )


def test_torch_trainer_leaves_the_choice_of_the_backend():
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    config = lockstep.ray.LockstepConfig()
    TorchTrainer(lambda: None, torch_config=config, scaling_config=ScalingConfig(num_workers=2))
    assert config.to_dict() == {"backend": "auto", "timeout_s": 60.0, "adopt": True}


def test_train_v1_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", "import lockstep.ray"],
        env={**os.environ, "RAY_TRAIN_V2_ENABLED": "0"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "ConfigurationError: lockstep.ray needs Ray Train V2, which Ray " in done.stderr
