"""What the study measures word by word."""

import pytest
import torch

from rewards import Fence
from rollout import SamplingOptions, build_prompt, load_policy, read_answers, sample
from study.collapse import distinct_prefixes, word_nats


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
