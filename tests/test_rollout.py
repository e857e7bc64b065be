"""Sampling and scoring, on the tiny model and small random models of real architectures from disk."""

import re

import pytest
import torch
from helpers import (
    ARCHITECTURES,
    FENCE,
    TEMPERATURE,
    Lines,
    MarkedWords,
    Words,
    any_model,
    byte_model,
    draw,
    first_stop,
    load_random_model,
    plain_logits,
    prompts_of,
)
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import rollout
from rewards import Problem, Task
from rollout import Policy, StopRule
from tasks.code import Code

# Sampling.


@pytest.mark.parametrize("policy", ["tiny", *ARCHITECTURES], indirect=True)
@torch.no_grad()
def test_tokens_and_logprobs_are_those_of_plain_forward_passes(policy):
    """Every token, drawn again from logits without cache and padding, with its own random number.
    Guards against shifted positions, lost sliding windows, prompts that see their padding, sampling
    from one distribution and recording another, and random numbers that go to another rollout."""
    rollouts = draw(policy)
    assert len(set(rollouts.prompt_lengths)) > 1, "the test wants left padding"
    assert min(rollouts.lengths) < max(rollouts.lengths), "the test wants early ends"
    uniform = torch.rand(4, 3, 40, generator=torch.Generator().manual_seed(0)).flatten(0, 1)
    for row, length in enumerate(rollouts.lengths):
        logits = plain_logits(policy, rollouts, row) / TEMPERATURE
        tokens, logprobs = rollout.draw(logits, uniform[row, :length])
        assert rollouts.tokens[row, :length].tolist() == tokens.tolist()
        recorded = rollouts.logprobs[row, :length]
        torch.testing.assert_close(recorded, logprobs, atol=2e-5, rtol=1e-4)
        assert not rollouts.logprobs[row, length:].any()


@any_model
@pytest.mark.parametrize("batch", [1, 5, 9])
def test_tokens_do_not_depend_on_the_batch(policy, batch):
    """Guards against random numbers that belong to the batch, and groups that its border cuts."""
    whole = draw(policy, n=5)
    parts = draw(policy, n=5, batch=batch)
    assert parts.lengths == whole.lengths
    assert parts.texts == whole.texts
    assert parts.ended == whole.ended
    assert torch.equal(parts.tokens, whole.tokens)
    assert torch.allclose(parts.logprobs, whole.logprobs, atol=1e-4)


@any_model
def test_masks_come_from_positions(policy):
    """The first EOS, of several ids, is sampled and trained, and nothing after it, also at the last
    place. Guards against masks taken from the pad id. The rollouts without an EOS are cut off."""
    T = 12
    rollouts = draw(policy, n=12, G=12, max_new_tokens=T)
    is_end = torch.isin(rollouts.tokens, torch.tensor(policy.eos_ids)) & rollouts.token_mask
    for row, length in enumerate(rollouts.lengths):
        columns = is_end[row].nonzero()[:, 0].tolist()
        assert columns in ([], [length - 1]), "an EOS is the last token"
        assert rollouts.ended[row] == bool(columns)
        assert rollouts.ended[row] or length == T
        assert rollouts.token_mask[row].tolist() == [t < length for t in range(T)]
    assert set(rollouts.ended) == {True, False}, "the test wants both kinds"
    assert set(rollouts.tokens[is_end].tolist()) == set(policy.eos_ids)
    assert is_end[:, -1].any(), "the test wants an EOS at the last place"


def test_draws_follow_the_distribution():
    """20,000 even random numbers: each token gets its probability; guards against an index off by one."""
    log_p = torch.tensor([0.5, 0.0, 0.2, 0.25, 0.05]).log()
    uniform = (torch.arange(20_000) + 0.5) / 20_000
    tokens, logprobs = rollout.draw(log_p.expand(20_000, -1), uniform)
    drawn = torch.bincount(tokens, minlength=5) / 20_000
    torch.testing.assert_close(drawn, log_p.exp(), atol=2e-4, rtol=0)
    torch.testing.assert_close(logprobs, log_p[tokens])


