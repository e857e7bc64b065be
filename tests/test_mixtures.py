"""Policies between the start and the trained weights: exact at both ends, saved, and refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import SAVE, fails, sampled
from transformers import AutoModelForCausalLM

import eval as evaluation
from engine.mixtures import mixed
from engine.runs import load_run, task_of
from rollout import load_policy


def policies_of(folder: str) -> dict[str, dict]:
    return json.loads(Path(folder, "eval.json").read_text("utf-8"))["policies"]


def test_both_ends_are_todays_numbers_to_the_digit(toy_run):
    """t = 1 is the trained policy, t = 0 the start: VPO's the start that is asked for m answers."""
    settings = ["run", "--problems", "5", "--pool", "6"]
    evaluation.main([*settings, "--out", "today"])
    evaluation.main([*settings, "--out", "mix", "--mix", "0", "0.5", "1"])
    today = policies_of("today")
    mix = policies_of("mix")
    assert today == {name: values for name, values in mix.items() if "--mix" not in name}
    assert mix["grpo, --mix 0"] == mix["vpo, one answer, --mix 0"] == mix["start"]
    assert mix["vpo, --mix 0"] == mix["start_sets"]
    assert len({str(mix[name]) for name in ("start", "start_sets", "vpo, --mix 0.5", "vpo")}) == 4
    evaluation.main([*settings, "--mix", "0.5"])
    half = policies_of("run/eval-test-5x6-T0.7-mix0.5")
    expected = [name for name in mix if name.startswith("start") or "0.5" in name]
    assert half == {name: mix[name] for name in expected}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixture_is_a_weighted_mean(trained, dtype):
    config = replace(load_run(trained).config, dtype=dtype)
    policies = [mixed(trained, "grpo", t, task_of(config), config) for t in (0, 0.25, 1)]
    start = load_policy(str(trained / "start"), task_of(config))
    end = load_policy(str(trained / "grpo/checkpoint-000004"), task_of(config))
    models = [policy.model.parameters() for policy in (start, *policies, end)]
    for own_start, zero, quarter, one, own_end in zip(*models, strict=True):
        assert torch.equal(zero, own_start.to(zero.dtype))
        assert torch.equal(one, own_end.to(one.dtype))
        mean = 0.75 * own_start.double() + 0.25 * own_end.double()
        torch.testing.assert_close(quarter.double(), mean, atol=1e-6, rtol=1e-5)
        assert zero.dtype == one.dtype == getattr(torch, dtype)


def test_a_saved_mixture_is_an_ordinary_checkpoint(trained, capsys):
    """It samples the same tokens; nothing is written over. Who evaluates it is told how."""
    evaluation.main([str(trained), *SAVE, "--out", "out"])
    config = load_run(trained).config
    own = mixed(trained, "vpo", 0.5, task_of(config), config)
    assert sorted(path.name for path in Path("saved").iterdir()) == ["grpo-0.5", "vpo-0.5"]
    plain = AutoModelForCausalLM.from_pretrained("saved/vpo-0.5")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(plain(ids).logits, own.model(ids).logits)
    assert sampled(load_policy("saved/vpo-0.5", task_of(config)), trained) == sampled(own, trained)
    for folder in ("saved", "saved/vpo-0.5"):
        fails([folder], capsys, "it holds models: name the run", command=evaluation.main)
