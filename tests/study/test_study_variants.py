"""What the ablations of the study train, and what it measures word by word."""

import functools
import json
import random
import runpy
import sys
from pathlib import Path

import pytest
import torch
from helpers import WordProblems, scored_of

import train
import vpo
from engine.config import Config
from engine.optimizer import MasterWeightAdamW
from engine.tasks import load_task
from rewards import Fence
from rollout import SamplingOptions, build_prompt, load_policy, read_answers, sample
from study import variants
from study.collapse import distinct_prefixes, word_nats
from study.entries import LOW_RATE
from vpo import Options

STUDY = Path(__file__).resolve().parents[2] / "study"


def test_a_pass_is_a_full_reward_in_the_objectives_that_a_problem_has():
    scored = scored_of(torch.tensor([[1.0, 0.0], [0.9, 1.0]])[None, :, None])
    assert not variants.passes(scored, Options()).any()
    scored.objective_mask = torch.tensor([[True, False]])
    assert variants.passes(scored, Options())[0, 0] > 0


def test_shapley_values_share_the_best_utility():
    """Of 1, 1 and 3: the two equal ones share the first step with the best one, which has the rest alone."""
    values = variants.shapley_values(torch.tensor([1.0, 3.0, 1.0]))
    assert values.tolist() == pytest.approx([1 / 3, 1 / 3 + 2, 1 / 3])


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("credit", [variants.reward_to_go, variants.shapley])
def test_credit_for_each_answer_of_one_is_vpo(credit, updates):
    """Guards the loss, which gets every token as a rollout of its own, with a KL term too, and all updates."""
    task = WordProblems()
    config = Config(
        task="words", m=1, group_size=8, prompts_per_step=4, kl=0.1, updates=updates, steps=1
    )

    def gradient_norm(train_step) -> float:
        policy = load_policy("tiny", task)
        reference = load_policy("tiny", task, seed=1)
        optimizer = MasterWeightAdamW(policy.model)
        state = train.TrainState(policy, reference, optimizer, peak_lr=1e-2, step=0)
        metrics, _ = train_step("vpo", state, task, config)
        return float(metrics["grad_norm"])

    expected = gradient_norm(train.train_step)
    own = functools.partial(variants.train_step, credit=credit)
    assert gradient_norm(own) == pytest.approx(expected, rel=1e-4)
    assert expected > 0.01


def test_tokens_have_the_advantage_of_their_answer():
    task = load_task("toy")
    policy = load_policy("tiny", task)
    text = "<answer_1> 0 1 </answer_1> <answer_2> 1 </answer_2> 0"
    rollouts = train.rollouts_of_texts(policy, ["answers=2 bits"], [text])
    advantages = torch.tensor([[[1.0, 2.0]]])  # (P, G, m)
    found = variants.token_advantages(policy, task, rollouts, advantages)
    assert found.tolist() == [[1, 1, 1, 1, 2, 2, 2, 2, 2]]


SMALL = (
    "--task maze --size 5 --warm-steps 0 --steps 2 --prompts-per-step 2 --group-size 4 --snapshots 0 "
    "--eval-problems 0 --out run"
)


@pytest.mark.parametrize("variant", ["reward_to_go", "shapley"])
def test_a_variant_trains(variant, monkeypatch):
    """Guards against a change that train.py does not see: its log would be that of train.py."""
    usual = train.train_step
    monkeypatch.setattr(train, "train_step", usual)  # restored after the script has replaced it
    run_script("variants.py", f"{variant} --method vpo {SMALL}", monkeypatch)
    rows = Path("run/vpo/metrics.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]
    assert train.train_step is not usual


def run_script(script: str, flags: str, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [script, *flags.split()])
    runpy.run_path(str(STUDY / script), run_name="__main__")


@pytest.mark.parametrize("name", ["copies", "noisy", "halfway", "gems", "tradeoff"])
def test_a_blended_reward_is_made_of_the_mazes(name):
    task = load_task(f"{STUDY}/rewards/{name}.py")
    maze = load_task("maze")
    problem = maze.problems("demonstrations", 1)[0]
    assert task.problems("demonstrations", 1) == [problem]
    answers = [maze.demonstration(problem, random.Random(i)) for i in range(20)]
    answer = max(answers, key=lambda answer: maze.reward(problem, answer))
    vector = maze.reward(problem, answer)
    blend = task.reward(problem, answer)
    assert any(vector) and len(blend) == len(task.objectives)
    if name in ("copies", "noisy", "halfway"):
        assert sum(blend) / len(blend) == pytest.approx(sum(vector) / 4, abs=0.05)
    if name == "tradeoff":
        assert sum(blend) == pytest.approx(vector[0])
    if name == "gems":
        assert blend == vector[1:3]
    assert task.reward(problem, "") == [0.0] * len(task.objectives)


def test_grpo_at_a_low_rate_joins_a_run_and_is_searched_with(monkeypatch):
    """Guards against a search that compares with GRPO at one rate alone."""
    monkeypatch.setitem(vpo.ADVANTAGES, LOW_RATE, vpo.grpo)  # and out again
    flags = SMALL.replace("--task maze --size 5", "--task toy")
    train.main(["--method", "vpo", *flags.split()])
    own = "--method grpo_low_rate --lr grpo_low_rate=1e-4"
    run_script("low_rate.py", f"train {flags} {own}", monkeypatch)
    search = "--budget 6 --problems 1 --screen 0 --device cpu --out search"
    run_script("low_rate.py", f"search run {search}", monkeypatch)
    found = json.loads(Path("search/search.json").read_text("utf-8"))
    assert list(found["policies"]) == ["start", "vpo", "grpo_low_rate"]


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
