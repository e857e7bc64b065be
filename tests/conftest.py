"""The scripts lie one folder up and import one another by name, wherever pytest is started; no network."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are so small that threads wait for one another
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