@pytest.mark.parametrize("step", [0.3, -0.3])
def test_an_uneven_cumulative_sum_draws_no_negligible_token(step, monkeypatch):
    """Sums in parallel may rise or fall at a token of no probability: here enough to draw it."""
    logits = torch.zeros(100, 50)
    logits[:, 7] = -100.0
    original = Tensor.cumsum

    def cumsum(x: Tensor, dim: int) -> Tensor:
        total = original(x, dim)
        total[:, slice(7, None) if step > 0 else 6] += step
        return total

    monkeypatch.setattr(Tensor, "cumsum", cumsum)
    uniform = torch.linspace(0, 1, 100)
    total = cumsum(logits.softmax(-1), -1)
    unguarded = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)
    assert (unguarded == 7).any(), "without the guard it is drawn"
    tokens, logprobs = rollout.draw(logits, uniform)
    assert not (tokens == 7).any()
    assert (logprobs > rollout.NEGLIGIBLE).all()


def test_random_numbers_have_a_step_and_a_purpose():
    """Guards against weights that are drawn with the random numbers of the rollouts."""
    cases = [(1, 11, "rollouts"), (11, 1, "rollouts"), (1, 11, "weights"), (1, 12, "rollouts")]
    numbers = {torch.rand(1, generator=rollout.random_generator(*case)).item() for case in cases}
    assert len(numbers) == 4


# The stop rule.


class Sentences(Task):
    """A sign of three bytes, each a token of its own in a byte-level vocabulary."""

    ends = "。"

    def find_answers(self, text: str, m: int, finished: bool) -> list[str]:
        return re.findall("(.*?)。", text)[:m]


class AtEveryToken(StopRule):
    """The plain rule: the whole text is looked at after every token."""

    def may_end(self, token: int) -> bool:
        return True


@byte_model
@pytest.mark.parametrize("task", [Words(), MarkedWords()])
@pytest.mark.parametrize("m", [1, 3])
def test_a_rollout_ends_with_the_token_of_its_last_answer(policy, task, m):
    """Guards against tokens after the end that would be trained on, and an end that comes too late."""
    whole = draw(policy, n=6)
    cut = draw(policy, n=6, stop=StopRule(policy, task, m))
    n_stopped = 0
    for row, length in enumerate(whole.lengths):
        tokens = whole.tokens[row, :length].tolist()
        end = first_stop(AtEveryToken(policy, task, m), tokens) or length
        n_stopped += end < length
        assert cut.lengths[row] == end
        assert cut.tokens[row, :end].tolist() == tokens[:end]
        assert cut.tokens[row, end:].eq(policy.eos_ids[0]).all()
        assert torch.allclose(cut.logprobs[row, :end], whole.logprobs[row, :end], atol=1e-4)
        assert not cut.logprobs[row, end:].any()
        assert cut.ended[row] or end == 40
        assert cut.texts[row] == policy.tokenizer.decode(tokens[:end], skip_special_tokens=True)
    assert n_stopped > 3


TAGS = "Hm. <answer_1> a > b </answer_1>\n<answer_2>c</answer_2> and so on"
NUMBERED = "1. red\n2. blue\n3. green\n and so on"
THOUGHTS = "<think><answer_1>a</answer_1> <answer_2>b</answer_2></think> so" + TAGS
SIGNS = "一。二。三。"
BLOCK = "```python\nx = [1]\nprint(f'{x}')\n```\n"
BLOCKS = f"First:\n{BLOCK}Then:\n{BLOCK} and so on"
PROGRAMS = Code.__new__(Code)  # without problems


@byte_model
@pytest.mark.parametrize("text", [TAGS, NUMBERED, THOUGHTS, SIGNS, BLOCKS])
@pytest.mark.parametrize("task", [Task(), Lines(), Words(), MarkedWords(), Sentences(), PROGRAMS])
def test_the_rule_misses_no_end(policy, text, task):
    """Equal to a look at every token, for all forms; guards against signs that are cut into tokens."""
    tokens = policy.tokenizer(text)["input_ids"]
    for m in (1, 2):
        expected = first_stop(AtEveryToken(policy, task, m), tokens)
        assert first_stop(StopRule(policy, task, m), tokens) == expected


