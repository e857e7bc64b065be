"""Puts the project's folder and its tests on Python's path, wherever a benchmark is started."""

import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
signal.signal(signal.SIGTERM, signal.default_int_handler)  # subprocess.run then ends its child
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
