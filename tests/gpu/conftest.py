"""Tests that need a card: pytest tests/gpu. The other tests hide it."""

import os

import pytest

os.environ.pop("CUDA_VISIBLE_DEVICES", None)


@pytest.fixture(autouse=True)
def _needs_a_card() -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no card")
