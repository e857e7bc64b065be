"""Half-way weights in the study: rows, crossings, and what is measured word by word."""

import math

import pytest
import torch

from rewards import Fence
from rollout import SamplingOptions, build_prompt, load_policy, read_answers, sample
from study.collapse import distinct_prefixes, word_nats
from study.entries import GRPO_KL, VPO, mixed
from study.grid import cells, mixed_cells
from study.tables import KS, crossing


def test_a_mixed_policy_has_a_row_of_its_own():
    """At t = 1 it is the trained policy."""
    assert mixed(GRPO_KL, 0.5).title == "GRPO, KL 0.1 t = 0.5"
    assert mixed(VPO, 1.0) == VPO and not mixed(GRPO_KL, 0.5).is_cure


def test_a_mixed_cell_is_trained_by_the_command_of_its_policy():
    own = mixed_cells()
    assert {cell.method for cell in own if cell.task == "headline"} == {"grpo", "vpo"}
    assert set(own) <= set(cells())


@pytest.mark.parametrize(
    ("gaps", "k"),
    [
        ([-0.2, -0.1, 0.1, 0.2, 0.3, 0.3], math.sqrt(2 * 3)),  # half-way in log k
        ([-0.2, -0.1, -0.1, -0.1, -0.1, 0.0], math.inf),
        ([0.1, 0.1, 0.1, 0.1, 0.1, 0.1], 1),
        ([0.1, -0.1, 0.3, 0.1, 0.1, 0.1], 2 * 1.5**0.25),  # the last crossing counts
    ],
)
def test_the_crossing_is_interpolated_in_log_k(gaps, k):
    assert len(gaps) == len(KS)
    assert crossing(torch.tensor(gaps, dtype=torch.float64)) == pytest.approx(k)


def test_the_nats_of_a_word_are_those_of_its_tokens():
    policy = load_policy("tiny", Fence(), seed=3)
    prompts = [build_prompt(policy, Fence(), problem, 2) for problem in Fence().problems("test", 1)]
    options = SamplingOptions(40, torch.Generator().manual_seed(0))
    rollouts = sample(policy, prompts, 64, options)
    n_read = 0
    for row, answers in enumerate(read_answers(Fence(), rollouts, 2)):
        found = word_nats(policy, rollouts, row, answers)
        is_word = ~torch.isin(rollouts.tokens[row], policy.silent_ids)
        logprobs = rollouts.logprobs[row][is_word].tolist()
        words = rollouts.texts[row].split()
        for answer, nats in zip(answers, found, strict=True):
            n_read += len(nats)
            own = answer.split()
            starts = [i for i in range(len(words)) if words[i : i + len(own)] == own]
            sums = [[-value for value in logprobs[i : i + len(own)]] for i in starts]
            assert any(nats == pytest.approx(expected) for expected in sums)
    assert n_read


def test_distinct_beginnings_are_counted():
    assert distinct_prefixes([["a b", "a c"], ["a b", "a b"]])[:3] == [1.0, 1.5, 1.5]