def test_an_end_may_be_the_blank_of_a_next_word():
    """Guards against decoders that take the first blank of a text away, as Llama's does."""
    backend = Tokenizer(WordLevel({"<eos>": 0, "▁red": 2, "▁blue": 3}, unk_token="<eos>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    assert tokenizer.decode([2, 3]) == "red blue"
    policy = Policy(load_random_model("llama").model, tokenizer)
    assert first_stop(StopRule(policy, MarkedWords(), 1), [2, 3, 2]) == 2


@byte_model
def test_where_a_rollout_stops(policy):
    """Guards against a set that is cut short, a thought taken for an answer, and a line without its end."""
    drafts = THOUGHTS.removeprefix("<think>")
    cases = [  # text, task, opening of the prompt, the text after the place where it stops
        (TAGS, Task(), "", " and so on"),
        (NUMBERED, Task(), "", "3. green\n and so on"),
        (NUMBERED, Lines(), "", "3. green\n and so on"),
        (SIGNS, Sentences(), "", "三。"),
        (BLOCKS, PROGRAMS, "", "\n and so on"),
        (THOUGHTS, Task(), "", " and so on"),
        (drafts, Task(), "", "</think> so" + TAGS),
        (drafts, Task(), "<think>", " and so on"),
        (THOUGHTS.replace("</think>", ""), Task(), "", None),
        (" red\n2. blue\n3. green\n", FENCE, "<think>", None),
    ]
    for text, task, opening, rest in cases:
        tokens = policy.tokenizer(text)["input_ids"]
        rule = StopRule(policy, task, 2)
        rule.opening = opening
        n = first_stop(rule, tokens)
        assert rest == (None if n is None else policy.tokenizer.decode(tokens[n:]))


# Scoring.


def test_texts_as_rollouts():
    """What is imitated: every token of the text, and an EOS that closes it. What was cut off is no whole answer."""
    policy = load_random_model("llama")
    texts = ["one", "1\n2", "", "1\n2"]
    rollouts = rollout.rollouts_of_texts(policy, prompts_of(policy, 2), texts)
    assert rollouts.group_size == 2
    for row, text in enumerate(texts):
        tokens = [*policy.tokenizer(text)["input_ids"], policy.tokenizer.eos_token_id]
        assert rollouts.tokens[row, rollouts.token_mask[row]].tolist() == tokens
    rollouts.ended = [True, True, True, False]
    assert rollout.read_answers(Lines(), rollouts, 2)[1::2] == [["1", "2"], ["1"]]


def test_an_answer_is_scored_once():
    """Equal canonical forms are repeats, unequal texts are scored each; the rest has the task's minimum."""
    seen = []

    class Length(Task):
        objectives = ("length", "one")
        minimum = -2.0

        def rewards(self, pairs):
            seen.extend(answer for _, answer in pairs)
            return [[float(len(answer)), 1.0] for _, answer in pairs]

        def canonical(self, problem, answer):
            return answer.lower()

    answers = [["ab", "AB", "ab"], ["ab"], [], ["c", "ab"]]
    problems = [Problem("a", None), Problem("b", None)]
    scored = rollout.score(Length(), problems, answers, 3)
    assert sorted(seen) == ["", "", "AB", "ab", "ab", "c"], "once per problem"
    repeats = [[[False, True, True], [False] * 3], [[False] * 3] * 2]
    assert scored.repeat_mask.tolist() == repeats
    there = [[[True] * 3, [True, False, False]], [[False] * 3, [True, True, False]]]
    assert scored.answer_mask.tolist() == there
    assert scored.vectors[0, 1].tolist() == [[2, 1], [-2, -2], [-2, -2]]
    assert scored.scalars[1].tolist() == [[-2, -2, -2], [1, 1.5, -2]]
    assert scored.minimum == -2 and scored.missing_scalar.tolist() == [[-2], [-2]]
    torch.set_default_dtype(torch.bfloat16)  # as trainers do that load a model
    assert rollout.score(Length(), problems, answers, 3).vectors.dtype == torch.float32
