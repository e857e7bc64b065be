"""Puts the project's folder and its tests on Python's path, wherever a benchmark is started."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
