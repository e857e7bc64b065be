"""What the examples share: the advantages of micro_vpo.py, and of groups for other trainers."""

import pytest
import torch
from helpers import generator, scored_of

from examples import micro_vpo
from examples.groups import as_text, group_advantages, in_groups, of_text
from vpo import ADVANTAGES, Options, answers_per_rollout, group_normalize, set_reward

G = 4  # rollouts per prompt


def test_the_advantages_of_micro_vpo_are_ours():
    """Grey fences alone teach nothing: guards against rounding, which the optimizer turns into full steps."""
    rewards = torch.rand(4, 8, 3, 3, generator=generator())  # (P, G, m, d)
    weights = micro_vpo.random_users(4, 100)  # (P, K, d)
    expected = group_normalize(set_reward(rewards, weights))
    torch.testing.assert_close(micro_vpo.vpo_advantage(rewards, weights), expected)
    expected = ADVANTAGES["grpo"](scored_of(rewards[:, :, :1]), Options())
    torch.testing.assert_close(micro_vpo.grpo_advantage(rewards[:, :, :1]), expected)
    grey = micro_vpo.reward_vectors(torch.full((4, 8, 1, 6), 3))  # (P, G, 1, 3)
    assert (micro_vpo.grpo_advantage(grey) == 0).all()
    assert (micro_vpo.vpo_advantage(grey, weights) == 0).all()


@pytest.mark.parametrize("method", ADVANTAGES)
def test_the_mean_of_a_groups_advantages_is_0(method):
    """What the reward function for TRL relies on: TRL subtracts the mean of a group."""
    m = answers_per_rollout(method, 3)
    rewards = torch.rand(3, G, m, 3, generator=generator())
    objective_mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]).bool()
    scored = scored_of(rewards, rewards[..., 0] > 0.1, objective_mask=objective_mask, minimum=-0.5)
    A = ADVANTAGES[method](scored, Options())
    assert A.abs().max() > 0.1
    assert A.mean(1).abs().max() < 1e-6


@pytest.mark.parametrize("method", ADVANTAGES)
def test_groups_that_lost_rollouts_are_put_together_again(method):
    """Through a text and back; problems with two and with three objectives. A group of one gets 0."""
    m = answers_per_rollout(method, 2)
    parts = []
    groups = []
    for i, (d, size) in enumerate([(3, G), (2, G), (3, 1)]):
        rewards = torch.rand(size, 1, m, d, generator=generator(i))
        parts.append([scored_of(own[None], own[None, ..., 0] > 0.1) for own in rewards])
        groups.append({f"{i}_{j}": of_text(as_text(own)) for j, own in enumerate(parts[i])})
    actual = group_advantages(groups, G, method, Options(generator=generator()))
    scored = in_groups([*parts[0], *parts[1]], G)
    assert scored.objective_mask.tolist() == [[True] * 3, [True, True, False]]
    expected = ADVANTAGES[method](scored, Options(generator=generator())).flatten().tolist()
    assert list(actual.values()) == [*expected, 0]


def test_a_mistake_in_a_group_that_lost_rollouts_is_not_taken_for_its_size():
    """Sets of two answers for a method of one."""
    scored = scored_of(torch.rand(1, 1, 2, 3), torch.ones(1, 1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="one answer per rollout"):
        group_advantages([dict.fromkeys("abc", scored)], G, "grpo", Options())
