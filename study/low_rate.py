"""GRPO at a low rate as a method of its own, so that one search compares it with GRPO at its own rate.

    python study/low_rate.py train --kl 0.001 --method grpo_low_rate --lr grpo_low_rate=1.2e-4 --out runs/maze-seed0
    python study/low_rate.py search runs/maze-seed0 runs/maze-seed1 --goal diamond

The first word is train, eval or search, and the flags are those of train.py, eval.py or
examples/search.py.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import eval as evaluation
import train
import vpo
from examples import search
from study.entries import LOW_RATE

SCRIPTS = {"train": train, "eval": evaluation, "search": search}
vpo.ADVANTAGES[LOW_RATE] = vpo.grpo

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in SCRIPTS:
        sys.exit(f"{__doc__}\nerror: name one of {', '.join(SCRIPTS)}, then its flags")
    SCRIPTS[sys.argv[1]].main(sys.argv[2:])
