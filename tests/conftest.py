"""The scripts lie one folder up and import one another by name, wherever pytest is started; no network."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
