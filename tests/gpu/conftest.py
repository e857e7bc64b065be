"""Tests that need a card: pytest tests/gpu. The other tests hide it."""

import os

os.environ.pop("CUDA_VISIBLE_DEVICES", None)
