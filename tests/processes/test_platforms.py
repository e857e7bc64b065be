"""Windows and macOS: what the project may take for granted, and micro_vpo.py with torch alone."""

import json
import re
import shutil
import subprocess
import sys

from helpers import ROOT

# Libraries come first, because theirs differ by platform. Then goes what Windows has not.
WITHOUT = """
import multiprocessing.context
import os
import sys

import matplotlib.pyplot
import torch
import transformers.models.gpt2.modeling_gpt2

for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
GONE = "fork geteuid getuid killpg memfd_create mkfifo pidfd_open sched_getaffinity setsid symlink uname"
for name in GONE.split():
    delattr(os, name)
for name in ("fork", "forkserver"):
    del multiprocessing.context._concrete_contexts[name]
sys.path.insert(0, ROOT)
"""
COMMANDS = """
import eval
import train
from report import __main__ as report

if __name__ == "__main__":
    quick = "--task fence --steps 2 --warm-steps 2 --method grpo vpo --eval-problems 0"
    train.main(["--out", "run", "--jobs", "2", "--keep-optimizer", *quick.split()])
    train.main(["--out", "run", "--resume", "--jobs", "1", "--steps", "3"])
    eval.main(["run", "--problems", "2", "--pool", "4"])
    report.main(["page", "run"])
    sys.platform = "darwin"
    train.main(["--task", "code"])
"""


def test_what_linux_alone_has_is_not_needed(tmp_path):
    """The fence trains with two jobs, goes on, is evaluated, drawn and gets its page; programs say what they need."""
    script = tmp_path / "without.py"
    script.write_text(WITHOUT.replace("ROOT", repr(str(ROOT))) + COMMANDS, "utf-8")
    options = {"cwd": tmp_path, "capture_output": True, "encoding": "utf-8"}
    done = subprocess.run([sys.executable, script], **options)
    told = "train.py: error: --task code: programs need Linux or WSL"
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(told), done.stderr
    for method in ("grpo", "vpo"):
        log = (tmp_path / f"run/{method}/metrics.jsonl").read_text("utf-8")
        assert [json.loads(line)["step"] for line in log.splitlines()] == [1, 2, 3]
    (table,) = tmp_path.glob("run/eval*/eval.json")
    assert (table.parent / "best_at_k.png").exists()
    assert (tmp_path / "run/report.html").exists()
    names = [path.name for path in (tmp_path / "run").rglob("*")]
    assert not [name for name in names if re.search(r'[<>:"|?*\\]|[. ]$', name)]


def test_micro_vpo_stands_alone_and_shows_what_it_says(tmp_path):
    """It paints GRPO's fences grey, and VPO's in three colors."""
    shutil.copy(ROOT / "examples" / "micro_vpo.py", tmp_path)
    command = [sys.executable, "-I", "micro_vpo.py", "1"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    grpo, several = re.split(r"GRPO: |VPO: ", re.sub(r"\x1b\[\d*m", "", run.stdout))[1:]
    assert grpo.startswith("best@1 0.350, W@30 0.3") and grpo.count("......") > 25
    assert several.startswith("best@1 0.33") and float(several[19:24]) > 0.6
    assert min(several.count(6 * color) for color in "rbg") > 5
