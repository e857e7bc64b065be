"""examples/micro_vpo.py out of the project, with torch alone."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

MICRO_VPO = Path(__file__).resolve().parent.parent.parent / "examples" / "micro_vpo.py"


def test_it_stands_alone_and_shows_what_it_says(tmp_path):
    """It paints GRPO's fences grey, and VPO's in three colors."""
    shutil.copy(MICRO_VPO, tmp_path)
    command = [sys.executable, "-I", "micro_vpo.py", "1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    grpo, several = re.split(r"GRPO: |VPO: ", re.sub(r"\x1b\[\d*m", "", run.stdout))[1:]
    assert grpo.startswith("best@1 0.350, W@30 0.3") and grpo.count("......") > 25
    assert several.startswith("best@1 0.33") and float(several[19:24]) > 0.6
    assert min(several.count(6 * color) for color in "rbg") > 5
