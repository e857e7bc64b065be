"""Shapley credit: each answer of a VPO rollout gets its Shapley value in the set.

    python study/shapley.py --method vpo

The flags are those of train.py; `--sampler` and `--subset` have no effect. It needs the tiny model, in the
maze or the toy. As in `study/reward_to_go.py` every answer's tokens get an advantage of their own.

The game is E_w max: a set of answers is worth the utility of its best one. Its Shapley values have a
closed form, that of the airport game. Let u_1 <= ... <= u_m be the utilities under one w. The step from
u_{l-1} to u_l is shared equally by the m - l + 1 answers that reach u_l. The values add up to R(S).
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train
from study import reward_to_go


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


class ShapleyCredit(reward_to_go.AnswerCredit):
    """VPO with an advantage per answer: its Shapley value, normalised in the group."""

    def credits(
        self, rewards: Tensor, weights: Tensor, answer_mask: Tensor, missing_answer_reward: float
    ) -> list[Tensor]:
        """The Shapley values of the m answers, (P, G) each."""
        utilities = torch.einsum("pgmk,pwk->pgwm", rewards, weights)  # (P, G, K, m)
        utilities = utilities * answer_mask[:, :, None]  # a repeated answer adds nothing
        values = shapley_values(utilities).mean(2)  # (P, G, m)
        return list(values.unbind(-1))


reward_to_go.AnswerCredit = ShapleyCredit

if __name__ == "__main__":
    train.main()
