"""Shapley credit: each answer of a VPO rollout gets its Shapley value in the set.

    python study/shapley.py --method vpo

The flags are those of train.py; `--subset` has no effect. It needs the tiny model, in the maze or the
toy. As in `study/reward_to_go.py` every answer's tokens get an advantage of their own.

The game is E_w max: a set of answers is worth the utility of its best one. Its Shapley values have a
closed form, that of the airport game. Let u_1 <= ... <= u_m be the utilities under one w. The step from
u_{l-1} to u_l is shared equally by the m - l + 1 answers that reach u_l. The values add up to R(S).
"""

import functools
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from study import reward_to_go
from vpo import Scored


def shapley_values(utilities: Tensor) -> Tensor:
    """The Shapley value of every answer where a set is worth its best utility.

    Args:
        utilities: (..., m), not negative.

    Returns:
        (..., m), which add up to the largest utility.
    """
    m = utilities.shape[-1]
    ranked, order = utilities.sort(-1)  # (..., m), the smallest first
    steps = ranked.diff(dim=-1, prepend=torch.zeros_like(ranked[..., :1]))
    sharers = torch.arange(m, 0, -1)  # m answers reach the smallest utility, one the largest
    values = (steps / sharers).cumsum(-1)
    return torch.empty_like(values).scatter(-1, order, values)


def shapley_credit(scored: Scored, weights: Tensor) -> Tensor:
    """What each answer is paid (P, G, m): its Shapley value. A repeated answer adds nothing."""
    utilities = torch.einsum("pgmk,pwk->pgwm", scored.vectors, weights)  # (P, G, K, m)
    counts = scored.answer_mask & ~scored.repeat_mask  # (P, G, m)
    utilities = utilities.masked_fill(~counts[:, :, None], 0.0)
    return shapley_values(utilities).mean(2)


if __name__ == "__main__":
    train.train_step = functools.partial(reward_to_go.train_step, credit=shapley_credit)
    train.main([*sys.argv[1:], "--jobs", "1"])
