"""Tests in this folder need a CUDA device and skip themselves without one."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
